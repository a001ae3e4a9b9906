"""CPU clocks of this machine and of this process and its descendants, read from /proc and getrusage.

Clocks are in seconds and count from an arbitrary start; use the difference of two readings. Called by
`idle_check.py`. Unix only.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....actors.system.host_resources import ControlGroup

_BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq, softirq: columns of a line of /proc/stat
_STEAL = 7


@dataclass(frozen=True, slots=True)
class Clocks:
    """One reading of the clocks. CPU times are summed over the cores; None: the system has no such clock.

    Attributes:
        busy_s: time that the cores ran any process.
        stolen_s: time that the hypervisor gave to other virtual machines while this one had work.
        own_s: CPU time of this process and its descendants.
        throttled_s: time for which CPU quotas stopped this process.
        waited_s: wall time in which at least one thread was ready but had no core (Linux PSI, `cpu some`).
    """

    busy_s: float
    stolen_s: float
    own_s: float
    throttled_s: float | None
    waited_s: float | None

    def since(self, before: Clocks) -> Clocks:
        def passed(now: float | None, then: float | None) -> float | None:
            return None if now is None or then is None else now - then

        return Clocks(
            self.busy_s - before.busy_s,
            self.stolen_s - before.stolen_s,
            self.own_s - before.own_s,
            passed(self.throttled_s, before.throttled_s),
            passed(self.waited_s, before.waited_s),
        )


class ProcessTree:
    """Measures the CPU time of this process and its descendants, including orphans (Ray's daemons and
    workers).

    The CPU time of a process that ended is taken from its parent's clock, or from the last reading of the
    process itself if that is larger: a parent that ignores its children's exit (Ray's raylet) has no clock of
    them, and an orphan has no parent. Call `cpu_s` often while processes start and end.
    """

    def __init__(self, proc: Path) -> None:
        self._proc = proc
        self._members: dict[int, CpuProcess] = {}
        self._gone_ticks: dict[int, int] = {}  # CPU time of ended processes, by parent
        self._lost_ticks = 0  # CPU time of ended processes whose parent has ended, too
        self._first_ticks: dict[int, int] = {}  # child time that a process had on first sight
        self._first_children_s = _used_s(resource.RUSAGE_CHILDREN)

    def cpu_s(self) -> float:
        """Return the CPU time of all of these processes so far, in seconds."""
        children_s = _used_s(resource.RUSAGE_CHILDREN) - self._first_children_s
        processes = read_processes(self._proc)
        gone = self._members.keys() - processes.keys()
        while gone:  # children first, since their time is added to their parents'
            pid = next(each for each in gone if not any(self._members[of].parent == each for of in gone))
            gone.remove(pid)
            process, parent = self._members[pid], self._members[pid].parent
            ticks = self._ticks(pid, process)
            self._gone_ticks.pop(pid, None)
            self._first_ticks.pop(pid, None)
            if parent == os.getpid() or parent in self._members:
                self._gone_ticks[parent] = self._gone_ticks.get(parent, 0) + ticks
            else:
                self._lost_ticks += ticks
            del self._members[pid]
        self._members = descendants(processes, self._members)
        ticks = self._lost_ticks + sum(self._ticks(pid, of) for pid, of in self._members.items())
        children_s = max(children_s, self._gone_ticks.get(os.getpid(), 0) / ticks_per_s())
        return _used_s(resource.RUSAGE_SELF) + children_s + ticks / ticks_per_s()

    def _ticks(self, pid: int, process: CpuProcess) -> int:
        ended = process.ticks - process.own_ticks
        first = self._first_ticks.setdefault(pid, ended)
        return process.own_ticks + first + max(ended - first, self._gone_ticks.get(pid, 0))


def _used_s(who: int) -> float:
    used = resource.getrusage(who)  # finer resolution than ticks
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True, slots=True)
class CpuProcess:
    """CPU time of a process: `own_ticks` without, `ticks` with its children that have ended."""

    parent: int
    ticks: int
    own_ticks: int


def read_clocks(proc: Path, cores: Sequence[int], group: ControlGroup | None, tree: ProcessTree) -> Clocks:
    busy_s, stolen_s = _core_clocks(proc / "stat", cores)
    throttled_s = None if group is None else group.throttled_s()
    return Clocks(busy_s, stolen_s, tree.cpu_s(), throttled_s, _waited_s(proc))


def _core_clocks(stat: Path, cores: Sequence[int]) -> tuple[float, float]:
    """Return the busy and the stolen time of these cores since the machine started."""
    names = {f"cpu{core}" for core in cores}
    lines = (line.split() for line in stat.read_text(encoding="utf-8").splitlines())
    clocks = [[int(ticks) for ticks in line[1:]] for line in lines if line and line[0] in names]
    busy = sum(of_core[place] for of_core in clocks for place in _BUSY)
    return busy / ticks_per_s(), sum(of_core[_STEAL] for of_core in clocks) / ticks_per_s()


def descendants(processes: Mapping[int, CpuProcess], members: Collection[int] = ()) -> dict[int, CpuProcess]:
    """Return this process's descendants, the members that still run, and the descendants of those."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    family: dict[int, CpuProcess] = {}
    found = [*children.get(os.getpid(), ()), *(pid for pid in members if pid in processes)]
    while found:
        pid = found.pop()
        if pid not in family:
            family[pid] = processes[pid]
            found += children.get(pid, ())
    return family


def read_processes(proc: Path) -> dict[int, CpuProcess]:
    found: dict[int, CpuProcess] = {}
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # the process has ended
            continue
        fields = text.rpartition(")")[2].split()  # after the name, which may contain spaces and parentheses
        ticks = list(map(int, fields[11:15]))  # utime, stime, cutime, cstime
        found[int(folder.name)] = CpuProcess(int(fields[1]), sum(ticks), sum(ticks[:2]))
    return found


def _waited_s(proc: Path) -> float | None:
    """Return the total of Linux's pressure stall information for CPUs, in seconds; None without PSI."""
    try:
        text = (proc / "pressure" / "cpu").read_text(encoding="utf-8")
    except OSError:
        return None
    some = next((line for line in text.splitlines() if line.startswith("some")), None)
    return None if some is None else int(some.rpartition("total=")[2]) / 1e6


def ticks_per_s() -> int:
    """Return the resolution of the clocks in /proc."""
    return os.sysconf("SC_CLK_TCK")
