"""Gives memory that was freed in small pieces back to the system, where the C library keeps it (glibc)."""

from __future__ import annotations

import asyncio
import ctypes
import sys

DELAY_S = 1.0  # until what is no longer used has been freed


class FreedMemory:
    """Gives memory back soon after `give_back`, in a thread; calls meanwhile count as one."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
        self._trim = getattr(library, "malloc_trim", None)
        self._is_scheduled = False

    def give_back(self) -> None:
        """Call on an event loop."""
        if self._trim is not None and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_later(DELAY_S, self._start)

    def _start(self) -> None:
        self._is_scheduled = False
        assert self._trim is not None, "only scheduled where there is one"
        asyncio.get_running_loop().run_in_executor(None, self._trim, 0)
