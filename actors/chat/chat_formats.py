"""Tables of the reasoning and tool-call formats of model families.

Names are those of vLLM's parsers (`--reasoning-parser`, `--tool-call-parser`). A format that these
dataclasses can express needs no code. Marks are part of what models were trained on, as are the newlines
around them, which are not shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingFormat:
    """Reasoning between two marks, at the start of a response or after a call."""

    begin: str
    end: str
    heading: str = ""  # text that follows `begin` and is not shown
    # a response begins within reasoning, whether or not the prompt ends with `begin`
    always_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """Calls written as `begin {"name": .., "arguments": {..}} end`."""

    # mark before every call; if "", a response that begins with a brace and names a tool is a call
    begin: str = ""
    end: str = ""
    before: str = ""  # optional text before the first call
    between: str = ""  # separator of calls that have no `begin`
    arguments: str = "arguments"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadedCalls:
    """Calls written as `begin functions.NAME:0 heading {..} end`; the header is the call's id."""

    section: str
    section_end: str
    begin: str
    heading: str
    end: str
    prefix: str = "functions."


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCalls:
    """Calls in `section name_open NAME name_close (key_open KEY key_close value value_close)* end
    section_end`.

    Values are written without quotes; the tool's schema determines their type.
    """

    section: str  # may be absent where `name_open` is a mark of its own
    section_end: str
    name_open: str
    name_close: str  # "" if the name ends at the end of its line or at the next mark
    key_open: str
    key_close: str
    value_open: str = ""  # mark between key and value
    value_close: str
    end: str  # mark after a call; the section's end mark where a section holds one call
    newlines: bool = True  # one newline directly before and after a value belongs to the marks


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotedCalls:
    """Calls written as `begin call:NAME{key:quote text quote,other:42} end`, JSON with bare keys."""

    begin: str
    heading: str
    quote: str
    end: str


CallSyntax: TypeAlias = JsonCalls | HeadedCalls | TaggedCalls | QuotedCalls


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Messages with headers that name recipients: `start ROLE to=X channel Y kind json body text end`."""

    start: str
    # possible beginnings of a response; the prompt has ended with `start` and the role
    first: tuple[str, ...]
    body: str
    ends: tuple[str, ...]
    channel: str = ""
    kind: str = ""
    thoughts: frozenset[str]  # channels or recipients of reasoning
    # recipients of content; a message without a recipient is also content
    answers: frozenset[str] = frozenset()
    prefix: str = ""  # prefix of tool names as recipients


Format: TypeAlias = ThinkingFormat | CallSyntax | Messages

HARMONY = Messages(
    start="<|start|>",
    first=("<|channel|>", "<|start|>", " to="),
    body="<|message|>",
    ends=("<|end|>", "<|call|>", "<|return|>"),
    channel="<|channel|>",
    kind="<|constrain|>",
    thoughts=frozenset({"analysis"}),
    prefix="functions.",
)
MUSE = Messages(
    start="<|start|>",
    first=("<|start|>", " to=", "<|message|>"),
    body="<|message|>",
    ends=("<|eom|>", "<|eot|>"),
    thoughts=frozenset({"self"}),
    answers=frozenset({"user"}),
)
THINK = ThinkingFormat(begin="<think>", end="</think>")
_OPEN_THINK = ThinkingFormat(begin="<think>", end="</think>", always_open=True)
_XML = TaggedCalls(
    section="<tool_call>",
    section_end="</tool_call>",
    name_open="<function=",
    name_close=">",
    key_open="<parameter=",
    key_close=">",
    value_close="</parameter>",
    end="</function>",
)

REASONING: Mapping[str, ThinkingFormat | Messages] = {
    "qwen3": THINK,
    "deepseek_r1": _OPEN_THINK,
    "kimi_k2": THINK,
    "minimax_m2": _OPEN_THINK,
    "glm45": THINK,
    "mimo": THINK,
    "gemma4": ThinkingFormat(begin="<|channel>", heading="thought", end="<channel|>"),
    "openai_gptoss": HARMONY,
    "muse_glimmer": MUSE,
}
CALLS: Mapping[str, CallSyntax | Messages] = {
    "hermes": JsonCalls(begin="<tool_call>", end="</tool_call>"),
    "llama3_json": JsonCalls(before="<|python_tag|>", between=";", arguments="parameters"),
    "qwen3_coder": _XML,
    "qwen3_xml": _XML,
    "mimo": TaggedCalls(
        **{name: getattr(_XML, name) for name in TaggedCalls.__slots__ if name != "newlines"}, newlines=False
    ),
    "minimax_m2": TaggedCalls(
        section="<minimax:tool_call>",
        section_end="</minimax:tool_call>",
        name_open='<invoke name="',
        name_close='">',
        key_open='<parameter name="',
        key_close='">',
        value_close="</parameter>",
        end="</invoke>",
    ),
    "glm45": TaggedCalls(
        section="<tool_call>",
        section_end="",
        name_open="",
        name_close="",
        key_open="<arg_key>",
        key_close="</arg_key>",
        value_open="<arg_value>",
        value_close="</arg_value>",
        end="</tool_call>",
        newlines=False,
    ),
    "kimi_k2": HeadedCalls(
        section="<|tool_calls_section_begin|>",
        section_end="<|tool_calls_section_end|>",
        begin="<|tool_call_begin|>",
        heading="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
    ),
    "gemma4": QuotedCalls(begin="<|tool_call>", heading="call:", quote='<|"|>', end="<tool_call|>"),
    "openai": HARMONY,
    "muse_glimmer": MUSE,
}
# Strings by which a chat template reveals its formats; the first line whose strings all occur applies.
TEMPLATE_SIGNS: tuple[tuple[tuple[str, ...], str | None, str | None], ...] = (
    (("<|channel|>", "<|message|>"), "openai", "openai_gptoss"),
    (("<|tool_call>",), "gemma4", "gemma4"),
    (("<|tool_call_begin|>",), "kimi_k2", "kimi_k2"),
    (("<minimax:tool_call>",), "minimax_m2", "minimax_m2"),
    (("<arg_key>",), "glm45", "glm45"),
    (("to=self", "<|eom|>"), "muse_glimmer", "muse_glimmer"),
    (("<function=", "<think>"), "qwen3_coder", "qwen3"),
    (("<function=",), "qwen3_coder", None),
    (("<tool_call>", "<think>"), "hermes", "qwen3"),
    (("<tool_call>",), "hermes", None),
    (("<|python_tag|>",), "llama3_json", None),
    (('"parameters"', "ipython"), "llama3_json", None),
    (("<think>",), None, "qwen3"),
)


def marks_of(given: Format) -> frozenset[str]:
    values = [getattr(given, f.name) for f in fields(given)]
    several = (value if isinstance(value, tuple) else (value,) for value in values)
    return frozenset(each for value in several for each in value if isinstance(each, str) and "<" in each)
