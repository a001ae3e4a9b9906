"""Pareto frontier of throughput per GPU against tokens per second of each user, over loads and layouts.

A point is on the frontier if no other point is better in both. Throughput is interpolated linearly between
neighbors, as a load between theirs would give it. There is none beyond the fastest point. Called by
`jobs/simulate/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Point = tuple[float, float]  # (tokens/s of a user, tokens/s of a GPU)


def frontier(points: Iterable[Point]) -> list[Point]:
    """Return the points that no other dominates, ascending in user speed, so that throughput falls."""
    best: list[Point] = []
    for user, gpu in sorted(points, reverse=True):
        if not best or gpu > best[-1][1]:
            best.append((user, gpu))
    return best[::-1]


def throughput_at(front: Sequence[Point], user_tokens_per_s: float) -> float | None:
    """Return the tokens/s of a GPU while every user gets at least so many; None if unreachable."""
    if not front or user_tokens_per_s > front[-1][0]:
        return None
    before: Point | None = None
    for user, gpu in front:
        if user >= user_tokens_per_s:
            if before is None:
                return gpu
            share = (user_tokens_per_s - before[0]) / (user - before[0])
            return before[1] + share * (gpu - before[1])
        before = user, gpu
    return None
