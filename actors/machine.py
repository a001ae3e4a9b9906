"""What this process may use of its machine: cores and memory, within the limits of its control groups.

Limits of containers (Docker, Kubernetes, systemd, Slurm) stand in files of control groups, of version 2 or 1,
this process's own and all above it. Elsewhere the machine itself is the limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
# Of a quota, so much more than whole cores is worth a thread that waits for the rest of its time.
_ROUND_UP_FROM = 0.6


def owned_cores() -> int:
    """Cores this process may use: its affinity, and what its quota of CPU time keeps busy."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _groups("cpu") if (quota := _cpu_quota(folder)) is not None]
    return min([affinity, *(max(1, int(quota + 1 - _ROUND_UP_FROM)) for quota in quotas)])


def free_ram_bytes() -> int:
    """Memory that can be had without swapping."""
    limits = [free for folder in _groups("memory") if (free := _free_bytes(folder)) is not None]
    return max(0, min([_available_bytes(), *limits]))


def _groups(controller: str) -> Iterator[Path]:
    """Folders of the control groups that hold this process, from its own up to what it sees as the root."""
    for line in _lines(_MEMBERSHIP):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            roots = [_MOUNT] if (_MOUNT / "cgroup.controllers").exists() else []
        elif controller in controllers.split(","):
            roots = [_MOUNT / controllers, _MOUNT / controller]
        else:
            continue
        root = next((root for root in roots if root.is_dir()), None)
        if root is None:
            continue
        inner = Path(path.lstrip("/"))  # as seen from outside, in a container without a view of its own
        for folder in (inner, *inner.parents):
            if (root / folder).is_dir():
                yield root / folder


def _cpu_quota(folder: Path) -> float | None:
    """Cores' worth of time; None without a limit."""
    share, period, *_ = [*_words(folder / "cpu.max"), None, None]
    if share is None:
        share, period = (_first(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    if share in (None, "max", "-1") or period is None:
        return None
    return int(share) / int(period)


def _free_bytes(folder: Path) -> int | None:
    """What the group's limit leaves; files that are only cached can go."""
    for most, used in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):
        limit, taken = _first(folder / f"memory.{most}"), _first(folder / f"memory.{used}")
        if limit not in (None, "max") and taken is not None:
            facts = dict(line.split() for line in _lines(folder / "memory.stat"))
            cached = facts.get("total_inactive_file", facts.get("inactive_file", 0))
            return int(limit) - int(taken) + int(cached)
    return None


def _available_bytes() -> int:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _lines(file: Path) -> list[str]:
    """Empty where there is no such file, or none for us."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _words(file: Path) -> list[str]:
    return [word for line in _lines(file) for word in line.split()]


def _first(file: Path) -> str | None:
    return next(iter(_words(file)), None)
