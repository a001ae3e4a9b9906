"""RayExecutor: the workers of one engine as Ray actors on the engine's node.

Ray places, starts, watches and ends them; no Ray call is made for a step. Plans go out and results come back
through `channel.py`. Each worker's `run` never returns while all is well, so a thread that waits on those
calls is told of every death. Whatever fails, the whole engine does: it is marked, all workers are
killed, and `submit`, `collect` and `check_health` raise from then on; a new engine takes its place.

Used by `executor.make_executor`, and directly by what has a placement group to offer.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup

from ...cluster.config import EngineConfig
from ...cluster.errors import EngineDeadError, MantaError, PlacementError
from ...cluster.executor import DrafterHealth, ExecutorInfo
from ...cluster.placement import Topology
from ...cluster.plan import SchedulerOutput, StepResult
from ..checkpoints import with_absolute_paths
from .channel import PeerLostError, StepChannel
from .drafter_worker import DrafterWorker
from .placement import PLACEMENT_TIMEOUT_S, Placement, node_resources, place
from .target_worker import TargetWorker
from .worker import StepFailure, WorkerFacts, WorkerSetup, forwarded_environment

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0  # processes up, torch imported
LOAD_TIMEOUT_S = 3600.0  # downloads and large checkpoints
STEP_TIMEOUT_S = 300.0
FAREWELL_S = 2.0  # workers leave by themselves when the channel closes; then they are killed

Actor = Any  # ray.actor.ActorHandle of a dynamically wrapped class has no static methods


class RayExecutor:
    """Workers under Ray; see `cluster.executor.Executor`.

    Args:
        config: of the engine. Any topology, one worker included.
        placement_group: whose bundle i holds worker i; by default the group that this process runs in (a
            Serve replica's) if it fits, else one made here and removed at the end.
        placement_timeout_s: how long to wait for room.

    Raises:
        PlacementError: there is no room for the workers, or they would not be on this node.
        CheckpointError and its kin: from loading, as the worker raised them.
    """

    def __init__(
        self,
        config: EngineConfig,
        placement_group: PlacementGroup | None = None,
        placement_timeout_s: float = PLACEMENT_TIMEOUT_S,
    ) -> None:
        self._reason: str | None = None  # why it cannot serve; set once
        self._closing = threading.Event()
        self._stepping = threading.Lock()
        self._placement: Placement | None = None
        self._channel: StepChannel | None = None
        self._actors: list[Actor] = []
        self._runs: list[ray.ObjectRef] = []
        self._watcher: threading.Thread | None = None
        atexit.register(self.close)
        try:
            self._info, self.worker_pids = self._start(config, placement_group, placement_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    @property
    def drafter_health(self) -> DrafterHealth:
        """The drafter lives and dies with the target."""
        return DrafterHealth()

    @property
    def owns_placement(self) -> bool:
        """Whether the workers' placement group was made here, and ends with this executor."""
        return self._placement is not None and self._placement.owned

    def submit(self, plan: SchedulerOutput) -> None:
        """Give the workers a step. Raises EngineDeadError when one has died."""
        with self._stepping, self._failing_with_peers() as channel:
            channel.send(plan, STEP_TIMEOUT_S, self.check_health)

    def collect(self) -> StepResult:
        """Wait for the oldest step. Raises EngineDeadError when a worker has died."""
        with self._stepping, self._failing_with_peers() as channel:
            rank, reply = channel.receive(STEP_TIMEOUT_S, self.check_health)
            if isinstance(reply, StepFailure):
                self._fail(f"a step failed on rank {rank} ({reply.message})")
                raise self._dead()
            return reply

    @contextmanager
    def _failing_with_peers(self) -> Iterator[StepChannel]:
        """The channel, while all is well; its failures are the engine's end."""
        self.check_health()
        assert self._channel is not None
        try:
            yield self._channel
        except PeerLostError as error:
            self._fail(f"{error} has died")
            raise self._dead() from None
        except TimeoutError:
            self._fail(f"a step did not end within {STEP_TIMEOUT_S:g} s")
            raise self._dead() from None

    def check_health(self) -> None:
        """Raise EngineDeadError if a worker is gone. Cheap; may be called from any thread."""
        if self._reason is not None:
            raise self._dead()

    def close(self) -> None:
        """End all workers, their group and the threads. Idempotent."""
        self._reason = self._reason or "it was closed"
        if self._closing.is_set():
            return
        self._closing.set()
        with self._stepping:  # a step under way sees the reason within a tenth of a second
            if self._channel is not None:
                self._channel.close()
        if ray.is_initialized():
            if self._runs:
                ray.wait(self._runs, num_returns=len(self._runs), timeout=FAREWELL_S)
            self._kill_all()
            if self._placement is not None:
                self._placement.release()
        if self._watcher is not None:
            self._watcher.join(timeout=10.0)
        atexit.unregister(self.close)

    def _start(
        self, config: EngineConfig, group: PlacementGroup | None, timeout_s: float
    ) -> tuple[ExecutorInfo, tuple[int, ...]]:
        if not ray.is_initialized():
            ray.init(include_dashboard=False)
        topology = Topology.of(config, node_resources())
        self._placement = place(topology, group, timeout_s)
        self._channel = StepChannel(topology.num_workers)
        self._actors = [
            _start_worker(topology, rank, self._placement) for rank in range(topology.num_workers)
        ]
        facts = self._set_up(config, topology)
        self._channel.accept()
        infos = _gather([actor.load.remote(facts[0].store_port) for actor in self._actors], LOAD_TIMEOUT_S)
        self._runs = [actor.run.remote() for actor in self._actors]
        self._watcher = threading.Thread(target=self._watch, name="manta-watcher", daemon=True)
        self._watcher.start()
        return infos[0], tuple(fact.pid for fact in facts)

    def _set_up(self, config: EngineConfig, topology: Topology) -> list[WorkerFacts]:
        assert self._channel is not None
        common = WorkerSetup(
            config=replace(with_absolute_paths(config), device=topology.device),
            topology=topology,
            rank=0,
            channel=self._channel.address,
            environment=forwarded_environment(),
        )
        return _gather(
            [actor.setup.remote(replace(common, rank=rank)) for rank, actor in enumerate(self._actors)],
            START_TIMEOUT_S,
        )

    def _watch(self) -> None:
        """In a thread of its own: the first `run` to end is a failure."""
        while not self._closing.is_set():
            try:
                ended, _ = ray.wait(self._runs, num_returns=1, timeout=1.0)
                if ended and not self._closing.is_set():
                    self._fail(f"the worker of rank {self._runs.index(ended[0])} ended ({_cause(ended[0])})")
                    return
            except Exception as error:  # Ray itself is gone; nothing can be watched any more
                self._fail(f"Ray is gone ({type(error).__name__}: {error})")
                return

    def _fail(self, reason: str) -> None:
        """Mark the engine as dead, and leave no worker behind. The first reason stands."""
        if self._reason is None:
            self._reason = reason
            logger.error("the engine is dead: %s", reason)
            self._kill_all()

    def _dead(self) -> EngineDeadError:
        return EngineDeadError(f"The engine cannot serve: {self._reason}. Retry on another replica.")

    def _kill_all(self) -> None:
        for actor in self._actors:
            try:
                ray.kill(actor)
            except Exception as error:  # Ray itself is gone, and its workers with it
                logger.debug("ray.kill: %s", error)


def _start_worker(topology: Topology, rank: int, placement: Placement) -> Actor:
    worker = DrafterWorker if rank == topology.drafter_rank else TargetWorker
    options: dict[str, Any] = {
        "num_cpus": topology.worker_resources.get("CPU", 0.0),
        "num_gpus": topology.worker_resources.get("GPU", 0.0),
        "scheduling_strategy": placement.strategy(rank),
        "max_restarts": 0,
    }
    if topology.device == "cuda":
        # Hidden devices break peer access between ranks (a 2400-fold slower all-reduce, or a hang).
        options["runtime_env"] = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    return ray.remote(worker).options(**options).remote()


def _gather(calls: Sequence[ray.ObjectRef], timeout_s: float) -> list[Any]:  # Any: what workers return.
    """All results by rank. The first failure is raised at once, while others may still wait for that rank."""
    deadline_s = time.monotonic() + timeout_s
    waiting = list(calls)
    while waiting:
        ended, waiting = ray.wait(waiting, timeout=max(0.0, deadline_s - time.monotonic()))
        if not ended:
            ranks = sorted(calls.index(call) for call in waiting)
            raise PlacementError(
                f"The workers of ranks {ranks} did not start within {timeout_s:g} s. Look at their logs; "
                "their bundles may be taken by other actors."
            )
        for call in ended:
            _result(call, calls.index(call))
    return ray.get(list(calls))


def _result(call: ray.ObjectRef, rank: int) -> Any:  # Any: what workers return.
    """A worker's result; its own errors as they were, not wrapped."""
    try:
        return ray.get(call)
    except RayTaskError as error:
        if isinstance(error.cause, MantaError):
            raise error.cause from None
        raise
    except RayError as error:
        raise EngineDeadError(f"The worker of rank {rank} died while starting: {error}") from None


def _cause(call: ray.ObjectRef) -> str:
    try:
        return str(ray.get(call, timeout=1.0))
    except RayTaskError as error:
        return f"{type(error.cause).__name__}: {error.cause}"
    except RayError as error:
        return type(error).__name__
