"""A case: something that a backend computes, compared with the definition in fp64, and a bound of its error.

Made by the modules beside this one; run by `../run.py` and by tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..findings import Check, Outcome, off_by, within
from .subject import Candidate, Place, Subject, candidates

REMEDY = (
    "serve with another backend (--attention-backend torch) until this is mended, and report the line with "
    "its trace (-o FILE); what fails behind a failed launch may be its consequence"
)


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table, in every dtype.

    Attributes:
        error: computes, and returns the largest error in units of the last place.
        half, fp32: the bounds of that, where results are rounded to 16 bits, and in fp32: there a sum of
            12288 terms in a row may be off by 90 units, one of products of tf32 is by thousands.
        is_operator: only backends whose passes are driven from Python compute this by itself.
    """

    name: str
    error: Callable[[Subject], float]
    half: float
    fp32: float
    is_operator: bool = True

    def check(self, group: str, place: Place, candidate: Candidate, dtype: torch.dtype) -> Check:
        name = f"{self.name}, {str(dtype).removeprefix('torch.')}"
        return Check(group, name, partial(self._examine, place, candidate, dtype), REMEDY)

    def _examine(self, place: Place, candidate: Candidate, dtype: torch.dtype) -> Outcome:
        with torch.inference_mode():
            error = self.error(Subject(place, candidate, dtype))
        return within(error, self.fp32 if dtype is torch.float32 else self.half)


def checks_of_served(group: str, place: Place, cases: Iterable[Case], *, quick: bool) -> Iterator[Check]:
    """Each case in each dtype of the backend that is served here; of two dtypes of 16 bits one if `quick`."""
    candidate, cases = candidates(place)[0], list(cases)
    for dtype in candidate.examined(quick=quick):
        for case in cases:
            yield case.check(group, place, candidate, dtype)


def error_of(subject: Subject, compute: Callable[[Subject], list[Tensor]]) -> float:
    """The largest error of what `compute` returns for a subject: against the definition's results in fp64."""
    definition = subject.definition()  # before operands are drawn
    found, exact = compute(subject), compute(definition)
    return max(off_by(*pair) for pair in zip(found, exact, strict=True))
