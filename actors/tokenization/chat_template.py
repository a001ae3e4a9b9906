"""A model's chat template. Thread-safe.

`client_messages.py` first fits the messages to what the template accepts; `jinja_template.py` renders them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from ...cluster.errors import RequestError
from ..checkpoints.file_names import DEFAULT, TOOL_USE
from .client_messages import Message, TemplateRoles, has_calls, text_of
from .jinja_template import JinjaTemplate
from .message_forms import ArgumentForms, ContentForms
from .typescript_tools import declare, sort_keys

MAX_PROMPT_CHARS = 64 * 1024 * 1024
# Rendering arguments that no request may set in `chat_template_kwargs`.
TEMPLATE_ARGUMENTS = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "tools", "documents"}
)
_TYPESCRIPT = "tools_ts_str"  # a template's variable for tools in TypeScript
MAX_REQUEST_TEMPLATES = 16  # compiled templates of requests that are kept
# Added to the final message, to find its end. It ends with a space because templates may remove that.
_END = "<end of the final message> "
_PROBED_TOOL = {
    "type": "function",
    "function": {
        "name": "manta_probe",
        "description": "Probes.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}},
    },
}


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
        self._another = lru_cache(MAX_REQUEST_TEMPLATES)(self._compile)

    def another(self, source: str) -> ChatTemplate:
        """Return the same with other Jinja source, or with the named template `source`."""
        return self._another(self._named.get(source, source))

    def _compile(self, source: str) -> ChatTemplate:
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
        messages = jinja.fit(messages)
        if continue_final_message:
            messages = _with_end(messages)
        arguments = {
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            **self._tool_arguments(tools or ()),
        }
        text = jinja.render(messages, {**self._special_tokens, **arguments, **self._defaults, **variables})
        if len(text) > MAX_PROMPT_CHARS:
            raise RequestError(
                f"messages: the chat template makes {len(text)} characters of them; at most "
                f"{MAX_PROMPT_CHARS}.",
                param="messages",
            )
        jinja.check_text(messages, text)
        if tools and not jinja.writes_tools(messages, self._tool_arguments):
            # Only the client's variables and messages can have written the tools. Without either the text is
            # not searched: it may contain tools' names by chance.
            by_client = variables or any("tools" in message for message in messages)
            _check_tools(tools, text if by_client else "")
        return _cut_after_final_message(text) if continue_final_message else text

    def _tool_arguments(self, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        tools = self._sorted_tools(tools)
        if self._declares and tools and (typescript := declare(tools)) is not None:
            return {"tools": tools, _TYPESCRIPT: typescript}
        return {"tools": tools or None}  # the template writes JSON

    def _sorted_tools(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        if not self._sorts_tools:
            return list(tools)
        try:
            return [sort_keys(tool) for tool in tools]
        except RecursionError:
            raise RequestError("tools: their schemas are nested too deep.", param="tools") from None


class _Jinja:
    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self._template = JinjaTemplate(source)
        self._variables = {"tools": None, "documents": None, "add_generation_prompt": True, **variables}
        self._roles = TemplateRoles(self.render, names_developers="developer" in source)
        self._contents = ContentForms(self._text)
        self._names_messages = "messages" in source
        self._writes_tools: dict[str, bool] = {}

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        return self._roles.fit(messages)

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        """Raises RequestError if the template rejects the messages."""
        messages = self._contents.apply(messages)
        if has_calls(messages):
            messages = self._argument_forms.apply(messages)
        return self._text(messages, variables)

    def check_text(self, messages: Sequence[Message], text: str) -> None:
        """Raise RequestError if the template left out what users wrote: it takes it in no form."""
        if self._roles.takes("user") or not self._names_messages:
            return
        for message in messages:
            if message.get("role") == "user" and text_of(message).strip() not in text:
                raise RequestError(
                    "messages: the chat template leaves out the text of messages. Start the server with "
                    "another --chat-template, or use /v1/completions.",
                    param="messages",
                )

    def writes_tools(
        self,
        messages: Sequence[Message],
        arguments: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]],
    ) -> bool:
        """Return whether tools are written into prompts of messages that begin with the same role.

        `arguments`: makes the template's variables of tools.
        """
        first = messages[0].get("role") or ""
        if first not in self._writes_tools:
            roles = dict.fromkeys((first, "user"))
            variables = {**self._variables, **arguments([_PROBED_TOOL])}
            try:
                text = self.render([{"role": role, "content": "x"} for role in roles], variables)
            except RequestError:
                text = ""
            self._writes_tools[first] = _PROBED_TOOL["function"]["name"] in text
        return self._writes_tools[first]

    @cached_property
    def _argument_forms(self) -> ArgumentForms:
        return ArgumentForms.of(lambda messages: self._text(self._contents.apply(messages)))

    def _text(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        given = self._variables if variables is None else variables
        return self._template.render({**given, "messages": [dict(message) for message in messages]})


def _refusing(named: Mapping[str, str]) -> str:
    """Return a template that rejects every conversation, for models without a default one."""
    reason = f"of its templates none is the default; name one of {', '.join(sorted(named))} as chat_template"
    return f"{{{{ raise_exception({json.dumps(reason)}) }}}}"


def _check_tools(tools: Sequence[Mapping[str, Any]], text: str) -> None:
    """Raise RequestError unless the text, which the client's own variables may have made, names all tools."""
    if not all(str(tool.get("function", tool).get("name")) in text for tool in tools):
        raise RequestError(
            "tools: this model's chat template does not write tools, so the model would not see them. Leave "
            "them out and describe them in a message, or start the server with a --chat-template that writes "
            "them.",
            param="tools",
        )


def _with_end(messages: Sequence[Message]) -> list[Message]:
    """Add a mark to the end of the final message's text."""
    *others, final = messages
    content = final.get("content")
    if not text_of(final).strip():
        raise _no_final_text()
    if isinstance(content, str):
        return [*others, {**final, "content": content + _END}]
    parts = [*(content or ())]
    parts[-1] = {**parts[-1], "text": parts[-1]["text"] + _END}
    return [*others, {**final, "content": parts}]


def _cut_after_final_message(text: str) -> str:
    """Drop what the template put after the last message, so that the model continues it."""
    at = text.rfind(_END.rstrip())
    if at < 0:
        raise _no_final_text()
    return text[:at] if text.startswith(_END, at) else text[:at].rstrip()


def _no_final_text() -> RequestError:
    return RequestError(
        "continue_final_message: the final message must have text that the chat template keeps.",
        param="continue_final_message",
    )
