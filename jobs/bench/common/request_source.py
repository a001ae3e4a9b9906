"""Requests of a load benchmark: an endless sequence over the prompts of a file, the same for every side.

The number of a request determines its prompt, sampling parameters, seed and length, so request 17 is the same
for all sides. Lengths vary by up to half, so that requests that start together do not finish together, as in
a real service. The engines are in `sweep/`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....actors.batch.dataset.row_requests import row_seed
from ....actors.tokenization.prompts import encode_prompt
from ....actors.tokenization.tokenizer import Tokenizer
from ....cluster.request.request import SamplingParams
from .engine_passes import PromptRow

_GOLDEN = 0.6180339887  # golden ratio - 1: the fractional parts of its multiples fill [0, 1) evenly


@dataclass(frozen=True, slots=True)
class LoadRequest:
    number: int
    category: str
    prompt: Any  # content of the user's file
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool = True

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            detokenize=False,
        )


class RequestSource:
    """An endless sequence of requests over `rows`; `natural` ones stop at an end-of-sequence token."""

    def __init__(
        self,
        rows: Sequence[PromptRow],
        max_tokens: int,
        temperature: float,
        *,
        natural: bool = False,
    ) -> None:
        self._rows = list(rows)
        random.Random(0).shuffle(self._rows)  # files are sorted by category; a turn should contain all
        self._max_tokens, self._temperature = max_tokens, temperature
        self._natural = natural

    def __getitem__(self, number: int) -> LoadRequest:
        row = self._rows[number % len(self._rows)]
        share = 1.0 if self._natural else 0.5 + number * _GOLDEN % 1.0
        return LoadRequest(
            number,
            row.category,
            row.prompt,
            max(1, round(self._max_tokens * share)),
            self._temperature,
            row_seed(0, f"{row.name} {number}"),
            ignore_eos=not self._natural,
        )


def encode_rows(rows: Sequence[PromptRow], tokenizer: Tokenizer | None) -> list[PromptRow]:
    return [row._replace(prompt=encode_prompt(row.prompt, tokenizer).token_ids) for row in rows]
