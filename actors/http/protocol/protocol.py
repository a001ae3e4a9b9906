"""Pydantic models of requests that generate: the fields that completions and chat have in common.

Written by hand, with vLLM's extensions; `check_extra_fields` handles fields that are not here. Responses are
plain dictionaries, because we need not validate them and building models per token takes time.

A request may have one of `response_format` (OpenAI's) and `structured_outputs` (vLLM's).

A field that is not implemented and would change the answer is refused if it is set to anything but its
default, because an answer that ignores it would be silently wrong. An implemented field moves from `REFUSED`
to a request model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from ....cluster.errors import RequestError, brief_name, did_you_mean
from ....cluster.request.caller import REQUEST_ID
from ....cluster.request.request import MAX_BAD_WORDS, MAX_LOGPROBS, SamplingParams, SpeculationOptions
from ....cluster.request.structured_outputs import CONSTRAINTS, StructuredOutputsParams
from ...tokenization.generation_config import GenerationDefaults
from ..config.settings import UnknownParams
from ..wire.json_io import Integer, Number, TokenIds, no_booleans, types_of
from ..wire.request_model import RequestModel

MAX_STOP_STRINGS = 64
MAX_BAD_WORD_CHARS = 256
MAX_BIASES = 1 << 13

# fail_fast: pydantic would otherwise describe each of a million wrong elements, which blocks all streams.
StopStrings = Annotated[list[str], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
BadWord = Annotated[str, Field(max_length=MAX_BAD_WORD_CHARS)]


# Any: validators see raw JSON.
def _stop_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _not_many_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise RequestError(f"logit_bias: {len(value)} tokens; at most {MAX_BIASES}.", param="logit_bias")
    if isinstance(value, dict):
        no_booleans(types_of(value.values()))
    return value


def _speculation(value: Any) -> Any:
    return {"enabled": value} if isinstance(value, bool) else value


def no_boolean(field: str) -> Callable[[Any], Any]:
    """Return a validator for counts of log probabilities: `false` means none, `true` is refused."""

    def check(value: Any) -> Any:
        if value is True:
            raise RequestError(
                f"{field}=true is not allowed: it takes an integer from 0 to {MAX_LOGPROBS}, the "
                "number of likeliest tokens to return at each position.",
                param=field,
            )
        return None if value is False else value

    return check


class StreamOptions(RequestModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Speculative(RequestModel):
    """Options of speculation for one request. The answer does not depend on them.

    Attributes:
        enabled: false decodes without drafts.
        max_tokens: most drafts per step.
        tpot_ms: target time per output token (`cluster/request/request.py`).
        adaptive: false drafts as much as allowed in every step, also where the engine expects no gain, while
            the request runs alone or beside others that say so. It shows what drafts save.
        drafter: refused; an engine has one.
        return_trace: return where each token came from, in `metrics`.
    """

    model_config = ConfigDict(extra="forbid")

    enabled: bool = True
    max_tokens: Annotated[Integer | None, Field(ge=0)] = None
    tpot_ms: Annotated[Number | None, Field(gt=0, allow_inf_nan=False)] = None
    adaptive: bool = True
    drafter: str | None = None
    return_trace: bool = False

    @model_validator(mode="after")
    def _one_drafter_for_all(self) -> Speculative:
        if self.drafter is not None:
            raise RequestError(
                "speculative.drafter is not supported: an engine has one drafter, for all of its requests. "
                "Leave it out.",
                param="speculative.drafter",
            )
        return self

    @property
    def max_draft_tokens(self) -> int | None:
        """The bound of `Request` in `cluster/request/request.py`."""
        return self.max_tokens if self.enabled else 0

    @property
    def options(self) -> SpeculationOptions:
        return {
            "max_draft_tokens": self.max_draft_tokens,
            "tpot_ms": self.tpot_ms,
            "adaptive_drafts": self.adaptive,
        }


class JsonSchemaFormat(RequestModel):
    """A schema and its name.

    The answer follows the schema with or without `strict`, which refuses keywords that cannot be enforced.
    """

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool = Field(alias="schema")  # Any: JSON
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """OpenAI's field; a schema may also be in `schema`, as for llama.cpp, Together and Fireworks.

    Structural tags have `structures` and `triggers` in addition to `type`.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")  # Any: JSON

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        has_schema = self.json_schema is not None or self.schema_ is not None
        if self.type == "json_schema" and not has_schema:
            raise RequestError(
                'response_format: type "json_schema" needs json_schema.', param="response_format.json_schema"
            )
        for name, value in (("json_schema", self.json_schema), ("schema", self.schema_)):
            if value is not None and not (
                self.type == "json_schema" or (self.type, name) == ("json_object", "schema")
            ):
                raise RequestError(
                    f'response_format: type "{self.type}" takes no {name}.', param=f"response_format.{name}"
                )
        if self.json_schema is not None and self.schema_ is not None:
            raise RequestError(
                "response_format: json_schema and schema are two schemas. Send one of them.",
                param="response_format.schema",
            )
        return self

    def own_unknown_fields(self) -> Iterable[str]:
        return () if self.type == "structural_tag" else super().own_unknown_fields()

    def constraint(self) -> StructuredOutputsParams | None:
        if self.json_schema is not None:
            schema = self.json_schema.json_schema
            return StructuredOutputsParams(
                json=schema,
                strict=bool(self.json_schema.strict),
                sent_as="response_format.json_schema.schema",
            )
        if self.schema_ is not None:
            return StructuredOutputsParams(json=self.schema_, sent_as="response_format.schema")
        if self.type == "json_object":
            return StructuredOutputsParams(json_object=True, sent_as="response_format")
        if self.type == "structural_tag":
            return StructuredOutputsParams(structural_tag=self.model_extra or {}, sent_as="response_format")
        return None


class StructuredOutputs(RequestModel):
    """vLLM's field; see `StructuredOutputsParams`."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")  # Any: JSON
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None  # Any: JSON
    disable_any_whitespace: bool = False

    def constraint(self) -> StructuredOutputsParams | None:
        fields = self.model_dump(by_alias=True)
        if not fields["json_object"]:
            del fields["json_object"]
        is_used = any(fields.get(name) is not None for name in CONSTRAINTS)
        return StructuredOutputsParams(**fields) if is_used else None


class GenerationRequest(RequestModel):
    """The fields that completions and chat have in common. None means: the server's default.

    Attributes:
        model: one of /v1/models; the first if absent.
        stream: answer in events, one for each verified block.
        stream_options: `include_usage` returns the usage at the end, `continuous_usage_stats` with every
            event.
        max_completion_tokens: the newer name of max_tokens; takes precedence over it.
        include_stop_str_in_output: the stop string that ended the text is part of it.
        response_format: OpenAI's: text, json_object, or json_schema.
        structured_outputs: vLLM's: json, regex, choice, grammar or structural_tag.
        truncate_prompt_tokens: keep this many tokens of the prompt's end; -1: as many as leave room.
        return_token_ids: return the ids of the prompt's and the answer's tokens.
        include_metrics: return in `metrics` how long it took and what speculation did.
        priority: lower is scheduled first; needs scheduling_policy=priority.
        cache_salt: prompts share cached beginnings only with those of the same salt.
        request_id: used in logs and in X-Request-Id.
        speculative: false decodes without drafts; or bounds, targets and a trace. The answer is the same.
        store: false: nothing of this request is captured, where a server does that (`--capture`).
    """

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Integer | None = None
    max_completion_tokens: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    n: Integer | None = None
    seed: Integer | None = None
    stop: Annotated[StopStrings | None, BeforeValidator(_stop_list)] = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    min_tokens: Integer = 0
    ignore_eos: bool = False
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_not_many_biases)] = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    prompt_logprobs: Annotated[Integer | None, BeforeValidator(no_boolean("prompt_logprobs"))] = None
    thinking_token_budget: Integer | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[Integer | None, Field(ge=-1)] = None
    return_token_ids: bool = False
    include_metrics: bool = True
    priority: Integer = 0
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=1024)] = None
    request_id: Annotated[str | None, Field(pattern=REQUEST_ID)] = None
    speculative: Annotated[Speculative, BeforeValidator(_speculation)] = Speculative()
    store: bool | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream=true.", param="stream_options")
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_need_a_whole_answer(self) -> GenerationRequest:
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError(
                "prompt_logprobs are not available in streams. Leave out stream, or prompt_logprobs.",
                param="prompt_logprobs",
            )
        return self

    @property
    def token_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        return "max_completion_tokens", self.max_completion_tokens

    def truncation(self, max_model_len: int) -> int | None:
        """Return how many tokens of a prompt's end are kept; None: all."""
        _, limit = self.token_limit
        if self.truncate_prompt_tokens != -1 or limit is None:
            return self.truncate_prompt_tokens
        return max(1, max_model_len - limit)

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens per position; None: no log probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    @property
    def echoes_only(self) -> bool:
        """Whether the answer is the prompt alone."""
        return False

    def sampling_params(self, defaults: GenerationDefaults, max_tokens: int | None) -> SamplingParams:
        """Use the request's values, else generation_config.json's, else OpenAI's. `max_tokens`: default."""
        limit_name, limit = self.token_limit
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
                prompt_logprobs=self.num_prompt_logprobs,
                thinking_token_budget=self.thinking_token_budget,
                structured_outputs=constraint_of(self.response_format, self.structured_outputs),
            )
        except RequestError as error:
            if error.param != "max_tokens":
                raise
            raise RequestError(error.message.replace("max_tokens", limit_name, 1), param=limit_name) from None


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def constraint_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> StructuredOutputsParams | None:
    """Raises RequestError if both fields have a constraint."""
    constraint = [each.constraint() for each in (response_format, structured_outputs) if each is not None]
    wanted = [each for each in constraint if each is not None]
    if len(wanted) == 2:
        raise RequestError(
            "structured_outputs and response_format both constrain the answer. Send one of them.",
            param="structured_outputs",
        )
    return wanted[0] if wanted else None


# Field -> values that mean "not used"; None and absence always do.
REFUSED: Mapping[str, tuple[object, ...]] = {
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "repetition_detection": (),
    "stream_interval": (1,),
    "prompt_embeds": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "lora_path": (),
}
# Field -> the value that means "not used", and what to do instead of using it.
NEVER: Mapping[str, tuple[object, str]] = {
    "best_of": (1, "Leave it out: ask for n completions with logprobs, and choose among them."),
    "suffix": (
        "",
        "Leave it out: put what is to follow into the prompt, as the model was taught.",
    ),
    **{
        f"guided_{constraint}": (None, f"Send structured_outputs.{constraint}.") for constraint in CONSTRAINTS
    },
    "guided_decoding_backend": (None, "Leave it out: there is one."),
    "guided_whitespace_pattern": (None, "Leave it out, or send structured_outputs.disable_any_whitespace."),
    "regex": (None, "Send structured_outputs.regex."),
    "ebnf": (None, "Send structured_outputs.grammar."),
}
# Fields that describe the request and do not affect the answer.
SILENT = frozenset({"user", "metadata", "session_id", "safety_identifier", "service_tier"})


def check_extra_fields(
    extra: Mapping[str, Any], known: Iterable[str], policy: UnknownParams, nested: Iterable[str] = ()
) -> list[str]:
    """Return unknown, ignored fields. Raises RequestError for those that must not be ignored.

    `nested`: dotted names of those within objects.
    """
    for name, value in extra.items():
        if name in NEVER and value is not None and value != NEVER[name][0]:
            raise RequestError(f"{name} is not supported. {NEVER[name][1]}", param=name)
        if name in REFUSED and value is not None and value not in REFUSED[name]:
            raise RequestError(
                f"{name} is not supported by this server yet. Leave it out"
                + (f" or send its default ({json.dumps(REFUSED[name][0])})." if REFUSED[name] else "."),
                param=name,
            )
    unknown = [name for name in extra if not (name in REFUSED or name in NEVER or name in SILENT)]
    unknown += nested
    if unknown and policy == "reject":
        hint = did_you_mean(unknown[0], [*known, *REFUSED, *NEVER, *SILENT], fallback="Leave it out.")
        name = brief_name(unknown[0])
        raise RequestError(f"{name} is not a known field. {hint}", param=name)
    return unknown
