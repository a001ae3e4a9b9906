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

    Whoever ends is counted by its parent's clock. Who has no parent left to count it counts as what it had
    taken when it was seen last: look often where such processes end.
    """

    def __init__(self, proc: Path) -> None:
        self._proc = proc
        self._members: dict[int, CpuProcess] = {}
        self._lost_ticks = 0  # of those that ended without a parent

    def look(self) -> float:
        """CPU time of all of them so far, in seconds."""
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own_s = sum(of.ru_utime + of.ru_stime for of in used)  # finer than the ticks below
        processes = read_processes(self._proc)
        for pid, process in self._members.items():
            counted = (
                process.parent == os.getpid() or process.parent in self._members.keys() & processes.keys()
            )
            if pid not in processes and not counted:
                self._lost_ticks += process.ticks
        self._members = descendants(processes, self._members)
        ticks = sum(process.ticks for process in self._members.values()) + self._lost_ticks
        return own_s + ticks / ticks_per_s()


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
