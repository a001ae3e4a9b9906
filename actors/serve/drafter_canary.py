"""Which drafter a replica drafts with: by its deployment's `user_config`, and by what comes of a trial.

    user_config ─▶ configure ─▶ swap, or load a candidate ─▶ requests draw lots (engine.py) every LOOK_S ─▶
    tell the board what was found, pool what all replicas found ─▶ verdict (cluster/fleet/canary.py) ─▶
    promote the candidate, or take it out: on every replica, by the first verdict that is told

Replicas decide together, and none alone: what all have found is one evidence. A verdict stands on the board,
so a replica that comes later begins with it. Made by `actors/replica.py`; all on the event loop but calls of
the board.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ...cluster.errors import ConfigError, MantaError
from ...cluster.fleet.canary import NO_EVIDENCE, CanaryTrial, Evidence, Verdict, verdict
from ..engine.async_engine import AsyncEngine
from .user_config import DrafterCandidate, ReplicaUserConfig

logger = logging.getLogger(__name__)

LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica says of a trial.

    Attributes:
        evidence: that it has found.
        refused: why it does not take part; None if it does.
    """

    evidence: Evidence = NO_EVIDENCE
    refused: str | None = None


class CanaryStatusStore(Protocol):
    """What replicas tell each other: `trial_board.TrialBoard`."""

    def wish(self) -> dict[str, Any] | None: ...  # Any: a user_config

    def began_s(self, trial: str, now_s: float) -> float: ...

    def tell(self, trial: str, replica: str, report: ReplicaReport) -> None: ...

    def told(self, trial: str) -> Mapping[str, ReplicaReport]: ...

    def verdict(self, trial: str) -> Verdict | None: ...

    def settle(self, trial: str, verdict: Verdict) -> Verdict: ...


class DrafterCanary:
    """Of one replica.

    Args:
        engine: whose drafter it is.
        board: of the deployment.
        replica: its name there.
        clock: Unix time, seconds.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        board: CanaryStatusStore,
        replica: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine, self._board, self._replica, self._clock = engine, board, replica, clock
        self._first = engine.drafter  # that the replica started with
        self._configured: Mapping[str, Any] = {}  # Any: YAML
        self._wish: Mapping[str, Any] | None = None
        self._candidate: DrafterCandidate | None = None  # that is on trial here
        self._trial = ""  # its id
        self._began_s = 0.0
        self._verdict: Verdict | None = None  # that has ended nothing: "better"
        self._lock = asyncio.Lock()

    async def configure(self, user_config: Mapping[str, Any]) -> None:
        """Draft as the deployment's `user_config` says; where it says nothing, as the board's wish does.

        What is wrong is refused in the log, and all stays: Serve would end the replica for an error.
        """
        async with self._lock:
            self._configured = dict(user_config)
            self._wish = None
            await self._follow(self._configured or await asyncio.to_thread(self._board.wish) or {})

    async def work_forever(self) -> None:
        """Look at the board, again and again. Cancelled at the end."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                async with self._lock:
                    await self._look()
            except Exception:  # a task's edge: the board may be away for a while, and drafts go on
                logger.exception("the drafter's trial could not be looked at")

    async def _look(self) -> None:
        if not self._configured:
            wish = await asyncio.to_thread(self._board.wish)
            if wish is not None and wish != self._wish:
                self._wish = wish
                await self._follow(wish)
        if self._candidate is not None and self._verdict is None:
            await self._judge(self._candidate)

    async def _judge(self, candidate: DrafterCandidate) -> None:
        trial, age_s = self._engine.trial, self._clock() - self._began_s
        assert trial is not None, "as long as there is a candidate"
        pooled = await asyncio.to_thread(self._exchange, ReplicaReport(trial.evidence))
        stands = await asyncio.to_thread(self._board.verdict, self._trial)
        found = stands or verdict(candidate.rules, pooled, age_s)
        if found is None:
            return
        if stands is None:
            found = await asyncio.to_thread(self._board.settle, self._trial, found)
        logger.info("the trial of %s has ended: %s; %s", candidate.drafter, found, _words(pooled))
        if found == "better":
            self._verdict = found
            return
        await self._end(found)

    def _exchange(self, report: ReplicaReport) -> Evidence:
        """Tell the others what was found here; what all have found."""
        self._board.tell(self._trial, self._replica, report)
        return Evidence.pooled(each.evidence for each in self._board.told(self._trial).values())

    async def _follow(self, user_config: Mapping[str, Any]) -> None:
        try:
            await self._use(ReplicaUserConfig.of(user_config))
        except ConfigError as error:
            logger.error("user_config is refused, and all stays as it was: %s", error.message)

    async def _use(self, wanted: ReplicaUserConfig) -> None:
        drafter, candidate = wanted.drafter or self._first, wanted.candidate
        trial = wanted.trial_id
        stands = await asyncio.to_thread(self._board.verdict, trial) if candidate is not None else None
        if candidate is not None and stands == "promoted":
            drafter, candidate = candidate.drafter, None
        elif stands in ("rolled_back", "undecided"):
            candidate = None
        if self._candidate is not None and (candidate is None or trial != self._trial):
            await self._end("promoted" if drafter == self._candidate.drafter else None)
        if drafter is not None and drafter != self._engine.drafter:
            await self._engine.swap_drafter(drafter)
            logger.info("drafting with %s from now on", drafter)
        if candidate is not None and candidate.drafter == drafter:
            name = "user_config.candidate.drafter"
            raise ConfigError(f"{name}={drafter!r} drafts already: there is nothing to try.", param=name)
        if candidate is not None and self._candidate is None:
            await self._begin(candidate, trial, stands)

    async def _begin(self, candidate: DrafterCandidate, trial: str, stands: Verdict | None) -> None:
        """Raises ConfigError, which the board is told."""
        self._trial, self._verdict = trial, stands
        try:
            await self._engine.begin_trial(candidate.drafter, CanaryTrial(candidate.rules))
        except MantaError as error:
            report = ReplicaReport(refused=error.message)
            await asyncio.to_thread(self._board.tell, trial, self._replica, report)
            raise
        self._candidate = candidate
        self._began_s = await asyncio.to_thread(self._board.began_s, trial, self._clock())
        how = "in the shadow" if candidate.rules.shadow else f"for {candidate.rules.fraction:.0%} of requests"
        logger.info("%s is on trial %s, beside %s", candidate.drafter, how, self._engine.drafter)

    async def _end(self, found: Verdict | None) -> None:
        """Of the trial here; None: it was taken back."""
        self._candidate = None
        await self._engine.end_trial(found)
        logger.info("drafting with %s from now on", self._engine.drafter)


def _words(evidence: Evidence) -> str:
    incumbent, candidate = (
        f"{tally.tokens_per_step or 0.0:.3f} tokens per step over {tally.requests} requests"
        for tally in (evidence.incumbent, evidence.candidate)
    )
    return f"the candidate brought {candidate}, the other {incumbent}"
