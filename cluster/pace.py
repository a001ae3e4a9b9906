"""What is learned of steps as they end, and what follows for the next one: drafts, turns, background work.

Online and background requests are apart in all of it, so that neither's texts nor times count for the other.
The questions are `draft_length.py`'s, `halves.py`'s and `background_share.py`'s. Used by `scheduler.py`
alone.

Legend: R requests of a step, online ones first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .background_share import BackgroundShare, Portion
from .draft_length import DraftLength
from .halves import Halves, Turn
from .limits import SchedulerConfig
from .outcome import StepOutcome
from .plan import BoolArray, SchedulerOutput, StepTimings

_QUIET_S = 5.0  # without online requests: the next one may be far


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan that is not committed yet.

    Attributes:
        plan: the step.
        planned_s: when it was made.
        num_online: its first requests, which are not background work.
        num_drafts: what each of its first kind of requests was to have, if it decoded and could.
        turn: how it was planned, where there is a choice.
        staying_R: which of its sequences are still those it was made for.
    """

    plan: SchedulerOutput
    planned_s: float
    num_online: int
    num_drafts: int
    turn: Turn | None
    staying_R: BoolArray


class Pace:
    """Of one engine."""

    def __init__(self, config: SchedulerConfig) -> None:
        most = self._most_drafts = config.num_speculative_tokens
        self._last_drafts = [most, most]  # of online and of background requests
        self._lengths: dict[tuple[bool, bool], DraftLength] = {}  # of (background, half of the requests)
        if config.adaptive_drafts and most > 0:
            ways = (False, True) if config.halves else (False,)
            self._lengths = {(kind, halved): DraftLength(most) for kind in (False, True) for halved in ways}
        self._share = BackgroundShare(config.max_rows, chunks=config.enable_chunked_prefill)
        self._halves = Halves() if config.halves else None
        self._ended_s = -math.inf  # the last step

    def in_halves(self, num_requests: int) -> bool:
        """Whether the next step of so many running requests is to have half of them."""
        return self._halves is not None and self._halves.choose(num_requests)

    def drafts(self, num_decoding: int, *, background: bool = False, halved: bool = False) -> int:
        """Drafts of each of so many requests that decode, the half of those that run or all."""
        length = self._lengths.get((background, halved))
        if length is None:
            chosen = self._most_drafts
        elif halved and length.is_new:  # begin with what is best for all of them
            chosen = self._lengths[background, False].choose(2 * num_decoding)
        else:
            chosen = length.choose(num_decoding)
        self._last_drafts[background] = chosen
        return chosen

    def last_drafts(self, *, background: bool = False) -> int:
        """What was chosen the last time."""
        return self._last_drafts[background]

    def beside(self, online: tuple[int, int], num_decoding: int) -> Portion:
        """Background work of a step in which so many online requests decode, with so many drafts each.

        Args:
            num_decoding: background requests that could.
        """
        return self._share.beside(*online, num_decoding)

    def alone(self, num_decoding: int, idle_s: float) -> Portion:
        """Background work of a step that holds nothing else.

        Args:
            num_decoding: background requests that could.
            idle_s: since the last step with online requests.
        """
        return self._share.alone(num_decoding, 1 + self._last_drafts[True], quiet=idle_s > _QUIET_S)

    def depart(
        self, plan: SchedulerOutput, now_s: float, num_online: int, num_running: int, *, halved: bool
    ) -> Flight:
        """A plan was made while so many requests of its first kind ran."""
        turn = None if self._halves is None else self._halves.plan(num_running, halved=halved)
        num_drafts = self._last_drafts[not num_online]
        return Flight(plan, now_s, num_online, num_drafts, turn, np.ones(plan.num_requests, dtype=np.bool_))

    def learn(
        self, flight: Flight, outcome: StepOutcome, timings: StepTimings, now_s: float, *, shares: bool
    ) -> None:
        """A step has ended; `shares` says whether there is background work at all."""
        elapsed_s, self._ended_s = now_s - max(flight.planned_s, self._ended_s), now_s
        if not self._lengths and self._halves is None and not shares:
            return
        self._learn_acceptance(flight, outcome)
        plan, num_online, seconds = flight.plan, flight.num_online, timings.total_s
        count = num_online or plan.num_requests
        num_drafts = decoding_alike(plan, count)
        if count < plan.num_requests:
            if num_drafts is not None:
                self._share.learn_joined(num_online, num_drafts, _portion_of(plan, num_online), seconds)
            return
        # Where drafts were withheld (no drafter, or no context) the time is not that of what was chosen.
        if num_drafts == flight.num_drafts:
            self._learn_choice(flight, timings, elapsed_s)
        if not num_online:
            self._share.learn_alone(plan.num_batched_tokens, seconds)
        elif num_drafts is not None and shares:
            self._share.learn_online(count, num_drafts, seconds)

    def _learn_choice(self, flight: Flight, timings: StepTimings, elapsed_s: float) -> None:
        """From a step in which all requests decoded, as was chosen."""
        turn, count, num_drafts = flight.turn, flight.plan.num_requests, flight.num_drafts
        length = self._lengths.get((not flight.num_online, turn is not None and turn.halved))
        if length is not None:
            length.learn_time(count, num_drafts, timings.total_s)
        if turn is not None and self._halves is not None:
            num_tokens = count * (1.0 if length is None else length.tokens(num_drafts))
            self._halves.learn(turn, num_tokens, elapsed_s, timings)

    def _learn_acceptance(self, flight: Flight, outcome: StepOutcome) -> None:
        goes_on_R = ~(outcome.stopped | outcome.full)  # where a sequence ends, drafts behind were not judged
        if flight.num_online == flight.plan.num_requests:
            parts = [(False, goes_on_R)]
        else:
            online_R = np.arange(len(goes_on_R)) < int(flight.staying_R[: flight.num_online].sum())
            parts = [(False, goes_on_R & online_R), (True, goes_on_R & ~online_R)]
        for background, chosen_R in parts:
            for halved in (False, True):
                if (length := self._lengths.get((background, halved))) is not None:
                    length.learn_acceptance(outcome.num_drafts[chosen_R], outcome.num_accepted[chosen_R])


def decoding_alike(plan: SchedulerOutput, count: int) -> int | None:
    """Drafts of each of a plan's first requests, if all decode with as many."""
    num_drafts = int(plan.num_drafts[0])
    drafts_R, rows_R = plan.num_drafts[:count], plan.num_rows[:count]
    return num_drafts if (drafts_R == num_drafts).all() and (rows_R == num_drafts + 1).all() else None


def _portion_of(plan: SchedulerOutput, num_online: int) -> Portion:
    """The background work that a step had."""
    drafts_B, rows_B = plan.num_drafts[num_online:], plan.num_rows[num_online:]
    decodes_B = plan.samples[num_online:] & (rows_B == drafts_B + 1)
    return Portion(int(decodes_B.sum()), int(rows_B[~decodes_B].sum()))
