"""What is looked at, and what is found: a line of the table each.

A check is a function that returns an `Outcome` or raises `NotHereError`. Whatever else it raises is its own
failure, never the end of the examination. Made by the modules beside this one, run by `run.py`.
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
    """This cannot be looked at here; the message says why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured.

    Attributes:
        measured, bound: in words, with units.
        passed: whether the one lies within the other; None where nothing is judged.
    """

    measured: str
    bound: str = ""
    passed: bool | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to look at.

    Attributes:
        group, name: where it stands in the table.
        look: measures.
        remedy: what to do where it fails.
    """

    group: str
    name: str
    look: Callable[[], Outcome]
    remedy: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the table; as JSON all of it.

    Attributes:
        measured: why, where it was skipped; what was raised, where the check itself broke.
        remedy: empty but for failures.
        trace: of what was raised.
    """

    group: str
    name: str
    status: Status
    measured: str
    bound: str = ""
    remedy: str = ""
    seconds: float = 0.0
    trace: str | None = None


def examine(check: Check) -> Finding:
    """Look, and say what was found."""
    begin_s = time.perf_counter()
    trace, remedy = None, ""
    try:
        outcome = check.look()
        status = _status(outcome)
    except NotHereError as skip:
        outcome, status = Outcome(str(skip)), "skipped"
    except Exception as error:  # a check's edge: whatever a broken machine may raise is what was found there
        words = " ".join(str(error).split())
        outcome, status = Outcome(f"{type(error).__name__}: {words}"), "failed"
        trace = traceback.format_exc()
    if status == "failed":
        remedy = check.remedy
    seconds = round(time.perf_counter() - begin_s, 3)
    return Finding(check.group, check.name, status, outcome.measured, outcome.bound, remedy, seconds, trace)


def raising(group: str, name: str, error: Exception) -> Check:
    """A line that says what stood in the way of looking."""

    def look() -> Outcome:
        raise error

    return Check(group, name, look, "report the line with its trace (-o FILE)")


def _status(outcome: Outcome) -> Status:
    if outcome.passed is None:
        return "fact"
    return "ok" if outcome.passed else "failed"


def off_by(found: Tensor, exact: Tensor) -> float:
    """The largest error, in units of the last place: of `found`'s dtype, at the size of the exact value or at
    the values' root mean square, whichever is more.

    Args:
        exact: fp64.
    """
    assert found.shape == exact.shape and exact.dtype is torch.float64, "like is compared with like"
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    size = torch.maximum(exact.abs(), exact.square().mean().sqrt())
    return float(((found.double() - exact).abs() / size).max()) / torch.finfo(found.dtype).eps


def within(units: float, bound: float) -> Outcome:
    """Of an error in units of the last place."""
    return Outcome(f"{units:.3g} ulp", f"{bound:g} ulp", units <= bound)


def none_differ(differing: int, among: int, what: str) -> Outcome:
    """Of things that must be equal."""
    return Outcome(f"{differing} of {among} {what} differ", "0", differing == 0)
