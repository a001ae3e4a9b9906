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

A grammar restricts the children of a node: disallowed candidates are skipped, so that others rank higher, and
a token that it forces is an only child (`drafter/grammars/tree_walks.py`).

A chain that is copied from earlier text can be a second source of tokens (`CopiedChain`). While both sources
agree they share nodes; where they differ, the tree forks.

Legend: D positions of a block, P candidates of the position before (or 1, if scores do not depend on it), C
candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .acceptance_model import PRIOR_BIAS, PRIOR_SLOPE
from .draft_trimming import MAX_MARGIN, Floats

# Not tuned: `tree_policy.BranchModel` learns factors of these chances while the engine runs.
_NOT_CANDIDATES = 2.0  # weight of all other tokens, in units of the least candidate's
_MAX_SHARE = 0.99  # of the best candidate's chance: keeps it the best
_LEAST_REST = 1e-6  # chance of all candidates but the best, as a divisor


class AcceptanceCurve(NamedTuple):
    """The chance that the best candidate is accepted, by position: see `Trim`; fp32 [D]."""

    bias_D: Floats
    slope_D: Floats

    @classmethod
    def prior(cls, depth: int) -> AcceptanceCurve:
        """Return the curve of a drafter that nothing is known about."""
        return cls(np.full(depth, PRIOR_BIAS, np.float32), np.full(depth, PRIOR_SLOPE, np.float32))


class TreeSizes(NamedTuple):
    """The largest trees of an engine: most drafts of a path, most children of a node, most nodes."""

    depth: int
    width: int
    nodes: int


class TreeNodes(NamedTuple):
    """The nodes of a tree, in the order of growth.

    Attributes:
        parents: row of each node's parent; row 0 is the root, node i is row i + 1.
        tokens: token ids.
        survivals: estimated probability that a node is accepted; never increases.
        chances: the same, given that the parent is accepted.
        ranks: by chance among the candidates after the parent, from 0 to width - 1. Of two sources, 0 is
            the one of the main path and `width` the other's best. The *main path* are the nodes of rank 0
            from the root on.
    """

    parents: list[int]
    tokens: list[int]
    survivals: list[float]
    chances: list[float]
    ranks: list[int]


class Child(NamedTuple):
    """A possible child of a node.

    Attributes:
        place: its index among the candidates of its position; None if it is none.
        is_best: whether it continues a path of best candidates.
    """

    chance: float
    rank: int
    token: int
    place: int | None
    is_best: bool = True


# Where a node's children are: their depth; the candidate before them, or None if it is none, so that there
# are no scores after it; whether the node is on the path of best candidates, and on a copied chain.
_Place = tuple[int, int | None, bool, bool]


class CopiedChain(NamedTuple):
    """Tokens copied from earlier text, as a source of nodes besides a block's candidates.

    Attributes:
        tokens, chances: by depth; the chance that each is accepted, given those before it.
        is_main: whether they are the main path, instead of the best candidates.
        factor: of the chance of the source off the main path where the sources differ (`TreeShape.fork`).
    """

    tokens: Sequence[int]
    chances: Sequence[float]
    is_main: bool
    factor: float = 1.0

    def join(self, found: list[Child], copied: Child, width: int, *, on_best: bool) -> list[Child]:
        """Return the children of a node on this chain's path, best first.

        The source of the main path keeps its chance, the other one gets a part of the rest, and all other
        candidates share what remains.

        Args:
            found: its candidates, best first.
            copied: this chain's next token.
            on_best: whether the node is on the path of best candidates.
        """
        if not found:
            return [copied._replace(rank=0 if self.is_main else width)]
        best, others = found[0], [child for child in found[1:] if child.token != copied.token]
        if best.token == copied.token:
            rank = 0 if self.is_main or on_best else width
            ahead = [best._replace(chance=max(best.chance, copied.chance), rank=rank)]
        else:
            ahead = [copied, best] if self.is_main or not on_best else [best, copied]
            first = ahead[0].chance
            second = min((1 - first) * min(ahead[1].chance * self.factor, 1), _MAX_SHARE * first)
            ranks = (0, width) if self.is_main or on_best else (width, 0)
            ahead = [ahead[0]._replace(rank=ranks[0]), ahead[1]._replace(chance=second, rank=ranks[1])]
        share = (1 - sum(child.chance for child in ahead)) / max(1 - best.chance, _LEAST_REST)
        children = ahead + [child._replace(chance=child.chance * share) for child in others]
        return sorted((child for child in children if child.chance > 0), key=lambda child: -child.chance)


# Maps a tree so far, the newest row and all of its possible children, best first, to those that it may have.
Restriction = Callable[[TreeNodes, list[Child]], list[Child]]


def candidate_chances(
    scores_DPC: Floats, curve: AcceptanceCurve, factors: Sequence[float] = (1.0,)
) -> Floats:
    """Return the chance of each candidate, given the one before it, fp32 [D, P, C].

    Args:
        scores_DPC: scores with noise; -inf where a token is impossible. At least two candidates.
        factors: see `TreeShape`; other candidates have the last one's.
    """
    top_DP1 = scores_DPC.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):  # -inf - -inf where no token is possible
        gaps_DPC = np.minimum(top_DP1 - scores_DPC, MAX_MARGIN)
    gaps_DPC = np.where(np.isnan(gaps_DPC), MAX_MARGIN, gaps_DPC)
    is_best_DPC = np.zeros(gaps_DPC.shape, dtype=np.bool_)
    np.put_along_axis(is_best_DPC, gaps_DPC.argmin(axis=-1, keepdims=True), np.True_, axis=-1)
    margins_DP = np.where(is_best_DPC, MAX_MARGIN, gaps_DPC).min(axis=-1)
    logits_DP = curve.bias_D[:, None] + curve.slope_D[:, None] * np.log1p(margins_DP)
    best_DP1: Floats = (1 / (1 + np.exp(-logits_DP)))[..., None]
    # Relative to the second best: weights of candidates far behind the best would vanish.
    weights_DPC = np.where(is_best_DPC, 0, np.exp(np.minimum(margins_DP[..., None] - gaps_DPC, 0)))
    least_DP1 = np.where(is_best_DPC, np.inf, weights_DPC).min(axis=-1, keepdims=True)
    total_DP1 = weights_DPC.sum(axis=-1, keepdims=True) + _NOT_CANDIDATES * least_DP1
    others_DPC = (1 - best_DP1) * weights_DPC / total_DP1
    if len(factors) > 1:
        ranks_DPC = np.argsort(np.argsort(gaps_DPC, axis=-1, kind="stable"), axis=-1, kind="stable")
        others_DPC = others_DPC * np.array(factors, np.float32)[np.minimum(ranks_DPC, len(factors) - 1)]
    others_DPC = np.minimum(others_DPC, _MAX_SHARE * best_DP1)
    chances_DPC: Floats = np.where(is_best_DPC, best_DP1, others_DPC)
    return np.where(gaps_DPC >= MAX_MARGIN, 0, chances_DPC).astype(np.float32)


def grow_tree(
    chances_DPC: Floats,
    ids_DC: NDArray[np.int64],
    max_nodes: int,
    width: int,
    off_main: float = 1.0,
    restrict: Restriction | None = None,
    copy: CopiedChain | None = None,
) -> TreeNodes:
    """Return the tree of at most `max_nodes` nodes with the largest sum of survivals.

    Args:
        chances_DPC: result of `candidate_chances`; D = 0 without a block.
        ids_DC: token ids of the candidates.
        width: most children of a node.
        off_main: factor of the chances of candidates after another one than the best.
        restrict: called once for the root, and for each node when it is added.
        copy: a second source of nodes.
    """
    depth, num_before, num_candidates = chances_DPC.shape
    order_DPC = np.argsort(-chances_DPC, axis=-1, kind="stable")[..., : num_candidates if restrict else width]
    falling: list[list[list[float]]] = np.take_along_axis(chances_DPC, order_DPC, axis=-1).tolist()
    ranked: list[list[list[int]]] = order_DPC.tolist()
    ids: list[list[int]] = ids_DC.tolist()
    nodes, off_main = TreeNodes([], [], [], [], []), min(off_main, 1.0)
    tokens = () if copy is None else copy.tokens

    best_rank = width if copy is not None and copy.is_main else 0
    known: dict[_Place, list[Child]] = {}

    def candidates(at: _Place) -> list[Child]:
        d, before, on_best, on_copy = at
        found, factor = list[Child](), 1.0 if on_best else off_main
        if d < depth and before is not None:
            pairs = zip(falling[d][before], ranked[d][before], strict=True)
            found = [
                Child(factor * chance, min(rank, width - 1) or best_rank, ids[d][place], place, rank == 0)
                for rank, (chance, place) in enumerate(pairs)
                if chance
            ]
        if copy is not None and on_copy:
            token = tokens[d]
            place = ids[d].index(token) if d < depth and token in ids[d] else None
            copied = Child(copy.chances[d], 0, token, place, is_best=False)
            found = copy.join(found, copied, width, on_best=on_best)
        return found if restrict is not None else found[:width]

    def children(at: _Place) -> list[Child]:
        if (found := known.get(at)) is None:
            found = known[at] = candidates(at)
        return found if restrict is None else restrict(nodes, found)[:width]

    # (-survival, parent, index among its children, children, survival of the parent, its place)
    heap: list[tuple[float, int, int, list[Child], float, _Place]] = []
    root, max_depth = (0, 0, True, len(tokens) > 0), max(depth, len(tokens))
    if max_nodes and (first := children(root)):
        heap.append((-first[0].chance, 0, 0, first, 1.0, root))
    for row in range(1, max_nodes + 1):
        if not heap:
            break
        negative, parent, index, siblings, of_parent, at = heappop(heap)
        chance, rank, token, place, is_best = siblings[index]
        nodes.parents.append(parent)
        nodes.tokens.append(token)
        nodes.survivals.append(-negative)
        nodes.chances.append(chance)
        nodes.ranks.append(rank)
        if index + 1 < len(siblings):
            survival = of_parent * siblings[index + 1].chance
            heappush(heap, (-survival, parent, index + 1, siblings, of_parent, at))
        d, _, on_best, on_copy = at
        if d + 1 < max_depth:
            on_copy = on_copy and tokens[d] == token and d + 1 < len(tokens)
            below = (d + 1, place if num_before > 1 else 0, on_best and is_best, on_copy)
            if after := children(below):
                heappush(heap, (negative * after[0].chance, row, 0, after, -negative, below))
    return nodes


def depth_and_width(parents: Sequence[int]) -> tuple[int, int]:
    """Return the length of the longest path, and the most nodes of one depth; 0 and 0 for a chain.

    `parents` are those of `TreeNodes`.
    """
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    width = int(np.bincount(depths).max())
    return (max(depths), width) if width > 1 else (0, 0)
