"""DFlash on a device: a pass over blocks, drafts after the known tokens, margins, and draft trees.

On a host by `drafter/dflash/proposer.py`.

Legend: R requests, N rows, E selector's rank, C candidates.
"""

from __future__ import annotations

from torch import Tensor

from .....drafter.compute.memory.kv_cache import PagedKVCache
from .....drafter.dflash.model import DFlashDrafter
from .....drafter.dflash.weights import Selector
from .....drafter.step.gpu_triton.draft_trees import grow_trees, likely_children, tree_scores
from .....drafter.step.gpu_triton.inputs.row_layout import (
    DeviceStepRequests,
    DeviceStepRows,
    lay_out_block,
    write_drafts,
)
from .....drafter.step.gpu_triton.sampling.selector import Candidates, find_candidates, walk_paths
from .device_trees import StepTrees
from .draft_source import DeviceDrafts, Drafter, StepMemory, VerifiedRows
from .tp_sampling import candidates_of_ranks, choose_drafts, first_rank_s


class DeviceBlocks(DeviceDrafts):
    """A drafter of blocks, and the pages of its context."""

    has_context = True

    def __init__(self, drafter: DFlashDrafter, context: PagedKVCache, memory: StepMemory) -> None:
        self.drafter, self.context, self._memory = drafter, context, memory
        self.tree_config, self.kept_by_page = drafter.config, (context.kv,)

    def with_drafter(self, drafter: Drafter) -> DeviceBlocks:
        assert isinstance(drafter, DFlashDrafter), "the new drafter has the kind of the old one"
        return DeviceBlocks(drafter, self.context, self._memory)

    def propose(self, requests: DeviceStepRequests, trees: StepTrees | None, *, filters: bool) -> None:
        margins_N = self._memory.workspace.margins_N[: requests.num_rows]
        where = self.drafter, self.context, self._memory
        BlockPass(*where, requests, trees, margins_N, filters=filters).run()

    def inject(self, verified: VerifiedRows) -> None:
        features_NH = self.drafter.context_features(verified.taps_NmH)
        self.drafter.write_context(features_NH, verified.rows, self.context)


class BlockPass:
    """A drafter's pass over given blocks, which leaves drafts in the requests' tokens, or trees.

    Used by `DeviceBlocks`, and by the process of a split drafter (`actors/workers/drafter/`).

    Args:
        requests, filters, trees: see `DeviceDrafts.propose`.
        margins_N: fp32, written: a margin for each row of blocks with an anchor and a mask per draft.
    """

    def __init__(
        self,
        drafter: DFlashDrafter,
        context: PagedKVCache,
        memory: StepMemory,
        requests: DeviceStepRequests,
        trees: StepTrees | None,
        margins_N: Tensor,
        *,
        filters: bool,
    ) -> None:
        self._drafter, self._context, self._memory = drafter, context, memory
        self._requests, self._trees, self._filters = requests, trees, filters
        self._margins_N = margins_N

    def run(self) -> Tensor:
        """Return a draft for each row of blocks with an anchor and a mask per draft, [N]."""
        rows, chosen_N, margins_N = self._draft()
        if margins_N is not self._margins_N:  # not the sampler's alone
            self._margins_N.copy_(margins_N)
        if self._trees is None:
            write_drafts(chosen_N, rows, self._memory.states.tables)
        return chosen_N

    def _draft(self) -> tuple[DeviceStepRows, Tensor, Tensor]:
        """Return the rows of blocks with an anchor and a mask for each draft, and drafts and margins [N]."""
        drafter, tables = self._drafter, self._memory.states.tables
        mask_id = drafter.config.mask_token_id
        rows = lay_out_block(self._requests, tables, mask_id)
        if not drafter.config.samples_anchor:
            hidden_NH = drafter.forward(drafter.embed_block(rows.token_ids_N), rows, self._context)
            return rows, *self._choose(hidden_NH, rows, self._requests.cu_rows_R1)
        requests = self._requests.sampling_anchors()
        block = lay_out_block(requests, tables, mask_id)
        hidden_NH = drafter.forward(drafter.embed_block(block.token_ids_N), block, self._context)
        chosen_N, margins_N = self._choose(hidden_NH, block.at_next_positions(), requests.cu_rows_R1)
        return rows, self._requests.at_masks(chosen_N), self._requests.at_masks(margins_N)

    def _choose(self, hidden_NH: Tensor, rows: DeviceStepRows, cu_rows_R1: Tensor) -> tuple[Tensor, Tensor]:
        """Return a draft and margin per row, equal on all ranks.

        Args:
            rows: with the positions of the tokens that they sample.
        """
        drafter = self._drafter
        if drafter.selector is not None:
            return self._select(drafter.selector, hidden_NH, rows, cu_rows_R1)
        if self._trees is not None:
            found = self._candidates(hidden_NH, rows, drafter.config.num_candidates[1])
            margins_N = self._grow(self._trees, found, rows, cu_rows_R1)
            if drafter.confidence_head is None:
                return found.ids_NK[:, 0], margins_N  # nothing reads them beside trees
            chosen_N = found.ids_NK.gather(1, found.scores_NK.argmax(1, keepdim=True)).squeeze(1)
            return chosen_N, drafter.sharpen(margins_N, hidden_NH, chosen_N, rows)
        head_inputs = (hidden_NH, rows.slots_N, rows.positions_N)
        how = {"filters": self._filters, "margins_N": self._margins_N}
        chosen_N, margins_N = choose_drafts(self._memory, drafter, *head_inputs, **how)
        return chosen_N, drafter.sharpen(margins_N, hidden_NH, chosen_N, rows)

    def _select(
        self, selector: Selector, hidden_NH: Tensor, rows: DeviceStepRows, cu_rows_R1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return a draft and margin per row, chosen along each request's path, equal on all ranks."""
        drafter, state, communicator = self._drafter, self._memory.states.sampling, self._memory.communicator
        found = self._candidates(hidden_NH, rows, selector.codebooks.top_k)
        gates_NE = selector.gates(hidden_NH)
        if self._trees is not None:
            self._grow(self._trees, found, rows, cu_rows_R1, gates_NE)
        margins_N = self._margins_N.zero_()
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

    def _candidates(self, hidden_NH: Tensor, rows: DeviceStepRows, count: int) -> Candidates:
        """Return the best tokens of each row. With a split head each rank finds some in its part."""
        drafter, memory, first_id = self._drafter, self._memory, 0
        is_split = drafter.is_split and not self._filters
        if is_split:
            logits, first_id = drafter.local_logits(hidden_NH)
        else:
            logits = drafter.logits(hidden_NH)
        found = find_candidates(
            logits,
            rows,
            memory.states.sampling,
            count,
            filters=self._filters,
            workspace=memory.workspace,
            vocab_start=first_id,
        )
        return candidates_of_ranks(found, count, memory.communicator) if is_split else found

    def _grow(
        self,
        step: StepTrees,
        found: Candidates,
        rows: DeviceStepRows,
        cu_rows_R1: Tensor,
        gates_NE: Tensor | None = None,
    ) -> Tensor:
        """Grow trees, equal on all ranks; return margins [N] of drafts that have no selector."""
        drafter, memory, distance = self._drafter, self._memory, self._drafter.anchor_distance
        codebooks = None if drafter.selector is None else drafter.selector.codebooks
        blocks = (rows, cu_rows_R1, self._requests.max_rows, memory.states.sampling)
        scores_NPC = tree_scores(
            found,
            gates_NE,
            *blocks,
            codebooks,
            filters=self._filters,
            floors_N=memory.workspace.filters.floor_N,
            margins_N=self._margins_N,
            anchor_distance=distance,
        )
        children = likely_children(scores_NPC, cu_rows_R1, self._requests.max_rows, step.trim, distance)
        grown_from = (found.ids_NK, cu_rows_R1, step.max_nodes_R, step.trim.factors_T)
        grow_trees(*children, *grown_from, step.trees, distance)
        step.keep(found.ids_NK, scores_NPC, memory.communicator)
        return self._margins_N
