"""Tables of the reasoning and tool-call formats of model families.

Names are those of vLLM's parsers (`--reasoning-parser`, `--tool-call-parser`). A format that the classes of
`*_calls.py`, `messages.py` and `ThinkingFormat` can express needs no code. Marks are part of what models were
trained on, as are the newlines around them, which are not shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace

from .call_syntax import CallSyntax, ThinkingFormat
from .headed_calls import HeadedCalls
from .json_calls import JsonCalls
from .messages import Messages
from .quoted_calls import QuotedCalls
from .tagged_calls import TaggedCalls

HARMONY = Messages(
    start="<|start|>",
    first=("<|channel|>", "<|start|>", " to="),
    body="<|message|>",
    ends=("<|end|>", "<|call|>", "<|return|>"),
    channel="<|channel|>",
    kind="<|constrain|>",
    thoughts=frozenset({"analysis"}),
    final="<|channel|>final",
    prefix="functions.",
)
MUSE = Messages(
    start="<|start|>",
    first=("<|start|>", " to=", "<|message|>"),
    body="<|message|>",
    ends=("<|eom|>", "<|eot|>"),
    thoughts=frozenset({"self"}),
    answers=frozenset({"user", "commentary", "developer"}),
    final=" to=user",
    calls=TaggedCalls(
        section="<atem:function_calls>",
        section_end="</atem:function_calls>",
        name_open='<atem:invoke name="',
        name_close='">',
        key_open='<atem:parameter name="',
        key_close='">',
        value_close="</atem:parameter>",
        end="</atem:invoke>",
        newlines=False,
        shares_section=True,
    ),
)
THINK = ThinkingFormat(begin="<think>", end="</think>")
_OPEN_THINK = replace(THINK, always_open=True)
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
_DSML = TaggedCalls(
    section="<｜DSML｜function_calls>",
    section_end="</｜DSML｜function_calls>",
    name_open='<｜DSML｜invoke name="',
    name_close='">',
    key_open='<｜DSML｜parameter name="',
    key_close='">',
    text_close='" string="true">',
    json_close='" string="false">',
    value_close="</｜DSML｜parameter>",
    end="</｜DSML｜invoke>",
    newlines=False,
    shares_section=True,
)
_DEEPSEEK = HeadedCalls(
    section="<｜tool▁calls▁begin｜>",
    section_end="<｜tool▁calls▁end｜>",
    begin="<｜tool▁call▁begin｜>",
    heading="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
)

REASONING: Mapping[str, ThinkingFormat | Messages] = {
    "qwen3": THINK,
    "deepseek_r1": _OPEN_THINK,
    "deepseek_v3": THINK,
    "mistral": ThinkingFormat(begin="[THINK]", end="[/THINK]"),
    "seed_oss": ThinkingFormat(begin="<seed:think>", end="</seed:think>"),
    "kimi_k2": THINK,
    "minimax_m2": _OPEN_THINK,
    "glm45": THINK,
    "mimo": THINK,
    "gemma4": ThinkingFormat(begin="<|channel>", heading="thought", end="<channel|>", anywhere=True),
    "openai_gptoss": HARMONY,
    "muse_glimmer": MUSE,
}
CALLS: Mapping[str, CallSyntax] = {
    "hermes": JsonCalls(begin="<tool_call>", end="</tool_call>"),
    "llama3_json": JsonCalls(before="<|python_tag|>", between=";", arguments="parameters"),
    "qwen3_coder": _XML,
    "qwen3_xml": _XML,
    "mimo": replace(_XML, newlines=False),
    "seed_oss": replace(_XML, section="<seed:tool_call>", section_end="</seed:tool_call>"),
    "minimax_m2": TaggedCalls(
        section="<minimax:tool_call>",
        section_end="</minimax:tool_call>",
        name_open='<invoke name="',
        name_close='">',
        key_open='<parameter name="',
        key_close='">',
        value_close="</parameter>",
        end="</invoke>",
        newlines=False,
        shares_section=True,
    ),
    "deepseek_v32": _DSML,
    "deepseek_v4": replace(_DSML, section="<｜DSML｜tool_calls>", section_end="</｜DSML｜tool_calls>"),
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
        prefix="functions.",
        heading="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        numbered=True,
    ),
    "deepseek_v3": replace(
        _DEEPSEEK,
        prefix="function<｜tool▁sep｜>",
        heading="\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
        between="\n",
    ),
    "deepseek_v31": _DEEPSEEK,
    "mistral": HeadedCalls(
        begin="[TOOL_CALLS]", heading="[ARGS]", id_mark="[CALL_ID]", id_chars=9, listed=JsonCalls(id_chars=9)
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
    (("]<]minimax[>[",), None, None),  # MiniMax-M3: nested elements
    (("<minimax:tool_call>",), "minimax_m2", "minimax_m2"),
    (("<arg_key>",), "glm45", "glm45"),
    (("to=self", "<|eom|>"), "muse_glimmer", "muse_glimmer"),
    (("｜DSML｜", "function_calls>"), "deepseek_v32", "deepseek_v3"),
    (("｜DSML｜", "tool_calls>"), "deepseek_v4", "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>", "```json", "<think>"), "deepseek_v3", "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3", None),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31", "deepseek_v3"),
    (("[TOOL_CALLS]", "[THINK]"), "mistral", "mistral"),
    (("[TOOL_CALLS]",), "mistral", None),
    (("<seed:tool_call>",), "seed_oss", "seed_oss"),
    (("<function=", "<parameter=", "<think>"), "qwen3_coder", "qwen3"),
    (("<function=", "<parameter="), "qwen3_coder", None),
    (("<function=",), None, None),  # functionary: JSON within the tag
    (("<tool_calls>",), None, None),  # Apriel: a list of JSON
    (("<tool_call>", "<think>"), "hermes", "qwen3"),
    (("<tool_call>",), "hermes", None),
    (("<|python_tag|>",), "llama3_json", None),
    (('"parameters"', "ipython"), "llama3_json", None),
    (("<think>",), None, "qwen3"),
)


def texts_of(given: CallSyntax | ThinkingFormat) -> frozenset[str]:
    """Return all marks and other texts of a format."""
    found: set[str] = set()
    for each in fields(given):  # type: ignore[arg-type]  # all formats are dataclasses
        value = getattr(given, each.name)
        values = value if isinstance(value, tuple | frozenset) else (value,)
        found.update(text for text in values if isinstance(text, str) and text)
        found.update(*(texts_of(nested) for nested in values if isinstance(nested, JsonCalls | TaggedCalls)))
    return frozenset(found)


def mark_ids(given: Iterable[CallSyntax | ThinkingFormat], added: Mapping[str, int]) -> dict[str, int]:
    """Return the ids of added tokens, given by text, that occur in the texts of formats."""
    texts = {text for each in given for text in texts_of(each)}
    return {
        token: token_id
        for token, token_id in added.items()
        if token[:1] in ("<", "[") and any(token in text for text in texts)
    }
