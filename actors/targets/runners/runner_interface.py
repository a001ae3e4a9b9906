"""The interface of a loaded rank, whether host or device drives its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ....cluster.step.scheduler_output import ExpertReads, SchedulerOutput, StepResult
from ....drafter.compute.memory.kv_cache import PagedKVCache
from ..model.decoder import Decoder
from .drafts.draft_source import Drafter

if TYPE_CHECKING:
    from ....drafter.grammars.matchers import GrammarStates
    from .page_mover import PageMover


class Runner(Protocol):
    """A loaded rank: `CpuModelRunner` or `GpuModelRunner`. Steps run in the order of submission."""

    @property
    def model(self) -> Decoder: ...

    @property
    def cache(self) -> PagedKVCache: ...

    @property
    def grammars(self) -> GrammarStates | None:
        """Grammars of the running requests; None if the rank cannot use grammars."""
        ...

    @property
    def mover(self) -> PageMover | None:
        """What moves its pages to a tier below them and back; None without one."""
        ...

    def submit(self, plan: SchedulerOutput) -> None: ...

    def is_ready(self) -> bool:
        """Return whether the oldest submitted step has ended."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest submitted step and return its result."""
        ...

    def execute(self, plan: SchedulerOutput) -> StepResult:
        """Run one step and wait for its result; no other step may be in flight."""
        ...

    def prepare(self) -> None:
        """Get ready for requests, after every kind of step has run in the warm-up."""
        ...

    def profile_run(self, largest: SchedulerOutput, used_bytes: Callable[[], int]) -> int:
        """Return the bytes that decoding takes in addition to what has run: its largest step, and all graphs.

        Args:
            used_bytes: reads the bytes of the device in use.
        """
        ...

    def swap_drafter(self, drafter: Drafter) -> None:
        """Replace a colocated drafter by another one of the same shape, over the same pages."""
        ...


class ReadsMeter:
    """Measures what routed layers read between two steps; the counter `Backend.expert_reads` wraps."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._last_count: int | None = None

    def forget(self) -> None:
        """Forget the last count, as something other than steps has read."""
        self._last_count = None

    def take(self) -> ExpertReads | None:
        """Return the reads since the last call, after a single pass, from the counter on the host."""
        reads_1 = self._model.backend.expert_reads
        return None if reads_1 is None else self.of(int(reads_1), num_passes=1)

    def of(self, count: int, *, num_passes: int) -> ExpertReads | None:
        """Return the reads since the last call, over `num_passes` passes, from an already copied count."""
        before, self._last_count = self._last_count, count
        if before is None or not self._model.num_routed:
            return None
        return ExpertReads((count - before) % 2**32, num_passes * self._model.num_routed)
