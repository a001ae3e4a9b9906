"""Draft trees on a GPU from trimming to acceptance: their rows, and the path that the target accepts.

Triton version of `DraftTrees.accept`, and of its paths and positions, in `../inputs/draft_trees.py`, which
explains rows, parents and paths. Nothing is read by the host, as in `draft_trees.py`, which grows them.
Called by `actors/targets/runners/drafts/device_trees.py`.

Legend: R requests, M most nodes, N rows of the target's pass, G page groups, D most rows of a path, P most
rows of all paths.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...compute.gpu_triton.attention.attention_tiles import TreeRows
from .draft_trees import DeviceTrees
from .inputs.row_layout import DeviceStepRequests, DeviceStepRows, SlotTables
from .verification import REQUESTS_AT_ONCE, keep_most_valuable, with_drafts

_WARP, _TREES = 32, 8  # lanes; trees per iteration


def trim_trees(
    drafted: DeviceStepRequests,
    trees: DeviceTrees,
    blocks: DeviceStepRequests,
    margins_N: Tensor,
    weights_R: Tensor,
    num_rows: int,
    num_drafts_R: Tensor,
    margins_RD: Tensor,
) -> DeviceStepRequests:
    """Return the requests with the nodes to verify in a pass of `num_rows` rows, the first of each tree.

    Args:
        drafted: requests with as many drafts as their trees may have nodes.
        blocks: the same requests with the rows of their blocks, by which margins are numbered.
        weights_R: fp32, see `TrimLists`; the other arguments as of `trim_drafts`.
    """
    num_requests, (nodes, stride) = len(drafted.slots_R), trees.sizes
    depth = margins_RD.shape[1]
    places = min(num_requests * (drafted.max_drafts + 1), len(margins_N))
    cu_rows_R1 = torch.empty_like(drafted.cu_rows_R1)
    worths_N = torch.empty(places, dtype=torch.float32, device=margins_N.device)
    kept_before_N1 = torch.empty(places + 1, dtype=torch.int32, device=margins_N.device)
    _trim_trees[1,](
        drafted.cu_rows_R1, drafted.num_drafts_R, trees.survivals_RM, weights_R, blocks.cu_rows_R1, margins_N,
        worths_N, kept_before_N1, cu_rows_R1, num_drafts_R, margins_RD, num_requests, num_rows, nodes, stride,
        depth,
        REQUESTS=REQUESTS_AT_ONCE, PLACES=triton.next_power_of_2(len(margins_N)), TREES=_TREES,
        LANES=triton.next_power_of_2(max(nodes, depth)), num_warps=8,
    )  # fmt: skip
    return with_drafts(drafted, cu_rows_R1, num_drafts_R, num_rows)


def place_rows(
    requests: DeviceStepRequests, trees: DeviceTrees, rows: DeviceStepRows, tables: SlotTables
) -> DeviceStepRows:
    """Return the rows of a pass as trees: with their paths, positions by depth, and tokens, which are also
    written after the known ones.

    Args:
        requests: decoding; their drafts are the first nodes of their trees.
        rows: from `lay_out_rows`; positions and tokens are overwritten.
    """
    depth, (nodes, stride) = trees.paths_RD.shape[1], trees.sizes
    paths_ND = torch.empty(requests.num_rows, depth, dtype=torch.int32, device=rows.positions_N.device)
    _place_rows[len(requests.slots_R),](
        requests.slots_R, requests.cu_rows_R1, requests.num_drafts_R, trees.tokens_RM, trees.parents_RM,
        tables.num_computed, tables.token_ids, paths_ND, rows.positions_N, rows.token_ids_N, stride,
        tables.token_ids.stride(0), depth,
        LANES=max(_WARP, triton.next_power_of_2(nodes + 1)), num_warps=1,
    )  # fmt: skip
    tree = TreeRows(paths_ND, rows.positions_N)
    return replace(rows, batches=tuple(replace(batch, tree=tree) for batch in rows.batches))


def accept_paths(
    chosen_X: Tensor,
    requests: DeviceStepRequests,
    trees: DeviceTrees,
    kv_slots_GN: Tensor,
    tables: SlotTables,
    outcome_RD1: Tensor,
) -> tuple[Tensor, Tensor]:
    """Accept a path of each request's tree, write its new tokens after the known ones, and advance.

    The tree's tokens are after the known ones, as `place_rows` writes them. As `accept_and_advance`, if
    parents are those of chains.

    Args:
        chosen_X: the target's sampled tokens, int64; each request's begin at its `first_chosen`.
        trees: their accepted paths are written.
        kv_slots_GN: int64, slots of the pass's rows; overwritten by their slots in the drafter's context:
            that of a row's place on the path, or the skip slot.
        outcome_RD1: int32 [R, D + 1], written: the new tokens, then -1; in the last column their number.

    Returns:
        Source and target slots of K/V, int64 [G, R, D]: moves of `compact_rows`; equal slots do not move.
    """
    (nodes, stride), (num_requests, depth) = trees.sizes, trees.paths_RD.shape
    assert outcome_RD1.shape == (num_requests, depth + 1), "room for a longest path, and its length"
    sources_GRD = kv_slots_GN.new_empty(len(kv_slots_GN), num_requests, depth)
    targets_GRD = torch.empty_like(sources_GRD)
    _accept_paths[num_requests,](
        chosen_X, requests.first_chosen_R, requests.slots_R, requests.cu_rows_R1, requests.num_drafts_R,
        requests.samples_R, trees.parents_RM, trees.paths_RD, kv_slots_GN, tables.skip_slots,
        tables.token_ids, tables.num_computed, outcome_RD1, sources_GRD, targets_GRD,
        tables.token_ids.stride(0), stride, kv_slots_GN.stride(0), num_requests, depth,
        GROUPS=len(kv_slots_GN), LANES=max(_WARP, triton.next_power_of_2(max(nodes + 1, depth))), num_warps=1,
    )  # fmt: skip
    return sources_GRD, targets_GRD


def path_rows(requests: DeviceStepRequests, trees: DeviceTrees, num_tokens_R: Tensor) -> Tensor:
    """Return the rows of the accepted paths, request after request, int64 [P]; after the last one 0.

    Args:
        requests: decoding, as verified.
        num_tokens_R: int32, rows of each path.
    """
    (num_requests, depth), (_, stride) = trees.paths_RD.shape, trees.sizes
    num_places = num_path_rows(num_requests, requests.num_rows, depth)
    rows_P = torch.empty(num_places, dtype=torch.int64, device=num_tokens_R.device)
    _path_rows[num_requests,](
        num_tokens_R, requests.cu_rows_R1, trees.paths_RD, rows_P, num_requests, num_places,
        num_tokens_R.stride(0), stride,
        REQUESTS=REQUESTS_AT_ONCE, LANES=max(_WARP, triton.next_power_of_2(depth)), num_warps=1,
    )  # fmt: skip
    return rows_P


def num_path_rows(num_requests: int, num_rows: int, depth: int) -> int:
    """Return P of a pass of `num_rows` rows; `depth`: most rows of a path."""
    return min(num_rows, num_requests * depth)


@triton.jit(
    do_not_specialize=["num_requests", "room", "nodes", "tree_stride", "depth"],
    do_not_specialize_on_alignment=["survivals", "margins_home", "new_num_drafts"],
)
def _trim_trees(
    cu_rows, num_drafts, survivals, weights, block_cu_rows, margins, worths, kept_before, new_cu_rows,
    new_num_drafts, margins_home, num_requests, room, nodes, tree_stride, depth,
    REQUESTS: tl.constexpr, PLACES: tl.constexpr, TREES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    lane_L = tl.arange(0, LANES)
    for begin in range(0, num_requests, TREES):
        request_T = begin + tl.arange(0, TREES)
        there_T = request_T < num_requests
        first_T = tl.load(cu_rows + request_T, mask=there_T, other=0)
        drafts_T = tl.load(num_drafts + request_T, mask=there_T, other=0)
        has_rows_T = there_T & (tl.load(cu_rows + request_T + 1, mask=there_T, other=0) > first_T)
        weight_T = tl.load(weights + request_T, mask=there_T, other=0.0)
        tl.store(worths + first_T, float("inf"), mask=has_rows_T)
        is_node_TL = (lane_L[None, :] < tl.minimum(drafts_T, nodes)[:, None]) & has_rows_T[:, None]
        survival_TL = tl.load(
            survivals + request_T[:, None] * tree_stride + lane_L[None, :], mask=is_node_TL, other=0.0
        )
        worth_TL = tl.where(survival_TL > 0, weight_T[:, None] * survival_TL, -1.0)
        tl.store(worths + first_T[:, None] + 1 + lane_L[None, :], worth_TL, mask=is_node_TL)
        anchor_T = tl.load(block_cu_rows + request_T, mask=there_T, other=0)
        end_T = tl.load(block_cu_rows + request_T + 1, mask=there_T, other=0)
        at_TL = anchor_T[:, None] + 1 + lane_L[None, :]
        margin_TL = tl.load(margins + at_TL, mask=at_TL < end_T[:, None], other=float("nan"))
        is_home_TL = there_T[:, None] & (lane_L < depth)[None, :]
        tl.store(margins_home + request_T[:, None] * depth + lane_L[None, :], margin_TL, mask=is_home_TL)
    tl.debug_barrier()
    keep_most_valuable(
        cu_rows, worths, kept_before, new_cu_rows, new_num_drafts, num_requests, room, REQUESTS, PLACES
    )


# Columns of trees, and `num_drafts`, a view into the outcome, have any alignment.
@triton.jit(
    do_not_specialize=["tree_stride", "max_depth"],
    do_not_specialize_on_alignment=["num_drafts", "tokens", "parents"],
)
def _place_rows(
    slots, cu_rows, num_drafts, tokens, parents, num_computed, token_ids, paths, positions, row_tokens,
    tree_stride, token_stride, max_depth,
    LANES: tl.constexpr,
):  # fmt: skip
    request, lane_L = tl.program_id(0), tl.arange(0, LANES)
    begin = tl.load(cu_rows + request)
    count = tl.load(cu_rows + request + 1) - begin
    if count == 0:
        return
    parents += request * tree_stride
    is_row_L = lane_L < count
    is_node_L = is_row_L & (lane_L > 0)
    slot = tl.load(slots + request)
    token_L = tl.load(tokens + request * tree_stride + lane_L - 1, mask=is_node_L, other=0)
    after = token_ids + slot.to(tl.int64) * token_stride + tl.load(num_computed + slot)
    tl.store(after + lane_L, token_L, mask=is_node_L)
    tl.store(row_tokens + begin + lane_L, token_L.to(tl.int64), mask=is_node_L)
    for depth in range(max_depth):
        tl.store(paths + (begin + lane_L) * max_depth + depth, -1, mask=is_row_L)
    anchor = tl.load(positions + begin)
    tl.debug_barrier()  # before other lanes overwrite these
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
    tl.store(positions + begin + lane_L, anchor + depth_L, mask=is_row_L)


@triton.jit(
    do_not_specialize=["tree_stride", "num_requests", "depth"],
    do_not_specialize_on_alignment=["num_drafts", "parents", "paths"],
)
def _accept_paths(
    chosen, first_chosen, slots, cu_rows, num_drafts, samples, parents, paths, kv_slots, skip_slots,
    token_ids, num_computed, outcome, sources, targets, token_stride, tree_stride, kv_stride, num_requests,
    depth,
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
    parent_L = tl.load(parents + request * tree_stride + lane_L - 1, mask=is_node_L, other=0)
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
    tl.debug_barrier()  # all threads have read the drafts that the verdicts replace
    tl.store(after + lane_L, tl.maximum(verdict_L, 0), mask=is_new_L)  # NOT_A_NUMBER is no input token
    tl.store(num_computed + slot, num_known + tl.maximum(num_tokens - 1, 0), mask=count > 0)
    tl.store(outcome + request * (depth + 1) + lane_L, verdict_L.to(tl.int32), mask=lane_L < depth)
    tl.store(outcome + request * (depth + 1) + depth, num_tokens)
    tl.store(paths + request * tree_stride + lane_L, tl.where(is_new_L, path_L, -1), mask=lane_L < depth)

    known = count - drafts - 1  # rows before the anchor's
    is_row_L = (lane_L <= drafts) & (count > 0)
    for group in tl.static_range(GROUPS):
        skip = tl.load(skip_slots + group)
        first = kv_slots + group * kv_stride + begin + known
        source_L = tl.load(first + path_L, mask=path_L >= 0, other=0)
        target_L = tl.load(first + lane_L, mask=path_L >= 0, other=0)
        context_L = tl.load(first + place_L, mask=place_L >= 0, other=0)
        home_L = (group * num_requests + request) * depth + lane_L
        tl.store(sources + home_L, tl.where(path_L >= 0, source_L, skip), mask=lane_L < depth)
        tl.store(targets + home_L, tl.where(path_L >= 0, target_L, skip), mask=lane_L < depth)
        tl.debug_barrier()  # all lanes have read
        tl.store(first + lane_L, tl.where(place_L >= 0, context_L, skip), mask=is_row_L)


@triton.jit(
    do_not_specialize=["num_requests", "num_places", "token_stride", "tree_stride"],
    do_not_specialize_on_alignment=["num_tokens", "paths"],
)
def _path_rows(
    num_tokens, cu_rows, paths, rows, num_requests, num_places, token_stride, tree_stride,
    REQUESTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    request, lane_L = tl.program_id(0), tl.arange(0, LANES)
    before = 0
    for begin in range(0, request, REQUESTS):
        other_Q = begin + tl.arange(0, REQUESTS)
        count_Q = tl.load(num_tokens + other_Q * token_stride, mask=other_Q < request, other=0)
        before += tl.sum(count_Q, 0)
    count = tl.load(num_tokens + request * token_stride)
    path_L = tl.load(paths + request * tree_stride + lane_L, mask=lane_L < count, other=0)
    row_L = tl.load(cu_rows + request) + path_L
    tl.store(rows + before + lane_L, row_L.to(tl.int64), mask=lane_L < count)
    if request == num_requests - 1:
        for begin in range(before + count, num_places, LANES):
            tl.store(rows + begin + lane_L, tl.zeros([LANES], tl.int64), mask=begin + lane_L < num_places)
