"""Simulated draft trees: the nodes of each request's tree, and which of them the target accepts.

At a node of the main path the best candidate is accepted with the chance p of a simulated chain's draft, and
candidate j after it with (1 - p) x SHARES[j - 1]; off the main path all chances are multiplied by OFF_MAIN.
Trees are grown by `speculation/draft_tree.py` from these chances, so they are as good as possible. Used by
`simulated_executor.py` only.

Legend: R requests, K most drafts on a path, M most nodes, C candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..speculation.draft_tree import TreeNodes, depth_and_width, grow_tree
from ..speculation.draft_trimming import prefixes_to_verify, tree_gain
from ..step.scheduler_output import IntArray, SchedulerOutput, TreeGain, TreeOutcome

# Of the shipped pair's trees of 63 nodes on 16 prompts: 0.40, 0.09, 0.02 and 0.56 at temperature 0; 0.32,
# 0.15, 0.09 and 0.61 at 1.
SHARES, OFF_MAIN = (0.36, 0.12, 0.05), 0.6

Doubles = NDArray[np.float64]


class SimulatedTrees(NamedTuple):
    """Results of a step's trees.

    Attributes:
        num_verified_R, num_accepted_R: nodes, int32.
        grow_s: seconds to grow them.
        gain: as in `StepResult.tree_gain`.
    """

    num_verified_R: IntArray
    num_accepted_R: IntArray
    outcome: TreeOutcome
    grow_s: float
    gain: TreeGain | None


def simulate_trees(
    plan: SchedulerOutput, chances_RK: Doubles, uniforms_RK: Doubles, grow_s: float
) -> SimulatedTrees:
    """Grow, trim and verify the trees of a step.

    Args:
        plan: with a shape of trees.
        chances_RK, uniforms_RK: of each depth, the chance of the best candidate, and the target's noise.
        grow_s: seconds to grow the tree of a request.
    """
    assert plan.tree is not None, "the plan has trees"
    width, size = plan.tree.width, (plan.num_requests, int(plan.num_drafts.max()))
    shares_C = np.array([1.0, *SHARES[: width - 1]])
    survivals_RM, is_main_RM = np.zeros(size, dtype=np.float32), np.zeros(size, dtype=np.bool_)
    grown = list[TreeNodes]()
    for r, (count, depth) in enumerate(
        zip(plan.num_drafts.tolist(), plan.block_drafts.tolist(), strict=True)
    ):
        chances_D1C = np.multiply.outer(1.0 - chances_RK[r, :depth], shares_C)[:, None]
        chances_D1C[:, 0, 0] = chances_RK[r, :depth]
        chances_D1C[:, 0] = np.minimum(chances_D1C[:, 0], chances_D1C[:, 0, :1])
        ids_DC = np.tile(np.arange(len(shares_C)), (depth, 1))
        nodes = grow_tree(chances_D1C.astype(np.float32), ids_DC, count, width, OFF_MAIN)
        survivals_RM[r, : len(nodes.parents)] = nodes.survivals
        is_main_RM[r, : len(nodes.parents)] = _main_nodes(nodes)
        grown.append(nodes)
    num_nodes_R = np.array([len(nodes.parents) for nodes in grown], dtype=np.int32)
    grow_s *= int(np.count_nonzero(plan.num_drafts))
    gain, num_other_rows = None, plan.num_batched_tokens - plan.num_draft_tokens
    if plan.trim is not None:
        gain = tree_gain(survivals_RM, is_main_RM, num_other_rows, plan.trim, grow_s)
        num_nodes_R = prefixes_to_verify(survivals_RM, num_nodes_R, num_other_rows, plan.trim)
    is_real_RM = np.arange(size[1]) < num_nodes_R[:, None]
    paths = [
        _accepted_path(nodes, int(count), chances_RK[r], uniforms_RK[r])
        for r, (nodes, count) in enumerate(zip(grown, num_nodes_R, strict=True))
    ]
    num_main_R = [int(is_main_RM[r, path].sum()) for r, path in enumerate(paths)]
    ranks_RW = np.full((size[0], plan.tree.depth), -1, dtype=np.int32)
    for r, path in enumerate(paths):
        ranks_RW[r, : len(path)] = [grown[r].ranks[node] for node in path]
    nothing_F = np.zeros(width + 1, dtype=np.float32)
    sizes = [depth_and_width(nodes.parents[: int(n)]) for nodes, n in zip(grown, num_nodes_R, strict=True)]
    depths_R, widths_R = np.array(sizes, dtype=np.int32).T
    return SimulatedTrees(
        num_nodes_R,
        np.array([len(path) for path in paths], dtype=np.int32),
        TreeOutcome(
            (is_main_RM & is_real_RM).sum(axis=1, dtype=np.int32),
            np.array(num_main_R, dtype=np.int32),
            ranks_RW,
            nothing_F,
            nothing_F,
            depths_R,
            widths_R,
        ),
        grow_s,
        gain,
    )


def _main_nodes(nodes: TreeNodes) -> list[bool]:
    is_main = [True]
    for parent, rank in zip(nodes.parents, nodes.ranks, strict=True):
        is_main.append(is_main[parent] and rank == 0)
    return is_main[1:]


def _accepted_path(nodes: TreeNodes, count: int, chances_K: Doubles, uniforms_K: Doubles) -> list[int]:
    """Return the accepted ones of a tree's first nodes."""
    path, row, is_main = list[int](), 0, True
    for node in range(count):
        if nodes.parents[node] != row:
            continue
        chance, uniform = chances_K[len(path)], uniforms_K[len(path)] / (1.0 if is_main else OFF_MAIN)
        ends = chance + (1.0 - chance) * np.cumsum((0.0, *SHARES))
        if nodes.ranks[node] == np.searchsorted(ends, uniform, side="right"):
            is_main = is_main and nodes.ranks[node] == 0
            path.append(node)
            row = node + 1
    return path
