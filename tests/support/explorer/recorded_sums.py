"""Sums over ranks as threads for the explorer, recorded from the kernel (`all_reduce_norm.py`).

The kernel runs in Triton's interpreter for each rank, alone: others' signals are there before. A row has as
many values as there are ranks, so that value t is thread t's, as is the signal to rank t; scalars are loaded
by all threads and stored by the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from manta.drafter.compute.gpu_triton.linear.all_reduce_norm import sum_add_rms_norm
from manta.drafter.compute.memory.peer_buffers import PeerBuffers
from torch import Tensor

from ..kernels.sanitizer import Access, Barrier, Launch, Sanitizer
from .machine import Deliver, Meet, Op, Read, Signal, Thread, Wait, Write

_LOOKS = 3  # at the signals, before the kernel gives up


class _Recorder(Sanitizer):
    """Keeps launches instead of judging them."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []

    def judge(self, launch: Launch) -> None:
        self.launches.append(launch)


@dataclass(frozen=True)
class Memory:
    """What ranks share, for rows of as many values as there are ranks."""

    values: Sequence[Tensor]  # by rank
    signals: Sequence[Tensor]
    launches: Sequence[Tensor]
    row_values: int

    @classmethod
    def build(cls, num_ranks: int, num_rows: int = 1) -> Memory:
        row_values = max(num_ranks, 4)  # 16 bytes
        values = [torch.zeros(2 * num_rows * row_values) for _ in range(num_ranks)]
        signals = [torch.zeros(num_rows, num_ranks, dtype=torch.int32) for _ in range(num_ranks)]
        launches = [torch.zeros(num_rows, dtype=torch.int32) for _ in range(num_ranks)]
        return cls(values, signals, launches, row_values)

    def of_rank(self, rank: int) -> PeerBuffers:
        values_P, signals_P = (
            torch.tensor([each.data_ptr() for each in tensors]) for tensors in (self.values, self.signals)
        )
        return PeerBuffers(
            rank,
            len(self.values),
            torch.float32,
            values_P,
            signals_P,
            self.launches[rank],
            self.row_values,
            self.values[rank].numel() // 2,
            spins=_LOOKS,
        )

    def name(self, address: int) -> str | None:
        """Return the name of a word that ranks or launches share; None for other memory."""
        for kind in ("values", "signals", "launches"):
            for rank, tensor in enumerate(getattr(self, kind)):
                offset = address - tensor.data_ptr()
                if 0 <= offset < tensor.nbytes:
                    return f"{kind} {offset // tensor.element_size()} of rank {rank}"
        return None


def sums_of_ranks(num_ranks: int, num_launches: int) -> list[Thread]:
    """Return the threads of ranks that sum a row in each launch, and of the engine that collects rank 0's."""
    threads = list[Thread]()
    for rank in range(num_ranks):
        memory = Memory.build(num_ranks)
        ops = [list[Op]() for _ in range(num_ranks)]
        for number in range(num_launches):
            launch = _recorded(memory, rank, number)
            for thread, found in enumerate(ops):
                found += _ops(launch, memory, thread, number)
                # A launch begins when all threads of the one before have ended.
                found.append(Meet(-1 - number))
                if rank == thread == 0:
                    found.append(Signal("outcomes"))
        process = f"rank {rank}"
        threads += [Thread(f"{process}, thread {i}", process, each) for i, each in enumerate(ops)]
    collected = [op for i in range(num_launches) for op in (Wait("outcomes", i + 1), Deliver("rank 0"))]
    return [*threads, Thread("the engine", "engine", collected)]


def looks(num_ranks: int, number: int, num_signals: int) -> int:
    """Return how often launch `number` looks at signals of which each rank has sent this many."""
    memory = Memory.build(num_ranks)
    memory.launches[0].fill_(number)
    steps = _run(memory, 0, num_signals).programs[0]
    return sum(isinstance(step, Access) and "ACQ" in step.semantics for step in steps)


def _recorded(memory: Memory, rank: int, number: int) -> Launch:
    """Return launch `number` of a rank, whose signals are there before."""
    launch = _run(memory, rank, number + 1)
    assert memory.launches[rank].item() == number + 1, "launches are counted"
    return launch


def _run(memory: Memory, rank: int, num_signals: int) -> Launch:
    for each in memory.signals:
        each.fill_(num_signals)
    memory.signals[rank][:, rank] -= 1  # its own
    num_ranks = len(memory.values)
    ones, recorder = torch.ones(1, num_ranks), _Recorder()
    with recorder.installed():
        sum_add_rms_norm(ones, memory.of_rank(rank), ones, ones[0], 1e-6)
    (launch,) = recorder.launches
    return launch


def _ops(launch: Launch, memory: Memory, thread: int, number: int) -> Iterable[Op]:
    """Yield what a thread does in a launch."""
    (program,) = launch.programs
    for place, step in enumerate(program):
        if isinstance(step, Barrier):
            yield Meet(number * len(program) + place)
            continue
        for address, element in zip(step.addresses.tolist(), step.elements.tolist(), strict=True):
            name = memory.name(address)
            is_mine = element == thread or (step.num_elements == 1 and step.kind == "load")
            if name is not None and is_mine:
                yield from _op(step, name, number)


def _op(step: Access, name: str, number: int) -> Iterable[Op]:
    if step.kind == "load":
        yield Read(name, number if name.startswith("values") else None)
    elif step.kind == "store":
        yield Write(name, number)
    elif "ACQ" in step.semantics:
        yield Wait(name, number + 1)  # `looks` shows for which count it waits
    else:
        yield Signal(name, releases="REL" in step.semantics)
