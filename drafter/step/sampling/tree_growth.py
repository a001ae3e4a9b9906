"""Grows the draft trees of a step, and chooses how many of their nodes are verified.

`cluster/speculation/draft_tree.py` grows a request's tree from its block's candidates. Nodes of all requests
compete for the step's rows, as the drafts of chains do. Called by `actors/targets/runners/cpu_runner.py`.

Legend: R requests, M most nodes, D positions of a block, P candidates before, C candidates, X rows of blocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from ....cluster.speculation.draft_tree import (
    AcceptanceCurve,
    CopiedChain,
    Restriction,
    candidate_chances,
    grow_tree,
)
from ....cluster.speculation.draft_trimming import Floats, prefixes_to_verify, tree_gain
from ....cluster.step.scheduler_output import SchedulerOutput, TreeGain
from ..inputs.draft_trees import DraftTrees
from ..inputs.proposals import Proposals


def grow_trees(
    plan: SchedulerOutput, proposals: Proposals, restrictions: Mapping[int, Restriction]
) -> tuple[DraftTrees, TreeGain | None]:
    """Return the trees to verify, of at most `plan.num_drafts` nodes for each request, and their gain.

    Args:
        plan: with a shape of trees.
        proposals: with the candidates of several drafters, if each drafts for some of the requests, or with
            copies.
        restrictions: of requests with grammars, by their index in the plan.
    """
    begin_s, shape, trim = time.perf_counter(), plan.tree, plan.trim
    assert shape is not None, "the plan has trees"
    curve, bias_R = AcceptanceCurve.prior(shape.depth), np.zeros(plan.num_requests, dtype=np.float32)
    if trim is not None:
        curve, bias_R = AcceptanceCurve(trim.bias_K, trim.slope_K), trim.bias_R
    trees = DraftTrees.empty(plan.num_requests, int(plan.num_drafts.max()))
    survivals_RM = np.zeros(trees.tokens_RM.shape, dtype=np.float32)
    for r, ids_DC, scores_DPC in _blocks(proposals, plan):
        depth = len(ids_DC)
        of_request = AcceptanceCurve(curve.bias_D[:depth] + bias_R[r], curve.slope_D[:depth])
        chances_DPC = candidate_chances(scores_DPC, of_request, shape.factors) if depth else scores_DPC
        limits = (int(plan.num_drafts[r]), shape.width, shape.factors[0])
        copy = _copied_chain(proposals, r, shape.fork)
        nodes = grow_tree(chances_DPC, ids_DC, *limits, restrictions.get(r), copy)
        trees.write(r, nodes)
        survivals_RM[r, : len(nodes.parents)] = nodes.survivals
    if trim is None:
        return trees, None
    num_other_rows = plan.num_batched_tokens - plan.num_draft_tokens
    grow_s = time.perf_counter() - begin_s
    gain = tree_gain(survivals_RM, trees.main_nodes(), num_other_rows, trim, grow_s)
    return trees.cut(prefixes_to_verify(survivals_RM, trees.num_nodes_R, num_other_rows, trim)), gain


def _copied_chain(proposals: Proposals, r: int, factor: float) -> CopiedChain | None:
    """Return what is copied for a request; None if nothing is."""
    copies, is_copied_R = proposals.copies, proposals.is_copied_R
    if copies is None or is_copied_R is None or not (count := int((copies.tokens_RK[r] >= 0).sum())):
        return None
    tokens, chances = copies.tokens_RK[r, :count].tolist(), copies.chances_RK[r, :count].tolist()
    return CopiedChain(tokens, chances, bool(is_copied_R[r]), factor)


def _blocks(proposals: Proposals, plan: SchedulerOutput) -> Iterator[tuple[int, NDArray[np.int64], Floats]]:
    """Yield each request that drafts, with its candidates [D, C] and their scores [D, P, C].

    D = 0 where the drafter's pass was left out, since copies are all that is drafted.
    """
    for candidates in proposals.candidates:
        ids_XC, scores_XPC = candidates.ids_XC.cpu().numpy(), candidates.scores_XPC.cpu().numpy()
        begin = 0
        for r, count in enumerate(candidates.counts_R.tolist()):
            if count:
                yield r, ids_XC[begin : begin + count], scores_XPC[begin : begin + count]
            begin += count
    if proposals.is_pass_skipped:
        for r in np.flatnonzero(plan.num_drafts).tolist():
            yield r, np.zeros((0, 1), dtype=np.int64), np.zeros((0, 1, 1), dtype=np.float32)
