"""Stalled steps: how they are detected, and what engine, server and gateway do then."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from manta.actors.engine.async_engine import AsyncEngine
from manta.actors.engine.uniproc_executor import make_executor
from manta.actors.http.config.settings import ServerSettings
from manta.actors.http.wire.errors import ENGINE_DEAD
from manta.actors.tokenization.prompts import EncodedPrompt
from manta.actors.workers.ray_executor import RayExecutor
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.engine.step_watchdog import COMPILING_S, FACTOR, FLOOR_S, TICK_S, StepWatchdog
from manta.cluster.errors import EngineDeadError, EngineStalledError
from manta.cluster.request.request import SamplingParams
from manta.cluster.simulation.simulated_executor import SimulatedExecutor
from manta.cluster.step.executor import Executor
from manta.cluster.step.scheduler_output import StepResult
from support.checkpoints.text_pair import LiveServer, make_text_pair
from support.engines.cluster_checker import make_info, make_request
from support.engines.passing_executor import PassingExecutor
from support.servers.gateway_stand import GatewayStand

FLOOR_IN_TESTS_S = 1.0
BODY = {"prompt": "x", "max_tokens": 60, "temperature": 1, "seed": 3, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    target, _ = make_text_pair(tmp_path_factory.mktemp("pair"))
    return EngineConfig(model=str(target), dtype="float32", device="cpu", max_num_seqs=8, num_pages=256)


class Hanging(PassingExecutor):
    """Does not end a step, as a device that hangs, until it is released.

    Attributes:
        left: steps until then.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(make_executor(config))
        self.left = 0
        self.released = threading.Event()

    def collect(self) -> StepResult:
        self.left -= 1
        if self.left == 0:
            self.released.wait(60)
        return super().collect()


def until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline_s = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


class Driven:
    """A watch that gets real plans with scripted seconds."""

    def __init__(self) -> None:
        self.watch = StepWatchdog()
        config = EngineConfig(model="", max_num_seqs=8, skip_tokenizer_init=True)
        self._engine = EngineCore(
            config, SimulatedExecutor(make_info(max_model_len=1000, num_pages=(500,), eos_token_ids=()))
        )
        self._executor = self._engine._executor
        self._now_s = 0.0
        self._num_requests = 0

    def add(self, **params: Any) -> None:
        self._num_requests += 1
        self._engine.add_request(make_request(str(self._num_requests), max_tokens=900, **params))

    def step(self, seconds: float = 0.01, *, ticks: bool = False) -> bool:
        plan = self._engine.plan()
        assert plan is not None
        self.watch.before_submit(plan)
        self._executor.submit(plan)
        self.watch.after_submit(0.0)
        self.watch.before_collect()
        stalled = ticks and self.tick(seconds)
        self._engine.commit(self._executor.collect())
        self.watch.after_collect(seconds)
        return stalled

    def tick(self, seconds: float, stopped: Sequence[str] = ()) -> bool:
        """Return whether a stall was found while time passed, tick by tick."""
        found = False
        for _ in range(round(seconds / TICK_S) + 1):
            self._now_s += TICK_S
            found = self.watch.check(self._now_s, lambda: stopped) is not None
        return found

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
    plan = driven._engine.plan()
    assert plan is not None
    driven.watch.before_submit(plan)
    assert not driven.tick(1.0)
    assert not any(driven.suspend(3600.0) for _ in range(10))
    assert not driven.tick(FLOOR_S - 12.0) and driven.tick(2.0)


def test_a_stopped_processs_step_stalls_after_the_minimum() -> None:
    driven = Driven()
    driven.add()
    plan = driven._engine.plan()
    assert plan is not None
    driven.watch.before_submit(plan)
    assert not driven.tick(100.0)
    assert driven.tick(1.0, ["rank 3 (process 7)"])
    stall = driven.watch.check(driven._now_s + TICK_S, lambda: ["rank 3 (process 7)"])
    assert stall is not None and "rank 3 (process 7)" in stall.reason
    driven.watch.after_submit(1.0)
    assert not driven.tick(100.0, ["rank 3 (process 7)"])  # nothing waits for it


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [orjson.loads(line.removeprefix("data: ")) for line in lines[:-1] if line.startswith("data: ")]


def test_streams_of_a_hanging_step_end_and_health_follows_it(
    config: EngineConfig,
) -> None:
    made: list[Hanging] = []

    def make(config: EngineConfig) -> Executor:
        made.append(Hanging(config))
        return made[0]

    watch = StepWatchdog(FLOOR_IN_TESTS_S)
    with LiveServer(config, make=make, watch=watch) as server:
        ask = lambda: httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60)  # noqa: E731
        _, whole = ask(), ask()  # steps of kinds that were not seen are not judged
        made[0].left = 45
        cut = ask()
        error = events(cut)[-1]["error"]
        assert error["code"] == 503 and error["message"] == ENGINE_DEAD
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503 and "a step has not ended" in health.text
        assert httpx.post(f"{server.url}/v1/completions", json={**BODY, "stream": False}).status_code == 503
        made[0].released.set()
        until(lambda: httpx.get(f"{server.url}/health").status_code == 200)
        again = ask()
        until(lambda: server.engine.stats().running == 0 and server.engine.stats().kv_usage == 0.0)
    texts = ["".join(e["choices"][0]["text"] for e in events(r) if "choices" in e) for r in (whole, again)]
    assert texts[0] == texts[1] and texts[0]


def test_a_gateway_moves_streams_from_a_replica_with_a_hanging_step(config: EngineConfig) -> None:
    made: list[Hanging] = []

    def make(config: EngineConfig) -> Executor:
        made.append(Hanging(config))
        return made[-1]

    settings = ServerSettings(served_model_name="tiny")
    body = {**BODY, "return_token_ids": True}
    stand = GatewayStand([(config, settings)] * 2, makers=[make, None], floor_s=FLOOR_IN_TESTS_S)
    with stand:
        path = f"{stand.url}/v1/completions"
        _, whole = (httpx.post(path, json=body, timeout=60) for _ in range(2))
        made[0].left = 45
        moved = httpx.post(path, json=body, timeout=60)
        after = httpx.post(path, json=body, timeout=60)
        assert [replica.engine.is_alive for replica in stand.replicas] == [False, True]
        text = httpx.get(f"{stand.url}/metrics").text
        made[0].released.set()
    ids = [
        [i for e in events(r) for c in e["choices"] for i in c.get("token_ids", ())]
        for r in (whole, moved, after)
    ]
    assert ids[0] == ids[1] == ids[2] and len(ids[0]) == 60
    assert 'manta:gateway_resumed_streams_total{gateway="0",model_name="tiny"} 1.0' in text


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_stopped_worker_is_named_its_streams_end_and_closing_removes_it(
    tiny_qwen3: Path,
) -> None:
    base = EngineConfig(
        model=str(tiny_qwen3),
        skip_tokenizer_init=True,
        dtype="float32",
        device="cpu",
        max_model_len=192,
        max_num_seqs=4,
        num_pages=48,
        num_threads=1,
        tensor_parallel_size=2,
    )
    executors: list[RayExecutor] = []

    def make(config: EngineConfig) -> Executor:
        executors.append(RayExecutor(config))
        return executors[0]

    async def ask(engine: AsyncEngine, id: str, first: asyncio.Event | None = None) -> list[int]:
        params = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
        found: list[int] = []
        async for output in engine.add(id, EncodedPrompt((5, 6, 7)), params):
            found += output.outputs[0].token_ids
            if first is not None:
                first.set()
        return found

    async def main() -> None:
        engine = AsyncEngine(base, make, StepWatchdog(FLOOR_IN_TESTS_S))
        await engine.start()
        pids = executors[0].worker_pids
        whole = await ask(engine, "whole")
        first = asyncio.Event()
        task = asyncio.create_task(ask(engine, "cut", first))
        await first.wait()
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match=rf"rank 1 \(process {pids[1]}\)"):
            await asyncio.wait_for(task, 30)
        with pytest.raises(EngineStalledError, match="rank 1"):
            engine.check_health()
        os.kill(pids[1], signal.SIGCONT)
        while not engine.is_alive:
            await asyncio.sleep(0.05)
        assert await ask(engine, "again") == whole
        os.kill(pids[0], signal.SIGSTOP)
        task = asyncio.create_task(ask(engine, "second"))
        with pytest.raises(EngineDeadError, match="rank 0"):
            await asyncio.wait_for(task, 30)
        await asyncio.to_thread(engine.close)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))

    asyncio.run(main())
