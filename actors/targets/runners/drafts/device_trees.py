"""Draft trees in steps of a device: their memory, and what the host makes of them.

    [draft ─▶ candidates ─▶ trees]  ─▶  [trim ─▶ verify ─▶ accept a path ─▶ move its K/V]  ─▶ outcome ─▶ host
    (graph)                             (graph)

Each drafting step of such an engine has trees: a chain is one without branches. A drafter's pass leaves trees
in memory that the target's pass reads, and that is copied to the outcome. Called by `draft_pass.py`,
`step_passes.py`, `gpu_runner.py` and, for grammars, `grammar_masks.py`.

Legend: R requests, G requests of an iteration, M most nodes, N rows of blocks, P candidates before, C
candidates, L lists, E values of a tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .....cluster.speculation.draft_tree import Restriction, TreeSizes
from .....cluster.speculation.draft_trimming import tree_gain
from .....cluster.step.scheduler_output import IntArray, SchedulerOutput, TreeGain, TreeOutcome, TreeShape
from .....drafter.dflash.config import DrafterConfig
from .....drafter.step.gpu_triton.draft_trees import DeviceTrees
from .....drafter.step.gpu_triton.inputs.row_layout import DeviceStepRequests
from .....drafter.step.gpu_triton.verification import TrimLists
from .....drafter.step.inputs.draft_trees import AcceptedPaths, DraftTrees
from .....drafter.step.inputs.proposals import BlockCandidates, Proposals
from .....drafter.step.sampling.tree_growth import grow_trees
from ...model.tensor_parallel import Communicator

Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class StepTrees:
    """The trees of a pass's requests.

    Attributes:
        blocks: the requests with the rows of their blocks; `max_nodes_R`: int32.
        trim: the curves and factors by which trees grow.
        candidates: where those of all rows are kept, int64 [N, C] and fp32 [N, P, C]; None if no request can
            have a grammar.
    """

    trees: DeviceTrees
    blocks: DeviceStepRequests
    max_nodes_R: Tensor
    trim: TrimLists
    candidates: tuple[Tensor, Tensor] | None

    def keep(self, ids_NC: Tensor, scores_NPC: Tensor, communicator: Communicator) -> None:
        """Keep the trees of the first rank, and their candidates."""
        if communicator.world_size > 1:
            self.trees.values_RE.copy_(communicator.broadcast(self.trees.values_RE))
        if self.candidates is not None:
            for memory, values in zip(self.candidates, (ids_NC, scores_NPC), strict=True):
                memory[: len(values)].copy_(values)


@dataclass(frozen=True, slots=True)
class TreeMemory:
    """Memory of a rank's trees, at fixed addresses.

    Attributes:
        trees: of as many requests as run at once.
        decoding_LW, blocks_LW: lists of the decoding requests (`row_layout.pack`), with the rows of the
            target's pass and of their blocks.
        trim: see `StepTrees`.
        anchor_distance: see `DrafterConfig`.
        candidates: see `StepTrees`.
    """

    sizes: TreeSizes
    trees: DeviceTrees
    decoding_LW: Tensor
    blocks_LW: Tensor
    trim: TrimLists
    anchor_distance: int
    candidates: tuple[Tensor, Tensor] | None

    @classmethod
    def build(
        cls,
        sizes: TreeSizes,
        max_requests: int,
        lists: tuple[Tensor, Tensor],
        trim: TrimLists,
        config: DrafterConfig,
        num_kept: int,
    ) -> TreeMemory:
        """Allocate memory for the trees of `max_requests` requests.

        Args:
            lists: `decoding_LW` and `blocks_LW`.
            num_kept: rows of blocks with candidates that are kept.
        """
        device, (before, count) = lists[0].device, config.num_candidates
        candidates = None
        if num_kept:
            scores_NPC = torch.empty(num_kept, before, count, dtype=torch.float32, device=device)
            candidates = torch.empty(num_kept, count, dtype=torch.int64, device=device), scores_NPC
        trees = DeviceTrees.build(max_requests, sizes, device)
        return cls(sizes, trees, *lists, trim, config.anchor_distance, candidates)

    def of_requests(self, num_requests: int) -> StepTrees:
        """Return the trees of the first requests."""
        trees = DeviceTrees.views_of(self.trees.values_RE[:num_requests], self.sizes)
        decoding, blocks = (
            DeviceStepRequests.decoding(lists_LW, num_requests, width, 0)
            for lists_LW, width in (
                (self.decoding_LW, 1 + self.sizes.nodes),
                (self.blocks_LW, 1 + self.sizes.depth),
            )
        )
        return StepTrees(trees, blocks, decoding.num_drafts_R, self.trim, self.candidates)

    def regrow(
        self,
        plan: SchedulerOutput,
        requests_G: Indices,
        restrictions: Mapping[int, Restriction],
        communicator: Communicator,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Grow restricted trees again, on the host; return tokens and parents [G, M] of all.

        Args:
            requests_G: the decoding requests of the plan.
            restrictions: by index among these.
        """
        assert self.candidates is not None, "requests may have grammars"
        drafts_G = plan.block_drafts[requests_G].astype(np.int64)
        begin_G = np.cumsum(drafts_G + self.anchor_distance) - drafts_G
        counts_R = np.zeros(plan.num_requests, dtype=np.int64)
        counts_R[requests_G[list(restrictions)]] = drafts_G[list(restrictions)]
        rows = np.concatenate([begin_G[g] + np.arange(drafts_G[g]) for g in restrictions])
        if len(rows):
            rows_X = torch.from_numpy(rows).to(self.candidates[0].device)
            ids_XC, scores_XPC = (values.index_select(0, rows_X) for values in self.candidates)
            found = BlockCandidates(ids_XC, scores_XPC, torch.from_numpy(counts_R))
            of_plan = {int(requests_G[g]): restriction for g, restriction in restrictions.items()}
            # Nothing is trimmed yet, as nodes of other requests count, too. A chain is a tree of width 1.
            trim = plan.trim and replace(plan.trim, num_rows=plan.num_batched_tokens)
            shape = plan.tree or TreeShape(self.sizes.depth, 1, (1.0,))
            proposals = replace(Proposals.none(plan.num_requests, "cpu"), candidates=(found,))
            grown, _ = grow_trees(replace(plan, trim=trim, tree=shape), proposals, of_plan)
            for g in restrictions:
                self._write(g, grown, int(requests_G[g]))
        values_GE = self.trees.values_RE[: len(requests_G)]
        if communicator.world_size > 1:
            values_GE.copy_(communicator.broadcast(values_GE))
        found = DeviceTrees.views_of(values_GE.cpu(), self.sizes)
        return found.tokens_RM.long().numpy(), found.parents_RM.long().numpy()

    def _write(self, place: int, grown: DraftTrees, request: int) -> None:
        count, most = int(grown.num_nodes_R[request]), self.sizes.nodes
        values_E = np.zeros(self.trees.values_RE.shape[1], dtype=np.int32)
        tokens, parents, ranks, survivals = values_E[: 4 * most].reshape(4, most)
        tokens[:], parents[:] = -1, np.arange(most)
        nodes = slice(count)
        tokens[nodes], parents[nodes] = grown.tokens_RM[request, nodes], grown.parents_RM[request, nodes]
        ranks[nodes] = grown.ranks_RM[request, nodes]
        survivals[nodes] = grown.survivals()[request, nodes].view(np.int32)
        values_E[4 * most] = count
        self.trees.values_RE[place].copy_(torch.from_numpy(values_E))

    def results(
        self,
        plan: SchedulerOutput,
        requests_G: Indices,
        values_GE: Tensor,
        num_drafts_R: IntArray,
        token_ids_RW: IntArray,
        num_tokens_R: IntArray,
    ) -> tuple[TreeOutcome | None, TreeGain | None]:
        """Return what the trees of a step, copied to the host, teach; None if all drafts were chains.

        Args:
            num_drafts_R: verified nodes.
            token_ids_RW, num_tokens_R: as of `StepResult`.
        """
        if plan.tree is None:
            return None, None
        found = DeviceTrees.views_of(values_GE, self.sizes)
        trees = DraftTrees.empty(plan.num_requests, self.sizes.nodes)
        survivals_RM = np.zeros(trees.tokens_RM.shape, dtype=np.float32)
        for mine, theirs in (
            (trees.tokens_RM, found.tokens_RM),
            (trees.parents_RM, found.parents_RM),
            (trees.ranks_RM, found.ranks_RM),
            (survivals_RM, found.survivals_RM),
            (trees.num_nodes_R, found.num_nodes_R),
        ):
            mine[requests_G] = theirs.numpy()
        of_parents_RM = np.take_along_axis(
            np.pad(survivals_RM, ((0, 0), (1, 0)), constant_values=1), trees.parents_RM, axis=1
        )
        np.divide(survivals_RM, of_parents_RM, out=trees.chances_RM, where=survivals_RM > 0)
        gain = None
        if plan.trim is not None:  # the device's growth is a part of drafting
            num_other_rows = plan.num_batched_tokens - plan.num_draft_tokens
            gain = tree_gain(survivals_RM, trees.main_nodes(), num_other_rows, plan.trim, grow_s=0.0)
        verified = trees.cut(num_drafts_R)
        if not verified.branches().any():
            return None, gain
        rows_RW = np.full((plan.num_requests, self.sizes.depth + 1), -1, dtype=np.int64)
        rows_RW[requests_G] = found.paths_RD.numpy()
        paths = AcceptedPaths(token_ids_RW.astype(np.int64), rows_RW, num_tokens_R.astype(np.int64))
        return verified.outcome(paths, plan.tree.width), gain
