"""Load on one engine in this process: it is stepped, and every update is kept with its time.

Three ways: a closed loop over some requests (`closed`), an open one (`open`), and a closed one for some time
(`hold`). No text is made and nothing stands between; `tests/benchmarks/serve_tax.py` measures
what HTTP adds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ....cluster.config import EngineConfig
from ....cluster.engine import Engine
from ....cluster.executor import Executor
from ....cluster.request import Request
from ..load.arrivals import Arrivals
from ..load.asks import Asks
from .answers import Answer, Block, LoadPass


class Driver:
    """One engine under load, pass after pass.

    Args:
        executor: loaded; closed with the driver.
        clock: seconds.
    """

    def __init__(
        self, config: EngineConfig, executor: Executor, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.info = executor.info
        self.engine = Engine(config, executor, clock)
        self._clock = clock

    def closed(self, asks: Asks, part: range, at_once: int) -> LoadPass:
        """Ask for all of `part`, always with `at_once` requests there: behind the last come the next numbers,
        which are left when the last of `part` has ended. So no place stands empty at the end."""
        flight, left = _Flight(self), set(part)
        number = part.start
        while left:
            while flight.num_open < at_once:
                flight.ask(asks, number, self._clock())
                number += 1
            left -= flight.step()
        return flight.leave()

    def open(self, asks: Asks, part: range, arrivals: Arrivals) -> LoadPass:
        """Ask for all of `part`, each at its time, and wait for all. A request that must queue has asked when
        its time came."""
        flight, left = _Flight(self), set(part)
        offsets_s = arrivals.offsets_s(len(part), seed=part.start)
        coming = list(zip(part, offsets_s, strict=True))[::-1]
        while left:
            now_s = self._clock() - flight.begin_s
            while coming and coming[-1][1] <= now_s:
                number, offset_s = coming.pop()
                flight.ask(asks, number, flight.begin_s + offset_s)
            if not flight.num_open:
                time.sleep(max(coming[-1][1] - now_s, 0.0))
                continue
            left -= flight.step()
        return flight.leave()

    def hold(self, asks: Asks, loads: tuple[int, ...], seconds: float) -> list[LoadPass]:
        """A closed loop with as many requests as each load says, for so long each; a pass of each load. Where
        the next load is smaller, those that are too many leave."""
        flight, number = _Flight(self), 0
        passes: list[LoadPass] = []
        for at_once in loads:
            begin_s = self._clock()
            flight.keep(at_once)
            while True:
                while flight.num_open < at_once:
                    flight.ask(asks, number, self._clock())
                    number += 1
                flight.step()
                if self._clock() - begin_s >= seconds:
                    break
            passes.append(flight.between(begin_s, self._clock()))
        flight.leave()
        return passes

    def close(self) -> None:
        self.engine.close()


class _Flight:
    """The requests of one pass."""

    def __init__(self, driver: Driver) -> None:
        self._engine, self._clock = driver.engine, driver._clock
        self._before = self._engine.stats().step_seconds
        self._answers: dict[str, Answer] = {}
        self._open: dict[str, Answer] = {}
        self.begin_s = self._clock()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def ask(self, asks: Asks, number: int, asked_s: float) -> None:
        ask = asks[number]
        name = str(number)
        self._answers[name] = self._open[name] = Answer(number, ask.category, asked_s)
        self._engine.add_request(
            Request(
                request_id=name,
                prompt_token_ids=tuple(ask.prompt),
                params=ask.sampling,
                arrival_s=asked_s,
            )
        )

    def step(self) -> set[int]:
        """One step of the engine; the numbers of requests that it ended."""
        ended: set[int] = set()
        updates = self._engine.step()
        now_s = self._clock()
        for update in updates:
            if (answer := self._open.get(update.request_id)) is None:
                continue  # it has left
            count = len(update.token_ids)
            answer.blocks.append(Block(now_s, count, update.num_drafted, update.num_accepted))
            answer.token_ids += update.token_ids
            if update.finish_reason is not None:
                answer.ended_s = now_s
                ended.add(answer.number)
                del self._open[update.request_id]
        return ended

    def keep(self, count: int) -> None:
        """The first ones stay, others leave."""
        now_s = self._clock()
        for name in list(self._open)[count:]:
            self._engine.abort(name)
            self._open.pop(name).ended_s = now_s

    def leave(self) -> LoadPass:
        """The pass is over now; whoever is still there leaves."""
        end_s, after = self._clock(), self._engine.stats().step_seconds
        for name in self._open:
            self._engine.abort(name)
        self._open = {}
        while self._engine.has_unfinished:
            self._engine.step()
        spent = {part: seconds - self._before.get(part, 0.0) for part, seconds in after.items()}
        return LoadPass(self.begin_s, end_s, list(self._answers.values()), spent)

    def between(self, begin_s: float, end_s: float) -> LoadPass:
        """What came in that time, of whatever requests."""
        parts: list[Answer] = []
        for answer in self._answers.values():
            if (answer.ended_s or end_s) <= begin_s:
                continue
            blocks = [block for block in answer.blocks if begin_s <= block.at_s <= end_s]
            asked_s = max(answer.asked_s, begin_s)
            parts.append(Answer(answer.number, answer.category, asked_s, blocks, ended_s=answer.ended_s))
        return LoadPass(begin_s, end_s, parts, {})
