"""Outputs of a request: text, tokens, statistics, traced steps and log probabilities, in vLLM's shapes.

Values only; `output_processor.py` makes them. A step that drafts is a *verify step*, vLLM's `num_spec_steps`.
All others produce one plain token, as the step that completes the prompt does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, overload

from ...cluster.request.logprobs import RowLogprobs, TokenLogprobs
from ...cluster.request.request import FinishReason
from ...cluster.speculation.acceptance_length import mean_acceptance_length
from ..tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of n completions. In a stream `text` and `token_ids` hold only the new part, otherwise everything.

    `stop_reason` is the stop string or stop token id that ended it, None for EOS. `logprobs` belong to
    `token_ids`; None if not requested.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: OutputLogprobs | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log probabilities of `token_ids`; None without `logprobs`."""
        if self.logprobs is None:
            return None
        return sum(place[token].logprob for place, token in zip(self.logprobs, self.token_ids, strict=True))


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Statistics of a request. Times in seconds; None until known.

    `acceptance_histogram[a]` counts verify steps in which `a` drafts were accepted, without the bonus token.
    `trace` lists every step of a finished request with one completion, if requested.
    """

    num_cached_tokens: int
    queue_s: float
    ttft_s: float | None
    e2e_s: float
    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_histogram: list[int]
    trace: tuple[TracedStep, ...] | None = None

    @property
    def mean_acceptance_length(self) -> float | None:
        return mean_acceptance_length(self.num_steps, self.num_accepted_tokens)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The state of a request: everything so far or, in a stream, the new part since the last output.

    `prompt_logprobs_state` holds log probabilities of the prompt if requested, from the first tokens on.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs_state: PromptLogprobs | None = None

    @property
    def prompt_logprobs(self) -> list[PositionLogprobs | None] | None:
        """Log probabilities of each prompt token, None for the first; None if not requested."""
        return None if self.prompt_logprobs_state is None else self.prompt_logprobs_state.positions


@dataclass(frozen=True, slots=True)
class ResumeState:
    """Progress of another engine on a request: its output tokens, and the number of characters sent."""

    token_ids: tuple[int, ...] = ()
    num_chars: int = 0


NOT_RESUMED = ResumeState()


TokenOrigin = Literal["plain", "draft", "bonus"]


class TracedStep(NamedTuple):
    num_drafted: int  # drafts verified; 0 in a plain decoding step
    num_accepted: int  # drafts accepted, as in `RequestMetrics`
    num_tokens: int  # tokens produced, cut where a stop string ends the text
    branches: tuple[int, ...] = ()  # as in `SequenceUpdate`

    @property
    def origins(self) -> Iterator[TokenOrigin]:
        """Yield the origin of each token: accepted draft, bonus token after drafts, or plain token."""
        for place in range(self.num_tokens):
            if place < self.num_accepted:
                yield "draft"
            else:
                yield "bonus" if self.num_drafted else "plain"


def token_origins(trace: Iterable[TracedStep]) -> Iterator[tuple[int, TokenOrigin]]:
    for number, step in enumerate(trace):
        for origin in step.origins:
            yield number, origin


class Logprob(NamedTuple):
    logprob: float  # natural logarithm, of the model's own distribution
    rank: int  # rank of the token in the vocabulary, from 1
    decoded_token: str | None  # text of this token alone; None without a tokenizer


Numbers = tuple[int, float, int, tuple[int, ...], tuple[float, ...]]  # a token's id and TokenLogprobs
PositionLogprobs = dict[int, Logprob]  # token id + TokenLogprobs' fields


class OutputLogprobs(Sequence[PositionLogprobs]):
    """One `PositionLogprobs` for each token of an output, stored as numbers and converted on access.

    Twenty top tokens at thousands of positions would be millions of objects; collecting their garbage blocks
    all streams. Plain tuples of numbers are not tracked by the collector.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        found: Iterable[TokenLogprobs] = (),
        token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        # Not TokenLogprobs: only plain tuples are untracked. A stop string may cut off some tokens.
        self.numbers: list[Numbers] = [
            (token_id, logprobs.logprob, logprobs.rank, logprobs.top_ids, logprobs.top_logprobs)
            for token_id, logprobs in zip(token_ids, found, strict=False)
        ]

    def extend(self, more: OutputLogprobs) -> None:
        self.numbers.extend(more.numbers)

    @classmethod
    def joined(cls, first: OutputLogprobs, more: OutputLogprobs) -> OutputLogprobs:
        found = cls(first._tokenizer)
        found.numbers = [*first.numbers, *more.numbers]
        return found

    def clear(self) -> None:
        self.numbers.clear()

    def text_of(self, token_id: int) -> str:
        return display_text(token_id, _text_of(token_id, self._tokenizer))

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to a text; without a tokenizer, its displayed text."""
        data = None if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        return self.text_of(token_id).encode() if data is None else data

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, at: int) -> PositionLogprobs: ...

    @overload
    def __getitem__(self, at: slice) -> OutputLogprobs: ...

    def __getitem__(self, at: int | slice) -> PositionLogprobs | OutputLogprobs:
        if isinstance(at, slice):
            part = OutputLogprobs(self._tokenizer)
            part.numbers = self.numbers[at]
            return part
        token_id, logprob, rank, top_ids, top_logprobs = self.numbers[at]
        place = {token_id: self._readable(token_id, logprob, rank)}
        for top_rank, (top_id, value) in enumerate(zip(top_ids, top_logprobs, strict=True), start=1):
            if top_id not in place:
                place[top_id] = self._readable(top_id, value, top_rank)
        return place

    def _readable(self, token_id: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, _text_of(token_id, self._tokenizer))


class PromptLogprobs:
    """Log probabilities of a prompt, converted to text on first use. `rows`: of all tokens but the first."""

    def __init__(
        self, token_ids: Sequence[int], rows: RowLogprobs | None, tokenizer: Tokenizer | None
    ) -> None:
        self._token_ids, self._rows, self._tokenizer = token_ids, rows, tokenizer

    @cached_property
    def scored(self) -> OutputLogprobs:
        """Log probabilities of each token but the first."""
        rows = () if self._rows is None else self._rows.tokens()
        return OutputLogprobs(self._tokenizer, rows, self._token_ids[1:])

    @property
    def positions(self) -> list[PositionLogprobs | None]:
        """Log probabilities of each token; None for the first."""
        return [None, *self.scored]

    @property
    def first_text(self) -> str:
        return display_text(self._token_ids[0], _text_of(self._token_ids[0], self._tokenizer))


def display_text(token_id: int, text: str | None) -> str:
    return f"token_id:{token_id}" if text is None else text


def _text_of(token_id: int, tokenizer: Tokenizer | None) -> str | None:
    return None if tokenizer is None else tokenizer.token_text(token_id)
