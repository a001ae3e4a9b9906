"""Messages between the engine and its workers other than plans and results.

They use the same channel as plans (`cluster/step/scheduler_output.py`) and stay in order with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ....cluster.errors import MantaError
from ....cluster.step.page_transfer import PagesMoved, PageTransfer


@dataclass(frozen=True, slots=True)
class DrafterAt:
    """A drafter is available: rank 0 connects to it, and leaves the one it has."""

    generation: int
    address: str = field(repr=False)  # a secret


@dataclass(frozen=True, slots=True)
class DrafterReport:
    """Rank 0's view of the drafter, sent when it changes."""

    generation: int  # generation of the drafter in question
    ready: bool  # whether drafts may be requested
    lost: bool  # whether its session is lost


@dataclass(frozen=True, slots=True)
class LoadDrafter:
    """Load another drafter next to the current one; every rank answers with a `DrafterLoaded`."""

    model: str


@dataclass(frozen=True, slots=True)
class DrafterLoaded:
    error: MantaError | None


@dataclass(frozen=True, slots=True)
class UseDrafter:
    """Switch to the loaded drafter, or drop it if a rank could not load it."""

    accepted: bool


@dataclass(frozen=True, slots=True)
class ReportMoves:
    """Report the page transfers that have ended (`MovesReport`); every rank answers.

    Attributes:
        wait_s: how long to wait for one, if no step is in flight.
    """

    wait_s: float


@dataclass(frozen=True, slots=True)
class MovesReport:
    ended: tuple[PagesMoved, ...]


ControlMessage = DrafterAt | LoadDrafter | UseDrafter | PageTransfer | ReportMoves
