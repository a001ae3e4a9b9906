"""RayExecutor: the workers of one engine as Ray actors on the engine's node.

Ray places, starts, watches and ends them; no Ray call is made for a step. Plans go out and results come back
through `channel.py`. Each worker's `run` never returns while all is well, so a thread that waits on those
calls is told of every death. Whatever fails of the target, the whole engine does: it is marked, all workers
are killed, and `submit`, `collect` and `check_health` raise from then on; a new engine takes its place. A
drafter in a process of its own is none of them: its end costs drafts, and `drafter_keeper.py` finds another.

Used by `executor.make_executor`, and directly by what has a placement group to offer.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup

from ...cluster.config import EngineConfig
from ...cluster.errors import EngineDeadError, MantaError, PlacementError
from ...cluster.executor import DrafterHealth, ExecutorInfo
from ...cluster.placement import Topology
from ...cluster.plan import SchedulerOutput, StepResult
from ..checkpoints import with_absolute_paths, with_drafter
from ..process_log import in_force
from .channel import StepChannel
from .drafter_keeper import DrafterKeeper
from .drafter_process import DrafterSource
from .ends import PeerLostError
from .orders import BeginTrial, DrafterAt, DrafterLoaded, DrafterReport, EndTrial, LoadDrafter, UseDrafter
from .placement import PLACEMENT_TIMEOUT_S, Placement, node_resources, place
from .target_worker import TargetWorker
from .worker import StepFailure, WorkerFacts, WorkerSetup, forwarded_environment

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0  # processes up, torch imported
LOAD_TIMEOUT_S = 3600.0  # downloads and large checkpoints
STEP_TIMEOUT_S = 300.0
FAREWELL_S = 2.0  # workers leave by themselves when the channel closes; then they are killed

T = TypeVar("T")
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
        self._keeper: DrafterKeeper | None = None
        self._config = with_absolute_paths(config)
        self._num_swaps = 0  # of drafters beside the target
        self._candidate: EngineConfig | None = None  # with the drafter on trial, while there is one
        self._results: deque[StepResult] = deque()  # that came while something else was waited for
        atexit.register(self.close)
        try:
            self._info, self.worker_pids = self._start(placement_group, placement_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    @property
    def drafter_health(self) -> DrafterHealth:
        """Of a drafter beside the target, which lives and dies with it, only swaps are counted."""
        return self._keeper.health if self._keeper is not None else DrafterHealth(generation=self._num_swaps)

    @property
    def drafter_pid(self) -> int | None:
        """Of the drafter's process, where it has one of its own."""
        return self._keeper.pid if self._keeper is not None else None

    @property
    def owns_placement(self) -> bool:
        """Whether the workers' placement group was made here, and ends with this executor."""
        return self._placement is not None and self._placement.owned

    def submit(self, plan: SchedulerOutput) -> None:
        """Give the workers a step. Raises EngineDeadError when one has died."""
        with self._stepping, self._failing_with_peers() as channel:
            offer = self._keeper.take_offer() if self._keeper is not None else None
            if offer is not None:
                channel.send(offer, STEP_TIMEOUT_S, self.check_health)
            channel.send(plan, STEP_TIMEOUT_S, self.check_health)

    def collect(self) -> StepResult:
        """Wait for the oldest step. Raises EngineDeadError when a worker has died."""
        with self._stepping, self._failing_with_peers() as channel:
            while not self._results:
                self._results.append(self._receive(channel, StepResult))
            return self._results.popleft()

    def swap_drafter(self, model: str) -> None:
        """Draft with another checkpoint from now on; between steps, on the engine's thread.

        Beside the target it is there when this returns; in a process of its own it loads meanwhile, and
        decoding goes on plainly. Then the drafter's generation is one higher.

        Raises:
            CheckpointError, ConfigError: it does not fit this engine. The old one stays.
        """
        config = with_drafter(self._config, model)
        assert config.speculative_config is not None and config.speculative_config.model is not None
        with self._stepping, self._failing_with_peers() as channel:
            errors = self._load(channel, LoadDrafter(config.speculative_config.model))
            channel.send(UseDrafter(accepted=not errors), STEP_TIMEOUT_S, self.check_health)
        if errors:
            raise errors[0]
        self._config = config
        if self._keeper is not None:
            self._keeper.use(config)
        else:
            self._num_swaps += 1

    def begin_trial(self, model: str) -> None:
        """Load a candidate beside the drafter, to draft for requests `on_trial`; between steps, on the
        engine's thread, which is told then. Raises CheckpointError, ConfigError: nothing has changed."""
        config = with_drafter(self._config, model)
        assert config.speculative_config is not None and config.speculative_config.model is not None
        with self._stepping, self._failing_with_peers() as channel:
            errors = self._load(channel, BeginTrial(config.speculative_config.model))
            if errors:
                channel.send(EndTrial(promoted=False), STEP_TIMEOUT_S, self.check_health)
                raise errors[0]
        self._candidate = config

    def end_trial(self, *, promoted: bool) -> None:
        """Have one drafter again: the candidate if it is `promoted`. Then tell the engine."""
        with self._stepping, self._failing_with_peers() as channel:
            channel.send(EndTrial(promoted), STEP_TIMEOUT_S, self.check_health)
        if promoted and self._candidate is not None:
            self._config = self._candidate
        self._candidate = None

    def _load(self, channel: StepChannel, order: LoadDrafter | BeginTrial) -> list[MantaError]:
        """Have every rank load a drafter; what kept them from it."""
        channel.send(order, LOAD_TIMEOUT_S, self.check_health)
        loaded = [self._receive(channel, DrafterLoaded, LOAD_TIMEOUT_S) for _ in self._actors]
        return [reply.error for reply in loaded if reply.error is not None]

    def _receive(self, channel: StepChannel, wanted: type[T], timeout_s: float = STEP_TIMEOUT_S) -> T:
        """The next message of this kind; others are taken in."""
        while True:
            rank, reply = channel.receive(timeout_s, self.check_health)
            if isinstance(reply, StepFailure):
                self._fail(f"a step failed on rank {rank} ({reply.message})")
                raise self._dead()
            if isinstance(reply, wanted):
                return reply
            if isinstance(reply, DrafterReport):
                assert self._keeper is not None, "reported where there is one"
                self._keeper.report(reply)
            else:
                assert isinstance(reply, StepResult), "a step that ended meanwhile"
                self._results.append(reply)

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

    def stopped_workers(self) -> list[str]:
        """Return the names of workers whose processes are stopped. From any thread."""
        ranks = enumerate(self.worker_pids)
        return [f"rank {rank} (process {pid})" for rank, pid in ranks if _is_stopped(pid)]

    def give_up(self, reason: str) -> None:
        """Mark the engine as dead and end its workers; a stopped one hears nothing but SIGKILL."""
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
        with self._stepping:  # a step under way sees the reason within a tenth of a second
            if self._channel is not None:
                self._channel.close()
        if ray.is_initialized():
            if self._runs:
                ray.wait(self._runs, num_returns=len(self._runs), timeout=FAREWELL_S)
            self._kill_all()
            if self._placement is not None:
                self._placement.release()
            if self._keeper is not None:
                self._keeper.join()
        if self._watcher is not None:
            self._watcher.join(timeout=10.0)
        atexit.unregister(self.close)

    def _start(self, group: PlacementGroup | None, timeout_s: float) -> tuple[ExecutorInfo, tuple[int, ...]]:
        if not ray.is_initialized():
            ray.init(include_dashboard=False)
        topology = Topology.of(self._config, node_resources())
        self._placement = place(topology, group, timeout_s)
        self._config = replace(self._config, device=topology.device)
        self._channel = StepChannel(topology.tensor_parallel_size)
        self._actors = [
            _start_worker(topology, rank, self._placement) for rank in range(topology.tensor_parallel_size)
        ]
        facts = self._set_up(topology)
        self._channel.accept()
        loads = [actor.load.remote(facts[0].store_port) for actor in self._actors]
        first = self._first_drafter(topology)
        infos = _gather(loads, LOAD_TIMEOUT_S)
        if first is not None:
            _gather([self._actors[0].take_seat.remote(first)], START_TIMEOUT_S)
        self._runs = [actor.run.remote() for actor in self._actors]
        self._watcher = threading.Thread(target=self._watch, name="manta-watcher", daemon=True)
        self._watcher.start()
        if self._keeper is not None:
            self._keeper.begin()
        return infos[0], tuple(fact.pid for fact in facts)

    def _first_drafter(self, topology: Topology) -> DrafterAt | None:
        """The one in a process of its own, if that is where it is; loads beside the target."""
        if not (topology.split_drafter or topology.shared_drafter):
            return None
        assert self._placement is not None
        self._keeper = DrafterKeeper(DrafterSource(topology, self._placement), self._config)
        return self._keeper.start()

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
        if self._keeper is not None:
            self._keeper.close()
        for actor in self._actors:
            try:
                ray.kill(actor)
            except Exception as error:  # Ray itself is gone, and its workers with it
                logger.debug("ray.kill: %s", error)


def _is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped, or a debugger holds it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def _start_worker(topology: Topology, rank: int, placement: Placement) -> Actor:
    options: dict[str, Any] = {
        "num_cpus": topology.worker_resources.get("CPU", 0.0),
        "num_gpus": topology.worker_resources.get("GPU", 0.0),
        "scheduling_strategy": placement.strategy(rank),
        "max_restarts": 0,
    }
    if topology.device == "cuda":
        # Hidden devices break peer access between ranks (a 2400-fold slower all-reduce, or a hang).
        options["runtime_env"] = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    return ray.remote(TargetWorker).options(**options).remote()


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
