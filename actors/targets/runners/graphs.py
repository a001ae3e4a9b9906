"""Decoding steps by kind, each with buffers of its own shape; on a GPU one CUDA graph per kind of pass.

A step that drafts is two passes: the drafter's over blocks, and the target's over as many rows as are to be
verified. The two follow one another, so each has kinds of its own, and any of one goes with any of the other:

    blocks    requests   1 2 3 4 6 8 12 16 24 32 48 64 96 128 192 256 ..          the most that run
              rows each  2, 4, 6, 8, 12, 16, .. most drafts + 1 (the lengths of `draft_lengths`)
    target    rows       1 2 3 4 6 8 12 16 24 32 40 48 56 64 80 96 112 128 160 .. the budget
              rows each  1, at most 4, at most as many as there are

Beside these whether any request filters its distribution, and, where nobody drafts, whether the drafter's
context is written. Drafts per request may differ: rows are ragged, and those behind the last are padding.
Where a plan trims, the drafts that are worth most fill the target's rows. No kind has more rows than a step's
budget. With 15 drafts and a budget of 2048 rows these are 294 graphs for 64 requests, 394 for 256, of which
188 are of the drafter's few layers.

All share one pool of memory, since one runs at a time and leaves nothing there: drafts stand in the requests'
tokens, margins in the workspace. Where there is no graph (a CPU; a GPU before they are captured) a kind's
parts are launched one by one over the same buffers, padding included. Called by `device.py`.

Legend: W rows of a request at most.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....cluster.plan import SchedulerOutput
from ....cluster.speculation.draft_lengths import draft_lengths
from ....drafter.step.device.rows import StepRequests
from ....drafter.step.device.trimming import TrimLists
from .drafting import Drafting
from .iteration import Iteration, MakeMasks, StepModels
from .outcome import Outcome

_SMALL_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
_NARROW = 4  # rows of a request: attention's tiles are lower


@dataclass(frozen=True, slots=True)
class PassKind:
    """A kind of a decoding step's pass.

    Attributes:
        drafts: the drafter's; else the target's.
        num_requests: there is room for.
        width: most rows of a request.
        num_rows: N, padding included.
        filters: whether any request has top-k, top-p, min-p or rules, or asks for log probabilities.
        writes_context: whether the drafter gets what the target computes.
    """

    drafts: bool
    num_requests: int
    width: int
    num_rows: int
    filters: bool
    writes_context: bool = True

    @property
    def num_outcome_values(self) -> int:
        return Outcome.num_values(self.num_requests, self.width)


class StepKinds:
    """All kinds of one engine's decoding steps.

    Args:
        max_requests: most that run at once.
        num_drafts: most of a request.
        max_rows: a step's budget.

    Attributes:
        rows: of the target's passes, rising.
    """

    def __init__(self, max_requests: int, num_drafts: int, max_rows: int) -> None:
        self._max_requests, self._max_rows = max_requests, max_rows
        most = 1 + num_drafts
        self.rows = tuple(sorted({*_ladder(min(max_requests * most, max_rows), 4), max_requests}))
        self._widths = tuple(sorted({1, min(_NARROW, most), most}))
        self._block_widths = tuple(1 + drafts for drafts in draft_lengths(num_drafts) if drafts)
        sizes = _ladder(max_requests, 2)
        self._block_sizes = {
            width: (*(size for size in sizes[:-1] if size * width <= max_rows), max_requests)
            for width in self._block_widths
        }

    def of(
        self, plan: SchedulerOutput, requests_G: NDArray[np.intp], *, filters: bool
    ) -> tuple[PassKind | None, PassKind]:
        """The drafter's pass, if anybody drafts, and the target's, for those of a plan that decode.

        A plan that trims has chosen how many rows the target's has; else it has all that were planned.
        """
        num_requests, rows_G = len(requests_G), plan.num_rows[requests_G]
        width, num_rows = int(rows_G.max()), int(rows_G.sum())
        if plan.trim is not None and plan.trim.num_rows is not None:
            num_rows = min(num_rows, max(num_requests, plan.trim.num_rows))
        block = self.block(num_requests, width, filters=filters) if width > 1 else None
        writes = plan.writes_context
        return block, self.target(num_requests, width, num_rows, filters=filters, writes_context=writes)

    def block(self, num_requests: int, width: int, *, filters: bool) -> PassKind:
        """The smallest kind of the drafter's passes that has room for a step; it must keep the bounds."""
        width = self._block_widths[bisect_left(self._block_widths, width)]
        sizes = self._block_sizes[width]
        return self._block(sizes[bisect_left(sizes, num_requests)], width, filters)

    def target(
        self, num_requests: int, width: int, num_rows: int, *, filters: bool, writes_context: bool
    ) -> PassKind:
        """The same of the target's, for so many rows in all, of which a request has `width` at most."""
        assert num_requests <= num_rows, "everybody has a row"
        width = self._widths[bisect_left(self._widths, width)]
        rows = self.rows[bisect_left(self.rows, max(num_rows, self._fewest(width)))]
        return self._target(rows, width, filters, writes_context or not self._may_not_write(width))

    def all(self) -> list[PassKind]:
        """The target's, then the drafter's; of most rows first: the others then fit into their memory."""
        switches = (True, False)
        targets = [
            self._target(rows, width, filters, writes)
            for width in self._widths
            for rows in self.rows
            if self._fewest(width) <= rows <= self._most(width)
            for filters in switches
            for writes in (switches if self._may_not_write(width) else (True,))
        ]
        blocks = [
            self._block(size, width, filters)
            for width, sizes in self._block_sizes.items()
            for size in sizes
            for filters in switches
        ]
        return [*_largest_first(targets), *_largest_first(blocks)]

    def largest(self) -> list[PassKind]:
        """Of the target's and of the drafter's passes those of most rows, with filters and without."""
        kinds = self.all()
        first_block = next((i for i, kind in enumerate(kinds) if kind.drafts), len(kinds))
        return [*kinds[:2], *kinds[first_block : first_block + 2]]

    def _block(self, size: int, width: int, filters: bool) -> PassKind:
        return PassKind(True, size, width, min(size * width, self._max_rows), filters)

    def _target(self, rows: int, width: int, filters: bool, writes_context: bool) -> PassKind:
        return PassKind(False, min(rows, self._max_requests), width, rows, filters, writes_context)

    def _may_not_write(self, width: int) -> bool:
        """Nobody drafts in the pass, though there is a drafter."""
        return width == 1 < self._widths[-1]

    def _fewest(self, width: int) -> int:
        """Rows of a pass in which somebody has more than the next lower width."""
        lower = self._widths[self._widths.index(width) - 1] if width > 1 else 0
        return self.rows[bisect_left(self.rows, lower + 1)]

    def _most(self, width: int) -> int:
        return self.rows[bisect_left(self.rows, min(self._max_requests * width, self._max_rows))]


def _largest_first(kinds: Iterable[PassKind]) -> list[PassKind]:
    return sorted(kinds, key=lambda kind: (kind.num_rows, kind.width), reverse=True)


def _ladder(most: int, steps: int) -> tuple[int, ...]:
    """Numbers of which none is far above the next lower one: so many to an octave; the last is `most`."""
    sizes = [size for size in _SMALL_SIZES if size < most]
    size = _SMALL_SIZES[-1]
    while size < most:
        size += max(8, (1 << size.bit_length() - 1) // steps)
        if size < most:
            sizes.append(size)
    return (*sizes, most)


class StepGraphs:
    """What replays the kinds.

    Args:
        lists_LW: on the device, where the requests that decode arrive (`rows.pack`).
        trim: where it arrives by what their drafts are cut.
        outcome: on the device, where outcomes are left: at its begin.
    """

    def __init__(self, models: StepModels, lists_LW: Tensor, trim: TrimLists, outcome: Tensor) -> None:
        self._models, self._lists_LW, self._trim, self._outcome = models, lists_LW, trim, outcome
        self._passes: dict[PassKind, Drafting | Iteration] = {}
        self._graphs: dict[PassKind, torch.cuda.CUDAGraph] = {}

    def renew(self, models: StepModels) -> None:
        """Forget what was made with other models."""
        self._models = models
        self._passes.clear()
        self._graphs.clear()

    def parts(self, kind: PassKind) -> tuple[str, ...]:
        """Of a step with such a pass of the target; see `iteration.Iteration.parts`."""
        target = self._pass(kind)
        assert isinstance(target, Iteration), "the drafter's pass is one of the parts"
        return target.parts

    def replay(self, kind: PassKind) -> None:
        """Run a pass whose requests have arrived."""
        graph = self._graphs.get(kind)
        if graph is None:
            self._pass(kind).run()
        else:
            graph.replay()

    def run_guided(self, kind: PassKind, masks: MakeMasks) -> None:
        """Run such a pass of the target with grammars' masks, which only the host can make: no graph."""
        self._iteration(kind, masks).run()

    def capture(self, kinds: Iterable[PassKind]) -> None:
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
                one, graph = self._pass(kind), torch.cuda.CUDAGraph()
                one.run()
                torch.cuda.synchronize(device)
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    one.run()
                finally:
                    graph.capture_end()
                self._graphs[kind] = graph
        torch.cuda.synchronize(device)

    def _pass(self, kind: PassKind) -> Drafting | Iteration:
        found = self._passes.get(kind)
        if found is None:
            found = self._passes[kind] = self._drafting(kind) if kind.drafts else self._iteration(kind)
        return found

    def _drafting(self, kind: PassKind) -> Drafting:
        return self._models.drafting(self._requests(kind), self._outcome_of(kind), filters=kind.filters)

    def _iteration(self, kind: PassKind, masks: MakeMasks | None = None) -> Iteration:
        return self._models.iteration(
            self._requests(kind),
            self._outcome_of(kind),
            self._trim,
            filters=kind.filters,
            writes_context=kind.writes_context,
            masks=masks,
        )

    def _requests(self, kind: PassKind) -> StepRequests:
        return StepRequests.decoding(self._lists_LW, kind.num_requests, kind.width, kind.num_rows)

    def _outcome_of(self, kind: PassKind) -> Outcome:
        return Outcome.over(self._outcome, kind.num_requests, kind.width)
