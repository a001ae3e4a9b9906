"""A case: a computation of a backend, compared with the definition in fp64, with an error bound."""

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
    """A line of the table in each dtype; `error` is the largest error in units of the last place.

    Bounds are for 16 bits (`half`) and fp32, where a sequential sum of 12288 terms may be off by 90 units,
    with tf32 products by thousands. If `is_operator`, only backends driven from Python compute this
    separately.
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
    definition = inputs.definition()  # before any operands are drawn
    found, exact = compute(inputs), compute(definition)
    return max(off_by(*pair) for pair in zip(found, exact, strict=True))
