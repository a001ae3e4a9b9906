"""Checks of the doctor and their results, one table line each.

A check is a function that returns an `CheckOutcome` or raises `NotHereError`. Any other exception is reported
as a failure of that check; it never ends the run. The modules beside this one make checks,
`jobs/doctor/doctor_run.py` runs them.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

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
