"""Checks of the doctor and their results, one table line each.

A check is a function that returns an `CheckOutcome` or raises `NotHereError`. Any other exception is reported
as a failure of that check; it never ends the run. The modules beside this one make checks,
`jobs/doctor/doctor_run.py` runs them.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from .subject import BackendCandidate, KernelInputs, MachineKind, candidates

Status = Literal["fact", "ok", "failed", "skipped"]


class NotHereError(Exception):
    """The check does not apply to this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """Result of a check, as text with units; `passed` None means that there is no bound."""

    measured: str
    bound: str = ""
    passed: bool | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """A check to run: its line in the table, the function, and what to do if it fails."""

    group: str
    name: str
    look: Callable[[], CheckOutcome]
    remedy: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report; `measured` is the result, the reason for skipping, or the exception."""

    group: str
    name: str
    status: Status
    measured: str
    bound: str = ""
    remedy: str = ""
    seconds: float = 0.0
    trace: str | None = None


def examine(check: Check) -> Finding:
    begin_s = time.perf_counter()
    trace, remedy = None, ""
    try:
        outcome = check.look()
        status = _status(outcome)
    except NotHereError as skip:
        outcome, status = CheckOutcome(str(skip)), "skipped"
    except Exception as error:  # a broken machine may raise anything
        words = " ".join(str(error).split())
        outcome, status = CheckOutcome(f"{type(error).__name__}: {words}"), "failed"
        trace = traceback.format_exc()
    if status == "failed":
        remedy = check.remedy
    seconds = round(time.perf_counter() - begin_s, 3)
    return Finding(check.group, check.name, status, outcome.measured, outcome.bound, remedy, seconds, trace)


def raising(group: str, name: str, error: Exception) -> Check:
    def look() -> CheckOutcome:
        raise error

    return Check(group, name, look, "report the line with its trace (-o FILE)")


def _status(outcome: CheckOutcome) -> Status:
    if outcome.passed is None:
        return "fact"
    return "ok" if outcome.passed else "failed"


def off_by(found: Tensor, exact: Tensor) -> float:
    """Return the largest error against fp64 in units of the last place at max(|exact|, root mean square)."""
    assert found.shape == exact.shape and exact.dtype is torch.float64, "equal shapes, exact in fp64"
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    size = torch.maximum(exact.abs(), exact.square().mean().sqrt())
    return float(((found.double() - exact).abs() / size).max()) / torch.finfo(found.dtype).eps


def within(units: float, bound: float) -> CheckOutcome:
    return CheckOutcome(f"{units:.3g} ulp", f"{bound:g} ulp", units <= bound)


def none_differ(differing: int, among: int, what: str) -> CheckOutcome:
    return CheckOutcome(f"{differing} of {among} {what} differ", "0", differing == 0)


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

    def check(
        self, group: str, machine: MachineKind, candidate: BackendCandidate, dtype: torch.dtype
    ) -> Check:
        name = f"{self.name}, {str(dtype).removeprefix('torch.')}"
        return Check(group, name, partial(self._examine, machine, candidate, dtype), REMEDY)

    def _examine(self, machine: MachineKind, candidate: BackendCandidate, dtype: torch.dtype) -> CheckOutcome:
        with torch.inference_mode():
            error = self.error(KernelInputs(machine, candidate, dtype))
        return within(error, self.fp32 if dtype is torch.float32 else self.half)


def checks_of_served(
    group: str, machine: MachineKind, cases: Iterable[Case], *, quick: bool
) -> Iterator[Check]:
    """Yield each case in each dtype of this device's preferred backend; only one 16-bit dtype if `quick`."""
    candidate, cases = candidates(machine)[0], list(cases)
    for dtype in candidate.examined(quick=quick):
        for case in cases:
            yield case.check(group, machine, candidate, dtype)


def error_of(inputs: KernelInputs, compute: Callable[[KernelInputs], list[Tensor]]) -> float:
    definition = inputs.definition()  # before any operands are drawn
    found, exact = compute(inputs), compute(definition)
    return max(off_by(*pair) for pair in zip(found, exact, strict=True))
