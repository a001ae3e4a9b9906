"""The messages between a target and a remote drafter, and the layout of the memory that they share.

    target rank 0                                        drafter
    Hello: name, config, and the memory   ── socket ──▶  a session: states, pages
                                          ◀──────────── Welcome, or DrafterRefusal
    DraftRequest: a plan                  ── down ────▶  draft
                              drafts ◀── mailbox ─────   Drafted
    verify
    verdict, features  ── mailbox ──▶
    StepReport: the results               ── down ────▶  append, write context
                                          ◀──── up ───   StepReportDone: the mailbox's bytes are free

A connection is one session at one drafter. Reconnecting gives a new one, so messages of different drafters or
sessions never mix; within a session messages carry the step. The two sides are `drafter_client.py` and
`drafter_server.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....cluster.config import EngineConfig
from ....cluster.errors import MantaError
from ....cluster.step.scheduler_output import DrafterUse, IntArray, SchedulerOutput
from ..shm.ring_buffer import Layout
from ..shm.tensor_mailbox import Kinds, padded, size_of

MAX_OPEN = 32  # steps by which a drafter may lag before it is given up
NUM_PLACES = 4  # of drafts; more than steps in flight, as only these are waited for
LAYOUT = Layout(
    num_workers=1, down_slots=128, down_slot_bytes=8 * 1024, up_slots=4 * MAX_OPEN, up_slot_bytes=4 * 1024
)
_STEPS = 4  # number of largest steps whose results the mailbox holds; decoding steps are far smaller


@dataclass(frozen=True, slots=True)
class Sizes:
    """Layout of a mailbox: places for the drafts of steps, in turn, then the target's results."""

    drafts_bytes: int  # size of one place
    results_bytes: int  # size of all results that the drafter has not taken in yet

    @classmethod
    def of(
        cls,
        max_requests: int,
        max_rows: int,
        num_drafts: int,
        hidden_size: int,
        dtype: torch.dtype,
        num_candidates: tuple[int, int] | None = None,
        values_each: int = 0,
    ) -> Sizes:
        """Return the layout for steps of at most `max_rows` rows.

        Args:
            num_candidates: see `draft_kinds`.
            values_each: int32 values of a request's drafts, if they are more than tokens.
        """
        rows = max(max_requests * (num_drafts + 2), max_rows)
        ids_bytes, margins_bytes = padded(rows * 8), padded(rows * 4)
        drafts_bytes = ids_bytes + margins_bytes
        if num_candidates is not None:
            drafts_bytes += size_of(
                _candidate_kinds(min(max_requests * (1 + num_drafts), max_rows), num_candidates)
            )
        drafts_bytes += padded(max_requests * values_each * 4)
        features_bytes = padded(rows * hidden_size * dtype.itemsize)
        return cls(drafts_bytes, _STEPS * (ids_bytes + features_bytes))

    @property
    def results_offset(self) -> int:
        return NUM_PLACES * self.drafts_bytes

    @property
    def total_bytes(self) -> int:
        return self.results_offset + self.results_bytes


def draft_kinds(plan: SchedulerOutput, num_candidates: tuple[int, int]) -> Kinds:
    """Return the kinds of a plan's drafts and margins [R, K], where the host drives the steps.

    If the plan needs candidates also those of the ids and scores of `BlockCandidates`; `num_candidates`: see
    `DrafterConfig`.
    """
    drafts_R = plan.block_drafts
    shape = plan.num_requests, int(drafts_R.max(initial=0))
    chosen: Kinds = [(shape, torch.int64), (shape, torch.float32)]
    candidates = _candidate_kinds(int(drafts_R.sum()), num_candidates) if plan.needs_candidates else []
    return [*chosen, *candidates]


def _candidate_kinds(num_rows: int, num_candidates: tuple[int, int]) -> Kinds:
    num_before, count = num_candidates
    return [((num_rows, count), torch.int64), ((num_rows, num_before, count), torch.float32)]


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a target; comes with the rings' memory file."""

    name: str  # of the engine, for the drafter's logs
    config: EngineConfig  # the engine's
    num_pages: tuple[int, ...]  # pages of each pool
    sizes: Sizes
    mailbox: object  # argument of `Mailbox.open`; None if it is a second file


@dataclass(frozen=True, slots=True)
class Welcome:
    """The drafter has created a session."""


@dataclass(frozen=True, slots=True)
class DrafterRefusal:
    error: MantaError


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Draft for this plan, into a place of the mailbox.

    Attributes:
        has_grammars: whether a grammar restricts drafts: then grown trees come with their candidates.
        sent_s: the machine's monotonic clock.
    """

    plan: SchedulerOutput
    place: int
    has_grammars: bool
    sent_s: float


@dataclass(frozen=True, slots=True)
class Drafted:
    """The tensors of `draft_kinds` are in place since `at_s`. `use`: the drafter's since its last message."""

    step: int
    at_s: float
    use: DrafterUse


@dataclass(frozen=True, slots=True)
class StepReport:
    """Results of a part of a step's rows are in the mailbox."""

    step: int
    part: int
    offset: int
    # whether the drafts were verified; if they came too late, tokens of id 0 were verified instead
    followed: bool
    # int32 [R], verified drafts, if the target's host knows that they are fewer than planned
    num_drafts: IntArray | None
    sent_s: float  # see `DraftRequest`


@dataclass(frozen=True, slots=True)
class StepReportDone:
    """The results have been taken in. `use` is the drafter's since its last message."""

    step: int
    part: int
    use: DrafterUse
