"""Cores and memory that this process may use, within the limits of its control groups."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import platform
import random
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .atomic_files import open_own

_MEMBERSHIP, _MOUNTS = Path("/proc/self/cgroup"), Path("/proc/self/mountinfo")
Controller = Literal["cpu", "memory"]


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The group of this process in a controller's hierarchy: `folder`, at or below `mount`."""

    folder: Path
    mount: Path
    version: int

    @classmethod
    def of_this_process(cls, controller: Controller = "cpu") -> ControlGroup | None:
        """Return None if no such hierarchy is mounted."""
        places = [line.split(":", 2)[1:] for line in _lines(_MEMBERSHIP)]
        v1 = next((path for names, path in places if controller in names.split(",")), None)
        v2 = next((path for names, path in places if not names), None)
        path, version = (v2, 2) if v1 is None else (v1, 1)
        found = _mounted(controller, version)
        if path is None or found is None:
            return None
        root, mount = found
        below = path.removeprefix(root.rstrip("/")).strip("/")  # a container sees its own group as the root
        folder = mount / below
        return cls(folder if folder.is_dir() else mount, mount, version)

    @property
    def _folders(self) -> Iterator[Path]:
        folder = self.folder
        yield folder
        while folder != self.mount:
            folder = folder.parent
            yield folder

    def cpu_quota(self) -> float | None:
        """Return the smallest CPU quota, in cores."""
        quotas = [quota for folder in self._folders if (quota := _cpu_quota(folder)) is not None]
        return min(quotas, default=None)

    def throttled_s(self) -> float | None:
        """Return the seconds throttled, summed over cores and groups; None without a quota."""
        found = [held_s for folder in self._folders if (held_s := _throttled_s(folder)) is not None]
        return sum(found) if found else None

    def limit_bytes(self) -> int | None:
        """Return the tightest memory limit; None without one."""
        found = [limit for folder in self._folders if (limit := _memory_limit(folder)) is not None]
        return min(found, default=None)

    def free_bytes(self) -> int | None:
        """Return the bytes that the tightest memory limit leaves; None without one."""
        found = [free for folder in self._folders if (free := _free_bytes(folder)) is not None]
        return min(found, default=None)


def _mounted(controller: Controller, version: int) -> tuple[str, Path] | None:
    """Return the group that the mount shows as its root, and the mount's path."""
    for line in _lines(_MOUNTS):
        before, after = line.split(" - ", 1)
        root, where = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2" if version == 2 else kind == "cgroup" and controller in options.split(","):
            return root, Path(where)
    return None


def _cpu_quota(folder: Path) -> float | None:
    share, period, *_ = [*_words(folder / "cpu.max"), None, None]
    if share is None:
        share, period = (_first(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    if share in (None, "max", "-1") or period is None:
        return None
    return int(share) / int(period)


def _throttled_s(folder: Path) -> float | None:
    facts = _facts(folder / "cpu.stat")
    if "throttled_usec" in facts:
        return facts["throttled_usec"] / 1e6
    return facts["throttled_time"] / 1e9 if "throttled_time" in facts else None


def _free_bytes(folder: Path) -> int | None:
    """Cached file pages count as free."""
    for maximum, used in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):
        limit, taken = _first(folder / f"memory.{maximum}"), _first(folder / f"memory.{used}")
        if limit not in (None, "max") and taken is not None:
            facts = _facts(folder / "memory.stat")
            cached = facts.get("total_inactive_file", facts.get("inactive_file", 0))
            return int(limit) - int(taken) + cached
    return None


def _memory_limit(folder: Path) -> int | None:
    found = (_first(folder / f"memory.{name}") for name in ("max", "limit_in_bytes"))
    return next((int(limit) for limit in found if limit not in (None, "max")), None)


def _facts(file: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in _lines(file))}


def _lines(file: Path) -> list[str]:
    """Return no lines if the file does not exist or is not readable."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _words(file: Path) -> list[str]:
    return [word for line in _lines(file) for word in line.split()]


def _first(file: Path) -> str | None:
    return next(iter(_words(file)), None)


# The fraction of a core in a quota, beyond whole cores, that justifies one more, partly throttled thread.
_WORTH_A_THREAD = 0.6


def owned_cores() -> int:
    """Return the number of cores, by CPU affinity and quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    group = ControlGroup.of_this_process("cpu")
    quota = group.cpu_quota() if group else None
    return affinity if quota is None else min(affinity, max(1, int(quota + 1 - _WORTH_A_THREAD)))


def cpu_name() -> str:
    facts = cpu_facts()
    return facts.get("model name") or facts.get("CPU part") or platform.processor() or platform.machine()


def cpu_facts() -> dict[str, str]:
    """Return the fields of the first core in /proc/cpuinfo; none on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    fields = (line.split(":", 1) for line in text.partition("\n\n")[0].splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in fields}


def free_ram_bytes() -> int:
    """Return the memory available without swapping."""
    group = ControlGroup.of_this_process("memory")
    limit = group.free_bytes() if group else None
    free = _available_bytes()
    return free if limit is None else max(0, min(free, limit))


def ram_limit() -> tuple[int, str]:
    """Return the bytes of memory that processes here may use, and what sets that limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = ControlGroup.of_this_process("memory")
    limit = group.limit_bytes() if group else None
    return (total, "the machine's") if limit is None or limit >= total else (limit, "the control group's")


def resident_bytes() -> int:
    """Return the memory that this process occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _available_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_port() -> int:
    """Return a TCP port that is free at every address of this machine.

    It is above the ports of Ray's workers (10002 to 19999) and below the system's ephemeral ports (from 32768
    on Linux), either of which could take it before it is used. Until this process ends, no other process of
    this user gets the port from here.
    """
    while True:
        port = random.randrange(20_000, 32_768)
        if port in _reserved_ports or not _reserve_port(port):
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


_reserved_ports: set[int] = set()


def _reserve_port(port: int) -> bool:
    """Lock the byte of this port in a file; return whether no other process has it locked."""
    locks = _ports_file()
    try:
        fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    _reserved_ports.add(port)
    return True


@functools.cache
def _ports_file() -> int:
    """Return the descriptor of the file of locks, which stays open: closing it would release them."""
    return open_own(Path(tempfile.gettempdir()) / f"manta-ports-{os.getuid()}", os.O_CREAT | os.O_RDWR, 0o600)
