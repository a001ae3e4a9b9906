"""Cores and memory that this process may use, within the limits of its control groups."""

from __future__ import annotations

import contextlib
import os
import platform
import random
import socket
from pathlib import Path

from .cgroups import ControlGroup

# The fraction of a core in a quota, beyond whole cores, that justifies one more, partly throttled thread.
_WORTH_A_THREAD = 0.6


def owned_cores() -> int:
    """Return the number of cores this process may use, by its CPU affinity and its quota of CPU time."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    group = ControlGroup.of_this_process("cpu")
    quota = group.cpu_quota() if group else None
    return affinity if quota is None else min(affinity, max(1, int(quota + 1 - _WORTH_A_THREAD)))


def cpu_name() -> str:
    """Return the CPU's name from Linux, elsewhere from Python."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return names[0] if names else platform.processor() or platform.machine()


def free_ram_bytes() -> int:
    """Return the memory available without swapping."""
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
    """Return a free TCP port of the loopback address.

    It is above the ports of Ray's workers (10002 to 19999) and below the system's ephemeral ports (from 32768
    on Linux), either of which could take it before it is used.
    """
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
