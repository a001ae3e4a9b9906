"""A case: a computation of a backend, compared with the definition in fp64, with an error bound.

Made by the modules beside this one; run by `../doctor_run.py` and by tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .checks import Check, CheckOutcome, off_by, within
from .subject import BackendCandidate, KernelInputs, MachineKind, candidates

REMEDY = (
    "serve with another backend (--attention-backend torch) until this is fixed, and report the line with "
    "its trace (-o FILE); failures after a failed launch may be its consequence"
)


@dataclass(frozen=True, slots=True)
class Case:
    """A line of the table in each dtype.

    Attributes:
        error: runs the computation and returns the largest error in units of the last place.
        half, fp32: bounds of the error with results in 16 bits and in fp32. In fp32 a sequential sum of 12288
            terms may be off by 90 units; with tf32 products it is off by thousands.
        is_operator: only backends driven from Python compute this separately.
    """

    name: str
    error: Callable[[KernelInputs], float]
    half: float
    fp32: float
    is_operator: bool = True

    def check(self, group: str, place: MachineKind, candidate: BackendCandidate, dtype: torch.dtype) -> Check:
        name = f"{self.name}, {str(dtype).removeprefix('torch.')}"
        return Check(group, name, partial(self._examine, place, candidate, dtype), REMEDY)

    def _examine(self, place: MachineKind, candidate: BackendCandidate, dtype: torch.dtype) -> CheckOutcome:
        with torch.inference_mode():
            error = self.error(KernelInputs(place, candidate, dtype))
        return within(error, self.fp32 if dtype is torch.float32 else self.half)


def checks_of_served(
    group: str, place: MachineKind, cases: Iterable[Case], *, quick: bool
) -> Iterator[Check]:
    """Yield each case in each dtype of this device's preferred backend; only one 16-bit dtype if `quick`."""
    candidate, cases = candidates(place)[0], list(cases)
    for dtype in candidate.examined(quick=quick):
        for case in cases:
            yield case.check(group, place, candidate, dtype)


def error_of(inputs: KernelInputs, compute: Callable[[KernelInputs], list[Tensor]]) -> float:
    """Return the largest error of `compute`'s results against the definition's in fp64."""
    definition = inputs.definition()  # before any operands are drawn
    found, exact = compute(inputs), compute(definition)
    return max(off_by(*pair) for pair in zip(found, exact, strict=True))
