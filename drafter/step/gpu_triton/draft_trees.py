"""Draft trees on a GPU: their growth from a block's candidates, and the path that the target accepts.

Triton version of `cluster/speculation/draft_tree.py` and of `DraftTrees.accept` in
`drafter/step/inputs/draft_trees.py`, which explains rows, parents and paths. The host reads nothing and grids
follow from shapes, so all of it can be captured in a CUDA graph; a tree's shape is data. No engine calls it
yet: `step_passes.py` verifies chains.

    scores [X, P, C] ─▶ chances, places [X, P, W] ─▶ nodes [R, M] ─▶ paths [N, D] ─▶ (target's pass) ─▶ moves

The nodes are those of the host, but for near-ties: products of chances are fp32 here. Grammars restrict trees
on the host alone.

Legend: R requests, M most nodes, X rows of blocks that sample a draft, P candidates before (or 1), C
candidates, W most children of a node, N rows of the target's pass, G page groups, D rows of the longest path.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .inputs.row_layout import DeviceStepRequests, SlotTables

_WARP = 32
# As in `cluster/speculation/draft_tree.py` and `draft_trimming.py`.
_MAX_MARGIN = tl.constexpr(1e6)
_NOT_CANDIDATES = tl.constexpr(2.0)
_MAX_SHARE = tl.constexpr(0.99)


@dataclass(frozen=True, slots=True)
class DeviceTrees:
    """Trees of a step's requests.

    Attributes:
        tokens_RM, parents_RM: int32, as in `DraftTrees`; tokens are -1 past the last node.
        num_nodes_R: int32.
        ranks_RM: int32, ranks among siblings.
        survivals_RM: fp32, estimated probabilities of acceptance; 0 past the last node.
    """

    tokens_RM: Tensor
    parents_RM: Tensor
    num_nodes_R: Tensor
    ranks_RM: Tensor
    survivals_RM: Tensor


@dataclass(frozen=True, slots=True)
class BlockCurves:
    """The chance of a block's best candidates: `Trim`'s parameters, fp32 [R] and [most positions of a block].

    `factors_W`: fp32, see `TreeShape.factors`.
    """

    bias_R: Tensor
    bias_K: Tensor
    slope_K: Tensor
    factors_W: Tensor


def likely_children(
    scores_XPC: Tensor, cu_rows_R1: Tensor, max_depth: int, curves: BlockCurves
) -> tuple[Tensor, Tensor]:
    """Return the chances, falling, and the places of the likeliest candidates, fp32 and int32 [X, P, W].

    Args:
        scores_XPC: fp32, of `BlockCandidates`.
        cu_rows_R1: int32, rows of blocks before each request.
        max_depth: at least the most rows of a block.
    """
    num_rows, num_before, count = scores_XPC.shape
    width = len(curves.factors_W)
    assert scores_XPC.is_contiguous() and 2 <= count >= width, "candidates for all children"
    chances_XPW = scores_XPC.new_empty(num_rows, num_before, width)
    places_XPW = torch.empty_like(chances_XPW, dtype=torch.int32)
    _likely_children[len(cu_rows_R1) - 1, max_depth, num_before](
        scores_XPC, cu_rows_R1, curves.bias_R, curves.bias_K, curves.slope_K, curves.factors_W, chances_XPW,
        places_XPW, num_before, count,
        W=width, CANDIDATES=max(_WARP, triton.next_power_of_2(count)), num_warps=1,
    )  # fmt: skip
    return chances_XPW, places_XPW


def grow_trees(
    chances_XPW: Tensor,
    places_XPW: Tensor,
    ids_XC: Tensor,
    cu_rows_R1: Tensor,
    max_nodes_R: Tensor,
    factors_W: Tensor,
    max_nodes: int,
) -> DeviceTrees:
    """Return the trees with the largest sums of survivals, of at most `max_nodes_R` (int32) nodes each.

    Args:
        chances_XPW, places_XPW: result of `likely_children`.
        ids_XC: int64, token ids of the candidates.
    """
    num_requests, num_before, width = len(max_nodes_R), *chances_XPW.shape[1:]
    size, device = (num_requests, max_nodes), chances_XPW.device
    tokens_RM, parents_RM, ranks_RM = (torch.empty(size, dtype=torch.int32, device=device) for _ in range(3))
    num_nodes_R = torch.empty(num_requests, dtype=torch.int32, device=device)
    survivals_RM = torch.empty(size, dtype=torch.float32, device=device)
    _grow[num_requests,](
        chances_XPW, places_XPW, ids_XC, cu_rows_R1, max_nodes_R, factors_W, tokens_RM, parents_RM, ranks_RM,
        survivals_RM, num_nodes_R, num_before, ids_XC.shape[1], max_nodes,
        W=width, LANES=max(_WARP, triton.next_power_of_2(max_nodes + 1)), num_warps=1,
    )  # fmt: skip
    return DeviceTrees(tokens_RM, parents_RM, num_nodes_R, ranks_RM, survivals_RM)


def place_rows(
    requests: DeviceStepRequests, parents_RM: Tensor, positions_N: Tensor, max_depth: int
) -> tuple[Tensor, Tensor]:
    """Return the paths of a pass's rows, int32 [N, D], and their positions, int64 [N] (`TreeRows`).

    Padding, and requests with rows before their anchor's, are chains.

    Args:
        parents_RM: int32, as in `DraftTrees`.
        positions_N: int64, of chains with as many rows.
        max_depth: at least the most rows of a path.
    """
    paths_ND = torch.full((requests.num_rows, max_depth), -1, dtype=torch.int32, device=positions_N.device)
    positions_N = positions_N.clone()
    lanes = max(_WARP, triton.next_power_of_2(parents_RM.shape[1] + 1))
    _place_rows[len(requests.slots_R),](
        requests.cu_rows_R1, requests.num_drafts_R, parents_RM, paths_ND, positions_N, parents_RM.stride(0),
        max_depth,
        LANES=lanes, num_warps=1,
    )  # fmt: skip
    return paths_ND, positions_N


@dataclass(frozen=True, slots=True)
class PathMoves:
    """What follows from the accepted paths for K/V.

    Attributes:
        source_slots_GRD, target_slots_GRD: int64, moves of `compact_rows`; equal slots do not move.
        context_slots_GN: int64, the slot of each row of the pass in the drafter's context: that of its place
            on the path, or the skip slot.
    """

    source_slots_GRD: Tensor
    target_slots_GRD: Tensor
    context_slots_GN: Tensor


def accept_paths(
    chosen_X: Tensor,
    requests: DeviceStepRequests,
    parents_RM: Tensor,
    kv_slots_GN: Tensor,
    tables: SlotTables,
    outcome_RD1: Tensor,
) -> PathMoves:
    """Accept a path of each request's tree, write its new tokens after the known ones, and advance.

    The tree's tokens are after the known ones, as `lay_out_rows` reads them. As `accept_and_advance`, if
    parents are those of chains.

    Args:
        chosen_X: the target's sampled tokens, int64; each request's begin at its `first_chosen`.
        parents_RM: int32, as in `DraftTrees`.
        kv_slots_GN: int64, slots of the pass's rows.
        outcome_RD1: int32 [R, D + 1], written: the new tokens, then -1; in the last column their number.
    """
    num_requests, depth = len(requests.slots_R), outcome_RD1.shape[1] - 1
    num_groups, num_rows = kv_slots_GN.shape
    lanes = max(_WARP, triton.next_power_of_2(max(parents_RM.shape[1] + 1, depth)))
    source_GRD = kv_slots_GN.new_empty(num_groups, num_requests, depth)
    target_GRD = torch.empty_like(source_GRD)
    context_GN = tables.skip_slots.unsqueeze(1).repeat(1, num_rows)
    _accept_paths[num_requests,](
        chosen_X, requests.first_chosen_R, requests.slots_R, requests.cu_rows_R1, requests.num_drafts_R,
        requests.samples_R, parents_RM, kv_slots_GN, tables.skip_slots, tables.token_ids, tables.num_computed,
        outcome_RD1, source_GRD, target_GRD, context_GN, tables.token_ids.stride(0), parents_RM.stride(0),
        kv_slots_GN.stride(0), num_rows, num_requests, depth,
        GROUPS=num_groups, LANES=lanes, num_warps=1,
    )  # fmt: skip
    return PathMoves(source_GRD, target_GRD, context_GN)


@triton.jit(do_not_specialize=["num_before", "count"])
def _likely_children(
    scores, cu_rows, request_biases, biases, slopes, factors, chances, places, num_before, count,
    W: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Rank the candidates of one row after one candidate of the row before."""
    request, nth, at_C = tl.program_id(0), tl.program_id(1), tl.arange(0, CANDIDATES)
    first = tl.load(cu_rows + request)
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


@triton.jit(do_not_specialize=["num_before", "num_candidates", "most"])
def _grow(
    chances, places, ids, cu_rows, max_nodes, factors, tokens, parents, ranks, survivals, num_nodes,
    num_before, num_candidates, most,
    W: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Add the likeliest possible node, until there is none; a lane has the next child of one node."""
    request, lane_L = tl.program_id(0), tl.arange(0, LANES)
    first_row = tl.load(cu_rows + request)
    depth = tl.load(cu_rows + request + 1) - first_row
    room = tl.load(max_nodes + request)
    off_main = tl.minimum(tl.load(factors), 1.0)
    tl.store(tokens + request * most + lane_L, -1, mask=lane_L < most)
    tl.store(parents + request * most + lane_L, lane_L, mask=lane_L < most)
    tl.store(ranks + request * most + lane_L, 0, mask=lane_L < most)
    tl.store(survivals + request * most + lane_L, 0.0, mask=lane_L < most)
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
        home = request * most + node
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
    tl.store(num_nodes + request, count)


# After trimming, `num_drafts` is a view into the outcome with any alignment.
@triton.jit(do_not_specialize=["max_depth"], do_not_specialize_on_alignment=["num_drafts"])
def _place_rows(
    cu_rows, num_drafts, parents, paths, positions, parent_stride, max_depth, LANES: tl.constexpr
):
    request, lane_L = tl.program_id(0), tl.arange(0, LANES)
    begin = tl.load(cu_rows + request)
    count = tl.load(cu_rows + request + 1) - begin
    if count != tl.load(num_drafts + request) + 1:
        return
    parents += request * parent_stride
    is_row_L = lane_L < count
    depth_L, row_L = tl.zeros([LANES], tl.int32), lane_L
    for _ in range(1, max_depth):
        is_below_L = is_row_L & (row_L > 0)
        depth_L += is_below_L.to(tl.int32)
        row_L = tl.load(parents + row_L - 1, mask=is_below_L, other=0)
    row_L = lane_L
    for up in range(max_depth):
        at_L = (begin + lane_L) * max_depth + depth_L - up
        tl.store(paths + at_L, row_L, mask=is_row_L & (up <= depth_L))
        row_L = tl.load(parents + row_L - 1, mask=is_row_L & (row_L > 0), other=0)
    anchor = tl.load(positions + begin)
    tl.debug_barrier()  # the anchor's lane stores its own
    tl.store(positions + begin + lane_L, anchor + depth_L, mask=is_row_L)


# After trimming, `num_drafts` is a view into the outcome with any alignment.
@triton.jit(
    do_not_specialize=["num_rows", "num_requests", "depth"], do_not_specialize_on_alignment=["num_drafts"]
)
def _accept_paths(
    chosen, first_chosen, slots, cu_rows, num_drafts, samples, parents, kv_slots, skip_slots, token_ids,
    num_computed, outcome, sources, targets, contexts, token_stride, parent_stride, kv_stride, num_rows,
    num_requests, depth,
    GROUPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A lane is a row of the tree, and a place of the path; one warp reads all drafts before it writes."""
    request, lane_L = tl.program_id(0), tl.arange(0, LANES)
    begin = tl.load(cu_rows + request)
    count = tl.load(cu_rows + request + 1) - begin
    drafts = tl.load(num_drafts + request, mask=count > 0, other=0)
    is_sampled = (tl.load(samples + request) != 0) & (count > 0)
    slot = tl.load(slots + request, mask=count > 0, other=0)
    num_known = tl.load(num_computed + slot, mask=count > 0, other=0) + count - drafts
    after = token_ids + slot.to(tl.int64) * token_stride + num_known
    verdicts = chosen + tl.load(first_chosen + request, mask=is_sampled, other=0)

    is_node_L = is_sampled & (lane_L > 0) & (lane_L <= drafts)
    parent_L = tl.load(parents + request * parent_stride + lane_L - 1, mask=is_node_L, other=0)
    draft_L = tl.load(after + lane_L - 1, mask=is_node_L, other=0)
    matches_L = is_node_L & (draft_L == tl.load(verdicts + parent_L, mask=is_node_L, other=-1))
    path_L = tl.where((lane_L == 0) & (count > 0), 0, -1)  # row of each place
    place_L = tl.where((lane_L == 0) & (count > 0), 0, -1)  # place of each row
    row = 0
    for place in range(1, depth):
        child = tl.min(tl.where(matches_L & (parent_L == row), lane_L, LANES), 0)
        row = tl.where(child < LANES, child, -1)
        path_L = tl.where((lane_L == place) & (row > 0), row, path_L)
        place_L = tl.where(lane_L == row, place, place_L)

    is_new_L = is_sampled & (path_L >= 0)
    verdict_L = tl.load(verdicts + path_L, mask=is_new_L, other=-1)
    num_tokens = tl.sum(is_new_L.to(tl.int32), 0)
    tl.store(after + lane_L, tl.maximum(verdict_L, 0), mask=is_new_L)  # NOT_A_NUMBER is no input token
    tl.store(num_computed + slot, num_known + tl.maximum(num_tokens - 1, 0), mask=count > 0)
    tl.store(outcome + request * (depth + 1) + lane_L, verdict_L.to(tl.int32), mask=lane_L < depth)
    tl.store(outcome + request * (depth + 1) + depth, num_tokens)

    known = count - drafts - 1  # rows before the anchor's
    for group in tl.static_range(GROUPS):
        skip = tl.load(skip_slots + group)
        first = kv_slots + group * kv_stride + begin + known
        source_L = tl.load(first + path_L, mask=path_L >= 0, other=0)
        target_L = tl.load(first + lane_L, mask=path_L >= 0, other=0)
        home_L = (group * num_requests + request) * depth + lane_L
        tl.store(sources + home_L, tl.where(path_L >= 0, source_L, skip), mask=lane_L < depth)
        tl.store(targets + home_L, tl.where(path_L >= 0, target_L, skip), mask=lane_L < depth)
        context_L = tl.load(first + place_L, mask=place_L >= 0, other=0)
        context = contexts + group * num_rows + begin
        tl.store(context + known + lane_L, context_L, mask=place_L >= 0)
        for at in range(0, known, LANES):
            is_known_L = at + lane_L < known
            own_L = tl.load(first - known + at + lane_L, mask=is_known_L, other=0)
            tl.store(context + at + lane_L, own_L, mask=is_known_L)
