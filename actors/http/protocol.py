"""Request bodies of the OpenAI-compatible endpoints, as pydantic models.

Written by hand, with vLLM's extensions; fields that are not here are `fields.py`'s business. A wrong value
ends in `RequestValidationError` or `RequestError`, both answered by `errors.py`. Responses are plain
dictionaries (`generation.py`): they are ours to get right, and building models per token costs time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from ...cluster.errors import RequestError
from ...cluster.request import MAX_LOGPROBS, SamplingParams
from ..prompts import Chat, EncodedPrompt, Prompt, needed
from ..tokenizer import Tokenizer
from .defaults import GenerationDefaults

MAX_STOP_STRINGS = 64
MAX_PROMPTS = 1024
REQUEST_ID = r"^[\x21-\x7e]{1,256}$"  # fits a header and a log line
TextOrIds = str | list[int]
Prompts = str | list[str] | list[int] | list[list[int]]
StopStrings = Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)]


# Any below: validators see raw JSON.
def _stop_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompt_list(value: Any) -> Any:
    """One list of prompts, whichever of the four forms came: str, [str], [int], [[int]]."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise RequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists, "
            "and not empty.",
            param="prompt",
        )
    prompts = [value] if _are_ids(value) else value
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(
            f"prompt: {len(prompts)} prompts in one request; at most {MAX_PROMPTS}.", param="prompt"
        )
    for prompt in prompts:
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and _are_ids(prompt)):
            raise RequestError(
                "prompt: each prompt must be a string or a list of token ids, not a mixture.", param="prompt"
            )
    return prompts


def _are_ids(values: list[Any]) -> bool:
    """Whether all are integers and no booleans; lists of a million come, so none is looked at in Python."""
    return set(map(type, values)) <= {int}


def _ids_as_they_are(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """What is in order is not copied one by one; for what is not, pydantic finds the words."""
    if isinstance(value, list) and _are_ids(value) and min(value, default=0) >= 0:
        return value
    return validate(value)


def _number_of_logprobs(value: Any) -> Any:
    """An integer is meant, and 0 is one; `false` is what chat calls none."""
    if value is True:
        raise RequestError(
            f"logprobs=true is not allowed: completions take an integer from 0 to {MAX_LOGPROBS}, how many "
            "likeliest tokens to tell in each place.",
            param="logprobs",
        )
    return None if value is False else value


def _whether_logprobs(value: Any) -> Any:
    """0 is no `false`: who sends a number means completions' field."""
    if value is None or isinstance(value, bool):
        return value
    raise RequestError(
        f"logprobs={value!r} is not allowed: chat takes true or false, and the number of likeliest tokens in "
        "top_logprobs.",
        param="logprobs",
    )


def _speculation(value: Any) -> Any:
    return {"enabled": value} if isinstance(value, bool) else value


class StreamOptions(BaseModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Speculative(BaseModel):
    """How this request is to be speculated on; the answer is the same whatever stands here."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = True
    max_tokens: int | None = None
    drafter: str | None = None
    return_trace: bool = False

    @model_validator(mode="after")
    def _only_what_works(self) -> Speculative:
        for name in ("max_tokens", "drafter", "return_trace"):
            if getattr(self, name):
                raise RequestError(
                    f"speculative.{name} is not supported by this server yet; speculative.enabled is.",
                    param=f"speculative.{name}",
                )
        return self


class GenerationRequest(BaseModel):
    """What completions and chat have in common. None means: the server's default."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: Annotated[StopStrings | None, BeforeValidator(_stop_list)] = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1)] = None
    return_token_ids: bool = False
    include_metrics: bool = True
    priority: int = 0
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=1024)] = None
    request_id: Annotated[str | None, Field(pattern=REQUEST_ID)] = None
    speculative: Annotated[Speculative, BeforeValidator(_speculation)] = Speculative()

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream=true.", param="stream_options")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are asked for in each place; None: no log probabilities."""
        raise NotImplementedError

    def sampling_params(self, defaults: GenerationDefaults, max_tokens: int | None) -> SamplingParams:
        """Request over `generation_config.json` over OpenAI's defaults; `max_tokens` is the last of these."""
        limit_name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        limit = getattr(self, limit_name)
        try:
            return SamplingParams(
                n=_first(self.n, 1),
                temperature=_first(self.temperature, defaults.temperature, 1.0),
                top_p=_first(self.top_p, defaults.top_p, 1.0),
                top_k=_first(self.top_k, defaults.top_k, 0),
                min_p=_first(self.min_p, defaults.min_p, 0.0),
                seed=self.seed,
                stop=tuple(self.stop or ()),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                max_tokens=_first(limit, defaults.max_tokens, max_tokens),
                min_tokens=self.min_tokens,
                ignore_eos=self.ignore_eos,
                include_stop_str_in_output=self.include_stop_str_in_output,
                skip_special_tokens=self.skip_special_tokens,
                presence_penalty=_first(self.presence_penalty, 0.0),
                frequency_penalty=_first(self.frequency_penalty, 0.0),
                repetition_penalty=_first(self.repetition_penalty, defaults.repetition_penalty, 1.0),
                logit_bias=tuple((self.logit_bias or {}).items()),
                allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
                bad_words=tuple(self.bad_words or ()),
                logprobs=self.num_logprobs,
            )
        except RequestError as error:
            if error.param != "max_tokens":
                raise
            raise RequestError(error.message.replace("max_tokens", limit_name, 1), param=limit_name) from None


class CompletionRequest(GenerationRequest):
    prompt: Annotated[list[TextOrIds], PlainValidator(_prompt_list, json_schema_input_type=Prompts)]
    logprobs: Annotated[int | None, BeforeValidator(_number_of_logprobs)] = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[Prompt]:
        """As the engine's door takes them; that ids are integers has been seen."""
        return [p if isinstance(p, str) else EncodedPrompt(tuple(p)) for p in self.prompt]


class ChatMessage(BaseModel):
    """One message; what else it carries (name, tool_calls, reasoning_content ...) goes to the template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None

    def for_template(self, at: str) -> dict[str, Any]:
        """The message with its content as one string."""
        message = {**(self.model_extra or {}), "role": self.role, "content": self.content or ""}
        if isinstance(self.content, list):
            message["content"] = "\n".join(
                _text(part, f"{at}.content.{i}") for i, part in enumerate(self.content)
            )
        return message


class ChatTemplateOptions(BaseModel):
    """How messages become a prompt; the same wherever messages are taken."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @model_validator(mode="after")
    def _one_way_to_end(self) -> ChatTemplateOptions:
        if self.continue_final_message and self.add_generation_prompt and self._both_were_asked():
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; send one of them.",
                param="continue_final_message",
            )
        return self

    def _both_were_asked(self) -> bool:
        return "add_generation_prompt" in self.model_fields_set


class ChatRequest(ChatTemplateOptions, GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    logprobs: Annotated[bool | None, BeforeValidator(_whether_logprobs)] = None
    top_logprobs: int | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                f"top_logprobs={self.top_logprobs} needs logprobs=true. Send both, or neither.",
                param="top_logprobs",
            )
        if not 0 <= (self.top_logprobs or 0) <= MAX_LOGPROBS:
            raise RequestError(
                f"top_logprobs={self.top_logprobs} is not allowed: it must be an integer from 0 to "
                f"{MAX_LOGPROBS}.",
                param="top_logprobs",
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(ChatTemplateOptions):
    """`prompt`, or `messages` with the template options of chat."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage] | None, Field(min_length=1)] = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("Send either prompt or messages.", param="prompt")
        return self


class DetokenizeRequest(BaseModel):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], WrapValidator(_ids_as_they_are)]


def conversation(request: ChatRequest | TokenizeRequest, tokenizer: Tokenizer | None) -> Chat:
    """The conversation of a request, for the engine's door; refused where the template would not heed it."""
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        if not needed(tokenizer, "messages").template_uses("reasoning_effort"):
            raise RequestError(
                "reasoning_effort: this model's chat template knows no reasoning effort. Leave it out.",
                param="reasoning_effort",
            )
        variables["reasoning_effort"] = request.reasoning_effort
    return Chat(
        [message.for_template(f"messages.{i}") for i, message in enumerate(request.messages or ())],
        request.add_generation_prompt,
        request.continue_final_message,
        variables,
    )


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _text(part: Mapping[str, Any], at: str) -> str:
    text = part.get("text")
    if part.get("type") not in ("text", "input_text") or not isinstance(text, str):
        raise RequestError(
            f'{at}: only parts {{"type": "text", "text": ...}} are supported; this model reads no images or '
            "sound.",
            param=at,
        )
    return text
