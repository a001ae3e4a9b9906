"""The step channel between real processes."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from manta.actors.workers.base.worker_base import StepFailure, Worker, WorkerSetup
from manta.actors.workers.drafter.drafter_client import DrafterClient
from manta.actors.workers.drafter.drafter_protocol import LAYOUT, Hello, Sizes
from manta.actors.workers.shm.abstract_sockets import AbstractListener
from manta.actors.workers.shm.endpoint import PeerLostError, SpinWaiter
from manta.actors.workers.shm.ring_buffer import Layout, SharedMemory, ShmRing
from manta.actors.workers.shm.step_channel import NUM_LANES, StepChannel, WorkerChannel, connect
from manta.cluster.config import EngineConfig
from manta.cluster.fleet.placement import Topology
from manta.cluster.step.dummy_steps import dummy_step
from manta.cluster.step.scheduler_output import SchedulerOutput, StepResult
from support.jobs.unpickling import TouchesWhenUnpickled
from support.waiting import wait_until

WORKER = """
import os, sys, time
from manta.actors.workers.shm.step_channel import WorkerChannel, connect
from manta.actors.workers.shm.endpoint import PeerLostError
address, rank, behaviour = sys.argv[1], int(sys.argv[2]), sys.argv[3]
answers = behaviour == "all answer" or rank == 0
try:
    channel = WorkerChannel(connect(address, rank), rank)
    while True:
        message = channel.receive()
        if behaviour == "stop reading":
            time.sleep(600)
        if answers:
            channel.send(message)
except PeerLostError:
    sys.exit(42)
"""
ENGINE = """
import time
from manta.actors.workers.shm.step_channel import StepChannel
channel = StepChannel(1)
print(channel.address, flush=True)
channel.accept(300.0)
channel.send("work")
channel.receive(300.0)
print("answered", flush=True)
time.sleep(600)
"""
WITHIN_S = 120.0  # the limit of what must happen
SMALL = {"down_slots": 2, "down_slot_bytes": 64, "up_slots": 2, "up_slot_bytes": 48}


@dataclass(frozen=True)
class Opened:
    """A channel whose workers have connected, and their processes, by rank."""

    channel: StepChannel
    workers: list[subprocess.Popen[bytes]]

    def echo(self, message: object) -> object:
        """Send a message and return rank 0's answer."""
        self.channel.send(message)
        rank, answer = self.channel.receive(WITHIN_S)
        assert rank == 0
        return answer


@pytest.fixture
def connected() -> Iterator[Callable[..., Opened]]:
    """Makes a channel and connects a process for each rank, with what it does with its messages."""
    opened: list[Opened] = []

    def open_channel(layout: Layout, behavior: str = "rank 0 answers") -> Opened:
        channel = StepChannel(layout.num_workers, layout)
        commands = [[channel.address, str(rank), behavior] for rank in range(layout.num_workers)]
        workers = [subprocess.Popen([sys.executable, "-c", WORKER, *command]) for command in commands]
        opened.append(Opened(channel, workers))
        channel.accept(WITHIN_S)
        return opened[-1]

    yield open_channel
    for each in opened:
        each.channel.close()
        for worker in each.workers:
            worker.kill()
            worker.wait()


def plan(num_tokens: int) -> SchedulerOutput:
    one = np.arange(num_tokens, dtype=np.int32)
    return SchedulerOutput(7, (), one, one, one, one, one, one, one, one, one > 0)


def test_every_worker_gets_every_plan_and_rank_0_answers_in_order(connected) -> None:
    opened = connected(Layout(2))
    for step in range(50):
        tokens = np.full((2, 3), step, np.int32)
        result = opened.echo(StepResult(step, tokens, np.array([3, 1], np.int32)))
        assert result.step == step
        np.testing.assert_array_equal(result.token_ids, tokens)
    opened.channel.close()
    assert [worker.wait(WITHIN_S) for worker in opened.workers] == [42, 42]


def test_any_rank_can_answer(connected) -> None:
    channel = connected(Layout(3), "all answer").channel
    channel.send("hello")
    assert sorted(channel.receive(WITHIN_S) for _ in range(3)) == [(r, "hello") for r in range(3)]


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [(Layout(2), [0, 5000, 3_000_000, 17]), (Layout(2, **SMALL), [0, 1, 8, 100, 3000])],
    ids=["large slots", "tiny slots"],
)
def test_messages_of_any_size_arrive_complete(connected, layout: Layout, sizes: list[int]) -> None:
    opened = connected(layout)
    for size in sizes:
        np.testing.assert_array_equal(opened.echo(plan(size)).slots, plan(size).slots)


def test_a_killed_worker_is_noticed_while_waiting_for_its_answer(connected) -> None:
    opened = connected(Layout(2), "stop reading")
    opened.channel.send("work")
    opened.workers[1].send_signal(signal.SIGKILL)
    with pytest.raises(PeerLostError, match="rank 1"):
        opened.channel.receive(WITHIN_S)


def raise_on_call() -> None:
    raise RuntimeError("marked as failed elsewhere")


def test_a_wait_for_a_worker_that_neither_reads_nor_answers_ends(connected) -> None:
    """At the timeout, of a reader and of a writer, or by what the liveness callback raises."""
    channel = connected(Layout(1, **SMALL), "stop reading").channel
    channel.send("the last it reads")
    with pytest.raises(TimeoutError):
        channel.receive(0.3)
    with pytest.raises(RuntimeError, match="marked as failed"):
        channel.receive(WITHIN_S, raise_on_call)
    with pytest.raises(TimeoutError):
        channel.send(bytes(1000), timeout_s=0.3)


def test_workers_end_and_nothing_is_left_when_the_engine_is_killed() -> None:
    before = _shared_files()
    engine = subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    address = engine.stdout.readline().strip()
    worker = subprocess.Popen([sys.executable, "-c", WORKER, address, "0", "rank 0 answers"])
    assert engine.stdout.readline().strip() == "answered"
    engine.kill()
    assert worker.wait(WITHIN_S) == 42
    engine.wait(WITHIN_S)
    assert _shared_files() == before


def test_a_worker_on_another_machine_gets_a_clear_error() -> None:
    with pytest.raises(PeerLostError, match="not on this machine"):
        connect(f"manta-nobody-listens/{'00' * 64}", 0)


def test_closing_twice_and_without_workers_is_fine(connected) -> None:
    channel = StepChannel(1)
    with pytest.raises(TimeoutError):
        channel.accept(timeout_s=0.2)
    channel.close()
    channel.close()
    opened = connected(Layout(1))
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    opened.channel.close()
    opened.channel.close()
    assert len(list(Path("/proc/self/fd").iterdir())) < descriptors


def test_a_sleeping_worker_wakes_and_reads_all_messages(connected) -> None:
    opened = connected(Layout(1))
    opened.echo("begin")
    (worker,) = opened.workers
    for number in range(3):
        wait_until(lambda: "S" in Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0])
        assert opened.echo(number) == number


def _shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("manta")}


class BreakingWorker(Worker):
    """A rank with a failing second step."""

    def _open(self) -> None:
        self.device = torch.device("cpu")
        self._set_threads = lambda: None

    def submit(self, plan: SchedulerOutput) -> None:
        if plan.num_drafts.any():
            raise RuntimeError("out of luck")

    def is_ready(self) -> bool:
        return True

    def collect(self) -> None: ...

    def take_report(self) -> None: ...


def test_a_worker_whose_step_fails_names_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    channel, worker = StepChannel(1), BreakingWorker()
    config = EngineConfig(model="m", device="cpu")
    setting = WorkerSetup(
        config=config, topology=Topology.of(config, {"CPU": 2.0}), rank=0, channel=channel.address
    )

    def live() -> None:
        worker.setup(setting)
        with pytest.raises(RuntimeError, match="out of luck"):
            worker.run()

    with ThreadPoolExecutor(1) as thread:
        life = thread.submit(live)
        channel.accept()
        prompts = [np.arange(3, dtype=np.int32)] * 3
        channel.send(dummy_step([0, 0, 0], [3, 3, 3], [0, 0, 0], prompts=prompts))
        channel.send(replace(dummy_step([3, 3], [3, 3], [2, 2]), slots=np.array([0, 2], np.int32)))
        _, failure = channel.receive(WITHIN_S)
        life.result(WITHIN_S)
    channel.close()
    assert isinstance(failure, StepFailure) and "out of luck" in failure.message
    (record,) = caplog.records
    assert record.request_ids == ["made-up-0", "made-up-2"] and "made-up-2" in record.getMessage()


def test_an_unauthenticated_peer_is_rejected_and_the_worker_connects() -> None:
    channel = StepChannel(1)
    name, _, key = channel.address.partition("/")
    assert f"@{name}" in Path("/proc/net/unix").read_text() and key not in Path("/proc/net/unix").read_text()
    wrong = f"{name}/{secrets.token_hex(len(key) // 2)}"
    strangers = [connect(address, 0)[0] for address in (wrong, f"{name}/{key[len(key) // 2 :] * 2}")]
    silent = socket.socket(socket.AF_UNIX)
    silent.connect("\0" + name)
    silent.shutdown(socket.SHUT_WR)
    connected = connect(channel.address, 0)
    channel.accept(WITHIN_S)
    worker = WorkerChannel(connected, 0)
    channel.send("work")
    assert worker.receive() == "work"
    for stranger in (*strangers, silent):
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b"", "no byte of ours, no descriptor"
        stranger.close()
    worker.close()
    channel.close()


def test_a_process_that_reuses_a_dead_ones_socket_name_is_not_trusted(tmp_path: Path) -> None:
    channel = StepChannel(1)
    address = channel.address
    channel.close()
    impostor = AbstractListener(1)
    impostor.listener.close()
    impostor.listener = socket.socket(socket.AF_UNIX)
    impostor.listener.bind("\0" + address.partition("/")[0])
    impostor.listener.listen(4)
    connected = connect(address, 0)
    sock, _ = impostor.listener.accept()
    sock.sendall(secrets.token_bytes(32))
    layout, file = Layout(1), os.memfd_create("impostor")
    os.ftruncate(file, layout.size_bytes)
    socket.send_fds(sock, [json.dumps(asdict(layout)).encode()], [file] * (1 + NUM_LANES))
    os.close(file)
    with pytest.raises(PeerLostError, match="the engine"):
        WorkerChannel(connected, 0)

    hello = Hello("mine", EngineConfig(model="m"), (1,), Sizes(64, 64), None)
    link = DrafterClient(address, hello, torch.device("cpu"), SpinWaiter(0.0))
    sock, _ = impostor.listener.accept()
    files = socket.recv_fds(sock, 1 << 18, 2)[1]
    memory = SharedMemory(files[0], LAYOUT.size_bytes)
    ShmRing.up(memory, LAYOUT, 0).put(
        memoryview(pickle.dumps(TouchesWhenUnpickled(tmp_path / "ran"))), last=True
    )
    link.receive()
    assert not link.is_lost, "it may prove itself yet"
    sock.sendall(secrets.token_bytes(32))
    link.receive()
    assert link.is_lost and not (tmp_path / "ran").exists()
    memory.close()
    impostor.listener.close()
