"""What the engine tells its workers between steps, and what they tell it beside results.

Plans go as they are (`cluster/plan.py`); these go over the same channel, in order with them. Sent by
`ray_executor.py`, obeyed by `worker.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...cluster.errors import MantaError


@dataclass(frozen=True, slots=True)
class DrafterAt:
    """There is a drafter: rank 0 takes a seat at it, and leaves the one it has."""

    generation: int
    address: str = field(repr=False)  # a secret


@dataclass(frozen=True, slots=True)
class DrafterReport:
    """How rank 0 finds the drafter; told where it changes.

    Attributes:
        generation: of the drafter meant.
        ready: drafts may be asked for.
        lost: its seat is gone.
    """

    generation: int
    ready: bool
    lost: bool


@dataclass(frozen=True, slots=True)
class LoadDrafter:
    """Load another drafter beside the one in use; every rank answers with a `DrafterLoaded`."""

    model: str


@dataclass(frozen=True, slots=True)
class BeginTrial:
    """Have another drafter beside the one in use; every rank answers with a `DrafterLoaded`, and if any
    could not, an `EndTrial` follows."""

    model: str


@dataclass(frozen=True, slots=True)
class EndTrial:
    """Have one drafter again: the other one, if that is promoted."""

    promoted: bool


@dataclass(frozen=True, slots=True)
class DrafterLoaded:
    """What came of loading another."""

    error: MantaError | None


@dataclass(frozen=True, slots=True)
class UseDrafter:
    """Take the one that was loaded, in place of the old; or, if any rank could not load it, forget it."""

    accepted: bool


Order = DrafterAt | LoadDrafter | UseDrafter | BeginTrial | EndTrial
