"""The CPU clocks of this machine and of this process, as Linux keeps them: in seconds, running since a start.

A reading alone means nothing; two of them say what happened between. Read by `idleness.py`. Unix only.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...actors.control_groups import ControlGroup

_BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq, softirq: places in a line of /proc/stat
_STEAL = 7


@dataclass(frozen=True, slots=True)
class Clocks:
    """One reading. CPU times are summed over some cores; None where the system does not keep a clock.

    Attributes:
        busy_s: cores at work, whoever they work for.
        stolen_s: cores wanted here and given to other virtual machines.
        own_s: of this process and its family.
        throttled_s: held up by CPU quotas.
        waited_s: the wall's, in which some thread was ready and had no core.
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


class Family:
    """This process and its descendants, also those that lose their parents (Ray's daemons and workers do).

    Whoever ends is counted by its parent's clock, or as what it had taken when it was seen last, whichever is
    more: a parent that does not care how its children end (Ray's raylet) has no clock of them, and some have
    no parent left. Look often where processes end.
    """

    def __init__(self, proc: Path) -> None:
        self._proc = proc
        self._members: dict[int, CpuProcess] = {}
        self._gone_ticks: dict[int, int] = {}  # of those that ended, by their parent
        self._lost_ticks = 0  # of those whose parent has ended too
        self._first_ticks: dict[int, int] = {}  # that a parent had counted of others before it was seen
        self._first_children_s = _used_s(resource.RUSAGE_CHILDREN)

    def look(self) -> float:
        """CPU time of all of them so far, in seconds."""
        children_s = _used_s(resource.RUSAGE_CHILDREN) - self._first_children_s
        processes = read_processes(self._proc)
        gone = self._members.keys() - processes.keys()
        while gone:  # children first: what they took is their parents'
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
    used = resource.getrusage(who)  # finer than ticks
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True, slots=True)
class CpuProcess:
    """`ticks` are of itself and of its children that have ended; `own_ticks` of itself alone."""

    parent: int
    ticks: int
    own_ticks: int


def read_clocks(proc: Path, cores: Sequence[int], group: ControlGroup | None, family: Family) -> Clocks:
    """All clocks now."""
    busy_s, stolen_s = _core_clocks(proc / "stat", cores)
    throttled_s = None if group is None else group.throttled_s()
    return Clocks(busy_s, stolen_s, family.look(), throttled_s, _waited_s(proc))


def _core_clocks(stat: Path, cores: Sequence[int]) -> tuple[float, float]:
    """Busy and stolen time of those cores since the machine started."""
    names = {f"cpu{core}" for core in cores}
    lines = (line.split() for line in stat.read_text(encoding="utf-8").splitlines())
    clocks = [[int(ticks) for ticks in line[1:]] for line in lines if line and line[0] in names]
    busy = sum(of_core[place] for of_core in clocks for place in _BUSY)
    return busy / ticks_per_s(), sum(of_core[_STEAL] for of_core in clocks) / ticks_per_s()


def descendants(processes: Mapping[int, CpuProcess], members: Collection[int] = ()) -> dict[int, CpuProcess]:
    """Of this process, and of those members that live; members are among them."""
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
    """All that live, by process id."""
    found: dict[int, CpuProcess] = {}
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has ended
            continue
        fields = text.rpartition(")")[2].split()  # behind the name, which may hold anything
        ticks = list(map(int, fields[11:15]))  # user and system: its own, and of its children that have ended
        found[int(folder.name)] = CpuProcess(int(fields[1]), sum(ticks), sum(ticks[:2]))
    return found


def _waited_s(proc: Path) -> float | None:
    """Linux's pressure figure."""
    try:
        text = (proc / "pressure" / "cpu").read_text(encoding="utf-8")
    except OSError:
        return None
    some = next((line for line in text.splitlines() if line.startswith("some")), None)
    return None if some is None else int(some.rpartition("total=")[2]) / 1e6


def ticks_per_s() -> int:
    """Of the clocks of processes."""
    return os.sysconf("SC_CLK_TCK")
