"""A rank of the target as a process of its own. Wrapped by `ray_executor.py`; runs `targets/runners`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from ...cluster.errors import ConfigError, MantaError
from ...cluster.executor import ExecutorInfo
from ...cluster.plan import SchedulerOutput, StepResult
from .ends import PeerLostError
from .orders import (
    BeginTrial,
    DrafterAt,
    DrafterLoaded,
    DrafterReport,
    EndTrial,
    LoadDrafter,
    Order,
    UseDrafter,
)
from .worker import Worker

if TYPE_CHECKING:
    from ...drafter.grammars.states import GrammarStates
    from ..targets.loading.swap import DrafterExchange
    from ..targets.runners.runner import Runner
    from .split_drafter import RemoteDrafts, SplitRunner

logger = logging.getLogger(__name__)


class TargetWorker(Worker):
    """Holds one shard of the target, and the drafter beside it unless that has a process of its own."""

    _runner: Runner | SplitRunner
    _info: ExecutorInfo
    _drafts: RemoteDrafts | None
    _exchange: DrafterExchange
    _grammars: GrammarStates | None

    def _load(self) -> ExecutorInfo:
        from ..targets.loading.plan import plan_load
        from ..targets.loading.rank import Checkpoints, start_runner
        from ..targets.loading.swap import DrafterExchange
        from .split_drafter import RemoteDrafts, SplitRunner

        plan = plan_load(self.setting.config)
        self.ranks.use_peer_memory(plan.dtype)
        made: list[RemoteDrafts] = []

        def remote(plan, backend):
            made.append(RemoteDrafts(plan, backend, self.ranks))
            return made[-1]

        runner, info = start_runner(
            plan, Checkpoints(), self.ranks, remote_drafts=remote if plan.split else None
        )
        self._drafts = made[-1] if made else None
        self._runner = SplitRunner(runner, self._drafts, plan) if self._drafts else runner
        self._exchange = DrafterExchange(plan, runner, self._drafts)
        self._info, self._report = info, DrafterReport(0, ready=True, lost=False)
        self.max_in_flight = info.max_in_flight
        self._grammars = runner.grammars
        return info

    def serve_beside(self, lanes: Collection[Connection]) -> None:
        """Compile grammars in threads."""
        from .grammar_lanes import serve_lanes

        serve_lanes(lanes, None if self._grammars is None else self._grammars.compiler)

    def take_seat(self, drafter: DrafterAt) -> None:
        """At start: at the first drafter. Raises what it refuses with."""
        assert self._drafts is not None
        self._drafts.connect(drafter.address, f"engine-{os.getpid()}", self._info, self.waiter)
        self._drafts.wait_for_seat()

    def submit(self, plan: SchedulerOutput) -> None:
        self._runner.submit(plan)

    def is_ready(self) -> bool:
        return self._runner.is_ready()

    def collect(self) -> StepResult | None:
        """Every rank computes; what rank 0 found is the result."""
        result = self._runner.collect()
        return result if self.setting.rank == 0 else None

    def news(self) -> DrafterReport | None:
        """How the drafter is, where that has changed."""
        if self._drafts is None or self.setting.rank > 0:
            return None
        link = self._drafts.link
        ready, lost = (False, True) if link is None else (link.is_ready, link.is_lost)
        report = DrafterReport(self._report.generation, ready, lost)
        if report == self._report:
            return None
        self._report = report
        return report

    def obey(self, order: Order) -> DrafterLoaded | None:
        match order:
            case DrafterAt(generation, address):
                self._meet_drafter(generation, address)
            case LoadDrafter(model):
                return DrafterLoaded(self._loaded(model, self._exchange.load))
            case BeginTrial(model):
                return DrafterLoaded(self._loaded(model, self._exchange.begin_trial))
            case EndTrial(promoted):
                self._exchange.end_trial(promoted=promoted)
            case UseDrafter(accepted):
                self._use_loaded(accepted)
        return None

    def _meet_drafter(self, generation: int, address: str) -> None:
        assert self._drafts is not None, "told of a drafter of its own"
        self._report = DrafterReport(generation, ready=True, lost=False)
        try:
            self._drafts.connect(address, f"engine-{os.getpid()}", self._info, self.waiter)
        except PeerLostError:
            self._drafts.disconnect()

    def _loaded(self, model: str, load: Callable[[str], None]) -> MantaError | None:
        """What keeps another drafter from coming, if anything."""
        try:
            load(model)
        except MantaError as error:
            return error
        except Exception as error:  # another rank may have loaded it: all must say something
            logger.exception("rank %d: the drafter %s cannot be loaded", self.setting.rank, model)
            return ConfigError(f"The drafter {model!r} cannot be loaded ({type(error).__name__}: {error}).")
        return None

    def _use_loaded(self, accepted: bool) -> None:
        if accepted:
            self._exchange.use()
        else:
            self._exchange.forget()
