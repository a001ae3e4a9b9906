"""Merges partial softmax sums: two of them, and those of several programs (split K/V, as in Flash-Decoding).

A part is (m, l, o) as in `paged_attention.py`; a part that saw no key is (-inf, 0, 0) and changes no bit of
what it is added to. Parts are stored in the workspace, each in a *slot*. A program that stores one increments
a counter; the program that completes the count adds all parts in their order, so the order of arrival does
not matter. No program waits for another.

Legend: R rows of a tile, D head dim.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def no_part(ROWS: tl.constexpr, DIM: tl.constexpr):
    m_R = tl.full([ROWS], -float("inf"), tl.float32)
    return m_R, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM], tl.float32)


@triton.jit
def add_parts(m_R, l_R, o_RD, m2_R, l2_R, o2_RD):
    """Add two parts, rescaled to a common maximum."""
    top_R = tl.maximum(m_R, m2_R)
    base_R = tl.where(top_R == -float("inf"), 0.0, top_R)  # avoids inf - inf
    weight_R, weight2_R = tl.exp2(m_R - base_R), tl.exp2(m2_R - base_R)
    l_R = l_R * weight_R + l2_R * weight2_R
    return top_R, l_R, o_RD * weight_R[:, None] + o2_RD * weight2_R[:, None]


@triton.jit
def store_part(parts, slot, m_R, l_R, o_RD, real_R, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Store a part in its slot of `parts`: pointers to the m, l and o of all slots."""
    max_ptr, sum_ptr, out_ptr = parts
    place_R = slot * ROWS + tl.arange(0, ROWS)
    tl.store(max_ptr + place_R, m_R, mask=real_R, cache_modifier=".cg")
    tl.store(sum_ptr + place_R, l_R, mask=real_R, cache_modifier=".cg")
    at_RD = place_R[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(out_ptr + at_RD, o_RD, mask=real_R[:, None], cache_modifier=".cg")


@triton.jit
def is_last(arrived_ptr, expected):
    """Count this program's part; return whether all parts are stored and may be read."""
    tl.debug_barrier()  # all threads' stores come before one thread's count
    last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(arrived_ptr, 0)  # for the next launch
    return last


@triton.jit
def add_slots(
    parts, origin, begin, end, step, real_R, STRIDE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr
):
    """Add parts begin, begin + step, .. below end, in order; part i is in slot origin + i * STRIDE."""
    max_ptr, sum_ptr, out_ptr = parts
    m_R, l_R, o_RD = no_part(ROWS, DIM)
    for i in range(begin // step, tl.cdiv(end, step)):
        slot = origin + tl.maximum(begin, i * step) * STRIDE
        place_R = slot * ROWS + tl.arange(0, ROWS)
        m2_R = tl.load(max_ptr + place_R, mask=real_R, other=-float("inf"), cache_modifier=".cg")
        l2_R = tl.load(sum_ptr + place_R, mask=real_R, other=0.0, cache_modifier=".cg")
        at_RD = place_R[:, None] * DIM + tl.arange(0, DIM)[None, :]
        o2_RD = tl.load(out_ptr + at_RD, mask=real_R[:, None], other=0.0, cache_modifier=".cg")
        m_R, l_R, o_RD = add_parts(m_R, l_R, o_RD, m2_R, l2_R, o2_RD)
    return m_R, l_R, o_RD
