"""Draft trees on a GPU: their growth from a block's candidates.

Triton version of `cluster/speculation/draft_tree.py`. The host reads nothing and grids follow from shapes, so
all of it can be captured in a CUDA graph; a tree's shape is data. A chain is a tree with factors of 0 from
the second best candidate on. Called by `targets/runners/drafts/device_trees.py`; `tree_rows.py` verifies.

    candidates ─▶ scores [X, P, C] ─▶ chances, places [X, P, W] ─▶ nodes [R, M] ─▶ trimmed ─▶ paths [N, D]

The nodes are those of the host, but for near-ties: products of chances are fp32 here. Grammars restrict trees
on the host alone.

Legend: R requests, M most nodes, X rows of blocks (anchors' are not read unless they sample), P candidates
before (or 1), C candidates, W most children of a node, D most rows of a path, E values of a tree.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....cluster.speculation.draft_tree import TreeSizes
from ..sampling.selector import SelectorCodebooks
from .inputs.row_layout import DeviceStepRows
from .sampling.sampling_metadata import (
    DeviceSamplingMetadata,
    has_filters,
    read_filters,
    read_temperature,
)
from .sampling.selector import Candidates, best_and_margin, scores_after, with_noise
from .verification import TrimLists

_WARP = 32
# As in `cluster/speculation/draft_tree.py` and `draft_trimming.py`.
_MAX_MARGIN = tl.constexpr(1e6)
_NOT_CANDIDATES = tl.constexpr(2.0)
_MAX_SHARE = tl.constexpr(0.99)


@dataclass(frozen=True, slots=True)
class DeviceTrees:
    """Views of trees of requests, in values [R, E].

    Attributes:
        values_RE: int32, all of it.
        tokens_RM, parents_RM: int32, as in `DraftTrees`; tokens are -1 past the last node.
        ranks_RM: int32, ranks among siblings.
        survivals_RM: fp32, estimated probabilities of acceptance; 0 past the last node.
        num_nodes_R: int32.
        paths_RD: int32, rows of the accepted path from the anchor on, then -1; of requests that sample.
    """

    values_RE: Tensor
    tokens_RM: Tensor
    parents_RM: Tensor
    ranks_RM: Tensor
    survivals_RM: Tensor
    num_nodes_R: Tensor
    paths_RD: Tensor

    @staticmethod
    def num_values(sizes: TreeSizes) -> int:
        """E: of each node token, parent, rank and survival; the number of nodes; the accepted path's rows."""
        return 4 * sizes.nodes + 2 + sizes.depth

    @classmethod
    def views_of(cls, values_RE: Tensor, sizes: TreeSizes) -> DeviceTrees:
        m = sizes.nodes
        tokens, parents, ranks, survivals, count, paths = values_RE.split((m, m, m, m, 1, sizes.depth + 1), 1)
        return cls(values_RE, tokens, parents, ranks, survivals.view(torch.float32), count[:, 0], paths)

    @classmethod
    def build(cls, num_requests: int, sizes: TreeSizes, device: torch.device | str) -> DeviceTrees:
        """Allocate trees without a node."""
        values_RE = torch.zeros(num_requests, cls.num_values(sizes), dtype=torch.int32, device=device)
        return cls.views_of(values_RE, sizes)

    @property
    def sizes(self) -> tuple[int, int]:
        """M and E."""
        return self.tokens_RM.shape[1], self.values_RE.shape[1]


def tree_scores(
    found: Candidates,
    gates_XE: Tensor | None,
    rows: DeviceStepRows,
    cu_rows_R1: Tensor,
    max_rows: int,
    state: DeviceSamplingMetadata,
    codebooks: SelectorCodebooks | None,
    *,
    filters: bool,
    floors_N: Tensor,
    margins_N: Tensor,
    anchor_distance: int,
) -> Tensor:
    """Return fp32 scores [X, P, C] of candidates with filters and noise, as `BlockCandidates` has them.

    Args:
        gates_XE, codebooks: of a selector, where scores depend on the candidate before; else None.
        rows: of the blocks, with the positions of the tokens that they sample.
        max_rows: at least the most rows of a request.
        floors_N: fp32, of the rows' filters, if scores do not depend on the candidate before.
        margins_N: fp32, written in the same case: each row's best score minus its second best.
    """
    num_rows, count = found.ids_NK.shape
    num_before = 1 if codebooks is None else count
    scores_XPC = torch.empty(num_rows, num_before, count, dtype=torch.float32, device=rows.positions_N.device)
    assert found.z_NK.is_contiguous() and found.ids_NK.is_contiguous(), "read as they lie"
    rank, books = 1, (None, None, None)
    if codebooks is not None and gates_XE is not None:
        rank, books = gates_XE.shape[1], (gates_XE, codebooks.predecessor_VE, codebooks.successor_VE)
    # By line: the candidates and the selector; the rows; sampling parameters by slot; results and sizes.
    _tree_scores[len(cu_rows_R1) - 1, max_rows, num_before](
        found.scores_NK, found.z_NK, found.ids_NK, *books,
        rows.token_ids_N, rows.slots_N, rows.positions_N, cu_rows_R1,
        state.temperature, state.top_k, state.top_p, state.min_p, state.seed, floors_N,
        scores_XPC, margins_N, num_before,
        FILTERS=filters, FIRST=anchor_distance, RANK=rank, TOP_K=count, RANKS=triton.next_power_of_2(rank),
        PLACES=triton.next_power_of_2(count), num_warps=1 if codebooks is None else 4,
    )  # fmt: skip
    return scores_XPC


def likely_children(
    scores_XPC: Tensor,
    cu_rows_R1: Tensor,
    max_rows: int,
    lists: TrimLists,
    anchor_distance: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the chances, falling, and the places of the likeliest candidates, fp32 and int32 [X, P, W].

    Args:
        scores_XPC: fp32, of `BlockCandidates`.
        cu_rows_R1: int32, rows of blocks before each request.
        max_rows: at least the most rows of a request.
        anchor_distance: rows of each request before the first that samples a draft.
    """
    (num_rows, num_before, count), width = scores_XPC.shape, len(lists.factors_T)
    assert scores_XPC.is_contiguous() and 2 <= count >= width, "candidates for all children"
    chances_XPW = scores_XPC.new_empty(num_rows, num_before, width)
    places_XPW = torch.empty_like(chances_XPW, dtype=torch.int32)
    _likely_children[len(cu_rows_R1) - 1, max_rows, num_before](
        scores_XPC, cu_rows_R1, lists.bias_R, lists.bias_K, lists.slope_K, lists.factors_T, chances_XPW,
        places_XPW, num_before, count,
        FIRST=anchor_distance, W=width, CANDIDATES=max(_WARP, triton.next_power_of_2(count)), num_warps=1,
    )  # fmt: skip
    return chances_XPW, places_XPW


def grow_trees(
    chances_XPW: Tensor,
    places_XPW: Tensor,
    ids_XC: Tensor,
    cu_rows_R1: Tensor,
    max_nodes_R: Tensor,
    factors_T: Tensor,
    trees: DeviceTrees,
    anchor_distance: int = 0,
) -> None:
    """Write the trees with the largest sums of survivals, of at most `max_nodes_R` (int32) nodes each.

    Args:
        chances_XPW, places_XPW: result of `likely_children`.
        ids_XC: int64, token ids of the candidates.
    """
    (num_before, width), (most, stride) = chances_XPW.shape[1:], trees.sizes
    _grow[len(max_nodes_R),](
        chances_XPW, places_XPW, ids_XC, cu_rows_R1, max_nodes_R, factors_T, trees.tokens_RM,
        trees.parents_RM, trees.ranks_RM, trees.survivals_RM, trees.num_nodes_R, num_before, ids_XC.shape[1],
        most, stride,
        FIRST=anchor_distance, W=width, LANES=max(_WARP, triton.next_power_of_2(most + 1)), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_before"])
def _tree_scores(
    ranked, z, ids, gates, predecessors, successors,
    token_ids, slots, positions, cu_rows,
    temperatures, top_ks, top_ps, min_ps, seeds, floors,
    scores, margins, num_before,
    FILTERS: tl.constexpr, FIRST: tl.constexpr, RANK: tl.constexpr, TOP_K: tl.constexpr, RANKS: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """Score the candidates of one row after one candidate of the row before."""
    request, nth, nth_before = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(cu_rows + request)
    row = begin.to(tl.int64) + FIRST + nth
    if row >= tl.load(cu_rows + request + 1):
        return
    slot, place_C = tl.load(slots + begin), tl.arange(0, PLACES)
    temperature = read_temperature(slot, temperatures, top_ks)
    filters = read_filters(slot, temperature, top_ks, top_ps, min_ps)
    there_C = place_C < TOP_K
    if gates is None:
        plain = tl.load(z + row * TOP_K + place_C, mask=there_C, other=float("-inf"))
        score = tl.load(ranked + row * TOP_K + place_C, mask=there_C, other=float("-inf"))
        if has_filters(filters) & FILTERS:
            is_cut = tl.math.div_rn(plain, temperature) < tl.load(floors + row)
            score = tl.where(is_cut, float("-inf"), score)
        _, margin = best_and_margin(score, plain, TOP_K, PLACES, FILTERS)
        tl.store(margins + row, margin)
    else:
        before = tl.load(token_ids + begin)
        if nth > 0:
            before = tl.load(ids + (row - 1) * TOP_K + nth_before)
        codebooks = (gates, predecessors, successors)
        tokens, score = scores_after(before, row, ids, z, codebooks, RANK, TOP_K, RANKS, PLACES)
        position = tl.load(positions + row).to(tl.int32)
        score = with_noise(score, tokens, position, temperature, filters, tl.load(seeds + slot), FILTERS)
    tl.store(scores + (row * num_before + nth_before) * TOP_K + place_C, score, mask=there_C)


@triton.jit(do_not_specialize=["num_before", "count"])
def _likely_children(
    scores, cu_rows, request_biases, biases, slopes, factors, chances, places, num_before, count,
    FIRST: tl.constexpr, W: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Rank the candidates of one row after one candidate of the row before."""
    request, nth, at_C = tl.program_id(0), tl.program_id(1), tl.arange(0, CANDIDATES)
    first = tl.load(cu_rows + request) + FIRST
    if nth >= tl.load(cu_rows + request + 1) - first:
        return
    there_C, row = at_C < count, (first + nth) * num_before + tl.program_id(2)
    score_C = tl.load(scores + row * count + at_C, mask=there_C, other=float("-inf"))
    top = tl.maximum(tl.max(score_C, 0), -1e38)  # finite also if no token is possible
    gap_C = tl.minimum(top - score_C, _MAX_MARGIN)
    left_C = tl.where(there_C, gap_C, float("inf"))  # padding is behind all candidates
    best_C = at_C == tl.argmin(left_C, 0)
    left_C = tl.where(best_C, float("inf"), left_C)
    margin = tl.min(left_C, 0)
    odds = tl.load(biases + nth) + tl.load(request_biases + request)
    odds += tl.load(slopes + nth) * tl.log(1 + margin)
    best = 1 / (1 + tl.exp(-odds))
    is_other_C = there_C & (best_C == 0)
    weight_C = tl.where(is_other_C, tl.exp(tl.minimum(margin - gap_C, 0.0)), 0.0)
    least = tl.min(tl.where(is_other_C, weight_C, float("inf")), 0)
    total = tl.sum(weight_C, 0) + least * _NOT_CANDIDATES
    # The second best has the second factor, ..; all after the last factor's have that one.
    factor_C = tl.zeros([CANDIDATES], tl.float32) + tl.load(factors + W - 1)
    for rank in tl.static_range(1, W):
        is_next_C = at_C == tl.argmin(left_C, 0)
        factor_C = tl.where(is_next_C, tl.load(factors + rank), factor_C)
        left_C = tl.where(is_next_C, float("inf"), left_C)
    other_C = tl.minimum((1 - best) * weight_C / total * factor_C, best * _MAX_SHARE)
    chance_C = tl.where(gap_C >= _MAX_MARGIN, 0.0, tl.where(best_C, best, other_C))
    chance_C = tl.where(there_C, chance_C, -1.0)
    for rank in tl.static_range(W):
        place = tl.argmax(chance_C, 0)
        tl.store(chances + row * W + rank, tl.max(chance_C, 0))
        tl.store(places + row * W + rank, place)
        chance_C = tl.where(at_C == place, -1.0, chance_C)


@triton.jit(
    do_not_specialize=["num_before", "num_candidates", "most", "tree_stride"],
    do_not_specialize_on_alignment=["tokens", "parents", "ranks", "survivals", "num_nodes"],
)
def _grow(
    chances, places, ids, cu_rows, max_nodes, factors, tokens, parents, ranks, survivals, num_nodes,
    num_before, num_candidates, most, tree_stride,
    FIRST: tl.constexpr, W: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Add the likeliest possible node, until there is none; a lane has the next child of one node."""
    request, lane_L = tl.program_id(0), tl.arange(0, LANES)
    first_row = tl.load(cu_rows + request) + FIRST
    depth = tl.load(cu_rows + request + 1) - first_row
    room = tl.load(max_nodes + request)
    off_main = tl.minimum(tl.load(factors), 1.0)
    tl.store(tokens + request * tree_stride + lane_L, -1, mask=lane_L < most)
    tl.store(parents + request * tree_stride + lane_L, lane_L, mask=lane_L < most)
    tl.store(ranks + request * tree_stride + lane_L, 0, mask=lane_L < most)
    tl.store(survivals + request * tree_stride + lane_L, 0.0, mask=lane_L < most)
    tl.debug_barrier()
    # Of each lane's possible node: survival (0: none), parent, rank, depth, place of the candidate before,
    # survival of the parent, factor of siblings.
    is_first_L = lane_L == 0
    top = tl.load(chances + first_row * num_before * W, mask=depth > 0, other=0.0)
    survival_L = tl.where(is_first_L, top, 0.0)
    parent_L, rank_L, depth_L, before_L = (
        tl.zeros([LANES], tl.int32),
        tl.zeros([LANES], tl.int32),
        tl.zeros([LANES], tl.int32),
        tl.zeros([LANES], tl.int32),
    )
    above_L, factor_L = tl.full([LANES], 1.0, tl.float32), tl.full([LANES], 1.0, tl.float32)
    count = 0
    for node in range(room):
        survival = tl.max(survival_L, 0)
        is_real = survival > 0.0
        # Of equal ones the one with the earliest parent, as on the host.
        order_L = tl.where(survival_L == survival, (parent_L * W + rank_L) * LANES + lane_L, 2**31 - 1)
        is_it_L = lane_L == tl.min(order_L, 0) % LANES
        parent = tl.sum(tl.where(is_it_L, parent_L, 0), 0)
        rank = tl.sum(tl.where(is_it_L, rank_L, 0), 0)
        at = tl.sum(tl.where(is_it_L, depth_L, 0), 0)
        before = tl.sum(tl.where(is_it_L, before_L, 0), 0)
        above = tl.sum(tl.where(is_it_L, above_L, 0.0), 0)
        factor = tl.sum(tl.where(is_it_L, factor_L, 0.0), 0)
        entry = ((first_row + at) * num_before + before) * W + rank
        place = tl.load(places + entry, mask=is_real, other=0)
        token = tl.load(ids + (first_row + at) * num_candidates + place, mask=is_real, other=-1)
        home = request * tree_stride + node
        tl.store(tokens + home, token.to(tl.int32), mask=is_real)
        tl.store(parents + home, parent, mask=is_real)
        tl.store(ranks + home, rank, mask=is_real)
        tl.store(survivals + home, survival, mask=is_real)
        count += is_real.to(tl.int32)
        # Its next sibling takes its lane.
        sibling = tl.load(chances + entry + 1, mask=is_real & (rank + 1 < W), other=0.0)
        survival_L = tl.where(is_it_L, above * (factor * sibling), survival_L)
        rank_L = tl.where(is_it_L, rank + 1, rank_L)
        # Its first child takes a new one.
        below = tl.where(rank == 0, factor, off_main)
        candidate = tl.where(num_before > 1, place, 0)
        entry = ((first_row + at + 1) * num_before + candidate) * W
        child = tl.load(chances + entry, mask=is_real & (at + 1 < depth), other=0.0)
        is_new_L = lane_L == node + 1
        survival_L = tl.where(is_new_L, survival * (below * child), survival_L)
        parent_L = tl.where(is_new_L, node + 1, parent_L)
        depth_L = tl.where(is_new_L, at + 1, depth_L)
        before_L = tl.where(is_new_L, candidate, before_L)
        above_L = tl.where(is_new_L, survival, above_L)
        factor_L = tl.where(is_new_L, below, factor_L)
    tl.store(num_nodes + request * tree_stride, count)
