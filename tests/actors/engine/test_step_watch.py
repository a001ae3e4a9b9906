"""Stalled steps: how they are detected, and what engine, server and gateway do then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from manta.actors.engine.uniproc_executor import make_executor
from manta.actors.http.config.settings import ServerSettings
from manta.actors.http.wire.errors import ENGINE_DEAD
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.engine.step_watchdog import COMPILING_S, FACTOR, FLOOR_S, TICK_S, Stall, StepWatchdog
from manta.cluster.simulation.simulated_executor import SimulatedExecutor
from manta.cluster.step.executor import Executor
from manta.cluster.step.scheduler_output import SchedulerOutput, StepResult
from support.checkpoints.text_pair import LiveServer
from support.engines.cluster_checker import make_info, make_request
from support.engines.passing_executor import PassingExecutor
from support.servers.gateway_stand import GatewayStand
from support.servers.server_probes import events, idle
from support.waiting import wait_until

BODY = {"prompt": "x", "max_tokens": 60, "temperature": 1, "seed": 3, "ignore_eos": True, "stream": True}


class Hanging(PassingExecutor):
    """An executor that hangs, as its device may, in a step that a test chooses, until it is released.

    Attributes:
        steps_left: steps until then.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(make_executor(config))
        self.steps_left = 0
        self.hangs, self.released = threading.Event(), threading.Event()

    def collect(self) -> StepResult:
        self.steps_left -= 1
        if self.steps_left == 0:
            self.hangs.set()
            self.released.wait(600)
            self.hangs.clear()
        return super().collect()


class HangWatchdog(StepWatchdog):
    """A watchdog whose clock runs only while the executor hangs, so that no slow step is a stall."""

    def __init__(self) -> None:
        super().__init__(floor_s=1.0)
        self.executors: list[Hanging] = []
        self._now_s = 0.0

    def make(self, config: EngineConfig) -> Executor:
        self.executors.append(Hanging(config))
        return self.executors[0]

    def check(self, now_s: float, stopped: Callable[[], Sequence[str]]) -> Stall | None:
        if self.executors and self.executors[0].hangs.is_set():
            self._now_s += 2 * TICK_S
        return super().check(self._now_s, stopped)


class Driven:
    """A watch that gets real plans with scripted seconds."""

    def __init__(self) -> None:
        self.watch = StepWatchdog()
        self.stall: Stall | None = None
        config = EngineConfig(model="", max_num_seqs=8, skip_tokenizer_init=True)
        self._executor = SimulatedExecutor(make_info(max_model_len=1000, num_pages=(500,), eos_token_ids=()))
        self._engine = EngineCore(config, self._executor)
        self._now_s = 0.0
        self._num_requests = 0

    def add(self, **params: Any) -> None:
        self._num_requests += 1
        self._engine.add_request(make_request(str(self._num_requests), max_tokens=900, **params))

    def submit(self) -> SchedulerOutput:
        """Report that the next step is being submitted."""
        plan = self._engine.plan()
        assert plan is not None
        self.watch.before_submit(plan)
        return plan

    def step(self, seconds: float = 0.01, *, ticks: bool = False) -> bool:
        self._executor.submit(self.submit())
        self.watch.after_submit(0.0)
        self.watch.before_collect()
        stalled = ticks and self.tick(seconds)
        self._engine.commit(self._executor.collect())
        self.watch.after_collect(seconds)
        return stalled

    def tick(self, seconds: float, stopped: Sequence[str] = ()) -> bool:
        """Return whether a stall was found while time passed, tick by tick."""
        for _ in range(round(seconds / TICK_S) + 1):
            self._now_s += TICK_S
            self.stall = self.watch.check(self._now_s, lambda: stopped)
        return self.stall is not None

    def suspend(self, seconds: float) -> bool:
        """Return whether a stall is found after the whole process was stopped for a time."""
        self._now_s += seconds
        return self.watch.check(self._now_s, tuple) is not None


@pytest.fixture
def driven() -> Driven:
    driven = Driven()
    driven.add(temperature=0.0)
    for _ in range(50):
        driven.step()
    return driven


def test_a_step_of_a_known_kind_stalls_after_the_minimum_and_a_hundred_times_its_usual_time(
    driven: Driven,
) -> None:
    assert not driven.step(FLOOR_S - 2, ticks=True)
    for _ in range(20):  # that hiccup is forgotten
        driven.step()
    assert driven.step(FLOOR_S + 2, ticks=True)
    for _ in range(40):
        driven.step(0.5)
    assert not driven.step(FLOOR_S + 10, ticks=True)
    for _ in range(40):
        driven.step(0.5)
    assert driven.step(FACTOR * 0.5 + 2, ticks=True)


def test_steps_that_may_compile_have_60_seconds(driven: Driven) -> None:
    driven.add(temperature=0.0, prompt=[5] * 100)
    assert not driven.step(COMPILING_S - 2, ticks=True)  # a longer prompt than any before
    for _ in range(40):
        driven.step()
    driven.add(temperature=0.7)
    driven.step()
    assert not driven.step(COMPILING_S - 2, ticks=True)  # the first that samples
    for _ in range(40):
        driven.step()
    assert driven.step(30.0, ticks=True)
    driven.watch.reset()  # another drafter
    assert not driven.step(290.0, ticks=True)


@pytest.mark.parametrize("unseen", [{"temperature": 0.7}, {"temperature": 0.0, "prompt": [5] * 100}])
def test_a_step_of_an_unseen_kind_is_judged_by_the_kinds_that_were_seen(
    driven: Driven, unseen: dict[str, Any]
) -> None:
    driven.add(**unseen)
    assert driven.step(COMPILING_S + 2, ticks=True)


def test_the_time_of_an_unseen_kind_is_expected_to_grow_with_its_rows() -> None:
    driven = Driven()
    driven.add(temperature=0.0)
    for _ in range(50):
        driven.step(0.5)
    driven.add(temperature=0.0, prompt=[5] * 100)
    assert not driven.step(290.0, ticks=True), "100 times 0.5 s, and the step has dozens of times the rows"


def test_time_of_a_suspended_process_does_not_count(driven: Driven) -> None:
    driven.submit()
    assert not driven.tick(1.0)
    assert not any(driven.suspend(3600.0) for _ in range(10))
    assert not driven.tick(FLOOR_S - 12.0) and driven.tick(2.0)


def test_a_stopped_processs_step_stalls_after_the_minimum() -> None:
    driven = Driven()
    driven.add()
    driven.submit()
    assert not driven.tick(100.0)
    assert driven.tick(1.0, ["rank 3 (process 7)"])
    assert driven.stall is not None and "rank 3 (process 7)" in driven.stall.reason
    driven.watch.after_submit(1.0)
    assert not driven.tick(100.0, ["rank 3 (process 7)"])  # nothing waits for it


def test_streams_of_a_hanging_step_end_and_health_follows_it(plain: EngineConfig) -> None:
    watch = HangWatchdog()
    with (
        LiveServer(plain, make=watch.make, watch=watch) as server,
        httpx.Client(base_url=server.url, timeout=600) as http,
    ):
        (executor,) = watch.executors
        _, whole = (http.post("/v1/completions", json=BODY) for _ in range(2))  # unseen kinds are not judged
        executor.steps_left = 45
        error = events(http.post("/v1/completions", json=BODY))[-1]["error"]
        assert error["code"] == 503 and error["message"] == ENGINE_DEAD
        health = http.get("/health")
        assert health.status_code == 503 and "a step has not ended" in health.text
        assert http.post("/v1/completions", json={**BODY, "stream": False}).status_code == 503
        executor.released.set()
        wait_until(lambda: http.get("/health").status_code == 200)
        again = http.post("/v1/completions", json=BODY)
        wait_until(lambda: idle(server))
    texts = ["".join(e["choices"][0]["text"] for e in events(r) if "choices" in e) for r in (whole, again)]
    assert texts[0] == texts[1] and texts[0]


def test_a_gateway_moves_streams_from_a_replica_with_a_hanging_step(plain: EngineConfig) -> None:
    watch, settings = HangWatchdog(), ServerSettings(served_model_name="tiny")
    body = {**BODY, "return_token_ids": True}
    with (
        GatewayStand([(plain, settings)] * 2, makers=[watch.make, None], watches=[watch, None]) as stand,
        httpx.Client(base_url=stand.url, timeout=600) as http,
    ):
        (executor,) = watch.executors
        _, whole = (http.post("/v1/completions", json=body) for _ in range(2))
        executor.steps_left = 45
        moved, after = (http.post("/v1/completions", json=body) for _ in range(2))
        assert [replica.engine.is_alive for replica in stand.replicas] == [False, True]
        text = http.get("/metrics").text
        executor.released.set()
    ids = [
        [i for e in events(r) for c in e["choices"] for i in c.get("token_ids", ())]
        for r in (whole, moved, after)
    ]
    assert ids[0] == ids[1] == ids[2] and len(ids[0]) == 60
    assert 'manta:gateway_resumed_streams_total{gateway="0",model_name="tiny"} 1.0' in text
