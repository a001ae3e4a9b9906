"""Launches of the kernels of layers, at sizes of served models; see `recorded_launches.py`.

Functions of a device launch one or a few kernels at all shapes that are compiled, the most important first;
the others return such a function, for shapes of which more is known.

Legend: N rows, B requests, Q query heads, K kv heads, D head dim, O outputs, I inputs, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from manta.cluster.pages.kv_cache_groups import KVCacheSpec
from manta.cluster.pages.recurrent_state_spec import RecurrentStateSpec
from manta.drafter.compute.checkpoint.packed_codes import PackedCodes
from manta.drafter.compute.checkpoint.quantized_matrix import Code
from manta.drafter.compute.gpu_triton.attention import mla, mla_prefill, mla_prefill_work
from manta.drafter.compute.gpu_triton.attention.attention_tiles import (
    AttentionKind,
    AttentionWorkspace,
    PagedRows,
    TreeRows,
    list_work,
    rows_from_host,
)
from manta.drafter.compute.gpu_triton.attention.compact_rows import compact_rows
from manta.drafter.compute.gpu_triton.attention.norm_rope_kv_write import norm_rotate_write, write_context
from manta.drafter.compute.gpu_triton.attention.paged_attention import verify_attention
from manta.drafter.compute.gpu_triton.backend import TritonBackend
from manta.drafter.compute.gpu_triton.common import element_ops
from manta.drafter.compute.gpu_triton.delta_net.dynamic_convolution import convolve
from manta.drafter.compute.gpu_triton.linear.all_reduce_norm import sum_add_rms_norm
from manta.drafter.compute.gpu_triton.linear.gemm_tiles import ProductWorkspace, tile_columns
from manta.drafter.compute.gpu_triton.linear.packed_codes import dequantize, for_kernels
from manta.drafter.compute.gpu_triton.linear.projections import OwnProjection, PendingNorm
from manta.drafter.compute.gpu_triton.moe import grouped_gemm, moe_align, topk_routing
from manta.drafter.compute.layers.gated_delta_net import DeltaNetShape
from manta.drafter.compute.layers.linear import RMSNorm
from manta.drafter.compute.layers.mla import MLALayer
from manta.drafter.compute.layers.moe import ExpertActivation, MoeRouter
from manta.drafter.compute.layers.rope import RopeConfig, RotaryEmbedding
from manta.drafter.compute.memory.kv_cache import KVScales, PagedKVCache
from manta.drafter.compute.memory.peer_buffers import PeerBuffers
from manta.drafter.compute.memory.recurrent_state_cache import Save, StateMemory
from manta.jobs.doctor.cases.delta_rule import DeltaLayer
from torch import Tensor

Call = Callable[[torch.device], object]
BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
I32, I64, U8 = torch.int32, torch.int64, torch.uint8
REQUESTS, PAGE, EPS = 3, 64, 1e-6


def paged_rows(rows: int, tree: TreeRows | None = None) -> PagedRows:
    """Return requests of up to `rows` rows, of which only the device knows the lengths."""
    lists = torch.zeros(3, REQUESTS + 1, dtype=I32)
    table = torch.zeros(REQUESTS, 512, dtype=I32)
    return PagedRows(lists[0, :REQUESTS], lists[1], lists[2, :REQUESTS], table, rows, tree=tree)


def attention(
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    v_dim: int | None = None,
    rows: int = 16,
    dtype: torch.dtype = BF16,
    kv: torch.dtype | None = None,
    page: int = PAGE,
    sinks: bool = False,
    tree: bool = False,
    batch_invariant: bool = False,
    **kind: Any,
) -> Call:
    def call(device: torch.device) -> None:
        of = AttentionKind(heads, kv_heads, dim, v_dim or dim, dtype, page, **kind)
        cache = PagedKVCache(1, 8, page, KVCacheSpec(kv_heads, dim, v_dim or dim), kv or dtype, device)
        q_NQD = torch.empty(rows, heads, dim, dtype=dtype)
        given = {"sinks_Q": torch.empty(heads) if sinks else None}
        _attend(of, q_NQD, cache.heads(0), rows, tree, batch_invariant, device, given)

    return call


def latents(
    heads: int,
    *,
    rows: int = 16,
    kv: torch.dtype = BF16,
    tree: bool = False,
    batch_invariant: bool = False,
    tile_rows: int | None = None,
) -> Call:
    """Attend over latents of Kimi K2 and DeepSeek-V3."""

    def call(device: torch.device) -> None:
        how = {"batch_invariant": batch_invariant, "tile_rows": tile_rows}
        of = mla.latent_kind(heads, 512, BF16, PAGE, **how)
        q_NQD, tail_NQC = torch.empty(rows, heads, 576, dtype=BF16).split((512, 64), dim=2)
        pages = torch.empty(8, PAGE, 1, 576, dtype=kv)
        given = {"q_tail_NQC": tail_NQC}
        _attend(of, q_NQD, (pages, pages), rows, tree, batch_invariant, device, given)

    return call


def _attend(
    of: AttentionKind,
    q_NQD: Tensor,
    pages: tuple[Tensor, Tensor],
    rows: int,
    tree: bool,
    batch_invariant: bool,
    device: torch.device,
    given: dict[str, Any],
) -> None:
    paths = TreeRows(torch.empty(rows, 16, dtype=I32), torch.empty(rows, dtype=I64)) if tree else None
    workspace = AttentionWorkspace(of.v_head_dim, device, batch_invariant=batch_invariant)
    paged = paged_rows(rows, paths)
    verify_attention(q_NQD, *pages, paged, list_work(of, paged, workspace), 0.1, **given)


def write_latents(device: torch.device) -> None:
    """Write those of Kimi K2, on eight ranks and on one."""
    for heads, dtype, kv in ((8, BF16, BF16), (64, FP32, FP32), (8, BF16, E4M3)):
        q_NJO, latent_NW = torch.empty(16, heads, 192, dtype=dtype), torch.empty(16, 576, dtype=dtype)
        pages, rope = torch.empty(8, PAGE, 576, dtype=kv), _rope(64, dtype, device)
        where = _parts(heads, dtype), rope, *_places(16), pages
        mla.norm_rotate_write_latents(q_NJO, latent_NW, *where)


def expanded_latents(heads: int, dtype: torch.dtype = BF16, kv: torch.dtype | None = None) -> Call:
    """Attend from a prompt at Kimi K2's and DeepSeek-V3's sizes, and gather its latents."""

    def call(device: torch.device) -> None:
        parts, spans = _parts(heads, dtype), (np.array([0, 0]), np.array([200, 300]))
        workspace = mla_prefill_work.ExpansionWorkspace(parts, 576, 171)
        rows = rows_from_host(*spans, np.zeros((2, 8), np.int32), PAGE, device)
        expansion = mla_prefill_work.find_expansion(rows, workspace)
        assert expansion is not None
        q_NJO, out_NJF = torch.empty(500, heads, 192, dtype=dtype), torch.empty(500, heads, 128, dtype=dtype)
        pages = torch.empty(16, PAGE, 576, dtype=kv or dtype)
        mla_prefill.attend_expanded(q_NJO, parts, pages, expansion, 0.1, out_NJF)

    return call


def _parts(heads: int, dtype: torch.dtype) -> MLALayer:
    norm = RMSNorm(torch.empty(512, dtype=dtype), EPS)
    up_JUC = torch.empty(heads, 256, 512, dtype=dtype)
    return MLALayer(q_norm=None, q_up=None, kv_norm=norm, kv_up_JUC=up_JUC, v_dim=128)


def _rope(dim: int, dtype: torch.dtype, device: torch.device) -> RotaryEmbedding:
    return RotaryEmbedding(RopeConfig(dim, 1e6, "default", {}), 256, dtype, device)


def _places(rows: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, dtype=I64), torch.zeros(rows, dtype=I64)


def write_heads(device: torch.device) -> None:
    """Norm and rotate the heads of a projection, and write keys and values, also of a drafter's context."""
    for heads, kv_heads, dims, dtype, weight, kv, v_norm, rotates in (
        (32, 8, (128, 128), BF16, BF16, BF16, False, True),  # Qwen3-8B
        (32, 8, (128, 128), BF16, None, BF16, False, True),
        (8, 1, (64, 64), BF16, BF16, BF16, False, True),
        (16, 4, (256, 256), FP32, FP32, FP32, False, True),
        (16, 8, (256, 256), BF16, FP32, BF16, False, True),  # Gemma 3
        (32, 16, (256, 256), BF16, FP32, BF16, True, True),  # Gemma 4
        (32, 4, (512, 512), BF16, FP32, BF16, True, True),
        (64, 4, (192, 128), BF16, None, BF16, False, True),  # MiMo-V2
        (32, 8, (128, 128), BF16, BF16, E4M3, False, True),
        (32, 2, (128, 128), BF16, FP32, BF16, False, False),  # Muse-Glimmer
    ):
        geometry, rope = KVCacheSpec(kv_heads, *dims), _rope(dims[0], dtype, device)
        pages = PagedKVCache(1, 4, PAGE, geometry, kv, device).heads(0)
        qkv_NO = torch.empty(16, heads * dims[0] + geometry.width, dtype=dtype)
        norm_D = None if weight is None else torch.empty(dims[0], dtype=weight)
        tables = (rope.cos_TD, rope.sin_TD) if rotates else (None, None)
        norm_rotate_write(qkv_NO, norm_D, norm_D, EPS, *tables, *_places(16), *pages, v_norm=v_norm)
    kv_NJD, norm_LD = torch.empty(16, 80, 128, dtype=BF16), torch.empty(5, 128, dtype=BF16)
    rope = _rope(128, BF16, device)
    for kv, scales in ((E4M3, [KVScales(0.1, 0.1)] * 5), (BF16, [])):
        pages, geometry = _far_pages(5, 2048, kv), KVCacheSpec(8, 128, 128)
        cache = PagedKVCache(5, len(pages[0]) - 1, PAGE, geometry, kv, device, scales=scales, kv=pages)
        where = *_places(16), cache.planes(0, 5), cache.scales_of(0, 5) if scales else None
        write_context(kv_NJD, norm_LD, EPS, rope.cos_TD, rope.sin_TD, *where)


def move_rows(device: torch.device) -> None:
    for dtype, width, moves in ((BF16, 2048, 16), (E4M3, 576, 8)):
        pages, geometry = _far_pages(1, width, dtype), KVCacheSpec(1, width // 2, width // 2)
        slots_RM = torch.empty(REQUESTS, moves, dtype=I64)
        compact_rows(
            PagedKVCache(1, len(pages[0]) - 1, PAGE, geometry, dtype, device, kv=pages), slots_RM, slots_RM
        )


def _far_pages(planes: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return pages without memory, of which a layer has more than 2^31 values."""
    return torch.empty(planes, 2**31 // (PAGE * width) + 2, PAGE, width, dtype=dtype, device="meta")


def norm(device: torch.device) -> None:
    for width, adds, dtype, weight, scalar in (
        (4096, True, BF16, BF16, None),
        (4096, False, BF16, BF16, None),
        (2880, True, BF16, BF16, None),
        (192, True, BF16, BF16, None),
        (8192, True, FP32, FP32, None),
        (3840, True, BF16, FP32, None),  # Gemma 3
        (3840, False, BF16, FP32, None),
        (5376, True, BF16, FP32, 0.7),  # Gemma 4
    ):
        x_NH, weight_H = torch.empty(16, width, dtype=dtype), torch.empty(width, dtype=weight)
        if adds:
            element_ops.add_rms_norm(x_NH, x_NH, weight_H, EPS, scalar)
        else:
            element_ops.rms_norm(x_NH, weight_H, EPS)
    element_ops.row_squares(torch.empty(16, 7168, dtype=BF16), (6144, 1024))  # MiniMax-M2


def gate(device: torch.device) -> None:
    for dtype in (BF16, FP32):
        element_ops.gate(torch.empty(16, 24576, dtype=dtype), "silu")
        element_ops.gate(torch.empty(16, 24576, dtype=dtype), "gelu_tanh")


def convolve_rows(device: torch.device) -> None:
    """Convolve with two taps and a kernel for 16 channels."""
    for hidden, dtype, adds in ((6656, BF16, False), (6656, BF16, True), (5120, FP32, True)):
        x_NH, base_TH = torch.empty(16, hidden, dtype=dtype), torch.empty(2, hidden, dtype=dtype)
        dynamic_NTC = torch.empty(16, 2, 2, hidden // 16, dtype=dtype)[:, 0]
        convolve(x_NH, dynamic_NTC, base_TH, torch.empty(16, dtype=I32), *((x_NH,) if adds else ()))


def sum_over_ranks(device: torch.device) -> None:
    for width, ranks, dtype in ((2880, 8, BF16), (4096, 2, FP32)):  # gpt-oss's is the first
        x_NH, addresses = torch.empty(16, width, dtype=dtype), torch.empty(ranks, dtype=I64)
        peers = PeerBuffers(2, ranks, dtype, addresses, addresses, torch.empty(64, dtype=I32), 2**14, 2**20)
        sum_add_rms_norm(x_NH, peers, x_NH, torch.empty(width, dtype=dtype), EPS)


class Codes:
    """A form of codes: inputs of a group (None: all), type of scales, whether with zeros."""

    def __init__(self, code: Code, scales: torch.dtype, group: int | None, *, zeros: bool = False) -> None:
        self._code: Code = code
        self._scales, self._group, self._has_zeros = scales, group, zeros

    def of(self, *shape: int) -> PackedCodes:
        """Return codes [.., O, I] as the device's kernels take them."""
        *outputs, inputs = shape
        groups = 1 if self._group is None else inputs // self._group
        is_packed = self._code in ("int4", "e2m1")
        codes = torch.zeros(*outputs, inputs // 2 if is_packed else inputs, dtype=U8)
        scales = torch.zeros(*outputs, groups, dtype=self._scales)
        zeros = torch.zeros(*outputs, groups, dtype=U8) if self._has_zeros else None
        return for_kernels(PackedCodes(self._code, codes, scales, zeros))


W4A16, W8A16 = Codes("int4", BF16, 128), Codes("int8", BF16, None)
AWQ, FP8_BLOCKS = Codes("int4", FP16, 128, zeros=True), Codes("e4m3", FP32, 128)
INT4, FP8_ROWS = Codes("int4", BF16, 32), Codes("e4m3", FP32, None)
MXFP4, NVFP4 = Codes("e2m1", U8, 32), Codes("e2m1", FP32, 16)


def dequantize_codes(device: torch.device) -> None:
    for codes in (AWQ, MXFP4, NVFP4, FP8_BLOCKS, W8A16, FP8_ROWS):
        dequantize(codes.of(4096, 12288), BF16)


def product(
    outputs: int,
    inputs: int,
    rows: int,
    fused: str = "",
    *,
    dtype: torch.dtype = BF16,
    codes: Codes | None = None,
    scaled_rows: bool = False,
    one_tile: bool = False,
    layers: int = 1,
) -> Call:
    """Multiply; `fused` has words of bias, norm, gate, residual (with squares of the sum).

    With `scaled_rows` weights are e4m3 with a scale per row; `one_tile` has all rows in tiles of one height.
    `outputs` are those of the weight's parts together, but of a gate alone.
    """

    def call(device: torch.device) -> None:
        workspace, gated = ProductWorkspace(device), "gate" in fused
        total = 2 * outputs if gated else outputs
        bias_O = torch.empty(total, dtype=dtype) if "bias" in fused else None
        x_NK = torch.empty(rows, inputs, dtype=dtype)
        if codes is not None:
            packed = codes.of(total, inputs)
            weight = packed.codes[None, None]
            own = OwnProjection(weight, bias_O, workspace, packed=packed, one_tile=one_tile)
        else:
            parts = 2 if layers > 1 else 1
            weight = torch.empty(
                parts, layers, total // (parts * layers), inputs, dtype=E4M3 if scaled_rows else dtype
            )
            scale_O = torch.empty(total) if scaled_rows else None
            own = OwnProjection(weight, bias_O, workspace, scale_O=scale_O, one_tile=one_tile)
        x: Tensor | PendingNorm = x_NK
        if "norm" in fused:
            norm_K = RMSNorm(torch.empty(inputs, dtype=dtype), EPS)
            squares_NT = torch.empty(rows, -(-inputs // tile_columns(own.row_tile(rows, dtype))))
            x = PendingNorm(x_NK, squares_NT, norm_K)
        if gated:
            own.gated(x, "silu")
        elif "residual" in fused:
            own.added(
                x_NK, torch.empty(rows, outputs, dtype=dtype), RMSNorm(torch.empty(outputs, dtype=dtype), EPS)
            )
        else:
            own(x)

    return call


def experts(
    outputs: int,
    inputs: int,
    height: int,
    *,
    activation: ExpertActivation | None = None,
    dtype: torch.dtype = BF16,
    codes: Codes | None = None,
) -> Call:
    """Multiply tiles of pairs: gate and up with an activation, else down. MXFP4 has biases."""

    def call(device: torch.device) -> None:
        places = 8 if activation else 1
        ids_Nk = torch.empty(16, 8, dtype=I32)
        tiles = moe_align.list_tiles(ids_Nk, 2, 0, height, torch.empty(1, dtype=I32))
        x = torch.empty(16 * 8 // places, inputs, dtype=dtype)
        weight = (
            torch.empty(2, outputs, inputs, dtype=dtype) if codes is None else codes.of(2, outputs, inputs)
        )
        bias = torch.empty(2, outputs, dtype=dtype) if codes is MXFP4 else None
        grouped_gemm.multiply_tiles(x, weight, tiles, bias_EO=bias, activation=activation, limit=7.0)

    return call


def route(device: torch.device) -> None:
    """Choose experts, list their tiles and add up their outputs."""
    qwen3 = MoeRouter(num_experts=128, top_k=8, score="softmax")
    gpt_oss = MoeRouter(num_experts=128, top_k=4, score="softmax", choose_first=True)
    deepseek = {"num_experts": 256, "top_k": 8, "groups": 8, "top_groups": 4}
    deepseek_v3 = MoeRouter(score="sigmoid", correction=True, **deepseek)  # type: ignore[arg-type]
    owners_N = torch.empty(16, dtype=I32)  # where a pass may have padding, as in graphs
    for rule, owners in ((qwen3, owners_N), (qwen3, None), (gpt_oss, None), (deepseek_v3, None)):
        correction = torch.empty(rule.num_experts) if rule.correction else None
        topk_routing.choose(torch.empty(16, rule.num_experts, dtype=BF16), rule, correction, owners_N=owners)
    for count, height in ((128, 16), (512, 64)):
        moe_align.list_tiles(torch.empty(16, 8, dtype=I32), count, 0, height, torch.empty(1, dtype=I32))
    for width, places in ((2048, 8), (2880, 4)):
        outputs_PH, ids_Nk = torch.empty(16 * places, width, dtype=BF16), torch.empty(16, places, dtype=I32)
        grouped_gemm.add_up(outputs_PH, ids_Nk, torch.empty(16, places), 128, 0)


def delta_net(key_heads: int, value_heads: int, dtype: torch.dtype = BF16, *, saves: bool = False) -> Call:
    """Run a gated delta layer with heads of 128, four taps and 15 drafts over a prompt."""

    def call(device: torch.device) -> None:
        kind = RecurrentStateSpec(key_heads, value_heads, 128, 128, 4)
        shape = DeltaNetShape(
            kind,
            kernel_CT=torch.empty(kind.channels, 4),
            rate_V=torch.empty(value_heads),
            dt_bias_V=torch.empty(value_heads),
            norm_F=torch.empty(128),
            eps=EPS,
        )
        memory = StateMemory(1, kind, 4, 15, dtype, device)
        layer = DeltaLayer(TritonBackend(device), shape, memory, PAGE)
        rows_NO = torch.empty(40, kind.channels + value_heads * 130, dtype=dtype)
        layer.run([(1, rows_NO, 0), (2, rows_NO, 0)], (Save(0, 16, 3),) if saves else ())

    return call
