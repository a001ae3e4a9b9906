"""Grows draft trees: which candidates of a block are verified, by the chance that their path is accepted.

A drafter proposes several candidates for each position of its block. Scores contain the noise under which the
target will choose, so at every temperature the candidates are ranked as the target would rank them with the
drafter's logits. Of a row's candidates, given the one before it,

    chance     of the best: as for a chain (`draft_trimming.py`), from the margin to the second best
               of another: (1 - chance of the best) x share; shares fall with the score, exp(-gap / scale),
               and leave a rest for tokens that are no candidates
    survival   of a node: product of the chances from the root to it

The tree is grown best first, so its first n nodes are the best tree of n nodes, and a parent precedes its
children. A chain is a tree of width one. No token depends on the tree: the target's choice at a node uses the
noise of the node's position alone. Called by `drafter/step/sampling/tree_growth.py`.

Legend: D positions of a block, P candidates of the position before (or 1, if scores do not depend on it), C
candidates, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .acceptance_model import PRIOR_BIAS, PRIOR_SLOPE
from .draft_trimming import MAX_MARGIN, Floats

_SCALE = 1.0  # logits
_NOT_CANDIDATES = 2.0  # weight of all other tokens, in units of the least candidate's
_MAX_SHARE = 0.99  # of the best candidate's chance: no other has a larger one


class AcceptanceCurve(NamedTuple):
    """The chance that the best candidate is accepted, by position: see `Trim`; fp32 [D]."""

    bias_D: Floats
    slope_D: Floats

    @classmethod
    def prior(cls, depth: int) -> AcceptanceCurve:
        """Return the curve of a drafter that nothing is known about."""
        return cls(np.full(depth, PRIOR_BIAS, np.float32), np.full(depth, PRIOR_SLOPE, np.float32))


class TreeNodes(NamedTuple):
    """The nodes of a tree, in the order of growth.

    Attributes:
        parents: row of each node's parent; row 0 is the root, node i is row i + 1.
        candidates: index of each node among the candidates of its position.
        depths: distance from the root, at least 1.
        survivals: estimated probability that a node is accepted; never increases.
        chances: the same, given that the parent is accepted.
        ranks: by chance among the children of the parent, from 0. The *main path* are the nodes of rank 0
            from the root on.
    """

    parents: list[int]
    candidates: list[int]
    depths: list[int]
    survivals: list[float]
    chances: list[float]
    ranks: list[int]


def candidate_chances(
    scores_DPC: Floats, curve: AcceptanceCurve, factors: Sequence[float] = (1.0,)
) -> Floats:
    """Return the chance of each candidate, given the one before it, fp32 [D, P, C].

    Args:
        scores_DPC: scores with noise; -inf where a token is impossible. At least two candidates.
        factors: see `TreeShape`; other candidates have the last one's.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # -inf - -inf where no token is possible
        gaps_DPC = np.minimum(scores_DPC.max(axis=-1, keepdims=True) - scores_DPC, MAX_MARGIN)
    gaps_DPC = np.where(np.isnan(gaps_DPC), MAX_MARGIN, gaps_DPC)
    is_best_DPC = np.zeros(gaps_DPC.shape, dtype=np.bool_)
    np.put_along_axis(is_best_DPC, gaps_DPC.argmin(axis=-1, keepdims=True), np.True_, axis=-1)
    margins_DP = np.where(is_best_DPC, MAX_MARGIN, gaps_DPC).min(axis=-1)
    logits_DP = curve.bias_D[:, None] + curve.slope_D[:, None] * np.log1p(margins_DP)
    best_DP1: Floats = np.asarray(1 / (1 + np.exp(-logits_DP)), dtype=np.float32)[..., None]
    # Relative to the second best: weights of candidates far behind the best would vanish.
    weights_DPC = np.where(is_best_DPC, 0, np.exp(np.minimum(margins_DP[..., None] - gaps_DPC, 0) / _SCALE))
    least_DP1 = np.where(is_best_DPC, np.inf, weights_DPC).min(axis=-1, keepdims=True)
    total_DP1 = weights_DPC.sum(axis=-1, keepdims=True) + _NOT_CANDIDATES * least_DP1
    others_DPC = (1 - best_DP1) * weights_DPC / total_DP1
    if len(factors) > 1:
        ranks_DPC = np.argsort(np.argsort(gaps_DPC, axis=-1, kind="stable"), axis=-1, kind="stable")
        others_DPC = others_DPC * np.array(factors, np.float32)[np.minimum(ranks_DPC, len(factors) - 1)]
    others_DPC: Floats = np.asarray(np.minimum(others_DPC, _MAX_SHARE * best_DP1), dtype=np.float32)
    chances_DPC: Floats = np.where(is_best_DPC, best_DP1, others_DPC)
    return np.where(gaps_DPC >= MAX_MARGIN, 0, chances_DPC).astype(np.float32)


def grow_tree(chances_DPC: Floats, max_nodes: int, width: int, off_main: float = 1.0) -> TreeNodes:
    """Return the tree of at most `max_nodes` nodes with the largest sum of survivals.

    Args:
        chances_DPC: result of `candidate_chances`.
        width: most children of a node.
        off_main: factor of the chances of children of nodes off the main path.
    """
    depth, num_before, width = chances_DPC.shape[0], chances_DPC.shape[1], min(width, chances_DPC.shape[2])
    order: NDArray[np.int64] = np.argsort(-chances_DPC, axis=-1, kind="stable")[..., :width]
    falling = np.take_along_axis(chances_DPC, order, axis=-1).tolist()
    ranked: list[list[list[int]]] = order.tolist()
    nodes, off_main = TreeNodes([], [], [], [], [], []), min(off_main, 1.0)
    # (-survival, parent, depth, candidate before, rank, survival of the parent, factor of its children)
    heap: list[tuple[float, int, int, int, int, float, float]] = []
    if max_nodes and falling[0][0][0] > 0:
        heap.append((-falling[0][0][0], 0, 0, 0, 0, 1.0, 1.0))
    while heap and len(nodes.parents) < max_nodes:
        negative, parent, d, before, rank, of_parent, factor = heappop(heap)
        candidate, chances = ranked[d][before][rank], falling[d][before]
        nodes.parents.append(parent)
        nodes.candidates.append(candidate)
        nodes.depths.append(d + 1)
        nodes.survivals.append(-negative)
        nodes.chances.append(factor * chances[rank])
        nodes.ranks.append(rank)
        if rank + 1 < width and (chance := factor * chances[rank + 1]) > 0:
            heappush(heap, (-of_parent * chance, parent, d, before, rank + 1, of_parent, factor))
        if d + 1 < depth:
            below = factor if rank == 0 else off_main
            place = candidate if num_before > 1 else 0
            if (chance := below * falling[d + 1][place][0]) > 0:
                heappush(heap, (negative * chance, len(nodes.parents), d + 1, place, 0, -negative, below))
    return nodes
