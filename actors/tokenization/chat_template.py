"""A model's chat template, rendered by minijinja.

This is 10 times faster than transformers, does not import it, and bounds a template's execution steps. The
functions that transformers adds to Jinja (`tojson`, `raise_exception`, `strftime_now`) are provided. Nothing
is ever evaluated as Python. Thread-safe.

`TemplateRoles` finds which roles a template accepts at which position, and rewrites conversations to fit.
Clients place system and developer messages anywhere, and several messages of one role in a row. Templates
reject some of these (Qwen3.5 accepts a system message only first, Gemma 2 none, Mistral no two user messages
in a row) or drop them silently (Qwen3 developer messages, gpt-oss a second system message). Messages that a
template accepts are passed unchanged. All others become part of a message that it accepts:

    developer                       system, if the template does not name developers
    several of them at the start    one message
    at the start, none accepted     the beginning of the first user message, or a user message of its own
    after the start                 the end of the preceding user message, else the beginning of the following
                                    one, else a user message of its own
    a user message after a user's   one message; likewise for the assistant
    a user message after a tool's   the end of the tool's result
    text with reasoning and calls   reasoning, if the template accepts only one of them (gpt-oss)

What a template accepts is found by rendering short conversations, each once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import minijinja

from ...cluster.errors import RequestError, brief
from .call_arguments import ArgumentForms, has_calls
from .tokenizer_config import DEFAULT, TOOL_USE
from .typescript_tools import declare, sort_keys

MAX_SHOWN = 300  # characters of a template's error message
MAX_TEMPLATE_STEPS = 2_000_000
MAX_TEMPLATE_CHARS = 256 * 1024
MAX_PROMPT_CHARS = 64 * 1024 * 1024
# Rendering arguments that no request may set in `chat_template_kwargs`.
TEMPLATE_ARGUMENTS = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "tools", "documents"}
)
_TYPESCRIPT = "tools_ts_str"  # a template's variable for tools in TypeScript
# Training marks around model output; they have no effect on the text.
_GENERATION = re.compile(r"{%([-+]?)\s*(?:end)?generation\s*([-+]?)%}")


class ChatTemplate:
    """A model's chat template, or several by name, with the variables that they are given besides messages.

    Of several, `tool_use` renders conversations with tools and `default` all others, as in transformers; the
    rest are used only by name. Raises RequestError if it is too long or not a template.

    Args:
        source: Jinja source, or several by name.
        special_tokens: special tokens by their template names (`bos_token` ..).
        defaults: variables that a request may override: `default_chat_template_kwargs`.
        sorts_tools: the model was trained on tools with sorted object keys, as are models if the template
            takes TypeScript declarations (`tools_ts_str`).
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, str],
        defaults: Mapping[str, Any] | None = None,
        *,
        sorts_tools: bool = False,
    ) -> None:
        self._named = {} if isinstance(source, str) else dict(source)
        if not isinstance(source, str):
            source = self._named.get(DEFAULT) or _refusing(self._named)
        for name in TEMPLATE_ARGUMENTS & (defaults or {}).keys():
            raise RequestError(
                f"default_chat_template_kwargs.{name}: every request sets this itself. Leave it out.",
                param="default_chat_template_kwargs",
            )
        self.names = frozenset(self._named)  # names of the templates if there are several
        self.source = "\n".join(dict.fromkeys((source, *self._named.values())))  # the source of all templates
        self._special_tokens = dict(special_tokens)
        self._defaults = dict(defaults or {})
        self._declares = self.uses(_TYPESCRIPT)
        self._sorts_tools = sorts_tools or self._declares
        given = self._special_tokens | self._defaults
        self._jinja = self._tool_jinja = _Jinja(source, given)
        if TOOL_USE in self._named:
            self._tool_jinja = _Jinja(self._named[TOOL_USE], given)

    def another(self, source: str) -> ChatTemplate:
        """Return the same with other Jinja source, or with the named template `source`."""
        source = self._named.get(source, source)
        return ChatTemplate(source, self._special_tokens, self._defaults, sorts_tools=self._sorts_tools)

    def uses(self, variable: str) -> bool:
        """Return whether the template names a variable; others have no effect."""
        return variable in self.source

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render messages, adapted to what the template accepts (`TemplateRoles`).

        `variables`: `chat_template_kwargs`. `tools`: in OpenAI's format. Raises RequestError if the template
        rejects the messages, or `variables` contains a reserved name.
        """
        variables = dict(variables or {})
        for name in TEMPLATE_ARGUMENTS & variables.keys():
            raise RequestError(
                f"chat_template_kwargs.{name}: send {name} as a field of the request itself.",
                param=f"chat_template_kwargs.{name}",
            )
        jinja = self._tool_jinja if tools else self._jinja
        tools = self._sorted_tools(tools or ())
        declared: dict[str, Any] = {}
        if self._declares and tools and (typescript := declare(tools)) is not None:
            declared[_TYPESCRIPT] = typescript  # otherwise the template writes JSON
        messages = jinja.fit(messages)
        arguments = {
            "tools": tools or None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = jinja.render(
            messages, {**self._special_tokens, **arguments, **declared, **self._defaults, **variables}
        )
        if len(text) > MAX_PROMPT_CHARS:
            raise RequestError(
                f"messages: the chat template makes {len(text)} characters of them; at most "
                f"{MAX_PROMPT_CHARS}.",
                param="messages",
            )
        return _cut_after_final_message(text, messages) if continue_final_message else text

    def _sorted_tools(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        if not self._sorts_tools:
            return list(tools)
        try:
            return [sort_keys(tool) for tool in tools]
        except RecursionError:
            raise RequestError("tools: their schemas are nested too deep.", param="tools") from None


class _Jinja:
    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self._environment = _environment(source)
        self._variables = {"tools": None, "documents": None, "add_generation_prompt": True, **variables}
        self._roles = TemplateRoles(self.render, names_developers="developer" in source)

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        return self._roles.fit(messages)

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        """Raises RequestError if the template rejects the messages."""
        if has_calls(messages):
            messages = self._argument_forms.apply(messages)
        return self._text(messages, variables)

    @cached_property
    def _argument_forms(self) -> ArgumentForms:
        return ArgumentForms.of(self._text)

    def _text(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        given = self._variables if variables is None else variables
        try:
            return self._environment.render_template(
                "chat", messages=[dict(message) for message in messages], **given
            )
        except minijinja.TemplateError as error:
            raise _refusal("refused them", error.message) from error


def _refusing(named: Mapping[str, str]) -> str:
    """Return a template that rejects every conversation, for models without a default one."""
    reason = f"of its templates none is the default; name one of {', '.join(sorted(named))} as chat_template"
    return f"{{{{ raise_exception({json.dumps(reason)}) }}}}"


def _environment(source: str) -> minijinja.Environment:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise RequestError(
            f"chat_template: it has {len(source)} characters; at most {MAX_TEMPLATE_CHARS}.",
            param="chat_template",
        )
    environment = minijinja.Environment(trim_blocks=True, lstrip_blocks=True, pycompat=True)
    try:
        environment.add_template("chat", _GENERATION.sub(r"{#\1 \2#}", source))
    except minijinja.TemplateError as error:
        raise RequestError(
            f"chat_template: it is no Jinja template: {brief(error.message, MAX_SHOWN)}.",
            param="chat_template",
        ) from None
    environment.fuel = MAX_TEMPLATE_STEPS  # a template is code: bound its execution steps
    environment.add_function("raise_exception", _raise_exception)  # type: ignore[attr-defined]  # not in its stubs
    environment.add_function("strftime_now", _strftime_now)  # type: ignore[attr-defined]
    environment.add_filter("tojson", _tojson)
    return environment


# Templates may call these with any arguments.
def _raise_exception(message: object) -> None:
    raise _refusal("refused them", message)


def _strftime_now(form: object) -> str:
    try:
        return datetime.now().strftime(form)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise _refusal(f"cannot format the time as {brief(form)}", error) from None


def _refusal(what: str, why: object) -> RequestError:
    """Quote the template's message, which may repeat message contents."""
    return RequestError(
        f"messages: the chat template {what}: {brief(str(why), MAX_SHOWN)}.", param="messages"
    )


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as in transformers; Jinja's own filter escapes HTML characters."""
    separators = None if separators is None else (separators[0], separators[1])
    try:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal("cannot write something as JSON", error) from None


def _cut_after_final_message(text: str, messages: Sequence[Message]) -> str:
    """Drop what the template put after the last message, so that the model continues it."""
    final = str(messages[-1].get("content") or "").strip()
    at = text.rfind(final)
    if not final or at < 0:
        raise RequestError(
            "continue_final_message: the final message must have text that the chat template keeps.",
            param="continue_final_message",
        )
    return text[: at + len(final)]


Message: TypeAlias = Mapping[str, Any]  # Any: message content is a string or a list of typed parts.
SYSTEM_ROLES = ("system", "developer")
MAX_PROBED = 4  # leading messages; a template that accepts this many is assumed to accept more
_BREAK = "\n\n"
_REASONING = ("reasoning", "reasoning_content", "thinking")
# Mistral's templates require an id of nine letters or digits.
_CALL_ID = "probe0000"


class TemplateRoles:
    """The roles that one template accepts.

    `render` raises RequestError for what the template rejects. `names_developers`: its source contains the
    word "developer".
    """

    def __init__(self, render: Callable[[Sequence[Message]], str], *, names_developers: bool) -> None:
        self._render = render
        self._names_developers = names_developers
        self._taken: dict[tuple[str, ...], bool] = {}

    def takes(self, *roles: str) -> bool:
        """Return whether the template renders every message of a conversation with these roles.

        `call` is an assistant's message with a call, `said call` one with reasoning and text; their contents
        are not checked.
        """
        if roles not in self._taken:
            self._taken[roles] = self._try(roles)
        return self._taken[roles]

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        """Return the conversation in a form that the template accepts; unchanged where possible."""
        found = [self._with_known_role(message) for message in messages]
        if not self.takes("user"):
            return found
        num_leading = next((i for i, each in enumerate(found) if not _is_system(each)), len(found))
        leading, following = found[:num_leading], found[num_leading:]
        taken = self._leading(leading, ("user",) if following else ())
        found = self._following(found) if taken is None else taken + self._following(following)
        if has_calls(found) and self._wants_thought_text():
            found = [_with_text_as_reasoning(each) for each in found]
        for role, probed in (
            ("user", ("user", "user")),
            ("assistant", ("user", *2 * ("assistant",), "user")),
        ):
            if _is_in_a_row(found, role, role) and not self.takes(*probed):
                found = _joined(found, role, role)
        answered = ("user", "call", "tool")
        if (
            _is_in_a_row(found, "tool", "user")
            and self.takes(*answered)
            and not self.takes(*answered, "user")
        ):
            found = _joined(found, "tool", "user")
        return found

    def _with_known_role(self, message: Message) -> Message:
        if message.get("role") != "developer":
            return message
        is_known = self._names_developers and self.takes("developer", "user")
        return message if is_known else {**message, "role": "system"}

    def _leading(self, messages: list[Message], following: tuple[str, ...]) -> list[Message] | None:
        """Return leading system messages in an accepted form; None if none is accepted before `following`."""
        roles = [each["role"] for each in messages[:MAX_PROBED]]
        if not roles or self.takes(*roles, *following):
            return messages
        role = next((role for role in (roles[0], "system") if self.takes(role, *following)), None)
        return None if role is None else _joined_all(messages, role)

    def _following(self, messages: list[Message]) -> list[Message]:
        """Rewrite system messages that the template rejects after the start."""
        found: list[Message] = []
        awaits_user = False  # the last message was a system message that may be merged into a user's
        for message in messages:
            if _is_system(message) and not self._accepts_after(message["role"]):
                message = {**message, "role": "user"}
                if found and found[-1]["role"] == "user":
                    found[-1] = _join(found[-1], message)
                else:
                    found.append(message)
                    awaits_user = True
                continue
            if awaits_user and message.get("role") == "user":
                message = _join(found.pop(), message)
            awaits_user = False
            found.append(message)
        return found

    def _wants_thought_text(self) -> bool:
        """Return whether text next to reasoning and calls must become reasoning."""
        return self.takes("user", "call", "tool") and not self.takes("user", "said call", "tool")

    def _accepts_after(self, role: str) -> bool:
        return self.takes("user", role, "user") and self.takes("user", "assistant", role, "user")

    def _try(self, roles: tuple[str, ...]) -> bool:
        marks = [f"probed{i}text" for i in range(len(roles))]
        messages = [_probe(role, mark) for role, mark in zip(roles, marks, strict=True)]
        try:
            rendered = self._render(messages)
        except RequestError:
            return False
        pairs = zip(marks, roles, strict=True)
        return all(mark in rendered for mark, role in pairs if not role.endswith("call"))


def _probe(role: str, text: str) -> Message:
    if not role.endswith("call"):
        return {"role": role, "content": text} | ({"tool_call_id": _CALL_ID} if role == "tool" else {})
    call = {"id": _CALL_ID, "type": "function", "function": {"name": "probe", "arguments": {}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    return message | ({"content": text, **dict.fromkeys(_REASONING, text)} if role == "said call" else {})


def _with_text_as_reasoning(message: Message) -> Message:
    reasoning = next((message[name] for name in _REASONING if message.get(name)), None)
    if not message.get("tool_calls") or reasoning is None or not message.get("content"):
        return message
    joined = _join({"content": reasoning}, {"content": message["content"]})["content"]
    return {**message, "content": "", **dict.fromkeys(_REASONING, joined)}


def _is_system(message: Message) -> bool:
    return message.get("role") in SYSTEM_ROLES


def _is_in_a_row(messages: Sequence[Message], first: str, second: str) -> bool:
    return any((a.get("role"), b.get("role")) == (first, second) for a, b in pairwise(messages))


def _joined(messages: Sequence[Message], first: str, second: str) -> list[Message]:
    found: list[Message] = []
    for message in messages:
        if found and (found[-1].get("role"), message.get("role")) == (first, second):
            found[-1] = _join(found[-1], message)
        else:
            found.append(message)
    return found


def _joined_all(messages: Sequence[Message], role: str) -> list[Message]:
    joined = {**messages[0], "role": role}
    for message in messages[1:]:
        joined = _join(joined, message)
    return [joined]


def _join(one: Message, other: Message) -> Message:
    joined = dict(one)
    contents = [content for each in (one, other) if (content := each.get("content"))]
    if all(isinstance(content, str) for content in contents):
        joined["content"] = _BREAK.join(contents)
    else:
        joined["content"] = [part for content in contents for part in _parts(content)]
    for name in _REASONING:
        if other.get(name):
            joined[name] = _BREAK.join(filter(None, (one.get(name), other[name])))
    if other.get("tool_calls"):
        joined["tool_calls"] = [*(one.get("tool_calls") or ()), *other["tool_calls"]]
    return joined


def _parts(content: str | Sequence[object]) -> Sequence[object]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
