"""Decides whether an adapted drafter replaces the old one: better on new text, no worse on old text.

Compares tokens per step on the same prompts (and the same answers, since speculation changes no token). Pure;
called by `adapt_run.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_LOSS = 0.03  # accepted loss of tokens per step in a category of old text


@dataclass(frozen=True, slots=True)
class GateLengths:
    """Tokens per step on all new text, and on each category of old text."""

    new: float
    old: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the comparison; `complaints` are reasons to reject the new drafter."""

    before: GateLengths
    after: GateLengths
    complaints: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.complaints

    def rows(self) -> list[tuple[str, float, float]]:
        old = [(name, self.before.old[name], self.after.old[name]) for name in self.before.old]
        return [("new", self.before.new, self.after.new), *old]

    def as_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "complaints": list(self.complaints),
            "tokens_per_step": {
                name: {
                    "before": round(before, 4),
                    "after": round(after, 4),
                    "gain": round(gain(before, after), 4),
                }
                for name, before, after in self.rows()
            },
        }


def judge(before: GateLengths, after: GateLengths, min_gain: float) -> Verdict:
    complaints: list[str] = []
    gained = gain(before.new, after.new)
    if gained < min_gain:
        complaints.append(f"new text gains {gained:+.1%}, less than {min_gain:.1%}")
    for name, length in before.old.items():
        if (lost := -gain(length, after.old[name])) > MAX_LOSS:
            complaints.append(f"{name} loses {lost:.1%}, more than {MAX_LOSS:.0%}")
    return Verdict(before, after, tuple(complaints))


def gain(before: float, after: float) -> float:
    return after / before - 1.0
