"""Grows the draft trees of a step, and chooses how many of their nodes are verified.

`cluster/speculation/draft_tree.py` grows a request's tree from its block's candidates. Nodes of all requests
compete for the step's rows, as the drafts of chains do. Called by `actors/targets/runners/cpu_runner.py`.

Legend: R requests, M most nodes, D positions of a block, P candidates before, C candidates, X rows of blocks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from ....cluster.speculation.draft_tree import AcceptanceCurve, Restriction, candidate_chances, grow_tree
from ....cluster.speculation.draft_trimming import prefixes_to_verify, tree_gain
from ....cluster.step.scheduler_output import SchedulerOutput, TreeGain
from ..inputs.draft_trees import DraftTrees
from ..inputs.proposals import BlockCandidates


def grow_trees(
    plan: SchedulerOutput, candidates: BlockCandidates, restrictions: Mapping[int, Restriction]
) -> tuple[DraftTrees, TreeGain | None]:
    """Return the trees to verify, of at most `plan.num_drafts` nodes for each request, and their gain.

    Args:
        plan: with a shape of trees.
        restrictions: of requests with grammars, by their index in the plan.
    """
    begin_s, shape, trim = time.perf_counter(), plan.tree, plan.trim
    assert shape is not None, "the plan has trees"
    ids_XC, scores_XPC = candidates.ids_XC.cpu().numpy(), candidates.scores_XPC.cpu().numpy()
    counts_R = candidates.counts_R.cpu().numpy()
    ends_R = np.cumsum(counts_R)
    curve, bias_R = AcceptanceCurve.prior(shape.depth), np.zeros(plan.num_requests, dtype=np.float32)
    if trim is not None:
        curve, bias_R = AcceptanceCurve(trim.bias_K, trim.slope_K), trim.bias_R
    trees = DraftTrees.empty(plan.num_requests, int(plan.num_drafts.max()))
    survivals_RM = np.zeros(trees.tokens_RM.shape, dtype=np.float32)
    for r in np.flatnonzero(plan.num_drafts).tolist():
        count, rows = counts_R[r], slice(int(ends_R[r] - counts_R[r]), int(ends_R[r]))
        of_request = AcceptanceCurve(curve.bias_D[:count] + bias_R[r], curve.slope_D[:count])
        chances_DPC = candidate_chances(scores_XPC[rows], of_request, shape.factors)
        limits = (int(plan.num_drafts[r]), shape.width, shape.factors[0])
        nodes = grow_tree(chances_DPC, ids_XC[rows], *limits, restrictions.get(r))
        trees.write(r, nodes)
        survivals_RM[r, : len(nodes.parents)] = nodes.survivals
    if trim is None:
        return trees, None
    num_other_rows, gain = plan.num_batched_tokens - plan.num_draft_tokens, None
    grow_s = time.perf_counter() - begin_s
    if trim.rate > 0.0:
        worth = tree_gain(survivals_RM, trees.main_nodes(), num_other_rows, trim)
        gain = TreeGain(worth, grow_s)
    return trees.cut(prefixes_to_verify(survivals_RM, trees.num_nodes_R, num_other_rows, trim)), gain
