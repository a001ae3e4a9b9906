"""Memory that was freed between pieces still in use returns to the system."""

from __future__ import annotations

import asyncio
import ctypes
from pathlib import Path

import pytest
from manta.actors.system import freed_memory
from manta.actors.system.freed_memory import FreedMemory
from support.waiting import wait_until

PIECE_BYTES, NUM_PIECES = 60_000, 2000


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_pieces_of_a_dropped_body_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "DELAY_S", 0.0)
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests freed, and the pieces would use again
    before = rss_bytes()
    pieces = [b"x" * PIECE_BYTES for _ in range(NUM_PIECES)]
    kept = pieces[:: NUM_PIECES // 20]  # between the others, so the heap's end stays in use
    pieces.clear()
    most_left = PIECE_BYTES * NUM_PIECES // 4
    assert rss_bytes() > before + most_left, "the C library keeps what was freed"

    async def give_back() -> None:
        freed = FreedMemory()
        freed.give_back()
        freed.give_back()
        await asyncio.to_thread(wait_until, lambda: rss_bytes() < before + most_left)

    asyncio.run(give_back())
    assert len(kept) == 20
