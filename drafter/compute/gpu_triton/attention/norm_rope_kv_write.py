"""Head norm, RoPE and the write to K/V pages, in one launch.

Equals `layers.HeadNorm`, `rope.Rotation` and `PagedKVCache.write` in sequence, with the same roundings: after
the norm, after its weight, after the product with the cosine, and at the end. Called once per layer of a step
(`norm_rotate_write`) and once per step for the drafter's context (`write_context`).

A program is one warp: a row's group of heads of one kind (query, key or value), so that 16 rows already fill
the GPU.

    q k v of a row   [Q heads | K heads | K heads]          group of heads = 512 elements, 16 bytes a load
    a head           [low half | high half]                 low' = low cos - high sin
                     pairs c, c + D/2                       high' = high cos + low sin

Legend: N rows, Q query heads, K kv heads, J heads in all, D head dim, F that of values, O values of a row, C
half a head's columns (padded to a power of two, and masked), G heads of a program, T positions, L layers, P
pages (the skip page included), S page size.
"""

# Type checkers know neither Triton's launch options nor what a jitted function returns.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...memory.kv_cache import UNSCALED, KVScales
from ..common.e4m3 import as_stored
from ..common.element_ops import dependent_launch, wait_for_predecessor

_ELEMENTS_PER_PROGRAM = 512  # 8 of each half of a head per thread of a warp: 16 bytes a load in bf16


def norm_rotate_write(
    qkv_NO: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    cos_TD: Tensor | None,
    sin_TD: Tensor | None,
    positions_N: Tensor,
    kv_slots_N: Tensor,
    k_PSKD: Tensor,
    v_PSKF: Tensor,
    *,
    v_norm: bool = False,
    scales: KVScales = UNSCALED,
) -> None:
    """Norm and rotate q in place; norm and rotate k and write it, and v, into a layer's pages.

    The keys and values inside `qkv` are not changed.

    Args:
        qkv_NO: Q + K heads of D, then K of F: q, k, v; rows may have any stride, a row is contiguous.
        q_norm_D, k_norm_D: weights of the heads' RMSNorm; both None for models without.
        cos_TD, sin_TD: `RotaryEmbedding`'s tables; cosines' second half and sines' first are not read. Both
            None rotate nothing.
        positions_N: absolute positions, int32 or int64, each below T, including padding's.
        kv_slots_N: int32 or int64; discarded rows carry the skip slot.
        v_norm: values are RMS-normed, without a weight.
        scales: of K and V in e4m3, by which they are divided.
    """
    _, _, num_kv, head_dim = k_PSKD.shape
    v_head_dim = v_PSKF.shape[3]
    num_q = (qkv_NO.shape[1] - num_kv * v_head_dim) // head_dim - num_kv
    assert num_q > 0 and (num_q + num_kv) * head_dim + num_kv * v_head_dim == qkv_NO.shape[1], "q, k, v heads"
    assert (q_norm_D is None) == (k_norm_D is None), "q and k are both normed or neither"
    assert k_PSKD.shape[:3] == v_PSKF.shape[:3] and v_head_dim % 2 == 0, "there is a value for every key"
    slot_stride = _slot_stride(k_PSKD)
    assert slot_stride == _slot_stride(v_PSKF), "v lies as k does"
    _check_rows(qkv_NO, head_dim, cos_TD, sin_TD)
    group = heads_per_program(head_dim, max(num_q, num_kv))
    num_groups = triton.cdiv(num_q, group) + 2 * triton.cdiv(num_kv, group)
    _norm_rotate_write[(len(qkv_NO), num_groups)](
        qkv_NO, q_norm_D, k_norm_D, cos_TD, sin_TD, positions_N, kv_slots_N, k_PSKD, v_PSKF, eps,
        *scales, qkv_NO.stride(0), slot_stride,
        NUM_Q=num_q, NUM_KV=num_kv, HALF=head_dim // 2, V_HALF=v_head_dim // 2,
        WIDTH=_power_of_two_above(head_dim // 2), V_WIDTH=_power_of_two_above(v_head_dim // 2), GROUP=group,
        V_NORM=v_norm, num_warps=1, **dependent_launch(qkv_NO.device),
    )  # fmt: skip


def write_context(
    kv_NJD: Tensor,
    k_norm_LD: Tensor,
    eps: float,
    cos_TD: Tensor,
    sin_TD: Tensor,
    positions_N: Tensor,
    kv_slots_N: Tensor,
    kv_LPS2KD: Tensor,
    scales_L2: Tensor | None = None,
) -> None:
    """Norm and rotate the keys of all layers and write them, and the values, into the pages of all layers.

    `kv_NJD` is the projection of the drafter's context features: J = 2 L K heads, the keys of all layers,
    then their values; only its rows may be strided. `k_norm_LD` is contiguous, as are `scales_L2`, the fp32
    scales of K and V in e4m3.
    """
    num_layers, num_kv, head_dim = kv_LPS2KD.shape[0], *kv_LPS2KD.shape[4:]
    assert kv_NJD.shape[1:] == (2 * num_layers * num_kv, head_dim), "one key and value per layer and kv head"
    assert k_norm_LD.shape == (num_layers, head_dim) and k_norm_LD.is_contiguous(), "one norm per layer"
    assert kv_LPS2KD[0].is_contiguous(), "the pages of a layer lie as PagedKVCache makes them"
    assert kv_NJD.stride()[1:] == (head_dim, 1), "the heads of a row must be contiguous"
    _check_rows(kv_NJD.flatten(1), head_dim, cos_TD, sin_TD)
    group = heads_per_program(head_dim, num_kv)
    _write_context[(len(kv_NJD), num_layers, 2 * triton.cdiv(num_kv, group))](
        kv_NJD, k_norm_LD, cos_TD, sin_TD, positions_N, kv_slots_N, kv_LPS2KD, scales_L2, eps,
        kv_NJD.stride(0), kv_LPS2KD.stride(0),
        NUM_LAYERS=num_layers, NUM_KV=num_kv, HALF=head_dim // 2, WIDTH=_power_of_two_above(head_dim // 2),
        GROUP=group, num_warps=1, **dependent_launch(kv_NJD.device),
    )  # fmt: skip


def heads_per_program(head_dim: int, max_heads: int) -> int:
    """Return how many heads one warp processes at once, a power of two."""
    width = _power_of_two_above(head_dim)
    return min(max(_ELEMENTS_PER_PROGRAM // width, 1), _power_of_two_above(max_heads))


def _power_of_two_above(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _slot_stride(k_PSKD: Tensor) -> int:
    """Return the elements from one slot to the next; pages are adjacent, so a slot's number suffices."""
    page_stride, slot_stride, head_stride, element_stride = k_PSKD.stride()
    _, page_size, _, head_dim = k_PSKD.shape
    assert (head_stride, element_stride) == (head_dim, 1), "the heads of a slot must be contiguous"
    assert page_stride == page_size * slot_stride, "a page must follow the one before"
    return slot_stride


def _check_rows(heads_NO: Tensor, head_dim: int, cos_TD: Tensor | None, sin_TD: Tensor | None) -> None:
    assert head_dim % 2 == 0, "the halves of a head are turned into each other"
    assert heads_NO.stride(1) == 1, "the heads of a row must be contiguous"
    assert (cos_TD is None) == (sin_TD is None), "both tables or neither"
    if cos_TD is None or sin_TD is None:
        return
    assert cos_TD.shape == sin_TD.shape and cos_TD.shape[1] == head_dim, "tables are [T, D]"
    assert cos_TD.is_contiguous() and sin_TD.is_contiguous(), "tables must be contiguous"


@triton.jit(do_not_specialize=["positions_ptr", "slots_ptr"])  # views with any alignment
def _norm_rotate_write(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, k_ptr, v_ptr, eps,
    k_scale, v_scale, row_stride, slot_stride,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, HALF: tl.constexpr, V_HALF: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, GROUP: tl.constexpr, V_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    Q_GROUPS: tl.constexpr = (NUM_Q + GROUP - 1) // GROUP
    KV_GROUPS: tl.constexpr = (NUM_KV + GROUP - 1) // GROUP
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    q_ptr = qkv_ptr + row * row_stride
    fresh_k_ptr = q_ptr + NUM_Q * 2 * HALF
    fresh_v_ptr = fresh_k_ptr + NUM_KV * 2 * HALF
    to = tl.load(slots_ptr + row).to(tl.int64) * slot_stride
    if cos_ptr is not None:
        at = tl.load(positions_ptr + row).to(tl.int64) * 2 * HALF
        cos_ptr += at
        sin_ptr += at
    if group < Q_GROUPS:
        _norm_rotate_store(
            q_ptr, q_ptr, group, q_norm_ptr, eps, cos_ptr, sin_ptr, None, NUM_Q, HALF, WIDTH, GROUP,
            PLAIN_NORM=False, IS_KV=False,
        )  # fmt: skip
    elif group < Q_GROUPS + KV_GROUPS:
        group -= Q_GROUPS
        _norm_rotate_store(
            fresh_k_ptr, k_ptr + to, group, k_norm_ptr, eps, cos_ptr, sin_ptr, k_scale, NUM_KV, HALF, WIDTH,
            GROUP, PLAIN_NORM=False, IS_KV=True,
        )  # fmt: skip
    else:
        group -= Q_GROUPS + KV_GROUPS
        _norm_rotate_store(
            fresh_v_ptr, v_ptr + to, group, None, eps, None, None, v_scale, NUM_KV, V_HALF, V_WIDTH, GROUP,
            PLAIN_NORM=V_NORM, IS_KV=True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["positions_ptr", "slots_ptr"])
def _write_context(
    kv_ptr, k_norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, pages_ptr, scales_ptr, eps, row_stride,
    layer_stride,
    NUM_LAYERS: tl.constexpr, NUM_KV: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    KEYS: tl.constexpr = NUM_KV * 2 * HALF  # elements of one layer's keys
    KV_GROUPS: tl.constexpr = (NUM_KV + GROUP - 1) // GROUP
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    group = tl.program_id(2)
    fresh_k_ptr = kv_ptr + row * row_stride + layer * KEYS
    at = tl.load(positions_ptr + row).to(tl.int64) * 2 * HALF
    k_ptr = pages_ptr + layer * layer_stride + tl.load(slots_ptr + row).to(tl.int64) * 2 * KEYS
    k_scale, v_scale = None, None
    if scales_ptr is not None:
        k_scale, v_scale = tl.load(scales_ptr + 2 * layer), tl.load(scales_ptr + 2 * layer + 1)
    if group < KV_GROUPS:
        norm_ptr = k_norm_ptr + layer * 2 * HALF
        cos_ptr += at
        sin_ptr += at
        _norm_rotate_store(
            fresh_k_ptr, k_ptr, group, norm_ptr, eps, cos_ptr, sin_ptr, k_scale, NUM_KV, HALF, WIDTH, GROUP,
            PLAIN_NORM=False, IS_KV=True,
        )  # fmt: skip
    else:
        fresh_v_ptr = fresh_k_ptr + NUM_LAYERS * KEYS
        group -= KV_GROUPS
        _norm_rotate_store(
            fresh_v_ptr, k_ptr + KEYS, group, None, eps, None, None, v_scale, NUM_KV, HALF, WIDTH, GROUP,
            PLAIN_NORM=False, IS_KV=True,
        )  # fmt: skip


@triton.jit
def _norm_rotate_store(
    from_ptr, to_ptr, group, norm_ptr, eps, cos_ptr, sin_ptr, scale,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    PLAIN_NORM: tl.constexpr, IS_KV: tl.constexpr,
):  # fmt: skip
    """Norm and rotate (each if given) group `group` of a row's `NUM_HEADS` heads, and write it.

    `PLAIN_NORM`: without a weight, as Gemma 4's values. `IS_KV`: `to_ptr` is in the pages, whose dtype may be
    e4m3; `scale` divides what is written in it.
    """
    heads_G = group * GROUP + tl.arange(0, GROUP)
    columns_C = tl.arange(0, WIDTH)
    inside = (heads_G < NUM_HEADS)[:, None]
    if HALF < WIDTH:
        inside = inside & (columns_C < HALF)[None, :]
    offsets_GC = heads_G[:, None] * (2 * HALF) + columns_C[None, :]
    low_GC = tl.load(from_ptr + offsets_GC, mask=inside, other=0.0)
    high_GC = tl.load(from_ptr + offsets_GC + HALF, mask=inside, other=0.0)
    if norm_ptr is not None:
        low_GC, high_GC = _norm(low_GC, high_GC, norm_ptr, columns_C, eps, HALF, WIDTH)
    if PLAIN_NORM:
        dtype = low_GC.dtype
        low_GC, high_GC = low_GC.to(tl.float32), high_GC.to(tl.float32)
        scale_G1 = _inverse_rms(low_GC, high_GC, eps, HALF)
        low_GC, high_GC = (low_GC * scale_G1).to(dtype), (high_GC * scale_G1).to(dtype)
    if cos_ptr is not None:
        cos_C = load_columns(cos_ptr, columns_C, HALF, WIDTH)
        # The first half of a row of sines is the second one negated.
        sin_C = load_columns(sin_ptr + HALF, columns_C, HALF, WIDTH)
        low_GC, high_GC = rotate_halves(low_GC, high_GC, cos_C[None, :], sin_C[None, :])
    if IS_KV:
        kept: tl.constexpr = to_ptr.dtype.element_ty
        low_GC, high_GC = as_stored(low_GC, kept, scale), as_stored(high_GC, kept, scale)
    tl.store(to_ptr + offsets_GC, low_GC, mask=inside)
    tl.store(to_ptr + offsets_GC + HALF, high_GC, mask=inside)


@triton.jit
def load_columns(ptr, columns_C, HALF: tl.constexpr, WIDTH: tl.constexpr):
    """Load half a head's values, padded with zeros."""
    if HALF < WIDTH:
        return tl.load(ptr + columns_C, mask=columns_C < HALF, other=0.0)
    else:
        return tl.load(ptr + columns_C)


@triton.jit
def _norm(low_GC, high_GC, weight_ptr, columns_C, eps, HALF: tl.constexpr, WIDTH: tl.constexpr):
    """Norm heads; rounds before and after the weight, as HeadNorm; once if the weight is wider."""
    dtype = low_GC.dtype
    inner: tl.constexpr = weight_ptr.dtype.element_ty
    low_GC, high_GC = low_GC.to(tl.float32), high_GC.to(tl.float32)
    scale_G1 = _inverse_rms(low_GC, high_GC, eps, HALF)
    weight_low_1C = load_columns(weight_ptr, columns_C, HALF, WIDTH).to(tl.float32)[None, :]
    weight_high_1C = load_columns(weight_ptr + HALF, columns_C, HALF, WIDTH).to(tl.float32)[None, :]
    low_GC = (low_GC * scale_G1).to(inner).to(tl.float32) * weight_low_1C
    high_GC = (high_GC * scale_G1).to(inner).to(tl.float32) * weight_high_1C
    return low_GC.to(dtype), high_GC.to(dtype)


@triton.jit
def _inverse_rms(low_GC, high_GC, eps, HALF: tl.constexpr):
    squares_G = tl.sum(low_GC * low_GC + high_GC * high_GC, axis=1)
    return tl.rsqrt(squares_G / (2 * HALF) + eps)[:, None]


@triton.jit
def rotate_halves(low_GC, high_GC, cos_1C, sin_1C):
    """Rotate; rounds after the product with the cosine and at the end, as Rotation's two operations do."""
    dtype = low_GC.dtype
    low_GC, high_GC = low_GC.to(tl.float32), high_GC.to(tl.float32)
    cos_1C, sin_1C = cos_1C.to(tl.float32), sin_1C.to(tl.float32)
    rotated_low_GC = (low_GC * cos_1C).to(dtype).to(tl.float32) - high_GC * sin_1C
    rotated_high_GC = (high_GC * cos_1C).to(dtype).to(tl.float32) + low_GC * sin_1C
    return rotated_low_GC.to(dtype), rotated_high_GC.to(dtype)
