"""Decoding steps by kind, each with buffers of its own shape; on a GPU one CUDA graph per kind.

A kind is how many requests there is room for, how many rows each may have (the anchor's and its drafts': the
lengths of `draft_ladder`), and whether any filters its distribution. Drafts per request may differ within it:
rows are ragged, and those behind the last are padding. Every decoding step has a kind:

    rows each    1, 2, 4                                 6, 8, 12, 16, .. most drafts + 1
    requests     1 2 3 4 6 8 12 16 24 32 40 48 56 64     1 2 3 4 6 8 12 16 24 32 48 64
                 80 .. 128 160 .. 256 ..                 96 128 192 256 ..               the most that run

None has more rows than a step's budget: of what exceeds it there is the largest room alone, with as many rows
as the budget. With 15 drafts and a budget of 2048 rows these are 180 kinds for 64 requests, 256 for 256.

A graph holds all four parts of a step. All share one pool of memory, since one runs at a time and leaves
nothing there. Where there is no graph (a CPU; a GPU before they are captured) a kind's parts are launched one
by one over the same buffers, padding included. Called by `device.py`.

Legend: W rows of a request at most.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ....cluster.draft_length import draft_ladder
from ....drafter.step.device.rows import StepRequests
from .iteration import MakeMasks, Pass, StepModels
from .outcome import Outcome

_SMALL_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
_NARROW = 4  # rows of a request


@dataclass(frozen=True, slots=True)
class StepKind:
    """A kind of decoding step.

    Attributes:
        num_requests: there is room for.
        width: most rows of a request.
        num_rows: N, padding included.
        filters: whether any request has top-k, top-p, min-p or rules, or asks for log probabilities.
    """

    num_requests: int
    width: int
    num_rows: int
    filters: bool

    @property
    def num_outcome_values(self) -> int:
        return Outcome.num_values(self.num_requests, self.width)


class StepKinds:
    """All kinds of one engine's decoding steps.

    Args:
        max_requests: most that run at once.
        num_drafts: most of a request.
        max_rows: a step's budget.
    """

    def __init__(self, max_requests: int, num_drafts: int, max_rows: int) -> None:
        self._max_rows = max_rows
        self._widths = tuple(1 + drafts for drafts in draft_ladder(num_drafts))
        self._sizes = {width: _sizes(width, max_requests, max_rows) for width in self._widths}

    def find(self, num_requests: int, width: int, *, filters: bool) -> StepKind:
        """The smallest kind that has room for a step; it must keep the bounds."""
        width = self._widths[bisect_left(self._widths, width)]
        sizes = self._sizes[width]
        return self._kind(sizes[bisect_left(sizes, num_requests)], width, filters)

    def all(self) -> list[StepKind]:
        """Those of most rows first: the others then fit into their memory."""
        kinds = [
            self._kind(size, width, filters)
            for width, sizes in self._sizes.items()
            for size in sizes
            for filters in (True, False)
        ]
        return sorted(kinds, key=lambda kind: kind.num_rows, reverse=True)

    def _kind(self, size: int, width: int, filters: bool) -> StepKind:
        return StepKind(size, width, min(size * width, self._max_rows), filters)


def _sizes(width: int, max_requests: int, max_rows: int) -> tuple[int, ...]:
    """Numbers of requests there is room for; the last one holds all that run."""
    sizes = [size for size in _SMALL_SIZES if size < max_requests]
    size = _SMALL_SIZES[-1]
    while size < max_requests:
        octave = 1 << size.bit_length() - 1
        size += max(8, octave // 4 if width <= _NARROW else octave // 2)
        if size < max_requests:
            sizes.append(size)
    return (*(size for size in sizes if size * width <= max_rows), max_requests)


class StepGraphs:
    """What replays the kinds.

    Args:
        lists_LW: on the device, where the requests that decode arrive (`rows.pack`).
        outcome: on the device, where outcomes are left: at its begin.
    """

    def __init__(self, models: StepModels, lists_LW: Tensor, outcome: Tensor) -> None:
        self._models, self._lists_LW, self._outcome = models, lists_LW, outcome
        self._iterations: dict[StepKind, Pass] = {}
        self._graphs: dict[StepKind, torch.cuda.CUDAGraph] = {}

    def renew(self, models: StepModels) -> None:
        """Forget what was made with other models."""
        self._models = models
        self._iterations.clear()
        self._graphs.clear()

    def parts(self, kind: StepKind) -> tuple[str, ...]:
        """Of such a step; see `iteration.Iteration.parts`."""
        return self._iteration(kind).parts

    def replay(self, kind: StepKind) -> None:
        """Run a step whose requests have arrived."""
        graph = self._graphs.get(kind)
        if graph is None:
            self._iteration(kind).run()
        else:
            graph.replay()

    def run_guided(self, kind: StepKind, masks: MakeMasks) -> None:
        """Run such a step with grammars' masks, which only the host can make: no graph."""
        self._new_iteration(kind, masks).run()

    def capture(self, kinds: Iterable[StepKind]) -> None:
        """Make their graphs, one behind the other.

        Requests are taken out first: with nobody there a run is short, and writes nothing of anybody's. Each
        kind runs once before its capture, for its kernels must be loaded by then. `torch.cuda.graph` would
        collect garbage and give back the allocator's memory each time; `capture_begin` does neither, and in
        the mode "thread_local" lets other threads (NCCL's watchdog, another engine) go on.
        """
        self._lists_LW.zero_()
        device = self._models.device
        torch.cuda.synchronize(device)
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for kind in kinds:
                iteration, graph = self._iteration(kind), torch.cuda.CUDAGraph()
                iteration.run()
                torch.cuda.synchronize(device)
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    iteration.run()
                finally:
                    graph.capture_end()
                self._graphs[kind] = graph
        torch.cuda.synchronize(device)

    def _iteration(self, kind: StepKind) -> Pass:
        iteration = self._iterations.get(kind)
        if iteration is None:
            iteration = self._iterations[kind] = self._new_iteration(kind)
        return iteration

    def _new_iteration(self, kind: StepKind, masks: MakeMasks | None = None) -> Pass:
        requests = StepRequests.decoding(self._lists_LW, kind.num_requests, kind.width, kind.num_rows)
        outcome = Outcome.over(self._outcome, kind.num_requests, kind.width)
        return self._models.iteration(requests, outcome, filters=kind.filters, masks=masks)
