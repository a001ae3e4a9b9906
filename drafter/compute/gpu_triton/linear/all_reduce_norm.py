"""Sum over ranks, residual addition and RMSNorm in one launch, through memory that all ranks can read.

Replaces an all-reduce of a few rows, which takes two to four launches with the norm after it. Program r owns
row r on every rank:

    own part ─▶ own buffer ─▶ signal to all ranks, wait for theirs ─▶ read all buffers, add in rank order
             ─▶ round ─▶ + residual ─▶ round ─▶ norm

All ranks add the same numbers in the same order, so they get the same bits. A signal is an increment of a
counter on the other rank, one for each row and rank. A row's place has two halves, used in turn by its
launches: a rank writes a half again after it has seen the next launch's signals, which a rank sends once it
has read the half.

A rank that waits keeps its processors busy; all ranks launch the same sums in the same order. After
`MAX_SPINS` looks (more time than a collective's timeout) a program goes on with what it finds: then the ranks
are being stopped. Made by `actors/workers/comm/custom_all_reduce.py`, which tries it at start.

Legend: N rows, H hidden, P ranks.
"""

# Type checkers do not know Triton's launch options.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...memory.peer_buffers import PeerBuffers
from ..common.element_ops import dependent_launch, normed, rounded_sum, wait_for_predecessor, warps_for


def sum_add_rms_norm(
    part_NH: Tensor,
    peers: PeerBuffers,
    x_NH: Tensor,
    weight_H: Tensor,
    eps: float,
    scalar: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `norms.add_rms_norm` of the ranks' summed parts: (residual + sum [N, H], normed [N, H]).

    Collective: all ranks call it with the same shapes. `x_NH` is the residual.
    """
    (num_rows, width), dtype = x_NH.shape, x_NH.dtype
    assert part_NH.shape == x_NH.shape and part_NH.dtype is dtype is peers.dtype, "parts like the residual"
    assert peers.takes(part_NH), "a row has a place in the buffers"
    assert weight_H.shape == (width,) and weight_H.is_contiguous(), "one weight per element of a row"
    assert x_NH.stride(1) == part_NH.stride(1) == 1, "a row must be contiguous"
    sum_NH, normed_NH = x_NH.new_empty(x_NH.shape), x_NH.new_empty(x_NH.shape)
    block = 1 << (width - 1).bit_length()
    _sum_add_norm[(num_rows,)](
        part_NH, peers.values_P, peers.signals_P, peers.launches, x_NH, weight_H, sum_NH, normed_NH,
        part_NH.stride(0), x_NH.stride(0), peers.row_values, peers.rank, peers.spins, eps, scalar,
        WORLD=peers.world_size, RANKS=triton.next_power_of_2(peers.world_size), WIDTH=width, BLOCK=block,
        num_warps=warps_for(block), **dependent_launch(x_NH.device),
    )  # fmt: skip
    return sum_NH, normed_NH


@triton.jit(do_not_specialize=["rank", "spins"])
def _sum_add_norm(
    part_ptr, values_ptr, signals_ptr, launches_ptr, x_ptr, weight_ptr, sum_ptr, normed_ptr,
    part_stride, x_stride, row_values, rank, spins, eps, scalar,
    WORLD: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = normed_ptr.dtype.element_ty
    columns_H = tl.arange(0, BLOCK)
    inside_H = columns_H < WIDTH
    launch = tl.load(launches_ptr + row)
    at = (2 * row + launch % 2) * row_values
    part_H = tl.load(part_ptr + row * part_stride + columns_H, mask=inside_H, other=0.0)
    tl.store(_buffer(values_ptr, rank, dtype) + at + columns_H, part_H, mask=inside_H)
    tl.debug_barrier()  # all threads' stores come before the signals
    tl.store(launches_ptr + row, launch + 1)
    _meet(signals_ptr, row * WORLD, rank, launch + 1, spins, WORLD, RANKS)
    total_H = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(WORLD):
        peer_ptr = _buffer(values_ptr, peer, dtype)
        read_H = tl.load(peer_ptr + at + columns_H, mask=inside_H, other=0.0, cache_modifier=".cg")
        total_H += read_H.to(tl.float32)
    x_H = tl.load(x_ptr + row * x_stride + columns_H, mask=inside_H, other=0.0).to(tl.float32)
    weight_H = tl.load(weight_ptr + columns_H, mask=inside_H, other=0.0).to(tl.float32)
    sum_H = rounded_sum(x_H, total_H.to(dtype).to(tl.float32), scalar, dtype)
    tl.store(sum_ptr + row * WIDTH + columns_H, sum_H, mask=inside_H)
    normed_H = normed(sum_H.to(tl.float32), weight_H, eps, WIDTH, dtype)
    tl.store(normed_ptr + row * WIDTH + columns_H, normed_H, mask=inside_H)


@triton.jit
def _buffer(values_ptr, rank, dtype: tl.constexpr):
    return tl.multiple_of(tl.load(values_ptr + rank).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _meet(signals_ptr, first, rank, launch, spins, WORLD: tl.constexpr, RANKS: tl.constexpr):
    """Signal to all ranks, and wait until all have signaled `launch` times; one thread per rank."""
    peer_P = tl.arange(0, RANKS)
    there_P = peer_P < WORLD
    theirs_P = tl.load(signals_ptr + peer_P, mask=there_P, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_add(theirs_P + first + rank, 1, mask=there_P, sem="release", scope="sys")
    mine_P = tl.load(signals_ptr + rank).to(tl.pointer_type(tl.int32)) + first + peer_P
    missing, count = 1, 0
    while (missing > 0) & (count < spins):
        seen_P = tl.atomic_add(mine_P, 0, mask=there_P, sem="acquire", scope="sys")
        missing = tl.max(tl.where(there_P, launch - seen_P, 0), 0)  # a difference, as counters wrap
        count += 1
    tl.debug_barrier()  # all threads read after those that have seen the signals
