"""What is learned of steps as they end, and what follows for the next one: drafts, and background work.

Online and background requests are apart in all of it, so that neither's texts nor times count for the other.
Used by `scheduler.py` alone; the two questions are `draft_length.py`'s and `background_share.py`'s.

Legend: R requests of a step, online ones first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .background_share import BackgroundShare, Portion
from .draft_length import DraftLength
from .limits import SchedulerConfig
from .outcome import StepOutcome
from .plan import BoolArray, SchedulerOutput

_QUIET_S = 5.0  # without online requests: the next one may be far


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan that is not committed yet.

    Attributes:
        plan: the step.
        num_online: its first requests, which are not background work.
        staying_R: which of its sequences are still those it was made for.
    """

    plan: SchedulerOutput
    num_online: int
    staying_R: BoolArray


class Pace:
    """Of one engine."""

    def __init__(self, config: SchedulerConfig) -> None:
        most = self._most_drafts = config.num_speculative_tokens
        self._last_drafts = most  # of background requests
        adapts = config.adaptive_drafts and most > 0
        self._online, self._background = (DraftLength(most) if adapts else None for _ in range(2))
        self._share = BackgroundShare(config.max_rows, chunks=config.enable_chunked_prefill)

    def drafts(self, num_decoding: int, *, background: bool = False) -> int:
        """Drafts of each of so many requests that decode."""
        length = self._background if background else self._online
        chosen = self._most_drafts if length is None else length.choose(num_decoding)
        if background:
            self._last_drafts = chosen
        return chosen

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
        return self._share.alone(num_decoding, 1 + self._last_drafts, quiet=idle_s > _QUIET_S)

    def learn(self, flight: Flight, outcome: StepOutcome, seconds: float, *, shares: bool) -> None:
        """A step has ended; `shares` says whether there is background work at all."""
        if self._online is None and not shares:
            return
        self._learn_acceptance(flight, outcome)
        plan, num_online = flight.plan, flight.num_online
        count = num_online or plan.num_requests
        num_drafts = decoding_alike(plan, count)
        if count < plan.num_requests:
            if num_drafts is not None:
                self._share.learn_joined(num_online, num_drafts, _portion_of(plan, num_online), seconds)
            return
        length = self._online if num_online else self._background
        if num_drafts is not None and length is not None:
            length.learn_time(count, num_drafts, seconds)
        if not num_online:
            self._share.learn_alone(plan.num_batched_tokens, seconds)
        elif num_drafts is not None and shares:
            self._share.learn_online(count, num_drafts, seconds)

    def _learn_acceptance(self, flight: Flight, outcome: StepOutcome) -> None:
        goes_on_R = ~(outcome.stopped | outcome.full)  # where a sequence ends, drafts behind were not judged
        if flight.num_online == flight.plan.num_requests:
            parts = [(self._online, goes_on_R)]
        else:
            online_R = np.arange(len(goes_on_R)) < int(flight.staying_R[: flight.num_online].sum())
            parts = [(self._online, goes_on_R & online_R), (self._background, goes_on_R & ~online_R)]
        for length, chosen_R in parts:
            if length is not None:
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
