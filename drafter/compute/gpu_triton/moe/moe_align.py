"""Groups (row, expert) pairs into tiles by expert, on the device.

    experts of rows   0: [2 0]   1: [0 2]   2: [2 5]      two choices each; pair = row * k + place
    tiles of 2 pairs  expert 0: [1 2]   expert 2: [0 3]   expert 2: [4 -]   expert 5: [5 -]
                      then idle tiles, up to as many as any choice of experts can need

So a launch grid depends only on the number of rows, and a CUDA graph can capture it: programs of idle tiles
return at once. Pairs of an expert are in ascending order, so the list is deterministic. Other ranks' experts
get no tiles.

Legend: N rows, k experts chosen per row, T tiles, M pairs of a tile; in the kernel B bins, C pairs per
iteration.
"""

# Type checkers do not know Triton's launch options.
# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ..common.element_ops import dependent_launch, wait_for_predecessor
from .grouped_gemm_tiles import max_tiles

_CHUNK = 1024  # pairs per iteration


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The list of tiles, int32: pairs [T, M] (`num_pairs` where unused), experts, and count of used tiles."""

    pairs_TM: Tensor
    experts_T: Tensor
    count_1: Tensor
    num_pairs: int


def list_tiles(
    expert_ids_Nk: Tensor, num_experts: int, first_expert: int, height: int, reads_1: Tensor
) -> ExpertTiles:
    """Return the tiles of the `num_experts` experts from `first_expert` on; ids are the model's, int32.

    `reads_1` (int32) is incremented by the number of experts that have tiles.
    """
    assert expert_ids_Nk.is_contiguous(), "a pair's place is its number"
    num_pairs = expert_ids_Nk.numel()
    num_tiles = max_tiles(num_pairs, num_experts, height)
    tiles = ExpertTiles(
        expert_ids_Nk.new_empty((num_tiles, height)),
        expert_ids_Nk.new_empty(num_tiles),
        expert_ids_Nk.new_empty(1),
        num_pairs,
    )
    _list_tiles[(num_experts,)](
        expert_ids_Nk, tiles.pairs_TM, tiles.experts_T, tiles.count_1, reads_1, num_pairs,
        FIRST=first_expert, EXPERTS=num_experts, BINS=triton.next_power_of_2(num_experts + 1), HEIGHT=height,
        CHUNK=_CHUNK, num_warps=4, **dependent_launch(expert_ids_Nk.device),
    )  # fmt: skip
    return tiles


@triton.jit(do_not_specialize=["num_pairs"])
def _list_tiles(
    ids_ptr, pairs_ptr, experts_ptr, count_ptr, reads_ptr, num_pairs,
    FIRST: tl.constexpr, EXPERTS: tl.constexpr, BINS: tl.constexpr, HEIGHT: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """List one expert's tiles, after counting all experts' pairs to find where its own begin."""
    wait_for_predecessor(PDL)
    expert = tl.program_id(0)
    bin_B = tl.arange(0, BINS)
    pairs_B = tl.zeros([BINS], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        chosen_C = _chosen(ids_ptr, start, num_pairs, FIRST, EXPERTS, CHUNK)
        pairs_B += tl.histogram(chosen_C, BINS)
    tiles_B = tl.where(bin_B < EXPERTS, (pairs_B + HEIGHT - 1) // HEIGHT, 0)
    first = tl.sum(tl.where(bin_B < expert, tiles_B, 0), 0)
    tiles = tl.sum(tl.where(bin_B == expert, tiles_B, 0), 0)
    if expert == EXPERTS - 1:
        tl.store(count_ptr, first + tiles)
        # The only writer; passes are sequential.
        tl.store(reads_ptr, tl.load(reads_ptr) + tl.sum((tiles_B > 0).to(tl.int32), 0))
    if tiles > 0:
        place = first * HEIGHT
        for start in range(0, num_pairs, CHUNK):
            mine_C = _chosen(ids_ptr, start, num_pairs, FIRST, EXPERTS, CHUNK) == expert
            at_C = place + tl.cumsum(mine_C.to(tl.int32), 0) - 1
            tl.store(pairs_ptr + at_C, start + tl.arange(0, CHUNK), mask=mine_C)
            place += tl.sum(mine_C.to(tl.int32), 0)
        idle_M = place + tl.arange(0, HEIGHT)
        tl.store(pairs_ptr + idle_M, num_pairs, mask=idle_M < (first + tiles) * HEIGHT)
        for tile in range(first, first + tiles):
            tl.store(experts_ptr + tile, expert)


@triton.jit
def _chosen(ids_ptr, start, num_pairs, FIRST: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """Return a chunk of pairs' experts as indices on this rank; EXPERTS for other ranks' and past the end."""
    pair_C = start + tl.arange(0, CHUNK)
    expert_C = tl.load(ids_ptr + pair_C, mask=pair_C < num_pairs, other=-1) - FIRST
    return tl.where((pair_C < num_pairs) & (expert_C >= 0) & (expert_C < EXPERTS), expert_C, EXPERTS)
