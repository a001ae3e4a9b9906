"""Sends grammars to the ranks, which compile and keep them, independently of the steps.

Each worker has two lanes with a thread each, so that a slow compilation does not delay cheap ones. A message
is JSON, `[action, kind, text]`; the answer is an error message, or empty.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection

from ....cluster.errors import EngineDeadError
from ....cluster.request.structured_outputs import Grammar
from ....drafter.grammars.compiler import GrammarCompiler, GrammarError

logger = logging.getLogger(__name__)

POLL_S = 0.1
NICENESS = 5  # of the threads that compile: a step's threads go first
_CHEAP, _LARGE = 0, 1  # lanes


class GrammarLanes:
    """The engine's end. Thread-safe. `check_health` raises EngineDeadError if no answer can come."""

    def __init__(self, lanes: Collection[tuple[Connection, ...]], check_health: Callable[[], None]) -> None:
        self._lanes, self._check_health = lanes, check_health
        self._locks = threading.Lock(), threading.Lock()

    def hold(self, grammar: Grammar) -> None:
        """Let every rank compile and keep a grammar. Raises GrammarError, EngineDeadError."""
        answers = self._send("hold", grammar, self._lanes)
        failed = [answer for answer in answers if answer]
        if failed:
            holding = [lanes for lanes, answer in zip(self._lanes, answers, strict=True) if not answer]
            self._send("let go", grammar, holding)
            raise GrammarError(failed[0])

    def release(self, grammar: Grammar) -> None:
        self._send("let go", grammar, self._lanes)

    def _send(self, action: str, grammar: Grammar, workers: Collection[tuple[Connection, ...]]) -> list[str]:
        lane = _CHEAP if grammar.is_cheap else _LARGE
        message = json.dumps([action, grammar.kind, grammar.text]).encode()
        with self._locks[lane]:
            self._check_health()
            try:
                for lanes in workers:
                    lanes[lane].send_bytes(message)
                return [self._answer(lanes[lane]) for lanes in workers]
            except (EOFError, OSError):
                self._check_health()
                raise EngineDeadError("A worker has ended. Retry on another replica.") from None

    def _answer(self, connection: Connection) -> str:
        while not connection.poll(POLL_S):
            self._check_health()
        return connection.recv_bytes().decode()


def serve_lanes(lanes: Collection[Connection], compiler: GrammarCompiler | None) -> None:
    """Start a worker's threads, which end when the engine closes its end."""
    for lane in lanes:
        threading.Thread(target=_serve, args=(lane, compiler), name="manta-grammar-lane", daemon=True).start()


def _serve(lane: Connection, compiler: GrammarCompiler | None) -> None:
    # On Linux this is the thread's alone; those that it starts to compile in inherit it.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + NICENESS)
    try:
        while True:
            action, kind, text = json.loads(lane.recv_bytes())
            lane.send_bytes(_run_action(compiler, action, Grammar(kind, text)).encode())
    except (EOFError, OSError):
        lane.close()


def _run_action(compiler: GrammarCompiler | None, action: str, grammar: Grammar) -> str:
    """Return an error message, or an empty string."""
    if compiler is None:
        return ""  # `cluster/step/limits.py` refuses such requests
    if action == "let go":
        compiler.release(grammar)
        return ""
    try:
        compiler.hold(grammar)
    except GrammarError as error:
        return str(error) or "it cannot be compiled"
    except Exception as error:  # the engine waits for an answer
        logger.exception("a grammar could not be compiled")
        return f"it cannot be compiled ({type(error).__name__})"
    return ""
