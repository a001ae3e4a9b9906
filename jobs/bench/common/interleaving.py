"""Runs the sides of a comparison in alternation, so that disturbances of the machine affect all of them.

In a *round* every side answers all prompts; a *turn* is one side's run over a few of them and takes some
tenths of a second. All sides answer the same prompts in consecutive turns, in rotating order. The figures of
a round are sums over its turns, so the speeds of two sides in a round, and their ratio, are for the same work
at nearly the same time. Medians are taken over rounds. `engine_passes.py` defines what a turn does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ...common.progress import counting
from .engine_passes import Pass, joined, say

LINE_S = 4.0  # interval of progress lines
TURN_S = 0.5  # duration for the slowest side
# Minimum number of full batches in a turn: at its end the batch is not full, which must not dominate.
LEAST_GROUPS = 2

_Pass = TypeVar("_Pass", bound=Pass)
_Name = TypeVar("_Name", bound=str)


def prompts_per_turn(requests: int, tokens_per_s: float, max_tokens: int) -> int:
    """Return the prompts that the slowest side answers in `TURN_S`: at least two groups of `requests`."""
    groups = round(TURN_S * tokens_per_s / max_tokens / requests)
    return requests * max(groups, LEAST_GROUPS)


def split_evenly(count: int, per_turn: int, requests: int) -> list[slice]:
    """Split `count` prompts into turns of at least `per_turn`; all but the last are whole groups."""
    num_turns = max(count // per_turn, 1)
    groups = -(-count // requests)
    ends = [min(count, i * groups // num_turns * requests) for i in range(1, num_turns + 1)]
    return [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def run_rounds(
    sides: Mapping[str, Callable[[slice], _Pass]], turns: Sequence[slice], rounds: int, title: str
) -> dict[str, list[_Pass]]:
    """Return for each side one pass over all prompts per round, summed over its turns."""
    passes: dict[str, list[_Pass]] = {name: [] for name in sides}
    for number in range(rounds):
        done: dict[str, list[_Pass]] = {name: [] for name in sides}
        with counting(f"{title}, round {number + 1}/{rounds}", say, every_s=LINE_S):
            for i, turn in enumerate(turns):
                for name in rotated(list(sides), number + i):
                    done[name].append(sides[name](turn))
        for name, parts in done.items():
            passes[name].append(joined(parts))
    return passes


def rotated(names: Sequence[_Name], number: int) -> list[_Name]:
    first = number % len(names)
    return [*names[first:], *names[:first]]


def ratios(ours: Sequence[Pass], theirs: Sequence[Pass]) -> list[float]:
    return [mine.tokens_per_s / other.tokens_per_s for mine, other in zip(ours, theirs, strict=True)]
