"""What is asked in a benchmark of load: an endless row of requests over a file's prompts, equal for all.

A request's number decides its prompt, sampling, seed and length, so that whoever asks for number 17 asks
for the same. Lengths differ by up to half, so that requests which began together do not end together, as in
any service. Not when they come (`arrivals.py`), nor who answers (`sweep/`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ....actors.batch.rows import row_seed
from ....actors.prompts import encode_prompt
from ....actors.tokenizer import Tokenizer
from ....cluster.request import SamplingParams
from ..passes import PromptRow

Traffic = Literal["prompts", "mixed"]
HOSTILE = "hostile"  # category
# With equal noise drafters follow even high temperatures: at 1 they follow least.
_HOSTILE_TEMPERATURE = 1.0
_GOLDEN = 0.6180339887  # its multiples fill [0, 1) evenly


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: `prompt` is text, a `Chat` or token ids."""

    number: int
    category: str
    prompt: Any  # of a user's file
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


class Asks:
    """Requests by number, without an end.

    Args:
        rows: the prompts, which come round again.
        max_tokens: of a request on average; each has between half of it and half more.
        traffic: "mixed" makes every other request hostile to drafters: its prompt's tokens (rows must hold
            token ids) in a random order, sampled at a temperature.
        natural: each ends with its text, at `max_tokens` at the latest.
    """

    def __init__(
        self,
        rows: Sequence[PromptRow],
        max_tokens: int,
        temperature: float,
        traffic: Traffic = "prompts",
        *,
        natural: bool = False,
    ) -> None:
        self._rows = list(rows)
        random.Random(0).shuffle(self._rows)  # a file's categories follow each other; a turn is to have all
        self._max_tokens, self._temperature = max_tokens, temperature
        self._mixed, self._natural = traffic == "mixed", natural

    def __getitem__(self, number: int) -> Ask:
        row = self._rows[number % len(self._rows)]
        hostile, prompt = self._mixed and number % 2 == 1, row.prompt
        if hostile:
            prompt = random.Random(number).sample(prompt, len(prompt))
        share = 1.0 if self._natural else 0.5 + number * _GOLDEN % 1.0
        return Ask(
            number,
            HOSTILE if hostile else row.category,
            prompt,
            max(1, round(self._max_tokens * share)),
            _HOSTILE_TEMPERATURE if hostile else self._temperature,
            row_seed(0, f"{row.name} {number}"),
            ignore_eos=not self._natural,
        )


def encode_rows(rows: Sequence[PromptRow], tokenizer: Tokenizer | None) -> list[PromptRow]:
    """The same prompts as token ids."""
    return [row._replace(prompt=encode_prompt(row.prompt, tokenizer).token_ids) for row in rows]
