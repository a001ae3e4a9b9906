"""RayExecutor: the workers of one engine as Ray actors on the engine's node.

Ray places, starts, watches and ends them, but is not called in a step: plans and results use
`actors/workers/shm/step_channel.py`. A worker's `run` only returns when it ends, so a thread that waits on
these calls notices every death. Any failure of the target ends the whole engine: it is marked as dead, all
workers are killed, and `submit`, `collect` and `check_health` raise from then on. The end of a remote drafter
only costs drafts, and `drafter_supervisor.py` finds another one.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import ray
from ray.exceptions import RayTaskError
from ray.util.placement_group import PlacementGroup

from ...cluster.config import EngineConfig
from ...cluster.errors import EngineDeadError, MantaError
from ...cluster.fleet.placement import Topology
from ...cluster.request.structured_outputs import Grammar
from ...cluster.step.clock import MACHINE_CLOCK, EngineClock
from ...cluster.step.executor import DrafterHealth, ExecutorInfo
from ...cluster.step.page_transfer import MovesOfRanks, PagesMoved, PageTransfer
from ...cluster.step.scheduler_output import SchedulerOutput, StepResult
from ..checkpoints.checkpoint_paths import with_absolute_paths, with_drafter
from ..system.log_setup import in_force
from .base.control_messages import (
    DrafterAt,
    DrafterLoaded,
    DrafterReport,
    LoadDrafter,
    MovesReport,
    ReportMoves,
    UseDrafter,
)
from .base.grammar_compilation import GrammarLanes
from .base.ray_actors import (
    PLACEMENT_TIMEOUT_S,
    Actor,
    WorkerPlacement,
    cause,
    create_placement,
    gather,
    node_resources,
    start_actor,
)
from .base.worker_base import StepFailure, WorkerFacts, WorkerSetup, forwarded_environment
from .drafter.drafter_process import DrafterSource
from .drafter.drafter_supervisor import DrafterSupervisor
from .local_ray import start_ray
from .shm.endpoint import PeerLostError
from .shm.step_channel import StepChannel
from .target_worker import TargetWorker

logger = logging.getLogger(__name__)

_CONNECT_ATTEMPTS = 3
START_TIMEOUT_S = 180.0  # until processes run and torch is imported
LOAD_TIMEOUT_S = 3600.0  # allows for downloads and large checkpoints
STEP_TIMEOUT_S = 300.0
EXIT_TIMEOUT_S = 2.0  # time for workers to exit after the channel closes, before they are killed

T = TypeVar("T")


class RayExecutor:
    """Workers under Ray, see `cluster/step/executor.py`.

    Args:
        config: the engine's, with any topology, including a single worker.
        placement_group: bundle i must hold worker i. By default the group in which this process runs (a Serve
            replica's) if it fits, else one that is created here and removed at the end.
        placement_timeout_s: how long to wait for resources.

    Raises PlacementError if there is no room for the workers or they would not be on this node, and the
    errors of loading.
    """

    clock: EngineClock = MACHINE_CLOCK

    def __init__(
        self,
        config: EngineConfig,
        placement_group: PlacementGroup | None = None,
        placement_timeout_s: float = PLACEMENT_TIMEOUT_S,
    ) -> None:
        self._reason: str | None = None  # why it cannot serve; set once
        self._closing = threading.Event()
        self._stepping = threading.Lock()
        self._placement: WorkerPlacement | None = None
        self._channel: StepChannel | None = None
        self._grammars: GrammarLanes | None = None
        self._actors: list[Actor] = []
        self._runs: list[ray.ObjectRef] = []
        self._watcher: threading.Thread | None = None
        self._drafter_supervisor: DrafterSupervisor | None = None
        if config.async_scheduling is None:
            # Otherwise workers wait in every step for two wake-ups, the scheduler and the streams' readers.
            config = replace(config, async_scheduling=True)
        self._config = with_absolute_paths(config)
        self._num_swaps = 0  # of a colocated drafter
        self._results: deque[StepResult] = deque()  # that arrived while other messages were awaited
        self._moves = MovesOfRanks(self._config.tensor_parallel_size)
        atexit.register(self.close)
        try:
            self.info, self.worker_pids = self._start(placement_group, placement_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def drafter_health(self) -> DrafterHealth:
        """State of a remote drafter; a colocated one only counts swaps, as it dies with the target."""
        return (
            self._drafter_supervisor.health
            if self._drafter_supervisor is not None
            else DrafterHealth(generation=self._num_swaps)
        )

    @property
    def drafter_pid(self) -> int | None:
        """Process id of a remote drafter; None for a colocated one."""
        return self._drafter_supervisor.pid if self._drafter_supervisor is not None else None

    @property
    def owns_placement(self) -> bool:
        """Whether the workers' placement group was created here, and ends with this executor."""
        return self._placement is not None and self._placement.owned

    def submit(self, plan: SchedulerOutput) -> None:
        """Send a step to the workers. Raises EngineDeadError."""
        with self._stepping, self._failing_with_peers() as channel:
            offer = self._drafter_supervisor.take_offer() if self._drafter_supervisor is not None else None
            if offer is not None:
                channel.send(offer, STEP_TIMEOUT_S, self.check_health)
            channel.send(plan, STEP_TIMEOUT_S, self.check_health)

    def collect(self) -> StepResult:
        """Wait for the oldest step's result. Raises EngineDeadError."""
        with self._stepping, self._failing_with_peers() as channel:
            while not self._results:
                self._results.append(self._receive(channel, StepResult))
            return self._results.popleft()

    def move_pages(self, transfer: PageTransfer) -> None:
        """Let all ranks move their part of pages, after the steps that were submitted so far."""
        self._moves.begin(transfer)
        with self._stepping, self._failing_with_peers() as channel:
            channel.send(transfer, STEP_TIMEOUT_S, self.check_health)

    def moved_pages(self, wait_s: float) -> list[PagesMoved]:
        """Return the transfers that have ended on all ranks.

        Ranks report beside their steps' results, so their reports are awaited only without a step in flight.
        """
        moves = self._moves
        if moves.are_under_way:
            with self._stepping, self._failing_with_peers() as channel:
                if moves.num_awaited == 0:
                    channel.send(ReportMoves(wait_s), STEP_TIMEOUT_S, self.check_health)
                    moves.num_awaited = len(self._actors)
                while wait_s and moves.num_awaited:
                    moves.on_report(self._receive(channel, MovesReport).ended)
        return moves.take_ended()

    def hold_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar on every rank outside of the steps, and keep it.

        Raises GrammarError if it cannot be compiled, EngineDeadError.
        """
        assert self._grammars is not None, "the executor has not started"
        self._grammars.hold(grammar)

    def release_grammar(self, grammar: Grammar) -> None:
        """Undo one `hold_grammar`; do nothing if the engine is dead."""
        assert self._grammars is not None, "the executor has not started"
        with suppress(EngineDeadError):
            self._grammars.release(grammar)

    def swap_drafter(self, model: str) -> None:
        """Switch to another drafter checkpoint. Called between steps, on the engine's thread.

        A colocated drafter is in use when this returns. A remote one loads in the background, while decoding
        continues without drafts, and then has the next generation number. Raises CheckpointError or
        ConfigError if it does not fit, and keeps the old one.
        """
        config = with_drafter(self._config, model)
        assert config.speculative_config is not None and config.speculative_config.model is not None
        with self._stepping, self._failing_with_peers() as channel:
            errors = self._load_drafter(channel, LoadDrafter(config.speculative_config.model))
            channel.send(UseDrafter(accepted=not errors), STEP_TIMEOUT_S, self.check_health)
        if errors:
            raise errors[0]
        self._config = config
        if self._drafter_supervisor is not None:
            self._drafter_supervisor.use(config)
        else:
            self._num_swaps += 1

    def _load_drafter(self, channel: StepChannel, message: LoadDrafter) -> list[MantaError]:
        channel.send(message, LOAD_TIMEOUT_S, self.check_health)
        loaded = [self._receive(channel, DrafterLoaded, LOAD_TIMEOUT_S) for _ in self._actors]
        return [reply.error for reply in loaded if reply.error is not None]

    def _receive(self, channel: StepChannel, kind: type[T], timeout_s: float = STEP_TIMEOUT_S) -> T:
        """Return the next message of this type, and handle all others."""
        while True:
            rank, reply = channel.receive(timeout_s, self.check_health)
            if isinstance(reply, StepFailure):
                self._fail(f"a step failed on rank {rank} ({reply.message})")
                raise self._dead_error()
            if isinstance(reply, kind):
                return reply
            if isinstance(reply, MovesReport):
                self._moves.on_report(reply.ended)
            elif isinstance(reply, DrafterReport):
                assert self._drafter_supervisor is not None, "only remote drafters are reported"
                self._drafter_supervisor.report(reply)
            else:
                assert isinstance(reply, StepResult), "unexpected message"
                self._results.append(reply)

    @contextmanager
    def _failing_with_peers(self) -> Iterator[StepChannel]:
        """Yield the channel; if it fails, the engine is dead."""
        self.check_health()
        assert self._channel is not None
        try:
            yield self._channel
        except PeerLostError as error:
            self._fail(f"{error} died")
            raise self._dead_error() from None
        except TimeoutError:
            self._fail(f"a step did not end within {STEP_TIMEOUT_S:g} s")
            raise self._dead_error() from None

    def check_health(self) -> None:
        """Raise EngineDeadError if a worker is gone. Cheap; callable from any thread."""
        if self._reason is not None:
            raise self._dead_error()

    def stopped_workers(self) -> list[str]:
        """Return the names of workers with stopped processes. Callable from any thread."""
        ranks = enumerate(self.worker_pids)
        return [f"rank {rank} (process {pid})" for rank, pid in ranks if _is_stopped(pid)]

    def kill_workers(self, reason: str) -> None:
        """Mark the engine as dead and kill its workers; a stopped process only reacts to SIGKILL."""
        self._fail(reason)
        for pid in self.worker_pids:
            if _is_stopped(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End all workers, their group and the threads. Idempotent."""
        self._reason = self._reason or "it was closed"
        if self._closing.is_set():
            return
        self._closing.set()
        with self._stepping:  # a running step sees the reason within a tenth of a second
            if self._channel is not None:
                self._channel.close()
        if ray.is_initialized():
            if self._runs:
                ray.wait(self._runs, num_returns=len(self._runs), timeout=EXIT_TIMEOUT_S)
            self._kill_all()
            if self._placement is not None:
                self._placement.release()
            if self._drafter_supervisor is not None:
                self._drafter_supervisor.join()
        if self._watcher is not None:
            self._watcher.join(timeout=10.0)
        atexit.unregister(self.close)

    def _start(self, group: PlacementGroup | None, timeout_s: float) -> tuple[ExecutorInfo, tuple[int, ...]]:
        """Place the workers, load the models and start the loop of each; return rank 0's facts, and pids.

        The first drafter is started while the workers load.
        """
        if not ray.is_initialized():
            start_ray(include_dashboard=False)
        topology = Topology.of(self._config, node_resources())
        self._placement = create_placement(topology, group, timeout_s)
        self._config = replace(self._config, device=topology.device)
        self._channel = StepChannel(topology.tensor_parallel_size)
        self._actors = [
            start_actor(TargetWorker, topology, scheduling_strategy=self._placement.strategy(rank))
            for rank in range(topology.tensor_parallel_size)
        ]
        facts = self._set_up(topology)
        self._channel.accept()
        self._grammars = GrammarLanes(tuple(self._channel.lanes.values()), self.check_health)
        loads = [actor.load.remote(facts[0].store_port) for actor in self._actors]
        first = self._first_drafter(topology)
        infos = gather(loads, LOAD_TIMEOUT_S)
        if first is not None:
            self._connect(first)
        self._runs = [actor.run.remote() for actor in self._actors]
        self._watcher = threading.Thread(target=self._watch, name="manta-watcher", daemon=True)
        self._watcher.start()
        if self._drafter_supervisor is not None:
            self._drafter_supervisor.begin()
        return infos[0], tuple(fact.pid for fact in facts)

    def _connect(self, drafter: DrafterAt) -> None:
        """Connect to a drafter, or to a new one if it ended meanwhile: its other engines may have."""
        assert self._drafter_supervisor is not None, "it has started the drafter"
        for attempt in range(_CONNECT_ATTEMPTS):
            try:
                gather([self._actors[0].connect_to_drafter.remote(drafter)], START_TIMEOUT_S)
                return
            except RayTaskError as error:
                if not isinstance(error.cause, PeerLostError) or attempt == _CONNECT_ATTEMPTS - 1:
                    raise
                drafter = self._drafter_supervisor.start()

    def _first_drafter(self, topology: Topology) -> DrafterAt | None:
        """Start a remote drafter if the topology has one; it loads while the target does."""
        if not (topology.split_drafter or topology.shared_drafter):
            return None
        assert self._placement is not None
        self._drafter_supervisor = DrafterSupervisor(DrafterSource(topology, self._placement), self._config)
        return self._drafter_supervisor.start()

    def _set_up(self, topology: Topology) -> list[WorkerFacts]:
        assert self._channel is not None
        common = WorkerSetup(
            config=self._config,
            topology=topology,
            rank=0,
            channel=self._channel.address,
            log=in_force(),
            environment=forwarded_environment(),
        )
        return gather(
            [actor.setup.remote(replace(common, rank=rank)) for rank, actor in enumerate(self._actors)],
            START_TIMEOUT_S,
        )

    def _watch(self) -> None:
        """Treat the first `run` that ends as a failure; runs in a thread of its own."""
        while not self._closing.is_set():
            try:
                ended, _ = ray.wait(self._runs, num_returns=1, timeout=1.0)
                if ended and not self._closing.is_set():
                    self._fail(f"the worker of rank {self._runs.index(ended[0])} ended ({cause(ended[0])})")
                    return
            except Exception as error:  # Ray itself is gone, so nothing can be watched any more
                self._fail(f"Ray is not reachable ({type(error).__name__}: {error})")
                return

    def _fail(self, reason: str) -> None:
        """Mark the engine as dead and kill all workers. Only the first reason is kept."""
        if self._reason is None:
            self._reason = reason
            logger.error("the engine is dead: %s", reason)
            self._kill_all()

    def _dead_error(self) -> EngineDeadError:
        return EngineDeadError(f"The engine cannot serve: {self._reason}. Retry on another replica.")

    def _kill_all(self) -> None:
        if self._drafter_supervisor is not None:
            self._drafter_supervisor.close()
        for actor in self._actors:
            try:
                ray.kill(actor)
            except Exception as error:  # Ray itself is gone, and its workers with it
                logger.debug("ray.kill: %s", error)


def _is_stopped(pid: int) -> bool:
    """Return whether a process of this machine is stopped, or held by a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False
