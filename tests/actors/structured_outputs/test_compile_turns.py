"""Compilations of several keys: turns, budgets, cancelled requests, and the end of an engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from manta.actors.structured_outputs import compile_turns
from manta.actors.structured_outputs.compile_turns import Compilation, CompileTurns
from manta.cluster.errors import EngineGoneError, OverloadedError, RateLimitError

WAIT_S = 300.0


def run(check: Callable[[CompileTurns], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        turns = CompileTurns()
        try:
            await check(turns)
        finally:
            turns.close()

    asyncio.run(main())


def online(owner: str) -> Compilation:
    return Compilation("schema", owner, asyncio.get_running_loop().time() + WAIT_S)


def spending(seconds: float) -> Callable[[], tuple[str, float]]:
    return lambda: ("compiled", seconds)


def test_a_key_with_many_slow_grammars_delays_another_key_by_one() -> None:
    async def check(turns: CompileTurns) -> None:
        may_run, order = threading.Event(), list[str]()

        async def compile_one(owner: str) -> None:
            await turns.run(online(owner), lambda: (may_run.wait(WAIT_S), 0.0), quick=False)
            order.append(owner)

        compilations = [asyncio.create_task(compile_one(owner)) for owner in "aaaaaab"]
        await asyncio.sleep(0)  # all wait
        may_run.set()
        await asyncio.gather(*compilations)
        assert order == list("abaaaaa")

    run(check)


def test_a_key_beyond_its_budget_is_refused_or_waits_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compile_turns, "BUDGET_S", 60.0)  # one second is regained per second

    async def check(turns: CompileTurns) -> None:
        await turns.run(online("a"), spending(60.1), quick=True)
        await asyncio.sleep(0)  # the slot is released, and the time counted
        with pytest.raises(RateLimitError, match="60 s to compile within a minute, the maximum"):
            await turns.run(online("a"), spending(1.0), quick=False)
        assert await turns.run(online("b"), spending(1.0), quick=True) == "compiled"
        assert await turns.run(online("a"), spending(0.0), quick=True, is_new=False) == "compiled"
        assert await turns.run(Compilation("schema", "a"), spending(0.0), quick=True) == "compiled"

    run(check)


def test_a_cancelled_compilation_keeps_its_slot_until_it_ends_and_is_paid_and_undone() -> None:
    async def check(turns: CompileTurns) -> None:
        may_end, begun, undone = threading.Event(), threading.Event(), threading.Event()

        def work() -> tuple[str, float]:
            begun.set()
            may_end.wait(WAIT_S)
            return "compiled", compile_turns.BUDGET_S + 1.0

        leaving = asyncio.create_task(turns.run(online("a"), work, quick=False, undo=undone.set))
        await asyncio.to_thread(begun.wait, WAIT_S)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        next_one = asyncio.create_task(turns.run(online("b"), spending(0.0), quick=False))
        await asyncio.sleep(0.2)  # time to go wrong
        assert not next_one.done()
        may_end.set()
        assert await next_one == "compiled" and undone.is_set()
        with pytest.raises(RateLimitError):
            await turns.run(online("a"), spending(0.0), quick=False)

    run(check)


def test_a_waiting_request_ends_at_its_deadline_or_with_the_engine() -> None:
    async def check(turns: CompileTurns) -> None:
        may_end = threading.Event()
        running = asyncio.create_task(
            turns.run(online("a"), lambda: (may_end.wait(WAIT_S), 0.0), quick=False)
        )
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="schema: Other grammars"):
            await turns.run(
                Compilation("schema", "b", asyncio.get_running_loop().time()), spending(0.0), quick=False
            )
        waiting = asyncio.create_task(turns.run(online("b"), spending(0.0), quick=False))
        await asyncio.sleep(0)
        turns.close()
        may_end.set()
        await running
        with pytest.raises(EngineGoneError):
            await waiting

    run(check)
