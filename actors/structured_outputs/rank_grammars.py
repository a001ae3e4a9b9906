"""Keeps the grammars of open requests compiled on an engine's ranks. Called by `grammar_frontend.py`."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from ...cluster.errors import RequestError
from ...cluster.request.structured_outputs import Grammar
from ...drafter.grammars.compiler import MAX_CACHED, GrammarError
from ..system.key_slots import KeySlots
from .compile_turns import Compilation, CompileTurns

logger = logging.getLogger(__name__)

# Grammars of open requests that are not cheap: each takes up to 128 MiB on every rank. Others wait. One key
# holds at most half of them.
MAX_LARGE = 8


@runtime_checkable
class HoldsGrammars(Protocol):
    """An executor with ranks that compile grammars alongside their steps. Thread-safe."""

    def hold_grammar(self, grammar: Grammar) -> None:
        """Compile on every rank and hold until `release_grammar`. Blocks; raises GrammarError."""
        ...

    def release_grammar(self, grammar: Grammar) -> None: ...


@dataclass(slots=True)
class _LargeGrammar:
    """A large grammar in use by `num_requests`, in a slot of the key that was first."""

    owner: str | None
    num_requests: int = 0


class RankGrammars:
    """Used on one event loop. `holder`: None if steps compile."""

    def __init__(self, holder: HoldsGrammars | None, turns: CompileTurns) -> None:
        self._holder, self._turns = holder, turns
        self._held: Counter[Grammar] = Counter()
        self._recent: OrderedDict[Grammar, None] = OrderedDict()  # that ranks keep without a request
        self._large: dict[Grammar, _LargeGrammar] = {}
        self._large_slots = KeySlots(MAX_LARGE, leaves_room=True)

    @asynccontextmanager
    async def hold(
        self, grammar: Grammar, cpu_s: float, compilation: Compilation
    ) -> AsyncGenerator[None, None]:
        """Compile on every rank, and hold. Raises RequestError, OverloadedError.

        `cpu_s`: what compiling costs the key if the ranks do not have it.
        """
        async with self._large_slot(grammar, compilation):
            await self._compile(grammar, cpu_s, compilation)
            self._held[grammar] += 1
            try:
                yield
            finally:
                self._held[grammar] -= 1
                self._held += Counter()  # drop grammars that no request uses
                self._recent[grammar] = None
                self._recent.move_to_end(grammar)
                if len(self._recent) > MAX_CACHED:
                    self._recent.popitem(last=False)
                self._release(grammar)

    @asynccontextmanager
    async def _large_slot(self, grammar: Grammar, compilation: Compilation) -> AsyncGenerator[None, None]:
        """Wait for a slot of a large grammar, unless another request holds the same one."""
        if grammar.is_cheap:
            yield
            return
        if grammar not in self._large:
            awaited = f"{MAX_LARGE} other large grammars, or half of them of this API key, have been in use"
            await compilation.acquire(self._large_slots, awaited)
            if grammar in self._large:  # another request was first meanwhile
                self._large_slots.release(compilation.owner)
            else:
                self._large[grammar] = _LargeGrammar(compilation.owner)
        large = self._large[grammar]
        large.num_requests += 1
        try:
            yield
        finally:
            large.num_requests -= 1
            if not large.num_requests:
                del self._large[grammar]
                self._large_slots.release(large.owner)

    async def _compile(self, grammar: Grammar, cpu_s: float, compilation: Compilation) -> None:
        holder = self._holder
        if holder is None:
            return
        is_new = grammar not in self._held and grammar not in self._recent

        def compile_on_ranks() -> tuple[None, float]:
            holder.hold_grammar(grammar)
            return None, cpu_s if is_new else 0.0

        try:
            await self._turns.run(
                compilation,
                compile_on_ranks,
                quick=grammar.is_cheap,
                is_new=is_new,
                undo=partial(self._release, grammar),
            )
        except GrammarError as error:
            raise refusal(compilation.field, str(error)) from None

    def _release(self, grammar: Grammar) -> None:
        """Release on the ranks, after the compilation that runs there now. Thread-safe."""
        if self._holder is None:
            return
        try:
            self._turns.submit(partial(self._holder.release_grammar, grammar), quick=grammar.is_cheap)
        except RuntimeError:  # the threads were shut down, and the holder too
            logger.debug("a grammar was released after the end")


def refusal(field: str, reason: str) -> RequestError:
    return RequestError(f"{field}: {reason}.", param=field)
