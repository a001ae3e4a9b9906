"""Grows the draft trees of a step, and chooses how many of their nodes are verified.

`cluster/speculation/draft_tree.py` grows a request's tree from its block's candidates. A request that may not
branch (`SlotSampling.allows_tree`) gets the chain of its drafts as a tree, as grammars edited it. Nodes of
all requests compete for the step's rows, as the drafts of chains do. Called by
`actors/targets/runners/cpu_runner.py`.

Legend: R requests, K most drafts of a chain, M most nodes, D positions of a block, P candidates before, C
candidates.
"""

from __future__ import annotations

import numpy as np

from ....cluster.speculation.draft_tree import AcceptanceCurve, TreeNodes, candidate_chances, grow_tree
from ....cluster.speculation.draft_trimming import prefixes_to_verify, survivals
from ....cluster.step.scheduler_output import BoolArray, SchedulerOutput, Trim
from ..inputs.draft_trees import DraftTrees, Ints
from ..inputs.proposals import Proposals


def grow_trees(plan: SchedulerOutput, proposals: Proposals, allows_tree_R: BoolArray) -> DraftTrees:
    """Return the trees to verify, of at most `plan.num_drafts` nodes for each request.

    Args:
        plan: with a shape of trees.
        proposals: with candidates and margins.
    """
    candidates, shape = proposals.candidates, plan.tree
    assert candidates is not None and shape is not None, "trees need candidates and a shape"
    drafts_RK = proposals.drafts_RK.cpu().numpy()
    assert proposals.margins_RK is not None, "candidates have scores, so drafts have margins"
    ids_XC, scores_XPC = candidates.ids_XC.cpu().numpy(), candidates.scores_XPC.cpu().numpy()
    counts_R = candidates.counts_R.cpu().numpy()
    ends_R, trim = np.cumsum(counts_R), plan.trim
    made_R = np.cumprod(drafts_RK >= 0, axis=1, dtype=np.int32).sum(axis=1, dtype=np.int32)
    made_R = np.minimum(made_R, plan.num_drafts)
    curve = _curve(trim, shape.depth)
    chains = _chain_trim(trim, plan.num_requests, shape.depth)
    chain_RK = survivals(proposals.margins_RK.cpu().numpy(), made_R, chains)
    size = (plan.num_requests, int(plan.num_drafts.max()))
    tokens_RM, parents_RM = np.full(size, -1, dtype=np.int64), np.tile(np.arange(size[1]), (size[0], 1))
    survivals_RM, chances_RM = np.zeros((2, *size), dtype=np.float32)
    ranks_RM = np.zeros(size, dtype=np.int64)
    num_nodes_R = made_R.copy()
    for r in np.flatnonzero(plan.num_drafts).tolist():
        if not allows_tree_R[r]:
            made = int(made_R[r])
            tokens_RM[r, :made], survivals_RM[r, :made] = drafts_RK[r, :made], chain_RK[r, :made]
            continue
        rows = slice(int(ends_R[r] - counts_R[r]), int(ends_R[r]))
        of_request = AcceptanceCurve(
            curve.bias_D[: counts_R[r]] + chains.bias_R[r], curve.slope_D[: counts_R[r]]
        )
        chances_DPC = candidate_chances(scores_XPC[rows], of_request, shape.factors)
        nodes = grow_tree(chances_DPC, int(plan.num_drafts[r]), shape.width, shape.factors[0])
        count = num_nodes_R[r] = len(nodes.parents)
        tokens_RM[r, :count] = _tokens(nodes, ids_XC[rows])
        parents_RM[r, :count], survivals_RM[r, :count] = nodes.parents, nodes.survivals
        ranks_RM[r, :count], chances_RM[r, :count] = nodes.ranks, nodes.chances
    trees = DraftTrees(tokens_RM, parents_RM, num_nodes_R, ranks_RM, chances_RM)
    if trim is None:
        return trees
    num_other_rows = plan.num_batched_tokens - plan.num_draft_tokens
    return trees.cut(prefixes_to_verify(survivals_RM, num_nodes_R, num_other_rows, trim))


def _tokens(nodes: TreeNodes, ids_DC: Ints) -> Ints:
    return ids_DC[np.array(nodes.depths, dtype=np.int64) - 1, np.array(nodes.candidates, dtype=np.int64)]


def _curve(trim: Trim | None, depth: int) -> AcceptanceCurve:
    if trim is None:
        return AcceptanceCurve.prior(depth)
    return AcceptanceCurve(trim.bias_K[:depth], trim.slope_K[:depth])


def _chain_trim(trim: Trim | None, num_requests: int, depth: int) -> Trim:
    if trim is not None:
        return trim
    (zeros_R, no_costs), prior = (
        (np.zeros(n, np.float32) for n in (num_requests, 0)),
        AcceptanceCurve.prior(depth),
    )
    return Trim(prior.bias_D, prior.slope_D, zeros_R, zeros_R, no_costs)
