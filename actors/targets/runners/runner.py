"""What a loaded rank can do, whoever drives its steps; and the clock of a step's parts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from ....cluster.plan import ExpertReads, SchedulerOutput, StepResult
from ....drafter.compute.kv_cache import PagedKVCache
from ....drafter.dflash.model import DFlashDrafter
from ....drafter.eagle3.model import Eagle3Drafter
from ..model.decoder import Decoder

if TYPE_CHECKING:
    from ....drafter.grammars.states import GrammarStates

Drafter = DFlashDrafter | Eagle3Drafter


class Runner(Protocol):
    """A loaded rank: `host.StepRunner`, or `device.DeviceRunner`. Steps run in the order of submission."""

    @property
    def model(self) -> Decoder: ...

    @property
    def cache(self) -> PagedKVCache: ...

    @property
    def grammars(self) -> GrammarStates | None:
        """Those of running requests; None where no text can be held to anything."""
        ...

    def submit(self, plan: SchedulerOutput) -> None:
        """Start a step."""
        ...

    def is_ready(self) -> bool:
        """Whether the oldest step submitted has ended."""
        ...

    def collect(self) -> StepResult:
        """The oldest step's result; waits for it."""
        ...

    def execute(self, plan: SchedulerOutput) -> StepResult:
        """Run one step to its end; nothing else may be under way."""
        ...

    def prepare(self) -> None:
        """Make ready for requests, once every kind of step has run."""
        ...

    def rehearse(self, largest: SchedulerOutput) -> int:
        """Take the memory of the largest decoding step, and of what `prepare` makes for it; returns how many
        graphs `prepare` makes besides."""
        ...

    def exchange(self, drafter: Drafter) -> None:
        """Draft with another one of the same shape from now on, over the same pages; of those beside it."""
        ...


@runtime_checkable
class TriesDrafters(Protocol):
    """A runner that can have another drafter beside its own: `host.StepRunner`."""

    def begin_trial(self, candidate: Drafter) -> None:
        """It drafts for the requests that are admitted `on_trial`, and gets the context of all."""
        ...

    def end_trial(self, *, promoted: bool) -> None:
        """Forget it; or, if it is promoted, the other. A no-op where there is none."""
        ...


class RemoteDrafter(Protocol):
    """The way to a drafter in a process of its own, where the device drives the steps; on every rank."""

    def receive(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Its proposals, int64 [N], a token per row of the blocks that `lay_out_block` makes; and how sure
        each is, fp32 [N], nan where it did not say."""
        ...

    def send(self, num_drafts_R: Tensor, chosen_X: Tensor, taps_NmH: Tensor) -> None:
        """How many drafts were verified, and the target's choices, from which it finds what stood as the
        target does; and what its context is made of."""
        ...


class ReadsMeter:
    """What routed layers read from one step to the next; `Backend.expert_reads` counts and wraps."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._before: int | None = None

    def forget(self) -> None:
        """Something else has read: the next step's count is not known."""
        self._before = None

    def take(self) -> ExpertReads | None:
        """Since the last time, of a count on the host; one pass."""
        reads_1 = self._model.backend.expert_reads
        return None if reads_1 is None else self.of(int(reads_1), num_passes=1)

    def of(self, count: int, *, num_passes: int) -> ExpertReads | None:
        """Since the last time, of a count that has come from elsewhere."""
        before, self._before = self._before, count
        if before is None or not self._model.num_routed:
            return None
        return ExpertReads((count - before) % 2**32, num_passes * self._model.num_routed)


class Clock:
    """Times between marks; on a GPU by events, which are read once the results are on the host."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        if not self._on_gpu:
            self._times.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def seconds(self) -> list[float]:
        """Between consecutive marks."""
        if not self._on_gpu:
            return [after - before for before, after in zip(self._times, self._times[1:], strict=False)]
        self._events[-1].synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        return [before.elapsed_time(after) / 1000 for before, after in pairs]
