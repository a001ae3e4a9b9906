"""The body of /v1/completions, and the choices of its response."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, PlainValidator

from ....cluster.errors import RequestError
from ....cluster.request.request import SamplingParams
from ...chat.chat_model import PLAIN
from ...chat.text_stream import NO_PIECE, AnswerDelta
from ...engine.outputs import CompletionOutput
from ...tokenization.generation_config import GenerationDefaults
from ...tokenization.prompts import EncodedPrompt, Prompt
from ..wire.json_io import Integer, JsonObject, are_ids
from .logprobs import completion_logprobs
from .protocol import GenerationRequest, no_boolean

MAX_PROMPTS = 1024
OPENAI_MAX_TOKENS = 16  # default of OpenAI's endpoint
TextOrIds = str | list[int]
Prompts = str | list[str] | list[int] | list[list[int]]


# Any below: validators see raw JSON.
def _prompt_list(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise RequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists, "
            "and not empty.",
            param="prompt",
        )
    prompts = [value] if are_ids(value) else value
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(
            f"prompt: {len(prompts)} prompts in one request; at most {MAX_PROMPTS}.", param="prompt"
        )
    for prompt in prompts:
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and are_ids(prompt)):
            raise RequestError(
                "prompt: each prompt must be a string or a list of token ids, not a mixture.", param="prompt"
            )
    return prompts


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions.

    Attributes:
        prompt: a text, a list of token ids, or a list of either.
        logprobs: return the log probability of each token, and of this many likeliest tokens in its position.
        echo: the answer begins with the prompt.
    """

    prompt: Annotated[list[TextOrIds], PlainValidator(_prompt_list, json_schema_input_type=Prompts)]
    logprobs: Annotated[Integer | None, BeforeValidator(no_boolean("logprobs"))] = None

    echo: bool = False

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Likeliest tokens per prompt position. `logprobs` applies to an echo, too."""
        requested = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in requested if count is not None), default=None)

    @property
    def echoes(self) -> bool:
        return self.echo

    @property
    def echoes_only(self) -> bool:
        return self.echo and 0 in (self.max_tokens, self.max_completion_tokens)

    def sampling_params(self, defaults: GenerationDefaults, max_tokens: int | None) -> SamplingParams:
        """Generate one token for an echo alone; it is not returned."""
        if not self.echoes_only:
            return super().sampling_params(defaults, max_tokens)
        changes = {"max_tokens": 1, "max_completion_tokens": None, "min_tokens": 0}
        return self.model_copy(update=changes).sampling_params(defaults, max_tokens)

    def prompts(self) -> list[Prompt]:
        """The token ids have been validated as integers."""
        return [p if isinstance(p, str) else EncodedPrompt(tuple(p)) for p in self.prompt]


class CompletionShape:
    """Formats the choices of a completion; see `ResponseShape` in `generation/generation.py`."""

    prefix = "cmpl-"
    full_object = "text_completion"
    chunk_object = "text_completion"
    parsers = PLAIN

    def opening(self, index: int) -> JsonObject | None:
        return None

    def chunks(self, index: int, delta: AnswerDelta) -> list[JsonObject]:
        return [{"index": index, "text": delta.content, "logprobs": None, "finish_reason": None}]

    def end(self, index: int, finish_reason: str) -> JsonObject:
        return self.full_choice(index, NO_PIECE, finish_reason)

    def full_choice(self, index: int, delta: AnswerDelta, finish_reason: str) -> JsonObject:
        return {"index": index, "text": delta.content, "logprobs": None, "finish_reason": finish_reason}

    def logprobs(self, completion: CompletionOutput, num_top: int, offset: int) -> JsonObject:
        return completion_logprobs(completion, num_top, offset)
