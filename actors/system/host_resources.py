"""What this process may use of its machine: cores and memory, within the limits of its control groups."""

from __future__ import annotations

import contextlib
import os
import platform
import random
import socket
from pathlib import Path

from .cgroups import ControlGroup

# Of a quota, so much of a core beyond whole ones is worth a thread that waits for the rest of its time.
_WORTH_A_THREAD = 0.6


def owned_cores() -> int:
    """Cores this process may use: its affinity, and what its quota of CPU time keeps busy."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    group = ControlGroup.of_this_process("cpu")
    quota = group.cpu_quota() if group else None
    return affinity if quota is None else min(affinity, max(1, int(quota + 1 - _WORTH_A_THREAD)))


def cpu_name() -> str:
    """As Linux tells it; elsewhere what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return names[0] if names else platform.processor() or platform.machine()


def free_ram_bytes() -> int:
    """Memory that can be had without swapping."""
    group = ControlGroup.of_this_process("memory")
    limit = group.free_bytes() if group else None
    free = _available_bytes()
    return free if limit is None else max(0, min(free, limit))


def _available_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_port() -> int:
    """Return a TCP port of the loopback address on which nobody listens.

    It lies above those that Ray's workers take (10002 to 19999) and below those that the system gives to
    connections (from 32768 on Linux), of which one could take it before it is used.
    """
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
