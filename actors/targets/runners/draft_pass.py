"""The drafter's pass of a step on a device: blocks, drafts after the known tokens, margins, and draft trees.

It is a graph of its own, as the number of rows in blocks does not depend on the number of drafts that are
verified. Drafts are left in the requests' tokens or trees, and margins in the workspace. A split drafter's
drafts are there before a pass, and are written here; its trees are in their memory already. Called by
`cuda_graphs.py`.

Legend: R requests, N rows, E selector's rank, C candidates.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ....drafter.compute.memory.kv_cache import PagedKVCache
from ....drafter.dflash.model import DFlashDrafter
from ....drafter.dflash.weights import Selector
from ....drafter.step.gpu_triton.draft_trees import grow_trees, likely_children, tree_scores
from ....drafter.step.gpu_triton.inputs.row_layout import (
    DeviceStepRequests,
    DeviceStepRows,
    lay_out_block,
    write_drafts,
)
from ....drafter.step.gpu_triton.inputs.transfers import stamp
from ....drafter.step.gpu_triton.ngram_lookup import look_up
from ....drafter.step.gpu_triton.sampling.selector import Candidates, find_candidates, walk_paths
from .device_trees import StepTrees
from .step_passes import DeviceModels, DraftingModels, choose_drafts
from .tp_sampling import candidates_of_ranks, first_rank_s


class DraftPass:
    """A drafting pass over given inputs.

    Args:
        requests: decoding requests, of which all that may draft do.
        times: timestamps of the step's outcome; the first two are written.
        filters: see `TargetPass`.
        trees: grown from the blocks' candidates, if drafts may form trees.
    """

    def __init__(
        self,
        models: DeviceModels,
        requests: DeviceStepRequests,
        times: Tensor,
        trees: StepTrees | None = None,
        *,
        filters: bool,
    ) -> None:
        self._models, self._requests, self._times, self._filters = models, requests, times, filters
        self._trees = trees

    def run(self) -> None:
        models, tables = self._models, self._models.states.tables
        stamp(self._times, 0)
        if models.lookup_lengths is not None:
            look_up(self._requests, tables, *models.lookup_lengths)
            models.workspace.margins_N[: self._requests.num_rows].fill_(float("nan"))
            return stamp(self._times, 1)
        if not models.has_drafter:
            return self.end_on_host(copies=True)
        if models.chains is not None:
            choose = partial(choose_drafts, models, filters=self._filters)
            models.chains.draft(self._requests, tables, models.workspace.margins_N, choose)
            return stamp(self._times, 1)
        if models.remote is not None:  # its margins are in the workspace, its trees in their memory
            if self._trees is None:
                rows = lay_out_block(self._requests, tables, mask_id=0)
                write_drafts(models.remote.drafts_N[: self._requests.num_rows], rows, tables)
            return stamp(self._times, 1)
        block = BlockPass(models, self._requests, self._trees, filters=self._filters)
        _, margins_N = block.run()
        models.workspace.margins_N[: len(margins_N)].copy_(margins_N)
        stamp(self._times, 1)

    def replace_by_copies(self) -> None:
        """Take drafts and margins that the host wrote instead of running the pass."""
        stamp(self._times, 0)
        self.end_on_host(copies=True)

    def end_on_host(self, *, copies: bool) -> None:
        """End the pass after the host has seen its drafts, and has written others if there are `copies`."""
        if copies:
            margins_N, count = self._models.copied_margins_N, self._requests.num_rows
            assert margins_N is not None, "drafts were planned, but there is no drafter"
            self._models.workspace.margins_N[:count].copy_(margins_N[:count])
        stamp(self._times, 1)


class BlockPass:
    """A DFlash drafter's pass over given blocks, which leaves drafts in the requests' tokens, or trees.

    Used by `DraftPass`, and by the process of a split drafter (`actors/workers/drafter/`).

    Args:
        requests, filters, trees: see `DraftPass`.
    """

    def __init__(
        self,
        models: DraftingModels,
        requests: DeviceStepRequests,
        trees: StepTrees | None = None,
        *,
        filters: bool,
    ) -> None:
        self._models, self._requests, self._trees, self._filters = models, requests, trees, filters

    def run(self) -> tuple[Tensor, Tensor]:
        """Return a draft and a margin for each row of blocks with an anchor and a mask per draft, [N]."""
        models, tables = self._models, self._models.states.tables
        drafter, cache = models.drafter, models.draft_cache
        assert drafter is not None and cache is not None, "drafts were planned, but there is no drafter"
        rows, chosen_N, margins_N = self._draft(drafter, cache)
        if self._trees is None:
            write_drafts(chosen_N, rows, tables)
        return chosen_N, margins_N

    def _draft(self, drafter: DFlashDrafter, cache: PagedKVCache) -> tuple[DeviceStepRows, Tensor, Tensor]:
        """Return the rows of blocks with an anchor and a mask for each draft, and drafts and margins [N]."""
        tables, mask_id = self._models.states.tables, drafter.config.mask_token_id
        rows = lay_out_block(self._requests, tables, mask_id)
        if not drafter.config.samples_anchor:
            hidden_NH = drafter.forward(drafter.embed_block(rows.token_ids_N), rows, cache)
            return rows, *self._choose(drafter, hidden_NH, rows, self._requests.cu_rows_R1)
        requests = self._requests.sampling_anchors()
        block = lay_out_block(requests, tables, mask_id)
        hidden_NH = drafter.forward(drafter.embed_block(block.token_ids_N), block, cache)
        block_at_drafts, cu_rows_R1 = block.at_next_positions(), requests.cu_rows_R1
        chosen_N, margins_N = self._choose(drafter, hidden_NH, block_at_drafts, cu_rows_R1)
        return rows, self._requests.at_masks(chosen_N), self._requests.at_masks(margins_N)

    def _choose(
        self, drafter: DFlashDrafter, hidden_NH: Tensor, rows: DeviceStepRows, cu_rows_R1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return a draft and margin per row, equal on all ranks.

        Args:
            rows: with the positions of the tokens that they sample.
        """
        if drafter.selector is not None:
            return self._select(drafter, drafter.selector, hidden_NH, rows, cu_rows_R1)
        if self._trees is not None:
            found = self._candidates(drafter, hidden_NH, rows, drafter.config.num_candidates[1])
            margins_N = self._grow(self._trees, drafter, found, rows, cu_rows_R1)
            if drafter.confidence_head is None:
                return found.ids_NK[:, 0], margins_N  # nothing reads them beside trees
            chosen_N = found.ids_NK.gather(1, found.scores_NK.argmax(1, keepdim=True)).squeeze(1)
            return chosen_N, drafter.sharpen(margins_N, hidden_NH, chosen_N, rows)
        head_inputs = (hidden_NH, rows.slots_N, rows.positions_N)
        chosen_N, margins_N = choose_drafts(self._models, drafter, *head_inputs, filters=self._filters)
        return chosen_N, drafter.sharpen(margins_N, hidden_NH, chosen_N, rows)

    def _select(
        self,
        drafter: DFlashDrafter,
        selector: Selector,
        hidden_NH: Tensor,
        rows: DeviceStepRows,
        cu_rows_R1: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return a draft and margin per row, chosen along each request's path, equal on all ranks."""
        state, communicator = self._models.states.sampling, self._models.communicator
        found = self._candidates(drafter, hidden_NH, rows, selector.codebooks.top_k)
        gates_NE = selector.gates(hidden_NH)
        if self._trees is not None:
            self._grow(self._trees, drafter, found, rows, cu_rows_R1, gates_NE)
        margins_N = torch.zeros(len(gates_NE), dtype=torch.float32, device=gates_NE.device)
        chosen_N = walk_paths(
            found,
            gates_NE,
            rows,
            cu_rows_R1,
            state,
            selector.codebooks,
            filters=self._filters,
            margins_N=margins_N,
            anchor_distance=drafter.anchor_distance,
        )
        margins_N = drafter.sharpen(margins_N, hidden_NH, chosen_N, rows)
        if communicator.world_size == 1:
            return chosen_N, margins_N
        return first_rank_s(chosen_N, margins_N, communicator)

    def _candidates(
        self, drafter: DFlashDrafter, hidden_NH: Tensor, rows: DeviceStepRows, count: int
    ) -> Candidates:
        """Return the best tokens of each row. With a split head each rank finds some in its part."""
        models, first_id = self._models, 0
        is_split = drafter.is_split and not self._filters
        if is_split:
            logits, first_id = drafter.local_logits(hidden_NH)
        else:
            logits = drafter.logits(hidden_NH)
        found = find_candidates(
            logits,
            rows,
            models.states.sampling,
            count,
            filters=self._filters,
            workspace=models.workspace,
            vocab_start=first_id,
        )
        return candidates_of_ranks(found, count, models.communicator) if is_split else found

    def _grow(
        self,
        step: StepTrees,
        drafter: DFlashDrafter,
        found: Candidates,
        rows: DeviceStepRows,
        cu_rows_R1: Tensor,
        gates_NE: Tensor | None = None,
    ) -> Tensor:
        """Grow trees, equal on all ranks; return margins [N] of drafts that have no selector."""
        models, distance = self._models, drafter.anchor_distance
        margins_N = torch.empty(len(found.ids_NK), dtype=torch.float32, device=found.ids_NK.device)
        codebooks = None if drafter.selector is None else drafter.selector.codebooks
        blocks = (rows, cu_rows_R1, self._requests.max_rows, models.states.sampling)
        scores_NPC = tree_scores(
            found,
            gates_NE,
            *blocks,
            codebooks,
            filters=self._filters,
            floors_N=models.workspace.filters.floor_N,
            margins_N=margins_N,
            anchor_distance=distance,
        )
        children = likely_children(scores_NPC, cu_rows_R1, self._requests.max_rows, step.trim, distance)
        grown_from = (found.ids_NK, cu_rows_R1, step.max_nodes_R, step.trim.factors_T)
        grow_trees(*children, *grown_from, step.trees, distance)
        step.keep(found.ids_NK, scores_NPC, models.communicator)
        return margins_N
