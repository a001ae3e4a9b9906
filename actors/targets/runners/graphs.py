"""Decoding steps captured in CUDA graphs: one set of four (draft, verify, sample, inject) per kind of step.

A kind is how many requests there is room for, whether they draft, and whether any filters its distribution.
Drafts per request may differ within a graph: rows are ragged and those behind the last are padding. All sets
share one pool of memory, since one runs at a time. Called by `device.py`; on a CPU there are none.

Legend: R requests, W = 1 + most drafts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....cluster.plan import SchedulerOutput
from ....drafter.step.device.rows import StepRequests, pack
from .iteration import DeviceModels, Iteration
from .runner import Clock

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of requests to capture steps for, up to the most that run at once."""
    return (*(size for size in _SIZES if size < max_num_seqs), max_num_seqs)


@dataclass(frozen=True, slots=True)
class GraphKey:
    """A kind of step."""

    num_requests: int
    drafts: bool
    filters: bool


@dataclass(frozen=True, slots=True)
class _Captured:
    values: Tensor  # the step's integers, on the device
    on_host: tuple[Tensor, ...]  # pinned; taken in turns, since a copy may still be under way
    graphs: tuple[torch.cuda.CUDAGraph, ...]
    step: Iteration  # holds on to what the graphs read and write


class StepGraphs:
    """The captured kinds.

    Args:
        num_drafts: most drafts of a request; 0 captures plain steps alone.
        sizes: numbers of requests, ascending.
    """

    _HOST_BUFFERS = 4  # more than steps can be in flight

    def __init__(self, models: DeviceModels, num_drafts: int, sizes: Sequence[int]) -> None:
        self._models, self._num_drafts, self._sizes = models, num_drafts, tuple(sizes)
        self._captured: dict[GraphKey, _Captured] = {}
        self._turn = 0

    def find(self, num_requests: int, drafts: bool, filters: bool) -> GraphKey | None:
        """The smallest kind that has room for the step; None if none was captured."""
        at = bisect_left(self._sizes, num_requests)
        if at == len(self._sizes):
            return None
        key = GraphKey(self._sizes[at], drafts, filters)
        return key if key in self._captured else None

    def capture(self) -> None:
        """Capture all kinds, the largest first: the smaller ones then fit into its memory."""
        pool = torch.cuda.graph_pool_handle() if self._sizes else None
        for size in reversed(self._sizes):
            for drafts in (True, False) if self._num_drafts else (False,):
                for filters in (False, True):
                    key = GraphKey(size, drafts, filters)
                    self._captured[key] = self._capture(key, pool)

    def replay(self, key: GraphKey, plan: SchedulerOutput, clock: Clock) -> Tensor:
        """Run a step that fits `key`; its outcome is overwritten by the next replay."""
        captured = self._captured[key]
        host = captured.on_host[self._turn % self._HOST_BUFFERS]
        self._turn += 1
        values = pack(plan.slots, plan.num_rows, plan.num_drafts, plan.samples, key.num_requests)
        host.numpy()[:] = values
        captured.values.copy_(host, non_blocking=True)
        for graph in captured.graphs:
            graph.replay()
            clock.mark()
        return captured.step.outcome

    def _capture(self, key: GraphKey, pool: Any) -> _Captured:  # Any: torch names its type in private
        size, width = key.num_requests, 1 + (self._num_drafts if key.drafts else 0)
        # As if nobody took part: lengths of 0 keep the runs before the capture short.
        idle = np.zeros(0, dtype=np.int32)
        first = torch.from_numpy(pack(idle, idle, idle, idle.astype(np.bool_), size))
        values = first.to(self._models.target.device)
        requests = StepRequests.over(values, size, size * width, width, width - 1)
        step = Iteration(self._models, requests if key.drafts else None, requests, None, key.filters)
        for part in step.parts:  # every kernel is loaded before a capture begins
            part()
        torch.cuda.synchronize(values.device)
        graphs: list[torch.cuda.CUDAGraph] = []
        for part in step.parts:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                part()
            graphs.append(graph)
        on_host = tuple(
            torch.empty(len(values), dtype=torch.int32).pin_memory() for _ in range(self._HOST_BUFFERS)
        )
        return _Captured(values, on_host, tuple(graphs), step)
