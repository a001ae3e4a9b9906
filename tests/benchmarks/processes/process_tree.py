"""CPU time of this process and all its descendants, also of orphans: Ray's daemons and workers, servers.

`TreeWatch` is the `Watch` of benchmarks that start processes; the product's own benchmarks start none.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from manta.jobs.bench.common.idle_check import PROC, Watch, ticks_per_s, used_s


class TreeWatch(Watch):
    """A watch whose own processes are this one and its descendants.

    Args:
        proc: the /proc file system.
        look_every_s: interval at which descendants are listed while a block is open, so that those that
            start, are orphaned and end within it are counted; each listing costs some milliseconds. None:
            list them only at the start and the end.
    """

    def __init__(self, proc: Path = PROC, *, look_every_s: float | None = None) -> None:
        super().__init__(proc)
        self._look_every_s = look_every_s

    @contextmanager
    def own_clock(self) -> Iterator[Callable[[], float]]:
        tree, lock, ended = ProcessTree(self.proc), threading.Lock(), threading.Event()

        def cpu_s() -> float:
            with lock:
                return tree.cpu_s()

        def look() -> None:
            while not ended.wait(self._look_every_s):
                cpu_s()

        thread = threading.Thread(target=look, name="bench-watch", daemon=True)
        if self._look_every_s is not None and self.is_known:
            thread.start()
        try:
            yield cpu_s
        finally:
            ended.set()
            if thread.is_alive():
                thread.join()


class ProcessTree:
    """Measures the CPU time of this process and its descendants, including orphans.

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
        self._first_children_s = used_s(resource.RUSAGE_CHILDREN)

    def cpu_s(self) -> float:
        """Return the CPU time of all of these processes so far, in seconds."""
        children_s = used_s(resource.RUSAGE_CHILDREN) - self._first_children_s
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
        return used_s(resource.RUSAGE_SELF) + children_s + ticks / ticks_per_s()

    def _ticks(self, pid: int, process: CpuProcess) -> int:
        ended = process.ticks - process.own_ticks
        first = self._first_ticks.setdefault(pid, ended)
        return process.own_ticks + first + max(ended - first, self._gone_ticks.get(pid, 0))


@dataclass(frozen=True, slots=True)
class CpuProcess:
    """CPU time of a process: `own_ticks` without, `ticks` with its children that have ended."""

    parent: int
    ticks: int
    own_ticks: int


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
