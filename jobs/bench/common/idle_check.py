"""Records whether the machine was idle during a measurement: CPU time of other processes, steal, throttling.

"Own" processes are this process and its descendants, including those whose parent exits while we watch (a Ray
cluster started here). Workers of a Ray cluster that ran before count as other processes. "The machine" is the
set of cores that this process may use. Linux only: elsewhere all figures are unknown. The results are part of
every benchmark's figures.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....actors.system.host_resources import ControlGroup
from .cpu_clocks import Clocks, ProcessTree, read_clocks

IDLE_SHARE = 0.05  # of CPU time; the machine is idle if others use less
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Idleness:
    """CPU times over `seconds` of watching, summed over `cores`; None is unknown.

    Attributes:
        own_s: CPU time of this process and its descendants.
        others_s: CPU time of all other processes.
        stolen_s: CPU time that the hypervisor gave to other virtual machines.
        throttled_s: time for which a CPU quota stopped this process.
        waited_s: part of `seconds` in which some thread (own or not) waited for a core.
    """

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
        said: list[str] = []
        if parts:
            said.append(
                f"The machine was not idle: {' and '.join(parts)} of its CPU time during the measurement; "
                "only ratios of sides that alternated are meaningful."
            )
        if self.throttled_s is not None and self._share(self.throttled_s) >= IDLE_SHARE:
            said.append(
                f"A CPU quota stopped this process for {self.throttled_s:.1f} s of {self.seconds:.1f} s."
            )
        return " ".join(said) or None

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        """Return the times as shares of the cores' time; null is unknown."""
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
    """Sums CPU times over all `with watch.open()` blocks.

    Args:
        proc: the /proc file system.
        look_every_s: interval at which descendants are listed while a block is open, so that those that
            start, are orphaned and end within it are counted; each listing costs some milliseconds. None:
            list them only at the start and the end.
    """

    def __init__(self, proc: Path = _PROC, *, look_every_s: float | None = None) -> None:
        self._proc = proc
        self._look_every_s = look_every_s
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._group = ControlGroup.of_this_process()
        self._seconds = 0.0
        self._seen: list[Clocks] = []
        self._known = (proc / "stat").exists() and bool(self._cores)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Watch for the duration of the `with` block."""
        begin_s = time.monotonic()
        tree = ProcessTree(self._proc)
        before = self._read(tree) if self._known else None
        try:
            with self._watched(tree) if self._known else nullcontext():
                yield
        finally:
            if before is not None:
                self._seen.append(self._read(tree).since(before))
            self._seconds += time.monotonic() - begin_s

    @contextmanager
    def _watched(self, tree: ProcessTree) -> Iterator[None]:
        """List the descendants every `look_every_s` in a thread for the duration of the block."""
        if (every_s := self._look_every_s) is None:
            yield
            return
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(every_s):
                tree.cpu_s()

        thread = threading.Thread(target=look, name="bench-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _read(self, tree: ProcessTree) -> Clocks:
        return read_clocks(self._proc, self._cores, self._group, tree)

    @property
    def found(self) -> Idleness:
        """Return the sums over all blocks so far."""
        if not self._seen:
            return Idleness(seconds=self._seconds, cores=max(len(self._cores), 1))
        own_s = sum(clocks.own_s for clocks in self._seen)
        return Idleness(
            seconds=self._seconds,
            cores=len(self._cores),
            own_s=own_s,
            others_s=sum(clocks.busy_s for clocks in self._seen) - own_s,
            stolen_s=sum(clocks.stolen_s for clocks in self._seen),
            throttled_s=_sum_of([clocks.throttled_s for clocks in self._seen]),
            waited_s=_sum_of([clocks.waited_s for clocks in self._seen]),
        )


def print_warning(found: Sequence[Mapping[str, Any]]) -> None:
    """Print the warning of the most disturbed point, given the `as_json` of each point."""
    disturbed = [idleness for idleness in found if idleness["warning"] is not None]
    if disturbed:
        print(max(disturbed, key=lambda idleness: idleness["others_share"])["warning"], flush=True)


def _sum_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
