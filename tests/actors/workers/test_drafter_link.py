"""The link to a drafter in another process, and its queue: both ends here, real sockets and memory."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from manta.actors.workers.drafter import drafter_client, drafter_server
from manta.actors.workers.drafter.drafter_client import DrafterClient
from manta.actors.workers.drafter.drafter_protocol import MAX_OPEN, Hello, Sizes, draft_kinds
from manta.actors.workers.drafter.drafter_server import DrafterServer
from manta.actors.workers.shm.abstract_sockets import connect
from manta.actors.workers.shm.endpoint import PeerLostError, SpinWaiter
from manta.actors.workers.shm.tensor_mailbox import RoundRobinBuffer, padded
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError
from manta.cluster.step.scheduler_output import DrafterUse, SchedulerOutput
from support.engines.steps import Steps
from support.jobs.unpickling import TouchesWhenUnpickled
from support.waiting import wait_until

CPU = torch.device("cpu")
DRAFTS = [7, 8]


class RecordingSession:
    """A drafter session that records its input and proposes the same drafts for all; `gate` makes it wait."""

    def __init__(
        self, name: str, notes: list[tuple[str, int]], gate: threading.Event, num_parts: int
    ) -> None:
        self._name, self._notes, self._gate, self._num_parts = name, notes, gate, num_parts

    def begin(self, plan: SchedulerOutput) -> None:
        self._notes.append((f"{self._name} begins", plan.step))
        self._gate.wait(600)

    def draft(
        self, plan: SchedulerOutput, *, has_grammars: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._notes.append((f"{self._name} drafts", plan.step))
        drafts = torch.tensor([DRAFTS] * plan.num_requests)
        return drafts, drafts / 8

    def num_parts(self, plan: SchedulerOutput) -> int:
        return self._num_parts

    def result_kinds(self, plan: SchedulerOutput, part: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [((plan.num_requests,), torch.int64), ((plan.num_requests, 4), torch.float32)]

    def take_in(
        self, plan: SchedulerOutput, part: int, values: Sequence[torch.Tensor], *, followed: bool
    ) -> None:
        self._gate.wait(600)
        verdict_R, c_R4 = values
        assert verdict_R.tolist() == [plan.step] * plan.num_requests and (c_R4 == plan.step / 2).all()
        self._notes.append((f"{self._name} learns", plan.step))


class RunningServer:
    """A server in a thread, and links to it."""

    def __init__(self) -> None:
        self.num_parts = 1
        self.notes: list[tuple[str, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.server = DrafterServer(self._make_session)
        self._thread = threading.Thread(target=self.server.serve, args=[0.2])
        self._links: list[DrafterClient] = []

    def _make_session(self, hello: Hello) -> RecordingSession:
        if not hello.num_pages[0]:
            raise ConfigError("no pages", param="num_pages")
        return RecordingSession(hello.name, self.notes, self.gate, self.num_parts)

    def connect(self, name: str, num_pages: int = 8) -> DrafterClient:
        config = EngineConfig(model="t", max_num_seqs=4, max_num_batched_tokens=32)
        sizes = Sizes.of(4, 32, 2, 4, torch.float32)
        hello = Hello(name, config, (num_pages,), sizes, None)
        self._links.append(DrafterClient(self.server.address, hello, CPU, SpinWaiter(0.0)))
        if not self._thread.is_alive():
            self._thread.start()
        self._links[-1].wait_for_welcome(120)
        return self._links[-1]

    def close(self) -> None:
        self.gate.set()
        for link in self._links:
            link.close()
        self._thread.join(600)
        assert not self._thread.is_alive(), "it ends when nobody is there"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets how long a step waits for its drafts; at first, longer than a slow machine takes."""

    def set_wait(seconds: float) -> None:
        monkeypatch.setattr(drafter_client, "MIN_WAIT_S", seconds)
        monkeypatch.setattr(drafter_client, "MAX_WAIT_S", seconds)

    set_wait(120.0)
    return set_wait


@pytest.fixture
def running() -> Iterator[RunningServer]:
    made = RunningServer()
    yield made
    made.close()


def drafts_of(link: DrafterClient, plan: SchedulerOutput) -> Sequence[torch.Tensor] | None:
    return link.drafts(plan.step, draft_kinds(plan, (1, len(DRAFTS))))


def report(link: DrafterClient, plan: SchedulerOutput, part: int = 0, *, is_last: bool = True) -> None:
    values = [torch.full((plan.num_requests,), plan.step), torch.full((plan.num_requests, 4), plan.step / 2)]
    link.send_results(plan.step, part, values, followed=True, num_drafts=None, is_last=is_last)


def wait_until_done(link: DrafterClient) -> None:
    wait_until(lambda: link.receive() or not link.num_open)


@pytest.mark.parametrize("common", ["nothing", "a request", "pages"])
def test_the_next_plan_is_drafted_ahead_if_it_shares_no_requests(running: RunningServer, common: str) -> None:
    link, steps = running.connect("a"), Steps(4)
    first = steps.plan([0, 1], [3, 3], [3, 3], [2, 2], admitted=[steps.admit(s, [1, 2, 3]) for s in (0, 1)])
    slot = 1 if common == "a request" else 2
    then = steps.plan([slot], [3], [3], [2], admitted=[steps.admit(slot, [1, 2, 3])])
    if common == "pages":  # of a request that has left meanwhile
        then.page_ids[:] = first.page_ids[: len(then.page_ids)]
    link.request_drafts(first)
    link.request_drafts(then)
    found = drafts_of(link, first)
    assert found is not None and found[0].tolist() == [DRAFTS] * 2
    assert found[1].dtype == torch.float32 and found[1].equal(found[0] / 8)
    if common == "nothing":
        wait_until(lambda: ("a drafts", then.step) in running.notes)
    else:
        time.sleep(0.05)
        assert running.notes[-1] == ("a drafts", first.step)
    report(link, first)
    assert drafts_of(link, then) is not None
    report(link, then)
    wait_until_done(link)
    learned = [step for note, step in running.notes if note == "a learns"]
    assert learned == [first.step, then.step]


def test_a_step_sent_in_parts_stays_open_until_the_drafter_has_read_all_of_them(
    running: RunningServer,
) -> None:
    running.num_parts = 2
    link, steps = running.connect("a"), Steps(4)
    plan = steps.plan([0], [3], [3], [2])
    link.request_drafts(plan)
    assert drafts_of(link, plan) is not None
    running.gate.clear()
    report(link, plan, 0, is_last=False)
    report(link, plan, 1)
    running.gate.set()
    wait_until_done(link)
    assert running.notes[-2:] == [("a learns", plan.step)] * 2


def test_a_stopped_drafter_is_awaited_once_and_catches_up_correctly(
    running: RunningServer, patience: Callable[[float], None]
) -> None:
    link, steps = running.connect("a"), Steps(4)
    plans = [steps.plan([0], [3 + i], [3], [2]) for i in range(6)]
    link.request_drafts(plans[0])
    assert drafts_of(link, plans[0]) is not None
    report(link, plans[0])
    wait_until_done(link)
    running.gate.clear()
    patience(0.25)
    link.request_drafts(plans[1])
    assert not link.is_answered(plans[1].step)
    assert drafts_of(link, plans[1]) is None
    assert not link.is_ready and not link.is_lost
    report(link, plans[1])
    for plan in plans[2:4]:
        link.request_drafts(plan)
        assert link.is_answered(plan.step), "it is not waited for again"
        assert drafts_of(link, plan) is None
        report(link, plan)
    running.gate.set()
    wait_until_done(link)
    assert link.is_ready
    learned = [step for note, step in running.notes if note == "a learns"]
    assert learned == [plan.step for plan in plans[:4]], "nothing is missing"
    patience(120.0)
    link.request_drafts(plans[4])
    assert drafts_of(link, plans[4]) is not None


def test_a_drafter_that_lags_too_long_is_given_up_and_a_dead_one_is_noticed_immediately(
    running: RunningServer, patience: Callable[[float], None]
) -> None:
    running.connect("b")  # which keeps the server
    link, steps = running.connect("a"), Steps(4)
    running.gate.clear()
    patience(0.05)
    for number in range(MAX_OPEN + 2):
        plan = steps.plan([0], [3 + number], [3], [2])
        link.request_drafts(plan)
        assert drafts_of(link, plan) is None
        report(link, plan)
    assert link.is_lost and not link.is_ready
    running.gate.set()
    patience(120.0)
    again = running.connect("a")  # its own session
    plan = steps.plan([0], [3], [3], [2])
    again.request_drafts(plan)
    assert drafts_of(again, plan) is not None
    with pytest.raises(PeerLostError):
        DrafterClient(
            "manta-nobody",
            Hello("b", EngineConfig(model="t"), (1,), Sizes(64, 64), None),
            CPU,
            SpinWaiter(0.0),
        )


def test_a_server_waits_longer_for_its_first_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first engine's target may load for minutes; engines that follow have loaded or start another."""
    server, waits = DrafterServer(lambda hello: pytest.fail("nobody connects")), list[float]()

    def wait(ready: Callable[[], bool], timeout_s: float) -> None:
        waits.append(timeout_s)
        raise TimeoutError

    monkeypatch.setattr(server._waiter, "wait", wait)
    server.serve(5.0)
    assert waits == [drafter_server.FIRST_CLIENT_S]


def test_a_refused_connection_gets_the_reason(running: RunningServer) -> None:
    with pytest.raises(ConfigError, match="no pages") as caught:
        running.connect("a", num_pages=0)
    assert caught.value.param == "num_pages"


def test_a_message_of_a_process_that_does_not_know_the_key_is_not_unpickled(
    running: RunningServer, tmp_path: Path
) -> None:
    name, _, key = running.server.address.partition("/")
    for wrong in (secrets.token_hex(len(key) // 2), key[len(key) // 2 :] * 2):
        sock, _ = connect(f"{name}/{wrong}")
        file = os.memfd_create("stranger")
        with contextlib.suppress(OSError):
            socket.send_fds(sock, [pickle.dumps(TouchesWhenUnpickled(tmp_path / "ran"))], [file])
        os.close(file)
        running.connect(f"next to {wrong[:4]}")
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(100) == b"", "no byte of ours"
        sock.close()
    assert not (tmp_path / "ran").exists()


class WorkClock:
    """A replacement of `time` for the server and its clients: it advances only while a session works."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> WorkClock:
    clock = WorkClock()
    monkeypatch.setattr(drafter_server, "time", clock)
    monkeypatch.setattr(drafter_client, "time", clock)
    return clock


def test_the_least_served_engine_is_next_and_every_engine_gets_its_queue_time(
    running: RunningServer, clock: WorkClock
) -> None:
    links, steps = {name: running.connect(name) for name in ("a", "b")}, Steps(4)
    running.gate.clear()
    first, *others = (steps.plan([slot], [3], [3], [2]) for slot in range(3))
    links["b"].request_drafts(first)
    wait_until(lambda: ("b begins", first.step) in running.notes)
    for plan in others:
        links["b"].request_drafts(plan)
    links["a"].request_drafts(late := steps.plan([0], [3], [3], [2]))
    clock.now_s = 10.0
    running.gate.set()
    uses = {name: DrafterUse() for name in links}

    def hear(drafted: dict[str, int]) -> bool:
        for name, link in links.items():
            link.receive()
            uses[name] += link.take_use()
        return {name: use.steps for name, use in uses.items()} == drafted

    wait_until(lambda: hear({"a": 1, "b": 3}))
    order = [note for note in running.notes if "drafts" in note[0]]
    assert order[:2] == [("b drafts", first.step), ("a drafts", late.step)], "b wants more, and has had more"
    assert uses["a"] == DrafterUse(steps=1, queue_s=10.0, served_s=0.0)
    assert uses["b"] == DrafterUse(steps=3, queue_s=0.0, served_s=10.0), "its own work is no queue"
    assert links["a"].take_use() == DrafterUse(), "told once"


def test_every_engine_gets_the_same_share_of_the_drafters_time(
    running: RunningServer, clock: WorkClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 8, 2 and 1 seconds: each waiting engine has had as much time as the others, within a step."""
    costs_s, asks = {"greedy": 8.0, "small": 2.0, "smaller": 1.0}, 20
    draft = RecordingSession.draft

    def working(
        self: RecordingSession, plan: SchedulerOutput, *, has_grammars: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        clock.now_s += costs_s[self._name]
        return draft(self, plan, has_grammars=has_grammars)

    monkeypatch.setattr(RecordingSession, "draft", working)
    links, steps = {name: running.connect(name) for name in costs_s}, Steps(asks)
    running.gate.clear()
    for link in links.values():
        for slot in range(asks):
            link.request_drafts(steps.plan([slot], [3], [3], [2]))
    running.gate.set()
    wait_until(lambda: len(running.notes) == 2 * asks * len(links))
    served_s, left = dict.fromkeys(costs_s, 0.0), dict.fromkeys(costs_s, asks)
    for note, _ in running.notes:
        name, what = note.split()
        if what == "drafts":
            served_s[name] += costs_s[name]
            left[name] -= 1
            wanting = [served_s[each] for each, count in left.items() if count]
            assert not wanting or max(wanting) - min(wanting) <= max(costs_s.values())
    assert served_s == {"greedy": 160.0, "small": 40.0, "smaller": 20.0}
    assert left == dict.fromkeys(costs_s, 0)


# After the wrap, what is left before the oldest range is too small.
@example([(True, 400), (True, 400), (False, 1), (True, 200), (True, 300)])
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 400)), max_size=60))
def test_mailbox_ranges_never_overlap(moves: list[tuple[bool, int]]) -> None:
    rounds, taken = RoundRobinBuffer(128, 1024), []
    for takes, size in moves:
        if takes:
            begin = rounds.take(size)
            if begin is not None:
                assert begin >= 128 and begin + padded(size) <= 128 + 1024
                assert all(begin + padded(size) <= b or e <= begin for b, e in taken)
                taken.append((begin, begin + padded(size)))
            else:
                assert taken, "an empty mailbox holds what fits"
        elif taken:
            rounds.release()
            taken.pop(0)
