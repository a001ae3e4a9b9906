"""Log probabilities as users read them: in vLLM's shape, with the text of tokens. Called by `outputs.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from ..cluster.logprobs import RowLogprobs, TokenLogprobs
from .tokenizer import Tokenizer


class Logprob(NamedTuple):
    """Of a token in one place of the output.

    Attributes:
        logprob: natural, of the model's own distribution.
        rank: the token's place among all of the vocabulary, from 1.
        decoded_token: its text by itself; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


PlaceLogprobs = dict[int, Logprob]  # by token id, the one that came out first, then the likeliest


def readable(
    found: Iterable[TokenLogprobs], token_ids: Sequence[int], tokenizer: Tokenizer | None
) -> list[PlaceLogprobs]:
    """One for each of these tokens."""

    def logprob(token_id: int, value: float, rank: int) -> Logprob:
        return Logprob(value, rank, _text_of(token_id, tokenizer))

    places: list[PlaceLogprobs] = []
    for token_id, told in zip(token_ids, found, strict=False):  # a stop string may leave some tokens out
        place = {token_id: logprob(token_id, told.logprob, told.rank)}
        for rank, (top_id, value) in enumerate(zip(told.top_ids, told.top_logprobs, strict=True), start=1):
            place.setdefault(top_id, logprob(top_id, value, rank))
        places.append(place)
    return places


class PromptLogprobs:
    """Those of a prompt: numbers at first, for a long prompt's texts take a while to make.

    Args:
        token_ids: of the prompt.
        rows: of all of its tokens but the first; None of a prompt of one token.
    """

    def __init__(
        self, token_ids: Sequence[int], rows: RowLogprobs | None, tokenizer: Tokenizer | None
    ) -> None:
        self._token_ids, self._rows, self._tokenizer = token_ids, rows, tokenizer

    @cached_property
    def told(self) -> list[PlaceLogprobs]:
        """One for each token but the first, which nothing foretells."""
        if self._rows is None:
            return []
        return readable(self._rows.tokens(), self._token_ids[1:], self._tokenizer)

    @property
    def places(self) -> list[PlaceLogprobs | None]:
        """One for each token; None of the first."""
        return [None, *self.told]

    @property
    def first_text(self) -> str:
        """The first token, as it is shown."""
        return shown_token(self._token_ids[0], _text_of(self._token_ids[0], self._tokenizer))


def shown_token(token_id: int, text: str | None) -> str:
    """A token's text; without a tokenizer its number."""
    return f"token_id:{token_id}" if text is None else text


def _text_of(token_id: int, tokenizer: Tokenizer | None) -> str | None:
    return None if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)
