"""Puts load on an engine in this process, steps it, and records each update with its time.

There are three modes: a closed loop over given requests (`closed`), an open loop (`open`), and a closed loop
for a given time (`hold`). Tokens are not decoded to text, and no server is involved;
`tests/benchmarks/serve_tax.py` measures what HTTP adds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ....cluster.config import EngineConfig
from ....cluster.engine.engine_core import EngineCore
from ....cluster.request.request import Request
from ....cluster.step.executor import Executor
from ..common.arrivals import Arrivals
from ..load.request_source import RequestSource
from .load_records import AnswerRecord, DraftBlock, LoadPass


class Driver:
    """One engine that is put under load in passes.

    Args:
        executor: an executor with loaded models; closed with the driver.
        clock: returns seconds.
    """

    def __init__(
        self, config: EngineConfig, executor: Executor, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.info = executor.info
        self.engine = EngineCore(config, executor, clock)
        self._clock = clock

    def closed(self, source: RequestSource, part: range, at_once: int) -> LoadPass:
        """Run the requests of `part` with `at_once` in flight, and return when all of them have finished.

        Requests that follow `part` keep the load constant until then and are aborted.
        """
        run, left = _LoadRun(self), set(part)
        number = part.start
        while left:
            while run.num_open < at_once:
                run.submit(source, number, self._clock())
                number += 1
            left -= run.step()
        return run.end()

    def open(self, source: RequestSource, part: range, arrivals: Arrivals) -> LoadPass:
        """Run the requests of `part`, each at its arrival time, and wait for all of them.

        A request that has to queue counts from its arrival time.
        """
        run, left = _LoadRun(self), set(part)
        offsets_s = arrivals.offsets_s(len(part), seed=part.start)
        coming = list(zip(part, offsets_s, strict=True))[::-1]
        while left:
            now_s = self._clock() - run.begin_s
            while coming and coming[-1][1] <= now_s:
                number, offset_s = coming.pop()
                run.submit(source, number, run.begin_s + offset_s)
            if not run.num_open:
                time.sleep(max(coming[-1][1] - now_s, 0.0))
                continue
            left -= run.step()
        return run.end()

    def hold(self, source: RequestSource, loads: tuple[int, ...], seconds: float) -> list[LoadPass]:
        """Run a closed loop for `seconds` at each load; return a pass per load.

        If the next load is smaller, surplus requests are aborted.
        """
        run, number = _LoadRun(self), 0
        passes: list[LoadPass] = []
        for at_once in loads:
            begin_s = self._clock()
            run.abort_after(at_once)
            while True:
                while run.num_open < at_once:
                    run.submit(source, number, self._clock())
                    number += 1
                run.step()
                if self._clock() - begin_s >= seconds:
                    break
            passes.append(run.between(begin_s, self._clock()))
        run.end()
        return passes

    def close(self) -> None:
        self.engine.close()


class _LoadRun:
    def __init__(self, driver: Driver) -> None:
        self._engine, self._clock = driver.engine, driver._clock
        self._before = self._engine.stats().step_seconds
        self._answers: dict[str, AnswerRecord] = {}
        self._open: dict[str, AnswerRecord] = {}
        self.begin_s = self._clock()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def submit(self, source: RequestSource, number: int, asked_s: float) -> None:
        request = source[number]
        name = str(number)
        self._answers[name] = self._open[name] = AnswerRecord(number, request.category, asked_s)
        self._engine.add_request(
            Request(
                request_id=name,
                prompt_token_ids=tuple(request.prompt),
                params=request.sampling,
                arrival_s=asked_s,
            )
        )

    def step(self) -> set[int]:
        """Run one step of the engine and return the numbers of the requests that finished."""
        ended: set[int] = set()
        updates = self._engine.step()
        now_s = self._clock()
        for update in updates:
            if (answer := self._open.get(update.request_id)) is None:
                continue  # aborted
            count = len(update.token_ids)
            answer.blocks.append(DraftBlock(now_s, count, update.num_drafted, update.num_accepted))
            answer.token_ids += update.token_ids
            if update.finish_reason is not None:
                answer.ended_s = now_s
                ended.add(answer.number)
                del self._open[update.request_id]
        return ended

    def abort_after(self, count: int) -> None:
        now_s = self._clock()
        for name in list(self._open)[count:]:
            self._engine.abort(name)
            self._open.pop(name).ended_s = now_s

    def end(self) -> LoadPass:
        """End the pass: abort all requests in flight and return the result."""
        end_s, after = self._clock(), self._engine.stats().step_seconds
        for name in self._open:
            self._engine.abort(name)
        self._open = {}
        while self._engine.has_unfinished:
            self._engine.step()
        spent = {part: seconds - self._before.get(part, 0.0) for part, seconds in after.items()}
        return LoadPass(self.begin_s, end_s, list(self._answers.values()), spent)

    def between(self, begin_s: float, end_s: float) -> LoadPass:
        """Return the result for a part of the time; answers are cut to it."""
        parts: list[AnswerRecord] = []
        for answer in self._answers.values():
            if (answer.ended_s or end_s) <= begin_s:
                continue
            blocks = [block for block in answer.blocks if begin_s <= block.at_s <= end_s]
            asked_s = max(answer.asked_s, begin_s)
            parts.append(
                AnswerRecord(answer.number, answer.category, asked_s, blocks, ended_s=answer.ended_s)
            )
        return LoadPass(begin_s, end_s, parts, {})
