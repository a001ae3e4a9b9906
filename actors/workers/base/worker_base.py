"""A rank as a process of its own: its set-up, and the loop that runs steps. Subclasses define what it runs.

A plain class; `ray_executor.py` wraps `target_worker.TargetWorker` with `ray.remote(...)`. The calls in order
are `__init__` (light: no torch), `setup`, `load`, and one `run` that returns only when the worker ends, which
is how Ray reports that. The process also ends when the engine does: its socket closes, and Ray kills it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NoReturn

from ....cluster.config import EngineConfig
from ....cluster.errors import PlacementError
from ....cluster.fleet.placement import Topology
from ....cluster.step.executor import ExecutorInfo
from ....cluster.step.scheduler_output import IntArray, SchedulerOutput, StepResult
from ...system.log_setup import LogSettings, log_to_stderr
from ..shm.endpoint import PeerLostError, SpinWaiter, spin_budget_s
from ..shm.step_channel import WorkerChannel, connect
from .control_messages import ControlMessage

if TYPE_CHECKING:
    import torch

    from ..comm.process_group import ProcessGroupCommunicator, Store

logger = logging.getLogger(__name__)

ORPHAN_TIMEOUT_S = 5.0
# Library settings of the engine's process that Ray's workers would otherwise lack.
FORWARDED = ("HF_", "HUGGING_FACE_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "TRITON_")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    config: EngineConfig  # the engine's, with absolute paths and the topology's device
    topology: Topology  # the engine's
    rank: int  # of this worker among the target's ranks
    # address of the engine's step channel
    channel: str = field(repr=False)  # a secret
    log: LogSettings | None = None  # log settings of the engine's process, if it has any
    # variables for libraries, set here unless this process has them
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """`store_port` is where the ranks meet; rank 0 serves it."""

    pid: int
    store_port: int | None


@dataclass(frozen=True, slots=True)
class StepFailure:
    """Sent instead of a result: the step failed, and with it the worker."""

    message: str


class Worker:
    setting: WorkerSetup
    device: torch.device
    ranks: ProcessGroupCommunicator
    waiter: SpinWaiter
    _set_threads: Callable[[], object]
    max_in_flight = 1

    def __init__(self) -> None:
        self._knocked: tuple[socket.socket, bytes] | None = None
        self._store: Store | None = None
        self._in_flight = _StepsInFlight()

    def setup(self, setting: WorkerSetup) -> WorkerFacts:
        """Prepare the process: environment, threads, device, connection to the engine."""
        self.setting = setting
        if setting.log is not None:
            log_to_stderr(setting.log.of(process="worker", rank=setting.rank))
        # The worker waits for the engine's host work, which is short and runs on one core.
        self.waiter = SpinWaiter(spin_budget_s(setting.topology.num_workers + 1))
        for name, value in setting.environment.items():
            os.environ.setdefault(name, value)
        try:
            self._knocked = connect(setting.channel, setting.rank)
        except PeerLostError as error:
            raise PlacementError(
                f"The worker of rank {setting.rank} cannot reach the engine: {error}. Plans travel through "
                "shared memory: all workers must run on the engine's node, as the same user."
            ) from None
        return WorkerFacts(os.getpid(), self._open())

    def _open(self) -> int | None:
        """Import torch, select the device, and open the store (rank 0)."""
        from ..comm import process_group

        topology = self.setting.topology
        self.device = open_device(topology, self.setting.config)
        if self.setting.rank > 0 or topology.tensor_parallel_size == 1:
            return None
        self._store = process_group.open_store(topology.tensor_parallel_size)
        return self._store.port

    def load(self, store_port: int | None) -> ExecutorInfo:
        """Join the other ranks and load the model."""
        from ...system.torch_threads import thread_setter
        from ..comm import process_group

        self.ranks = process_group.connect(
            rank=self.setting.rank,
            world_size=self.setting.topology.tensor_parallel_size,
            device=self.device,
            store=self._store or store_port or 0,
        )
        info = self._load()
        self._set_threads = thread_setter(info)
        return info

    def _load(self) -> ExecutorInfo:
        raise NotImplementedError

    def serve_lanes_in_thread(self, lanes: Collection[Connection]) -> None:
        """Start to serve requests of the engine outside of the steps."""

    def execute(self, message: ControlMessage) -> object | None:
        """Handle a message between steps; return the answer, if there is one."""
        raise NotImplementedError

    def take_report(self) -> object | None:
        """Return a message that the engine must get before the next result, if any."""
        raise NotImplementedError

    def submit(self, plan: SchedulerOutput) -> None:
        raise NotImplementedError

    def is_ready(self) -> bool:
        raise NotImplementedError

    def collect(self) -> StepResult | None:
        """Finish the oldest step; target rank 0 returns the result."""
        raise NotImplementedError

    def run(self) -> str:
        """Run steps until the engine ends. Raises a step's error, after reporting it to the engine."""
        assert self._knocked is not None, "call setup() first"
        channel: WorkerChannel | None = None
        try:
            channel = WorkerChannel(self._knocked, self.setting.rank, self.waiter)
            self.serve_lanes_in_thread(channel.lanes)
            self._run_steps(channel)
        except PeerLostError:
            # Ray kills a worker whose engine has ended, unless Ray itself has died.
            threading.Timer(ORPHAN_TIMEOUT_S, os._exit, (0,)).start()
            return "The engine has ended."
        except Exception as error:  # the engine must be told
            ids = self._in_flight.request_ids()
            logger.exception(
                "rank %d: a step failed; requests in flight: %s",
                self.setting.rank,
                ids,
                extra={"request_ids": ids},
            )
            if channel is not None:
                channel.send(StepFailure(f"{type(error).__name__}: {error}"))
            raise

    def _run_steps(self, channel: WorkerChannel) -> NoReturn:
        """Run steps until PeerLostError; on an asynchronous device, each as soon as it arrives."""
        in_flight, spins = self._in_flight, self.device.type == "cuda"
        while True:
            may_start = len(in_flight) < self.max_in_flight
            if not in_flight or (may_start and channel.has_message_before(self.is_ready, spins=spins)):
                message = channel.receive()
                if isinstance(message, SchedulerOutput):
                    self._set_threads()
                    in_flight.add(message)
                    self.submit(message)
                elif (answer := self.execute(message)) is not None:
                    channel.send(answer)
            else:
                result = self.collect()
                in_flight.remove_oldest()
                if (report := self.take_report()) is not None:
                    channel.send(report)
                if result is not None:
                    channel.send(result)


class _StepsInFlight:
    """The steps in flight and their requests' ids, which are logged when a step fails."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # request id by slot
        self._steps: deque[IntArray] = deque()  # slots of each step

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, plan: SchedulerOutput) -> None:
        for admitted in plan.admitted:
            self._names[admitted.slot] = admitted.request_id
        self._steps.append(plan.slots)

    def remove_oldest(self) -> None:
        self._steps.popleft()

    def request_ids(self) -> list[str]:
        return sorted({self._names[slot] for slots_R in self._steps for slot in slots_R.tolist()})


def open_device(topology: Topology, config: EngineConfig) -> torch.device:
    """Import torch, and select this process's device for the calling thread."""
    import torch

    from ...system.host_resources import owned_cores

    if topology.device == "cuda":
        device = torch.device("cuda", _own_gpu())
        torch.cuda.set_device(device)
        return device
    # Ray has set OMP_NUM_THREADS to the actor's CPUs; this overrides it.
    torch.set_num_threads(topology.num_threads(config, owned_cores()))
    return torch.device("cpu")


def forwarded_environment() -> dict[str, str]:
    """Return the variables that workers take over, without devices and ranks."""
    return {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}


def _own_gpu() -> int:
    """Return this actor's GPU among the visible ones (NOSET: Ray hides none)."""
    import ray

    (gpu,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(gpu) if visible else int(gpu)
