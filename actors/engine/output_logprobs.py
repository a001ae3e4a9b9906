"""Log probabilities in vLLM's shape, with the text of tokens. Called by `output_processor.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple, overload

from ...cluster.request.logprobs import RowLogprobs, TokenLogprobs
from ..tokenization.tokenizer import Tokenizer


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
        self._numbers: list[Numbers] = [
            (token_id, logprobs.logprob, logprobs.rank, logprobs.top_ids, logprobs.top_logprobs)
            for token_id, logprobs in zip(token_ids, found, strict=False)
        ]

    def extend(self, more: OutputLogprobs) -> None:
        self._numbers.extend(more._numbers)

    @classmethod
    def joined(cls, first: OutputLogprobs, more: OutputLogprobs) -> OutputLogprobs:
        found = cls(first._tokenizer)
        found._numbers = [*first._numbers, *more._numbers]
        return found

    def clear(self) -> None:
        self._numbers.clear()

    @property
    def numbers(self) -> Sequence[Numbers]:
        return self._numbers

    def text_of(self, token_id: int) -> str:
        return display_text(token_id, _text_of(token_id, self._tokenizer))

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to a text; without a tokenizer, its displayed text."""
        data = None if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        return self.text_of(token_id).encode() if data is None else data

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> PositionLogprobs: ...

    @overload
    def __getitem__(self, at: slice) -> OutputLogprobs: ...

    def __getitem__(self, at: int | slice) -> PositionLogprobs | OutputLogprobs:
        if isinstance(at, slice):
            part = OutputLogprobs(self._tokenizer)
            part._numbers = self._numbers[at]
            return part
        token_id, logprob, rank, top_ids, top_logprobs = self._numbers[at]
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
