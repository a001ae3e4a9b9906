"""Whether the machine was idle while something was measured: what CPU time others took, and what held us up.

*Ours* is this process and its descendants, also those that lose their parent while we watch (a Ray that is
started here); workers of a Ray that runs already are nobody's descendants here and count as others. *The
machine* is the cores that this process may use. Linux only: elsewhere nothing is known, and nothing is said.
Benchmarks' figures carry it.
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

from ...actors.control_groups import ControlGroup
from .cpu_clocks import Clocks, Family, read_clocks

IDLE_SHARE = 0.05  # of the cores' time: what others may take from a machine that still counts as idle
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Idleness:
    """What was seen over `seconds`. Times are of CPUs, summed over `cores`; None is unknown.

    Attributes:
        own_s: taken by this process and its descendants.
        others_s: taken by all other processes.
        stolen_s: taken by other virtual machines.
        throttled_s: for which a CPU quota held us up.
        waited_s: of `seconds`, in which some thread (ours or not) waited for a core.
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
        """Whether others left the machine to us; None where that is unknown."""
        if self.others_s is None or self.stolen_s is None:
            return None
        return max(self._share(self.others_s), self._share(self.stolen_s)) < IDLE_SHARE

    @property
    def sentence(self) -> str | None:
        """What the user should know; None where nothing disturbed, or nothing is known."""
        takers = {"other processes": self.others_s, "other virtual machines": self.stolen_s}
        took = {name: self._share(taken) for name, taken in takers.items() if taken is not None}
        parts = [f"{name} took {share * 100:.0f} %" for name, share in took.items() if share >= IDLE_SHARE]
        said: list[str] = []
        if parts:
            said.append(
                f"The machine was not idle: {' and '.join(parts)} of its CPU time during the measurement; "
                "only ratios of modes that took turns mean anything."
            )
        if self.throttled_s is not None and self._share(self.throttled_s) >= IDLE_SHARE:
            said.append(
                f"A CPU quota held this process up for {self.throttled_s:.1f} s of {self.seconds:.1f} s."
            )
        return " ".join(said) or None

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        """Shares of the cores' time; null is unknown."""
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
        return max(taken_s, 0.0) / (self._seconds * self.cores)  # clocks of 10 ms may leave less than nothing


class Watch:
    """Adds up what happens while it is open; it may be opened often.

    Args:
        proc: where Linux tells about processes.
        look_every_s: for processes of ours that start and end while it is open and lose their parents; a
            look costs some milliseconds. None: only at both ends.
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
        """Watch until the end of the block."""
        begin_s = time.monotonic()
        family = Family(self._proc)
        before = self._read(family) if self._known else None
        try:
            with self._looks(family) if self._known else nullcontext():
                yield
        finally:
            if before is not None:
                self._seen.append(self._read(family).since(before))
            self._seconds += time.monotonic() - begin_s

    @contextmanager
    def _looks(self, family: Family) -> Iterator[None]:
        """A thread that looks now and then."""
        if (every_s := self._look_every_s) is None:
            yield
            return
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(every_s):
                family.look()

        thread = threading.Thread(target=look, name="bench-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _read(self, family: Family) -> Clocks:
        return read_clocks(self._proc, self._cores, self._group, family)

    @property
    def found(self) -> Idleness:
        """What was seen so far."""
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
    """Below a table of figures: what `as_json` says of the point that others disturbed most, if any."""
    disturbed = [idleness for idleness in found if idleness["warning"] is not None]
    if disturbed:
        print(max(disturbed, key=lambda idleness: idleness["others_share"])["warning"], flush=True)


def _sum_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
