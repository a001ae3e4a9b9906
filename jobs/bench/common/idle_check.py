"""Records whether the machine was idle during a measurement: CPU time of other processes, steal, throttling.

"The machine" is the set of cores that this process may use; "own" is this process with its children that have
ended (`tests/benchmarks/processes/process_tree.py` also follows servers and Ray's daemons). Linux only:
elsewhere all figures are unknown. The results are part of every benchmark's figures.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ....actors.system.host_resources import ControlGroup

IDLE_SHARE = 0.05  # of CPU time; the machine is idle if others use less
PROC = Path("/proc")
_BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq, softirq: columns of a line of /proc/stat
_STEAL = 7


class _Clocks(NamedTuple):
    """Seconds from an arbitrary start, summed over cores; None: the system has no such clock."""

    busy_s: float  # the cores ran any process
    stolen_s: float  # the hypervisor ran other virtual machines while this one had work
    own_s: float
    throttled_s: float | None  # CPU quotas stopped this process
    waited_s: float | None  # wall time with a thread that was ready and had no core (Linux PSI, `cpu some`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Idleness:
    """CPU times over `seconds`, summed over `cores`; None: unknown; `waited_s`: a thread lacked a core."""

    seconds: float = 0.0
    cores: int = 1
    own_s: float | None = None
    others_s: float | None = None
    stolen_s: float | None = None
    throttled_s: float | None = None
    waited_s: float | None = None

    @property
    def idle(self) -> bool | None:
        """Return True if others took hardly any CPU time (below IDLE_SHARE); None if unknown."""
        if self.others_s is None or self.stolen_s is None:
            return None
        return max(self._share(self.others_s), self._share(self.stolen_s)) < IDLE_SHARE

    @property
    def sentence(self) -> str | None:
        """Return a warning for the user; None if nothing disturbed the measurement or nothing is known."""
        takers = {"other processes": self.others_s, "other virtual machines": self.stolen_s}
        took = {name: self._share(taken) for name, taken in takers.items() if taken is not None}
        parts = [f"{name} took {share * 100:.0f} %" for name, share in took.items() if share >= IDLE_SHARE]
        texts: list[str] = []
        if parts:
            texts.append(
                f"The machine was not idle: {' and '.join(parts)} of its CPU time during the measurement; "
                "only ratios of sides that alternated are meaningful."
            )
        if self.throttled_s is not None and self._share(self.throttled_s) >= IDLE_SHARE:
            texts.append(
                f"A CPU quota stopped this process for {self.throttled_s:.1f} s of {self.seconds:.1f} s."
            )
        return " ".join(texts) or None

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        times = {"own_share": self.own_s, "others_share": self.others_s, "stolen_share": self.stolen_s}
        return {
            "idle": self.idle,
            "warning": self.sentence,
            **{
                name: None if taken is None else round(self._share(taken), 4) for name, taken in times.items()
            },
            "waited_share": None if self.waited_s is None else round(self.waited_s / self._seconds, 4),
            "throttled_s": None if self.throttled_s is None else round(self.throttled_s, 3),
            "seconds": round(self.seconds, 3),
        }

    @property
    def _seconds(self) -> float:
        return max(self.seconds, 1e-9)

    def _share(self, taken_s: float) -> float:
        return max(taken_s, 0.0) / (self._seconds * self.cores)  # 10 ms ticks: may be below 0


class Watch:
    def __init__(self, proc: Path = PROC) -> None:
        self.proc = proc
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._group = ControlGroup.of_this_process()
        self._seconds = 0.0
        self._spent: list[_Clocks] = []
        self.is_known = (proc / "stat").exists() and bool(self._cores)

    @contextmanager
    def open(self) -> Iterator[None]:
        begin_s = time.monotonic()
        with self.own_clock() as own_s:
            before = self._read(own_s) if self.is_known else None
            try:
                yield
            finally:
                if before is not None:
                    pairs = zip(self._read(own_s), before, strict=True)
                    spent = [None if now is None or then is None else now - then for now, then in pairs]
                    self._spent.append(_Clocks(*spent))  # type: ignore[arg-type]  # None where before
                self._seconds += time.monotonic() - begin_s

    @contextmanager
    def own_clock(self) -> Iterator[Callable[[], float]]:
        """Yield a clock of the CPU time of the processes that are measured."""
        yield lambda: used_s(resource.RUSAGE_SELF) + used_s(resource.RUSAGE_CHILDREN)

    @property
    def found(self) -> Idleness:
        if not self._spent:
            return Idleness(seconds=self._seconds, cores=max(len(self._cores), 1))
        columns = (list(column) for column in zip(*self._spent, strict=True))
        busy_s, stolen_s, own_s, throttled_s, waited_s = (
            None if None in column else sum(column) for column in columns
        )
        assert busy_s is not None and own_s is not None
        others_s = busy_s - own_s
        return Idleness(
            seconds=self._seconds,
            cores=len(self._cores),
            own_s=own_s,
            others_s=others_s,
            stolen_s=stolen_s,
            throttled_s=throttled_s,
            waited_s=waited_s,
        )

    def _read(self, own_s: Callable[[], float]) -> _Clocks:
        busy_s, stolen_s = _core_clocks(self.proc / "stat", self._cores)
        throttled_s = None if self._group is None else self._group.throttled_s()
        return _Clocks(busy_s, stolen_s, own_s(), throttled_s, _waited_s(self.proc))


def print_warning(found: Sequence[Mapping[str, Any]]) -> None:
    if (warning := idleness_warning(found)) is not None:
        print(warning, flush=True)


def idleness_warning(found: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the warning about the period with most other load; None if there is no warning."""
    disturbed = [idleness for idleness in found if idleness["warning"] is not None]
    return max(disturbed, key=lambda idleness: idleness["others_share"])["warning"] if disturbed else None


def used_s(who: int) -> float:
    """Return the CPU seconds of `resource.getrusage`, with a finer resolution than ticks."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def ticks_per_s() -> int:
    return os.sysconf("SC_CLK_TCK")


def _core_clocks(stat: Path, cores: Sequence[int]) -> tuple[float, float]:
    """Return the busy and the stolen time of these cores since the machine started."""
    names = {f"cpu{core}" for core in cores}
    lines = (line.split() for line in stat.read_text(encoding="utf-8").splitlines())
    clocks = [[int(ticks) for ticks in line[1:]] for line in lines if line and line[0] in names]
    busy = sum(of_core[place] for of_core in clocks for place in _BUSY)
    return busy / ticks_per_s(), sum(of_core[_STEAL] for of_core in clocks) / ticks_per_s()


def _waited_s(proc: Path) -> float | None:
    """Return the total of Linux's pressure stall information for CPUs, in seconds; None without PSI."""
    try:
        text = (proc / "pressure" / "cpu").read_text(encoding="utf-8")
    except OSError:
        return None
    some = next((line for line in text.splitlines() if line.startswith("some")), None)
    return None if some is None else int(some.rpartition("total=")[2]) / 1e6
