"""A rank of the target as a process of its own. Wrapped by `ray_executor.py`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from ...cluster.errors import ConfigError, MantaError
from ...cluster.step.executor import ExecutorInfo
from ...cluster.step.page_transfer import PageTransfer
from ...cluster.step.scheduler_output import SchedulerOutput, StepResult
from .base.control_messages import (
    ControlMessage,
    DrafterAt,
    DrafterLoaded,
    DrafterReport,
    LoadDrafter,
    MovesReport,
    ReportMoves,
    UseDrafter,
)
from .base.worker_base import Worker
from .shm.endpoint import PeerLostError

if TYPE_CHECKING:
    from ...drafter.grammars.matchers import GrammarStates
    from ..targets.loading.drafter_swap import DrafterSwap
    from ..targets.runners.page_mover import PageMover
    from ..targets.runners.runner_interface import Runner
    from .drafter.remote_drafter import RemoteDrafterSource, SplitRunner

logger = logging.getLogger(__name__)


class TargetWorker(Worker):
    """Holds one shard of the target, and the drafter if it is colocated."""

    _runner: Runner | SplitRunner
    _info: ExecutorInfo
    _drafts: RemoteDrafterSource | None
    _exchange: DrafterSwap
    _grammars: GrammarStates | None
    _mover: PageMover | None

    def _load(self) -> ExecutorInfo:
        from ..targets.loading.drafter_swap import DrafterSwap
        from ..targets.loading.operator_factory import make_fused_sum
        from ..targets.loading.rank_loader import Checkpoints, start_runner
        from ..targets.loading.resolved_config import resolve_config
        from .drafter.remote_drafter import RemoteDrafterSource, SplitRunner

        plan = resolve_config(self.setting.config)
        self.ranks.use_peer_memory(plan.dtype, make_fused_sum(plan))
        sources: list[RemoteDrafterSource] = []

        def remote(plan, backend):
            sources.append(RemoteDrafterSource(plan, backend, self.ranks))
            return sources[-1]

        runner, info = start_runner(
            plan, Checkpoints(), self.ranks, remote_drafts=remote if plan.split else None
        )
        self._drafts = sources[-1] if sources else None
        self._mover = runner.mover
        self._runner = SplitRunner(runner, self._drafts, plan) if self._drafts else runner
        self._exchange = DrafterSwap(plan, runner, self._drafts, self.ranks)
        self._info, self._report = info, DrafterReport(0, ready=True, lost=False)
        self.max_in_flight = info.max_in_flight
        self._grammars = runner.grammars
        return info

    def serve_lanes_in_thread(self, lanes: Collection[Connection]) -> None:
        from .base.grammar_compilation import serve_lanes

        serve_lanes(lanes, None if self._grammars is None else self._grammars.compiler)

    def connect_to_drafter(self, drafter: DrafterAt) -> None:
        """Connect at start to the first drafter. Raises its refusal."""
        assert self._drafts is not None
        self._drafts.connect(drafter.address, f"engine-{os.getpid()}", self._info, self.waiter)
        self._drafts.wait_for_session()

    def submit(self, plan: SchedulerOutput) -> None:
        self._runner.submit(plan)

    def is_ready(self) -> bool:
        return self._runner.is_ready()

    def collect(self) -> StepResult | None:
        """Return None on ranks other than 0."""
        result = self._runner.collect()
        return result if self.setting.rank == 0 else None

    def take_report(self) -> DrafterReport | None:
        """Return the drafter's state if it has changed."""
        if self._drafts is None or self.setting.rank > 0:
            return None
        link = self._drafts.link
        ready, lost = (False, True) if link is None else (link.is_ready, link.is_lost)
        report = DrafterReport(self._report.generation, ready, lost)
        if report == self._report:
            return None
        self._report = report
        return report

    def execute(self, message: ControlMessage) -> DrafterLoaded | MovesReport | None:
        match message:
            case PageTransfer():
                assert self._mover is not None, "ExecutorInfo.kv_tier says whether there is a tier"
                self._mover.begin(message)
            case ReportMoves(wait_s):
                assert self._mover is not None, "only transfers are reported"
                return MovesReport(tuple(self._mover.take_ended(wait_s)))
            case DrafterAt(generation, address):
                self._connect_drafter(generation, address)
            case LoadDrafter(model):
                return DrafterLoaded(self._load_drafter(model, self._exchange.load))
            case UseDrafter(accepted):
                self._use_loaded(accepted)
        return None

    def _connect_drafter(self, generation: int, address: str) -> None:
        assert self._drafts is not None, "DrafterAt is for remote drafters"
        self._report = DrafterReport(generation, ready=True, lost=False)
        try:
            self._drafts.connect(address, f"engine-{os.getpid()}", self._info, self.waiter)
        except PeerLostError:
            self._drafts.disconnect()

    def _load_drafter(self, model: str, load: Callable[[str], None]) -> MantaError | None:
        try:
            load(model)
        except MantaError as error:
            return error
        except Exception as error:  # every rank must answer, as another one may have loaded it
            logger.exception("rank %d: the drafter %s cannot be loaded", self.setting.rank, model)
            return ConfigError(f"The drafter {model!r} cannot be loaded ({type(error).__name__}: {error}).")
        return None

    def _use_loaded(self, accepted: bool) -> None:
        if accepted:
            self._exchange.use()
        else:
            self._exchange.forget()
