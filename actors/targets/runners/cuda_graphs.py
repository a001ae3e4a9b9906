"""Decoding steps by kind, each with buffers of its own shape; on a GPU one CUDA graph per kind of pass.

A drafting step has two passes: the drafter's over blocks, and the target's over the rows to verify. Each pass
has kinds of its own, and any two can be combined:

    blocks    requests   1 2 3 4 6 8 12 16 24 32 48 64 96 128 192 256 ..          the most that run
              rows each  2, 4, 6, 8, 12, 16, .. most drafts + 1 (the lengths of `draft_lengths`)
    target    rows       1 2 3 4 6 8 12 16 24 32 40 48 56 64 80 96 112 128 160 .. the budget
              rows each  1, at most 4, at most as many as there are

Kinds also differ in whether any request filters its distribution and, if no request drafts, in whether the
drafter's context is written. Requests may have different numbers of drafts: rows are ragged, with padding
after the last. Where a plan trims, the most valuable drafts fill the target's rows. No kind has more rows
than a step's budget. With 15 drafts and a budget of 2048 rows there are 294 graphs for 64 requests and 394
for 256, of which 188 are for the drafter's few layers; with 8192 rows 406 for 256, of which 192.

All graphs share one memory pool, since one runs at a time and keeps nothing there: drafts are in the
requests' tokens, margins in the workspace. Without graphs (on a CPU, or before the capture) a kind's kernels
are launched one by one over the same buffers, including padding. Called by `gpu_runner.py`.

Legend: W most rows of a request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....cluster.speculation.draft_length_policy import draft_lengths
from ....cluster.speculation.draft_tree import TreeSizes
from ....cluster.step.scheduler_output import SchedulerOutput
from ....drafter.step.gpu_triton.draft_trees import DeviceTrees
from ....drafter.step.gpu_triton.inputs.row_layout import DeviceStepRequests
from ....drafter.step.gpu_triton.inputs.transfers import StepOutput
from ....drafter.step.gpu_triton.tree_rows import num_path_rows
from ....drafter.step.gpu_triton.verification import TrimLists
from .drafts.device_trees import StepTrees
from .step_passes import DeviceModels, DraftPass, TargetPass

_SMALL_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
_NARROW = 4  # rows of a request up to which attention uses lower tiles
_NUM_PROFILED = 16  # graphs captured to find the memory of one


@dataclass(frozen=True, slots=True)
class PassKind:
    """A kind of pass in a decoding step.

    Attributes:
        drafts: whether it is the drafter's pass; else the target's.
        num_requests: most requests.
        width: most rows of a request.
        num_rows: N, including padding.
        filters: whether any request has top-k, top-p, min-p, logits rules or, in the target's pass, a
            grammar, or requests log probabilities.
        writes_context: whether the drafter's context is written.
        tree: the largest trees of requests that draft; None if drafts form chains.
    """

    drafts: bool
    num_requests: int
    width: int
    num_rows: int
    filters: bool
    writes_context: bool = True
    tree: TreeSizes | None = None

    @property
    def num_context_rows(self) -> int:
        """Rows of the target's pass with hidden states that a drafter in another process gets."""
        if self.tree is None:
            return self.num_rows
        return num_path_rows(self.num_requests, self.num_rows, 1 + self.tree.depth)

    @property
    def outcome_shape(self) -> tuple[int, int, int]:
        """Requests, most tokens of one, and values of a tree, as `StepOutput` counts them."""
        if self.tree is None or self.drafts:
            return self.num_requests, self.width, 0
        return self.num_requests, 1 + self.tree.depth, DeviceTrees.num_values(self.tree)


class StepKinds:
    """All kinds of an engine's decoding steps.

    Args:
        max_requests: most requests that run at once.
        num_drafts: most drafts of a block.
        max_rows: a step's budget of rows.
        tree: the largest draft trees; None if drafts form chains.

    Attributes:
        rows: row counts of the target's passes, ascending.
    """

    def __init__(
        self, max_requests: int, num_drafts: int, max_rows: int, tree: TreeSizes | None = None
    ) -> None:
        self._max_requests, self._max_rows, self._tree = max_requests, max_rows, tree
        longest = 1 + num_drafts
        maximum = longest if tree is None else 1 + tree.nodes
        self.rows = tuple(sorted({*_ladder(min(max_requests * maximum, max_rows), 4), max_requests}))
        self._widths = tuple(sorted({1, *(min(width, maximum) for width in (_NARROW, longest, maximum))}))
        self._block_widths = tuple(1 + drafts for drafts in draft_lengths(num_drafts) if drafts)
        sizes = _ladder(max_requests, 2)
        self._block_sizes = {
            width: (*(size for size in sizes[:-1] if size * width <= max_rows), max_requests)
            for width in self._block_widths
        }

    @property
    def max_block_rows(self) -> int:
        """The most rows of a drafter's pass."""
        return min(self._max_requests * self._block_widths[-1], self._max_rows)

    def of(
        self, plan: SchedulerOutput, requests_G: NDArray[np.intp], *, filters: bool
    ) -> tuple[PassKind | None, PassKind]:
        """Return the drafter's pass, if any request drafts, and the target's, for a plan's decoding requests.

        A plan that trims may set the rows of the target's pass; otherwise it has all planned rows.
        """
        num_requests, rows_G = len(requests_G), plan.num_rows[requests_G]
        width, num_rows = int(rows_G.max()), int(rows_G.sum())
        block_width = 1 + int(plan.block_drafts[requests_G].max())
        if plan.trim is not None and plan.trim.num_rows is not None:
            num_rows = min(num_rows, max(num_requests, plan.trim.num_rows))
        block = self.block(num_requests, block_width, filters=filters) if width > 1 else None
        writes = plan.writes_context
        return block, self.target(num_requests, width, num_rows, filters=filters, writes_context=writes)

    def block(self, num_requests: int, width: int, *, filters: bool) -> PassKind:
        """Return the smallest kind of drafter's pass that a step fits in; the step must keep the bounds."""
        width = self._block_widths[bisect_left(self._block_widths, width)]
        sizes = self._block_sizes[width]
        return self._block(sizes[bisect_left(sizes, num_requests)], width, filters)

    def target(
        self, num_requests: int, width: int, num_rows: int, *, filters: bool, writes_context: bool
    ) -> PassKind:
        """Return the smallest kind of target's pass for `num_rows` rows with at most `width` per request."""
        assert num_requests <= num_rows, "every request has a row"
        width = self._widths[bisect_left(self._widths, width)]
        rows = self.rows[bisect_left(self.rows, max(num_rows, self._min_rows(width)))]
        return self._target(rows, width, filters, writes_context or not self._writes_optionally(width))

    def all(self) -> list[PassKind]:
        """Return the target's kinds, then the drafter's, largest first, so that later ones fit
        their memory.
        """
        switches = (True, False)
        targets = [
            self._target(rows, width, filters, writes)
            for width in self._widths
            for rows in self.rows
            if self._min_rows(width) <= rows <= self._max_rows_of_width(width)
            for filters in switches
            for writes in (switches if self._writes_optionally(width) else (True,))
        ]
        blocks = [
            self._block(size, width, filters)
            for width, sizes in self._block_sizes.items()
            for size in sizes
            for filters in switches
        ]
        return [*_largest_first(targets), *_largest_first(blocks)]

    def largest(self) -> list[PassKind]:
        """Return the kinds with the most rows of target and drafter, with filters and without."""
        kinds = self.all()
        first_block = next((i for i, kind in enumerate(kinds) if kind.drafts), len(kinds))
        return [*kinds[:2], *kinds[first_block : first_block + 2]]

    def _block(self, size: int, width: int, filters: bool) -> PassKind:
        return PassKind(True, size, width, min(size * width, self._max_rows), filters, tree=self._tree)

    def _target(self, rows: int, width: int, filters: bool, writes_context: bool) -> PassKind:
        tree = self._tree if width > 1 else None
        return PassKind(False, min(rows, self._max_requests), width, rows, filters, writes_context, tree)

    def _writes_optionally(self, width: int) -> bool:
        """Return whether the pass may skip the drafter's context: it has no drafts, but the engine can."""
        return width == 1 < self._widths[-1]

    def _min_rows(self, width: int) -> int:
        """Return the least rows of a pass in which a request has more rows than the next smaller width."""
        lower = self._widths[self._widths.index(width) - 1] if width > 1 else 0
        return self.rows[bisect_left(self.rows, lower + 1)]

    def _max_rows_of_width(self, width: int) -> int:
        return self.rows[bisect_left(self.rows, min(self._max_requests * width, self._max_rows))]


def _largest_first(kinds: Iterable[PassKind]) -> list[PassKind]:
    return sorted(kinds, key=lambda kind: (kind.num_rows, kind.width), reverse=True)


def _ladder(maximum: int, steps: int) -> tuple[int, ...]:
    """Return sizes up to `maximum` with `steps` sizes per octave above 16; the last one is `maximum`."""
    sizes = [size for size in _SMALL_SIZES if size < maximum]
    size = _SMALL_SIZES[-1]
    while size < maximum:
        size += max(8, (1 << size.bit_length() - 1) // steps)
        if size < maximum:
            sizes.append(size)
    return (*sizes, maximum)


class StepGraphs:
    """Runs or replays the passes of all kinds.

    Args:
        lists_LW: device memory with the lists of decoding requests (`rows.pack`).
        trim: device memory with the plan's values for trimming.
        outcome: device memory for outcomes, which are written at its beginning.
    """

    def __init__(self, models: DeviceModels, lists_LW: Tensor, trim: TrimLists, outcome: Tensor) -> None:
        self._models, self._lists_LW, self._trim, self._outcome = models, lists_LW, trim, outcome
        self._passes: dict[PassKind, DraftPass | TargetPass] = {}
        self._graphs: dict[PassKind, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None  # shared memory of the graphs; Any: PyTorch's type is private

    def rebuild(self, models: DeviceModels) -> None:
        """Drop everything that was made with other models, and give back its memory for what comes next."""
        self._models = models
        self._passes.clear()
        self._graphs.clear()
        self._pool = None
        torch.cuda.empty_cache()

    def parts(self, kind: PassKind) -> tuple[str, ...]:
        """Return the timed parts of a step with this target pass, see `TargetPass.parts`."""
        target = self._pass(kind)
        assert isinstance(target, TargetPass), "only the target's pass has parts"
        return target.parts

    def replay(self, kind: PassKind) -> None:
        """Run a pass; its requests' lists have been uploaded."""
        graph = self._graphs.get(kind)
        if graph is None:
            self._pass(kind).run()
        else:
            graph.replay()

    def drafting(self, kind: PassKind) -> DraftPass:
        drafting = self._pass(kind)
        assert isinstance(drafting, DraftPass), "only the drafter's pass drafts"
        return drafting

    def verified(self, kind: PassKind) -> DeviceStepRequests:
        """Launch the first part of a target's pass, which the pass repeats: return what it verifies."""
        target = self._pass(kind)
        assert isinstance(target, TargetPass), "only the target's pass verifies"
        return target.verified()

    def capture(self, kinds: Iterable[PassKind]) -> None:
        """Capture the graphs of these kinds one after another.

        The request lists are emptied first, which makes a run short and keeps it from writing to any
        request's memory. Each kind runs once before its capture, which loads its kernels. The allocator's
        cache is emptied once, at the end: what the runs took on the side stream, no other stream could use.
        """
        self._lists_LW.zero_()
        if self._models.trees is not None:
            self._models.trees.blocks_LW.zero_()
        device = self._models.target.device
        torch.cuda.synchronize(device)
        pool = self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for kind in kinds:
                pass_ = self._pass(kind)
                pass_.run()
                torch.cuda.synchronize(device)
                self._graphs[kind] = _capture(pass_.run, pool)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()

    def measure_bytes(self, kinds: StepKinds, used_bytes: Callable[[], int]) -> int:
        """Capture the graphs of the largest steps, which provide the memory that all share, and a few others.

        The few, of all sizes, show what each of the rest takes beside the shared memory.
        """
        torch.cuda.empty_cache()  # as at the end of a capture
        used_before, largest = used_bytes(), kinds.largest()
        self.capture(largest)
        used_by_largest = used_bytes() - used_before
        rest = [kind for kind in kinds.all() if kind not in largest]
        few = rest[:: max(1, len(rest) // _NUM_PROFILED)]
        self.capture(few)
        used_by_few = used_bytes() - used_before - used_by_largest
        return used_by_largest + (used_by_few * len(rest) // len(few) if few else 0)

    def _pass(self, kind: PassKind) -> DraftPass | TargetPass:
        found = self._passes.get(kind)
        if found is None:
            found = self._passes[kind] = self._drafting(kind) if kind.drafts else self._iteration(kind)
        return found

    def _drafting(self, kind: PassKind) -> DraftPass:
        times = self._outcome_of(kind).times
        return DraftPass(
            self._models.drafts, self._requests(kind), times, self._trees(kind), filters=kind.filters
        )

    def _iteration(self, kind: PassKind) -> TargetPass:
        masks = self._models.masks if kind.filters else None
        return TargetPass(
            self._models,
            self._requests(kind),
            self._outcome_of(kind),
            self._trim,
            filters=kind.filters,
            writes_context=kind.writes_context,
            masks=None if masks is None else masks.of_rows(kind.num_rows),
            trees=self._trees(kind),
        )

    def _trees(self, kind: PassKind) -> StepTrees | None:
        if kind.tree is None or self._models.trees is None:
            return None
        return self._models.trees.of_requests(kind.num_requests)

    def _requests(self, kind: PassKind) -> DeviceStepRequests:
        trees, lists_LW = self._models.trees, self._lists_LW
        if kind.drafts and trees is not None:
            lists_LW = trees.blocks_LW
        return DeviceStepRequests.decoding(lists_LW, kind.num_requests, kind.width, kind.num_rows)

    def _outcome_of(self, kind: PassKind) -> StepOutput:
        return StepOutput.views_of(self._outcome, *kind.outcome_shape)


class LazyGraphs:
    """CUDA graphs of passes that are captured as they are needed, in memory that they share.

    The first run of a pass loads its kernels, the second is captured. On a CPU passes are launched kernel by
    kernel.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[PassKind, torch.cuda.CUDAGraph | None] = {}
        self._pool: Any = None  # as in `StepGraphs`
        self._stream: torch.cuda.Stream | None = None  # one for all, as streams do not share memory

    def run(self, kind: PassKind, launch: Callable[[], object]) -> None:
        """Run a kind of pass; `launch` reads and writes the same addresses each time."""
        if self._device.type == "cpu" or kind not in self._graphs:
            self._graphs[kind] = None
            launch()
            return
        graph = self._graphs[kind]
        if graph is None:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._stream = self._stream or torch.cuda.Stream(self._device)
            torch.cuda.synchronize(self._device)
            with torch.cuda.stream(self._stream):
                graph = self._graphs[kind] = _capture(launch, self._pool)
        graph.replay()


def _capture(launch: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:  # Any: as in `StepGraphs`
    """Capture what is launched on the current stream.

    `torch.cuda.graph` would collect garbage and empty the allocator's cache; `capture_begin` does neither,
    and with mode "thread_local" other threads (NCCL's watchdog, another engine) can go on.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        launch()
    finally:
        graph.capture_end()
    return graph
