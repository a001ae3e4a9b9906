"""The parts of a response that show the prompt: `echo` and `prompt_logprobs`, in vLLM's formats.

The echo precedes a completion's text, and its log probabilities precede the choice's. `prompt_logprobs` is a
field of each choice in completions, and of the response in chat.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from ...engine.outputs import OutputLogprobs, PositionLogprobs, PromptLogprobs, RequestOutput
from ...tokenization.prompts import EncodedPrompt
from ...tokenization.tokenizer import Tokenizer
from ..wire.json_io import JsonObject
from .completion import CompletionRequest
from .logprobs import echo_logprobs
from .protocol import GenerationRequest


@dataclass(frozen=True, slots=True)
class PromptParts:
    echo: str | None  # the prompt's text; None if it is not shown
    num_top: int | None  # number of likeliest tokens per position of the echo; None: no log probabilities
    logprobs: PromptLogprobs | None  # the prompt's log probabilities; None if they were not requested
    # number of likeliest tokens per position of `prompt_logprobs`; None: no such field
    num_prompt_logprobs: int | None
    at_root: bool  # `prompt_logprobs` is a field of the response, not of each choice

    @classmethod
    async def of(
        cls,
        request: GenerationRequest,
        prompt: EncodedPrompt,
        logprobs: PromptLogprobs | None,
        tokenizer: Tokenizer | None,
    ) -> PromptParts:
        """Log probabilities are written out in a thread."""
        if logprobs is not None:
            await asyncio.to_thread(lambda: logprobs.scored)
        return cls(
            echo=_text(request, prompt, tokenizer) if request.echoes else None,
            num_top=request.num_logprobs,
            logprobs=logprobs,
            num_prompt_logprobs=request.prompt_logprobs,
            at_root=not isinstance(request, CompletionRequest),
        )

    @property
    def num_chars(self) -> int:
        return len(self.echo or "")

    def opening(self, index: int) -> JsonObject:
        return {"index": index, "text": self.echo, "logprobs": self._echo_logprobs(), "finish_reason": None}

    def begin(self, choice: JsonObject) -> JsonObject:
        if self.echo is not None:
            choice["text"] = self.echo + choice["text"]
            echo_lists, own_lists = self._echo_logprobs(), choice["logprobs"]
            if echo_lists is not None:
                own_lists["text_offset"] = [self.num_chars + offset for offset in own_lists["text_offset"]]
                choice["logprobs"] = {name: values + own_lists[name] for name, values in echo_lists.items()}
        return choice if self.at_root else choice | self._field()

    def root_fields(self) -> JsonObject:
        return self._field() if self.at_root else {}

    def _field(self) -> JsonObject:
        if self.num_prompt_logprobs is None:
            return {}
        assert self.logprobs is not None, "they were asked for"
        return {
            "prompt_logprobs": [
                _entries(place, self.num_prompt_logprobs) for place in self.logprobs.positions
            ]
        }

    def _echo_logprobs(self) -> JsonObject | None:
        if self.num_top is None or self.logprobs is None:
            return None
        return echo_logprobs(self.logprobs, self.num_top, self.num_chars)


def without_answer(output: RequestOutput) -> RequestOutput:
    """Drop the generated token: the engine generates at least one."""
    outputs = [
        replace(
            each,
            text="",
            token_ids=[],
            logprobs=None if each.logprobs is None else OutputLogprobs(None),
            finish_reason=None if each.finish_reason is None else "length",
            stop_reason=None,
        )
        for each in output.outputs
    ]
    return replace(output, outputs=outputs)


def _text(request: GenerationRequest, prompt: EncodedPrompt, tokenizer: Tokenizer | None) -> str:
    if prompt.text is not None and request.truncate_prompt_tokens is None:
        return prompt.text
    if tokenizer is None:
        return ""
    return tokenizer.decode(prompt.token_ids, skip_special_tokens=request.skip_special_tokens)


def _entries(position: PositionLogprobs | None, num_top: int) -> JsonObject | None:
    """Return a position's own token and the `num_top` likeliest, by token id."""
    if position is None:
        return None
    own = next(iter(position))
    return {
        str(token_id): found._asdict()
        for token_id, found in position.items()
        if token_id == own or found.rank <= num_top
    }
