"""A server in its own process with a watched event loop: `ProbedServer`; the process is `main`.

The application, the engine and the tokenizer are the real ones; only the executor computes nothing, so that
what holds the loop is the front's work, and a request of a thousand prompts ends while one waits. Used by
`abuse.py` and `test_abuse.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np
import uvicorn
from manta.actors.engine.async_engine import AsyncEngine
from manta.actors.http.app import create_app
from manta.actors.http.config.settings import ServerSettings
from manta.actors.system.event_loop import tune_gc
from manta.cluster.config import EngineConfig
from manta.cluster.request.logprobs import RowLogprobs, StepLogprobs
from manta.cluster.simulation.simulated_executor import LinearCost, SimulatedExecutor
from manta.cluster.step.clock import MACHINE_CLOCK
from manta.cluster.step.executor import Executor
from manta.cluster.step.scheduler_output import SchedulerOutput, StepResult

from support.engines.cluster_checker import make_info
from support.engines.passing_executor import PassingExecutor
from support.paths import module_command
from support.waiting import WAIT_S

TURN_S = 0.001
LATE_S = 0.015  # Python gives a thread its turn after 5 ms


@dataclass
class Pauses:
    """Pauses of a loop since the last call, in seconds.

    Attributes:
        longest_s: the longest time between two turns, without the intended wait.
        total_s: the sum of all longer than LATE_S.
        held_by: where the loop's thread was in those, and in how many samples.
    """

    longest_s: float = 0.0
    total_s: float = 0.0
    held_by: Counter[str] = field(default_factory=Counter)


class LoopProbe:
    """Watch the running loop. End it with `close`."""

    def __init__(self) -> None:
        self._pauses = Pauses()
        self._turn_s = time.monotonic()
        self._thread_id = threading.get_ident()
        self._closed = threading.Event()
        self._task = asyncio.create_task(self._turns())
        self._looker = threading.Thread(target=self._poll, name="loop-probe", daemon=True)
        self._looker.start()

    def take(self) -> Pauses:
        """The measurements since the last call; call it from the loop."""
        found, self._pauses = self._pauses, Pauses()
        return found

    def close(self) -> None:
        self._closed.set()
        self._task.cancel()

    async def _turns(self) -> None:
        while True:
            self._turn_s, spent_s = time.monotonic(), time.process_time()
            await asyncio.sleep(TURN_S)
            late_s = min(time.monotonic() - self._turn_s, time.process_time() - spent_s) - TURN_S
            self._pauses.longest_s = max(self._pauses.longest_s, late_s)
            self._pauses.total_s += late_s if late_s > LATE_S else 0.0

    def _poll(self) -> None:
        while not self._closed.wait(LATE_S / 3):
            if time.monotonic() - self._turn_s > LATE_S:
                frame = sys._current_frames().get(self._thread_id)
                self._pauses.held_by[_place(frame)] += 1


def _place(frame: FrameType | None) -> str:
    """The innermost two calls, ours marked by their path inside the package."""
    names: list[str] = []
    while frame is not None and len(names) < 3:
        code = frame.f_code
        names.append(f"{'/'.join(code.co_filename.split('/')[-2:])}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " < ".join(names)


STEP_S = 0.004
VOCAB, END = 4096, 0  # of the target that ships
TOP = 20


@dataclass(frozen=True)
class Found:
    """The server's state. Pauses (ms) are those of its loop since the last call.

    Attributes:
        held_by: where the loop was blocked, most frequent first.
        tasks, threads: of its process.
        rss_bytes: its resident memory, after a collection.
        running, waiting: requests; `kv_usage` is the share of pages that they hold.
    """

    pause_ms: float
    held_by: list[str]
    tasks: int
    threads: int
    rss_bytes: int
    running: int
    waiting: int
    kv_usage: float

    def busy(self, tasks: int | None) -> bool:
        """Whether there is a request, a page in use, or a task more than a number."""
        return bool(self.running or self.waiting or self.kv_usage or self.tasks > (tasks or self.tasks))


class ProbedServer:
    """The server, ready for requests at `url`; ended with the context.

    Args:
        model: folder of a checkpoint with a tokenizer of at most VOCAB tokens.
        settings: of the front, `ServerSettings`.
        keeps_little: the system keeps little of what clients do not read.
        has_end_token: texts may end, as grammars need; otherwise they end with `max_tokens` only.
        engine: further settings of the engine.
    """

    def __init__(
        self,
        model: Path,
        settings: dict[str, Any] | None = None,
        *,
        keeps_little: bool = False,
        has_end_token: bool = False,
        **engine: Any,
    ) -> None:
        given = json.dumps([str(model), settings or {}, engine, keeps_little, has_end_token])
        self._process = subprocess.Popen(
            module_command("support.servers.probed_server", [given]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._ask() or 0)
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        assert self.port, "the server did not start"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            assert self._process.wait(timeout=WAIT_S) == 0, "the server did not end well"
        finally:
            self._process.kill()

    def look(self) -> Found:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Found(**json.loads(self._ask()))

    def rest(self, tasks: int | None = None, timeout_s: float = WAIT_S) -> Found:
        """The same once nothing is left of requests, or when that has lasted too long.

        Args:
            tasks: that there were before.
        """
        deadline_s = time.monotonic() + timeout_s
        while (found := self.look()).busy(tasks) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return found

    def _ask(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


class WithLogprobs(PassingExecutor):
    """Log probabilities of a test's answer."""

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner)
        self._asking: dict[int, bool] = {}
        self._plans: list[SchedulerOutput] = []

    def submit(self, plan: SchedulerOutput) -> None:
        for request in plan.admitted:
            self._asking[request.slot] = request.sampling.logprobs is not None
        self._plans.append(plan)
        super().submit(plan)

    def collect(self) -> StepResult:
        result, plan = super().collect(), self._plans.pop(0)
        asking_A = np.flatnonzero([self._asking[slot] for slot in plan.slots.tolist()]).astype(np.int32)
        if not len(asking_A):
            return result
        width = result.token_ids.shape[1]
        num_rows = len(asking_A) * width
        rows = RowLogprobs(
            np.full(num_rows, -1.5, np.float32),
            np.ones(num_rows, np.int32),
            np.broadcast_to(np.arange(TOP, dtype=np.int32), (num_rows, TOP)),
            np.full((num_rows, TOP), -2.5, np.float32),
        )
        found = StepLogprobs(asking_A, np.full(len(asking_A), width, np.int32), rows)
        return StepResult(result.step, result.token_ids, result.num_tokens, result.timings, found)


def make_executor(config: EngineConfig, eos_token_ids: tuple[int, ...] = ()) -> Executor:
    sizes = {"num_pages": (config.num_pages or 40_000,), "max_model_len": config.max_model_len or 1 << 17}
    info = make_info(
        **sizes, page_size=16, vocab_size=VOCAB, num_speculative_tokens=0, eos_token_ids=eos_token_ids
    )
    return WithLogprobs(SimulatedExecutor(info, cost=LinearCost(verify_floor_s=STEP_S), clock=MACHINE_CLOCK))


def shrink_send_buffer(listener: socket.socket) -> None:
    """Limit the system's buffers for clients that do not read."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)


async def serve(
    model: str,
    settings: dict[str, Any],
    engine_settings: dict[str, Any],
    keeps_little: bool,
    has_end_token: bool,
) -> None:
    """Run until stdin ends; each line there is answered with the contents of `Found`."""
    many = {"max_num_seqs": 256, "max_num_batched_tokens": 1 << 16, "enable_prefix_caching": False}
    config = EngineConfig.from_dict({"model": model, **many, **engine_settings})
    engine = AsyncEngine(config, partial(make_executor, eos_token_ids=(END,) if has_end_token else ()))
    await engine.start()
    app = create_app(engine, ServerSettings(served_model_name="tiny", **settings))
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=2, backlog=2048)
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    if keeps_little:
        shrink_send_buffer(socket.socket(fileno=os.dup(server.servers[0].sockets[0].fileno())))
    tune_gc()
    probe = LoopProbe()
    loop = asyncio.get_running_loop()
    threading.Thread(target=_answer, args=(loop, engine, probe, server), daemon=True).start()
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await serving
    probe.close()
    engine.close()


def _answer(
    loop: asyncio.AbstractEventLoop, engine: AsyncEngine, probe: LoopProbe, server: uvicorn.Server
) -> None:
    for _ in sys.stdin:
        found = asyncio.run_coroutine_threadsafe(_found(engine, probe), loop).result()
        print(json.dumps(found), flush=True)
    server.should_exit = True


async def _found(engine: AsyncEngine, probe: LoopProbe) -> dict[str, Any]:
    pauses, stats = probe.take(), engine.stats()
    return {
        "pause_ms": round(1e3 * pauses.longest_s, 1),
        "held_by": [f"{count} x {place}" for place, count in pauses.held_by.most_common(3)],
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "rss_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_usage": stats.kv_usage,
    }


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(*json.loads(sys.argv[1])))
