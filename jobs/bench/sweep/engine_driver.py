"""Puts a closed loop on an engine in this process, steps it, and records each update with its time.

Tokens are not decoded to text, and no server is involved; `tests/benchmarks/serving/serve_tax.py` measures
what HTTP adds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ....cluster.config import EngineConfig
from ....cluster.engine.engine_core import EngineCore
from ....cluster.request.request import Request
from ....cluster.step.executor import Executor
from ..common.request_source import RequestSource
from .load_records import AnswerRecord, DraftBlock, LoadPass


class Driver:
    """One engine that is put under load in passes; it closes its executor."""

    def __init__(
        self, config: EngineConfig, executor: Executor, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.info = executor.info
        self.engine = EngineCore(config, executor, clock)
        self.clock = clock

    def closed(self, source: RequestSource, part: range, at_once: int) -> LoadPass:
        """Run the requests of `part` with `at_once` in flight; later ones keep the load and are aborted."""
        run, left = LoadRun(self), set(part)
        number = part.start
        while left:
            while len(run.open) < at_once:
                run.submit(source, number, self.clock())
                number += 1
            left -= run.step()
        return run.end()

    def close(self) -> None:
        self.engine.close()


class LoadRun:
    def __init__(self, driver: Driver) -> None:
        self._engine, self._clock = driver.engine, driver.clock
        self._before = self._engine.stats()
        self.answers: dict[str, AnswerRecord] = {}
        self.open: dict[str, AnswerRecord] = {}
        self.begin_s = self._clock()

    def submit(self, source: RequestSource, number: int, requested_s: float) -> None:
        request, name = source[number], str(number)
        self.answers[name] = self.open[name] = AnswerRecord(number, request.category, requested_s)
        self._engine.add_request(
            Request(
                request_id=name,
                prompt_token_ids=tuple(request.prompt),
                params=request.sampling,
                arrival_s=requested_s,
            )
        )

    def step(self) -> set[int]:
        ended: set[int] = set()
        updates = self._engine.step()
        now_s = self._clock()
        for update in updates:
            if (answer := self.open.get(update.request_id)) is None:
                continue  # aborted
            count = len(update.token_ids)
            answer.blocks.append(DraftBlock(now_s, count, update.num_drafted, update.num_accepted))
            answer.token_ids += update.token_ids
            if update.finish_reason is not None:
                answer.ended_s = now_s
                ended.add(answer.number)
                del self.open[update.request_id]
        return ended

    def end(self) -> LoadPass:
        end_s, before, after = self._clock(), self._before, self._engine.stats()
        for name in self.open:
            self._engine.abort(name)
        self.open = {}
        while self._engine.has_unfinished:
            self._engine.step()
        spent = {
            part: seconds - before.step_seconds.get(part, 0.0) for part, seconds in after.step_seconds.items()
        }
        counts = after.steps - before.steps, after.skipped_passes - before.skipped_passes
        return LoadPass(self.begin_s, end_s, list(self.answers.values()), spent, *counts)
