"""The body of /v1/responses, and its translation to a `ChatRequest`.

Fields that this API lacks (`top_k`, `seed`, `speculative` ...) are passed to the chat unchanged. Fields that
need stored responses are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ....cluster.errors import RequestError
from ..generation.chat_adapter import SupportedOptions
from ..generation.request_translation import chat_request, rename_error_fields
from ..protocol.chat_completion import ChatRequest
from ..protocol.tool_outputs import TranslatedMessages
from ..wire.json_io import Integer, JsonObject
from .input_items import read_items
from .tools import ClientTools

NOTHING_STORED = "This server keeps no responses: send the whole conversation in `input`."
# Field -> the values that mean "not used", and what to do instead of using it.
NEVER: Mapping[str, tuple[tuple[object, ...], str]] = {
    "previous_response_id": ((), NOTHING_STORED),
    "conversation": ((), NOTHING_STORED),
    "prompt": ((), "This server keeps no prompts: send `instructions` and `input`."),
    "background": ((False,), "Leave it out: an answer is streamed or complete."),
    "context_management": (([],), "This server does not compact: shorten `input`."),
    "max_tool_calls": ((), "It limits tools that the server runs; this server runs none."),
    "moderation": ((), "This server does not moderate."),
    "logprobs": ((False,), "Ask /v1/chat/completions for log probabilities."),
    "top_logprobs": ((0,), "Ask /v1/chat/completions for log probabilities."),
    "prompt_logprobs": ((), "Ask /v1/chat/completions for log probabilities."),
    "return_token_ids": ((False,), "Ask /v1/chat/completions for tokens."),
    "messages": ((), "The field is called input here."),
    "max_completion_tokens": ((), "The field is called max_output_tokens here."),
    "response_format": ((), "The field is called text.format here."),
    "reasoning_effort": ((), "The field is called reasoning.effort here."),
    "n": ((1,), "A response has one answer: send several requests, or use /v1/chat/completions."),
    "stop": (([],), "This API has no stop strings: use /v1/chat/completions."),
}
# Fields that describe the request or save costs at a hosted service; they do not affect the answer.
SILENT = frozenset(
    {
        *("user", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
        *("prompt_cache_options", "stream_options", "client_metadata"),
    }
)
# Path in the chat -> in this body.
NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
}


class ReasoningOptions(BaseModel):
    """Options of reasoning. There are no summaries: the reasoning itself is returned."""

    model_config = ConfigDict(extra="allow")

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class TextFormat(BaseModel):
    """`type`, and the name and schema of a json_schema."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="allow")

    format: TextFormat = Field(default_factory=TextFormat)

    def response_format(self) -> JsonObject | None:
        """Return the format for a chat, where a schema and its name are one level deeper."""
        if self.format.type == "text":
            return None
        rest = dict(self.format.model_extra or {})
        return {"type": self.format.type, **({"json_schema": rest} if rest else {})}


# Any: a validator sees raw JSON.
def _input_list(value: Any) -> Any:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise RequestError("input must be a string or a list of items, and not empty.", param="input")
    return value


class ResponsesRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    input: Annotated[
        list[dict[str, Any]], BeforeValidator(_input_list, json_schema_input_type=str | list[Any])
    ]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[Integer | None, Field(ge=1)] = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    @cached_property
    def client_tools(self) -> ClientTools:
        return ClientTools(self.tools or ())

    def ignored(self, supported: SupportedOptions) -> list[str]:
        """Return the names of ignored fields that SDKs send by themselves."""
        found = [*self.client_tools.left_out, *(["store"] if self.store else [])]
        found += [f"include.{name}" for name in self.include or () if name != "reasoning.encrypted_content"]
        found += ["reasoning.summary"] if self._requests(self.reasoning, "summary") else []
        found += ["text.verbosity"] if self._requests(self.text, "verbosity") else []
        is_ignored = self._effort is not None and not (supported.effort or self._switches(supported))
        return [*found, "reasoning.effort"] if is_ignored else found

    def conversation(self) -> TranslatedMessages:
        return read_items(self.instructions, self.input)

    def for_chat(self, conversation: TranslatedMessages, supported: SupportedOptions) -> ChatRequest:
        """Translate the body. Raises RequestError with this body's field names."""
        extra = self.model_extra or {}
        for name, (nothing, remedy) in NEVER.items():
            if extra.get(name) is not None and extra[name] not in nothing:
                raise RequestError(f"{name} is not supported. {remedy}", param=name)
        if not conversation.messages:
            raise RequestError(
                f"input: none of its items is supported ({', '.join(conversation.skipped)}). This server "
                "stores no items: send the messages, calls and outputs themselves.",
                param="input",
            )
        if self.truncation == "auto":
            raise RequestError(
                "truncation: this server drops no items of a conversation that is too long. Shorten `input`, "
                "or send truncate_prompt_tokens.",
                param="truncation",
            )
        tools = self.client_tools.tools
        flat = {f"tools.{i}.function": tool.at for i, tool in enumerate(tools)}
        with rename_error_fields({**NAMES, **conversation.names, **flat}):
            return chat_request(
                {
                    **{
                        name: value
                        for name, value in extra.items()
                        if name not in NEVER and name not in SILENT
                    },
                    "model": self.model,
                    "metadata": self.metadata,
                    "store": self.store,
                    "messages": conversation.messages,
                    "stream": self.stream,
                    "max_completion_tokens": self.max_output_tokens,
                    "tools": [{"type": "function", "function": tool.function} for tool in tools] or None,
                    "tool_choice": self.client_tools.choice(self.tool_choice),
                    "parallel_tool_calls": self.parallel_tool_calls,
                    "response_format": self.text.response_format() if self.text else None,
                    "reasoning_effort": self._effort if supported.effort else None,
                    **self._thinking_fields(supported),
                }
            )

    @property
    def _effort(self) -> str | None:
        return self.reasoning.effort if self.reasoning else None

    def _switches(self, supported: SupportedOptions) -> bool:
        """Effort "none" switches thinking off in a template without efforts."""
        return self._effort == "none" and supported.switch and not supported.effort

    def _thinking_fields(self, supported: SupportedOptions) -> JsonObject:
        if not self._switches(supported):
            return {}
        own = (self.model_extra or {}).get("chat_template_kwargs") or {}
        return {"chat_template_kwargs": {"enable_thinking": False, **own}}

    @staticmethod
    def _requests(options: BaseModel | None, name: str) -> bool:
        return options is not None and (options.model_extra or {}).get(name) is not None
