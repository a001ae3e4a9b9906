"""A step's transfers as threads for the explorer, recorded from the runner of GPUs.

`transfers.py` has pinned slots for uploads and for outcomes, and events beside them. The runner's `submit`
and `collect` run in Triton's interpreter, where copies are made at once; what they do with slots and events
is recorded, and explored with a stream that does its work at any later time:

    submitting   writes slots, waits for their events, gives the stream its work
    collecting   waits for a step's event, reads its outcome; then a further step may be submitted
    the stream   reads and writes slots, and records events, in the order of its work

One thread of the host submits and collects. As two threads they have more orders than it, not fewer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from manta.actors.targets.runners.gpu_runner import GpuModelRunner
from manta.cluster.step.scheduler_output import SchedulerOutput, StepResult
from manta.drafter.step.gpu_triton.inputs.row_layout import Ints
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .machine import Op, Read, Signal, Thread, Wait, Write


@dataclass
class _Written:
    """The array of a pinned slot; what the host writes to it is recorded."""

    trace: Trace
    place: str
    array: Ints

    def __setitem__(self, where: slice, value: Ints) -> None:
        self.trace.on_written(self.place)
        self.array[where] = value


@dataclass(eq=False)
class _Event:
    """A CUDA event that is never seen to be done, so that the host waits for it."""

    trace: Trace
    name: str
    num_records: int = 0

    def record(self) -> None:
        self.num_records += 1
        self.trace.launch(Signal(self.name))

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.trace.host.append(Wait(self.name, self.num_records))


@dataclass
class Trace:
    """What the host and the stream of a runner do.

    Attributes:
        host: operations of the call that runs.
        submits, collects: operations of each call.
        stream: operations of the stream, in the order of its work.
    """

    host: list[Op] = field(default_factory=list[Op])
    submits: list[list[Op]] = field(default_factory=list[list[Op]])
    collects: list[list[Op]] = field(default_factory=list[list[Op]])
    stream: list[Op] = field(default_factory=list[Op])
    _versions: dict[str, int] = field(default_factory=dict[str, int])
    _places: dict[int, str] = field(default_factory=dict[int, str])  # by address
    _num_launches: int = 0

    def watch(self, runner: GpuModelRunner) -> None:
        """Give a runner's slots the events of a GPU, and record what happens to them."""
        upload, outcomes = runner._upload, runner._outcomes
        for i, slot in enumerate(upload._slots):
            place = self._named(slot.tensor, f"upload {i}")
            upload._slots[i] = replace(slot, **self._recorded(place, array=_Written(self, place, slot.array)))
        for i, arrival in enumerate(outcomes._arrivals):
            place = self._named(arrival.values, f"outcome {i}")
            outcomes._arrivals[i] = replace(arrival, **self._recorded(place))

    def _named(self, memory: Tensor, place: str) -> str:
        self._places[memory.data_ptr()] = place
        return place

    def _recorded(self, place: str, **more: Any) -> dict[str, Any]:
        return {"copied": _Event(self, f"copied {place}"), **more}

    def on_written(self, place: str) -> None:
        self._versions[place] = self._versions.get(place, 0) + 1
        self.host.append(Write(place, self._versions[place]))

    def launch(self, op: Op) -> None:
        """Give the stream one more operation."""
        self._num_launches += 1
        self.host.append(Signal("work"))
        self.stream += [Wait("work", self._num_launches), op]

    def on_copy(self, to: Tensor, source: Tensor) -> None:
        if place := self._places.get(source.data_ptr()):
            self.launch(Read(place, self._versions[place]))
        if place := self._places.get(to.data_ptr()):
            self._versions[place] = self._versions.get(place, 0) + 1
            self.launch(Write(place, self._versions[place]))

    def submit(self, runner: GpuModelRunner, plan: SchedulerOutput) -> None:
        self.host = []
        with _Copies(self):
            runner.submit(plan)
        self.submits.append(self.host)

    def collect(self, runner: GpuModelRunner) -> StepResult:
        """The result must be a copy, as its step's slot is written again."""
        self.host, arrival = [], runner._pending[0].arrival
        result = runner.collect()
        memory = arrival.values.numpy()
        fields = [getattr(result, name) for name in result.__dataclass_fields__]
        arrays = [each for each in tree_leaves(fields) if isinstance(each, np.ndarray)]
        assert not any(np.shares_memory(memory, array) for array in arrays)
        place = self._places[arrival.values.data_ptr()]
        self.host.append(Read(place, self._versions[place]))
        self.collects.append(self.host)
        return result

    def threads(self, max_in_flight: int) -> list[Thread]:
        """Return the host's threads, with at most so many steps in flight, and the stream."""
        submitting, collecting = list[Op](), list[Op]()
        for number, ops in enumerate(self.submits):
            submitting += [Wait("collected", number + 1 - max_in_flight), *ops, Signal("submitted")]
        for number, ops in enumerate(self.collects):
            collecting += [Wait("submitted", number + 1), *ops, Signal("collected")]
        lists = {"submitting": submitting, "collecting": collecting, "the stream": self.stream}
        return [Thread(name, name, ops) for name, ops in lists.items()]


class _Copies(TorchDispatchMode):
    """Records copies from and to slots."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func._overloadpacket) == "aten.copy_":
            self._trace.on_copy(args[0], args[1])
        return func(*args, **(kwargs or {}))
