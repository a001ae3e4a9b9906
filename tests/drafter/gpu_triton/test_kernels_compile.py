"""Every Triton kernel compiles for Hopper (sm_90) and Blackwell (sm_100) without spills, without a GPU.

The machine code is counted, too: a loop over weights that takes longer to issue than the memory takes to read
them is bound by its instructions, which no other test shows.

`VARIANTS` lists, for each module of `compute/gpu_triton` and `step/gpu_triton`, few representative shapes,
because each costs seconds. They are compiled in one process without Triton's interpreter, by this file as a
script. The short form has one shape of every kernel and every second shape whose instructions are counted,
with capabilities in turn. `make kernels` compiles all for both.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from manta.drafter.compute.gpu_triton.attention.attention_tiles import AttentionKind, plan_tiles, tile_width
from manta.drafter.compute.gpu_triton.attention.mla import latent_kind
from manta.drafter.compute.gpu_triton.attention.paged_attention import MOST_REGISTERS
from manta.drafter.compute.gpu_triton.common.element_ops import warps_for
from manta.drafter.compute.gpu_triton.linear.gemm_tiles import plan_product
from manta.drafter.compute.gpu_triton.moe.grouped_gemm_tiles import HEIGHTS, cut_weight
from manta.drafter.step.gpu_triton.sampling.sampler import num_warps

CAPABILITIES = (90, 100)  # H100 and H200; B200 and B300
SHARED_MEMORY_BYTES = 228 * 1024  # of their multiprocessors; each program takes 1 KiB more
REGISTERS = 65536
WHOLE = os.environ.get("MANTA_GRID") == "whole"


@dataclass(frozen=True)
class Variant:
    """One kernel at one shape.

    Attributes:
        kernel: name of the jitted function in its module.
        signature: type by argument, as "*bf16:16", "i32:16" (divisible by 16, as pointers and strides are),
            "i32" or "fp32".
        constexprs: value by compile-time argument; None for a pointer that is not given.
        warps: of a program.
        stages: of its loop's copies; None leaves them to Triton.
        wgmma: whether Hopper's and Blackwell's own matrix instructions are expected.
        side_by_side: programs that a multiprocessor must have room for.
        registers: most of a thread, if the kernel is compiled with a limit.
        copies: asynchronous ones of an iteration of its loop, which has no other loads then.
        only: the capability that the shape is for; None for both.
        most_instructions: of an iteration of its loop, by capability; a warp issues one per cycle.
        spills_beside_loop: whether registers may be spilled, but not in the loop.
        fp_fusion: whether multiplications and additions may be fused, which batch-invariant mode forbids.
    """

    kernel: str
    signature: dict[str, str]
    constexprs: dict[str, object]
    warps: int = 4
    stages: int | None = None
    wgmma: bool = False
    side_by_side: int = 1
    registers: int | None = None
    copies: int | None = None
    only: int | None = None
    most_instructions: tuple[int, int] | None = None
    fp_fusion: bool = True
    spills_beside_loop: bool = False


def _attention(
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    v_dim: int | None = None,
    rows: int = 16,
    dtype: str = "bf16",
    page: int = 64,
    causal: bool = True,
    window: int = 0,
    first_key: int = 0,
    sinks: bool = False,
    tail: int = 0,
    batch_invariant: bool = False,
    kv: str | None = None,
    tree: bool = False,
    tile_rows: int | None = None,
) -> Variant:
    torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    if tail:
        how = {"batch_invariant": batch_invariant, "tile_rows": tile_rows}
        kind = latent_kind(heads, dim, torch_dtype, page, **how)
        kv_heads = kind.num_kv_heads
    else:
        kind = AttentionKind(heads, kv_heads, dim, v_dim or dim, torch_dtype, page)
    plan = plan_tiles(kind, rows, batch_invariant=batch_invariant, has_trees=tree)
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}:16")
    pointers |= dict.fromkeys(("k_ptr", "v_ptr"), f"*{kv or dtype}:16")
    pointers |= dict.fromkeys(("max_ptr", "sum_ptr", "partial_ptr"), "*fp32:16")
    pointers |= dict.fromkeys(("arrived_ptr", "work_ptr"), "*i32:16")
    pointers |= dict.fromkeys(("slots_ptr", "cu_rows_ptr", "kv_lengths_ptr", "page_table_ptr"), "*i32")
    pointers |= {"q_tail_ptr": f"*{dtype}:16"} if tail else {}
    strides = ("q_row", "q_head", "tail_row", "tail_head", "page", "token", "kv_head")
    signature = pointers | {f"{name}_stride": "i32:16" for name in strides}
    signature |= {"scale": "fp32", "v_scale": "fp32"}
    signature |= dict.fromkeys(("num_rows", "num_requests", "depth", "table_stride"), "i32")
    signature |= {"sinks_ptr": "*fp32:16"} if sinks else {}
    signature |= {"paths_ptr": "*i32", "positions_ptr": "*i64"} if tree else {}
    constexprs = {
        "HEADS": heads,
        "GROUP": heads // kv_heads,
        "DIM": dim,
        "V_DIM": v_dim or dim,
        "WIDTH": tile_width(dim),
        "V_WIDTH": tile_width(v_dim or dim),
        "TAIL": tail,
        "TAIL_WIDTH": tile_width(tail),
        "PAGE": page,
        "BLOCK_ROWS": plan.block_rows,
        "BLOCK_KEYS": plan.block_keys,
        "CAUSAL": causal,
        "WINDOW": window,
        "FIRST_KEY": first_key,
        "SPLIT_TILES": plan.split_keys // plan.block_keys,
        "RUN_SPLITS": plan.run_splits,
        "PDL": True,
    }
    optional = {"sinks_ptr": sinks, "q_tail_ptr": tail, "paths_ptr": tree, "positions_ptr": tree}
    constexprs |= {name: None for name, given in optional.items() if not given}
    limits = {"registers": MOST_REGISTERS if tail else None, "fp_fusion": not batch_invariant}
    return Variant("_attend", signature, constexprs, plan.num_warps, wgmma=plan.block_rows >= 64, **limits)


def _pointers(**names: str) -> dict[str, str]:
    """Return the signature of aligned pointers, from type = "name name ..."."""
    return {name: f"*{kind}:16" for kind, given in names.items() for name in given.split()}


_SETTINGS = _pointers(i32="slots top_ks", fp32="temperatures top_ps min_ps")
_LOGITS = _SETTINGS | _pointers(i64="positions", i32="min_lengths stop_ids") | {"row_stride": "i32:16"}
_WORKSPACE = _pointers(
    i32="num_done best_ids groups candidates",
    fp32="best_scores second_scores group_maxima chunk_maxima chunk_sums floors",
)
_STEP = _pointers(i32="slots num_computed token_ids") | {"token_stride": "i32"}


def _choose(dtype: str, *, filters: bool, seconds: bool = False, vocab: int = 151936) -> Variant:
    """Return the sampling kernel over a row of logits in chunks of 4096; by default Qwen3's."""
    signature = _LOGITS | {"logits": f"*{dtype}:16"} | _WORKSPACE
    signature |= _pointers(i64="seeds ids", fp32="scores seconds")
    signature |= {"vocab_size": "i32:16", "vocab_start": "i32:16"}
    chunks = -(-vocab // 4096)
    constexprs = {"CHUNKS": chunks, "WIDTH": 1 << (chunks - 1).bit_length(), "FILTERS": filters}
    constexprs |= {"SECONDS": seconds, "CHECKS": not seconds}  # of drafts, or of the target's tokens
    constexprs |= {"MAX_CANDIDATES": 16384, "NUM_STOP_IDS": 128, "CHUNK": 4096}
    return Variant(
        "_choose", signature, constexprs, num_warps(torch.float32 if dtype == "fp32" else torch.bfloat16)
    )


def _apply_rules(dtype: str, *, drafts: bool) -> Variant:
    """Return the rules kernel: chunks of Qwen3's vocabulary, tables of `RULE_LIMITS`."""
    numbers = (
        "is_ruled prompt_lengths nums_allowed nums_biased nums_bad_words budgets start_lengths end_lengths"
    )
    signature = _pointers(
        i32=f"slots token_ids num_computed {numbers} allowed_ids biased_ids bad_words marks",
        fp32="repetitions frequencies presences biases",
        i64="positions",
    )
    signature |= {"logits": f"*{dtype}:16", "row_stride": "i32:16", "tokens_stride": "i32"}
    signature |= {"vocab_size": "i32:16", "depth": "i32"} | _pointers(i32="paths")
    constexprs = {
        "DRAFTS": drafts,
        "MAX_ALLOWED": 1024,
        "MAX_BIASED": 512,
        "MAX_WORDS": 256,
        "WORD": 8,
        "MARK": 8,
    }
    return Variant("_apply", signature, constexprs | {"CHUNK": 1024}, 4)


def _walk(dtype: str, *, filters: bool, top_k: int = 16, first: int = 1) -> Variant:
    """Return the walk over the candidates of a row, with codebooks of rank 256."""
    signature = _SETTINGS | _pointers(i64="positions ids token_ids seeds chosen", i32="cu_rows")
    signature |= _pointers(fp32="z margins")
    signature |= dict.fromkeys(("gates", "predecessors", "successors"), f"*{dtype}:16")
    constexprs = {"FILTERS": filters, "FIRST": first, "RANK": 256, "RANKS": 256}
    return Variant("_walk", signature, constexprs | {"TOP_K": top_k, "PLACES": top_k})


def _best_of_chunk(dtype: str, *, filters: bool, top_k: int = 16) -> Variant:
    """Return the search for the candidates of a chunk."""
    signature = _LOGITS | {"logits": f"*{dtype}:16"} | _pointers(i64="seeds keys", fp32="floors")
    signature |= {"vocab_size": "i32:16", "vocab_start": "i32:16"}
    constexprs = {"FILTERS": filters, "TOP_K": top_k, "NUM_STOP_IDS": 128, "CHUNK": 4096}
    return Variant("_best_of_chunk", signature, constexprs, 8)


def _best_of_row(dtype: str, vocab: int = 151936, top_k: int = 16) -> Variant:
    """Return the search for the candidates of all chunks."""
    signature = _pointers(i64="keys ids", fp32="scores z") | {"logits": f"*{dtype}:16"}
    signature |= {"row_stride": "i32:16", "vocab_start": "i32"}
    keys = -(-vocab // 4096) * top_k
    sizes = {"KEYS": keys, "WIDTH": 1 << (keys - 1).bit_length()}
    return Variant("_best_of_row", signature, {"TOP_K": top_k, "PLACES": top_k, **sizes})


def _trim(requests: int, drafts: int, *, budget: int) -> Variant:
    signature = _pointers(
        i32="cu_rows num_drafts kept_before new_cu_rows",
        fp32="margins weights request_biases biases slopes worths",
    )
    signature |= {"margins_home": "*fp32", "new_num_drafts": "*i32"}
    signature |= dict.fromkeys(("num_requests", "room", "most"), "i32")
    places = min(requests * (drafts + 1), budget)
    constexprs = {"REQUESTS": 128, "PLACES": 1 << (places - 1).bit_length()}
    return Variant("_trim_drafts", signature, constexprs, 8)


def _convolve(hidden: int, *, residual: bool, dtype: str = "bf16") -> Variant:
    """Return the convolution with two taps and a kernel for 16 channels."""
    given = ("x", "base", "y", *(("residual",) if residual else ()))
    signature = dict.fromkeys(given, f"*{dtype}:16") | {"owners": "*i32", "num_rows": "i32"}
    signature |= {"dynamic": f"*{dtype}"}
    signature |= {"row_stride": "i32:16", "tap_stride": "i32:16"}
    constexprs = {"HIDDEN": hidden, "GROUP": 16, "TAPS": 2, "ROWS": 4, "COLUMNS": 256, "PDL": True}
    return Variant("_convolve", signature, constexprs | ({} if residual else {"residual": None}))


def _mask(dtype: str) -> Variant:
    signature = {"logits": f"*{dtype}:16", "row_stride": "i32:16", "num_words": "i32", "vocab_size": "i32:16"}
    return Variant("_mask", signature | _pointers(i32="places bits"), {"CHUNK": 4096}, 4)


def _lay_out(*, is_block: bool, groups: int = 1) -> Variant:
    rows = _pointers(
        i32="cu_rows row_slots kv_lengths page_tables",
        i64="row_positions row_kv_slots row_token_ids skip_slots",
    )
    numbers = dict.fromkeys(("kv_stride", "num_rows", "num_requests"), "i32")
    numbers |= dict.fromkeys(("group_stride", "table_stride", "mask_id"), "i32")
    constexprs = {"PAGE_SIZE": 64, "IS_BLOCK": is_block, "REQUESTS": 64, "ROWS": 32}
    constexprs |= {"NUM_GROUPS": groups}
    return Variant("_lay_out_rows", _STEP | rows | numbers, constexprs)


def _work(*, split_keys: int, run_splits: int) -> Variant:
    signature = _pointers(i32="work_ptr") | dict.fromkeys(("cu_rows_ptr", "kv_lengths_ptr"), "*i32")
    signature |= dict.fromkeys(("num_requests", "num_programs", "num_slots", "most_rows"), "i32")
    tiles = {"KV_HEADS": 8, "BLOCK_ROWS": 64, "BLOCK_KEYS": 64, "TILE_TOKENS": 16, "WINDOW": 2048}
    sums = {"SPLIT_KEYS": split_keys, "RUN_SPLITS": run_splits}
    return Variant("_list_work", signature, tiles | sums | {"PDL": True})


def _compact(kind: str, width: int, moves: int) -> Variant:
    signature = {"kv_ptr": f"*{kind}:16", "source_ptr": "*i64", "target_ptr": "*i64"}
    signature |= {"moves": "i32", "plane_stride": "i64"}
    sizes = {"WIDTH": width, "MOVES": moves, "COLUMNS": 2048 // moves}
    return Variant("_compact", signature, sizes | {"PDL": True})


def _norm(
    width: int,
    warps: int,
    *,
    add: bool = True,
    dtype: str = "bf16",
    weight: str | None = None,
    scaled: bool = False,
) -> Variant:
    given = ("x_ptr", "y_ptr", "weight_ptr", "sum_ptr", "normed_ptr")
    absent = (() if add else ("y_ptr", "sum_ptr")) + (() if scaled else ("scalar",))
    signature = {name: f"*{dtype}:16" for name in given if name not in absent}
    signature |= {"weight_ptr": f"*{weight or dtype}:16"}
    signature |= {"x_stride": "i32:16", "y_stride": "i32:16", "eps": "fp32"}
    signature |= {"scalar": "fp32"} if scaled else {}
    block = 1 << (width - 1).bit_length()
    constexprs = {"WIDTH": width, "BLOCK": block, "PDL": True} | dict.fromkeys(absent)
    return Variant("_rms_norm", signature, constexprs, warps)


@dataclass(frozen=True)
class Codes:
    """Codes of a weight: their kind, type of scales, inputs of a group (None: all), whether with zeros.

    `arranged` is as `arranged_codes.py` has it.
    """

    code: str
    scales: str
    group: int | None
    zeros: bool = False
    arranged: bool = False

    @property
    def takes_words(self) -> bool:
        return self.code in ("int4", "e2m1") and not self.arranged

    def pointers(self, codes: str, scales: str, zeros: str) -> dict[str, str]:
        element = "i16" if self.arranged else "fp8e4nv" if self.code == "e4m3" else "u8"
        given = {codes: f"*{element}:16", scales: f"*{self.scales}:16"}
        return given | ({zeros: "*u8:16"} if self.zeros else {})

    def constexprs(self, inputs: int) -> dict[str, object]:
        groups = 1 if self.group is None else inputs // self.group
        groups = -(-groups // 8) * 8 if self.arranged else groups
        pack = 2 if self.code in ("int4", "e2m1") else 0
        return {"CODE": self.code, "GROUP": self.group or 1 << 30, "GROUPS": groups, "PACK": pack}

    @staticmethod
    def none() -> dict[str, object]:
        return {"CODE": None, "GROUP": 0, "GROUPS": 0, "PACK": 0}


W4A16, W8A16 = Codes("int4", "bf16", 128), Codes("int8", "bf16", None)
AWQ, FP8_BLOCKS = Codes("int4", "fp16", 128, zeros=True), Codes("e4m3", "fp32", 128)
INT4 = Codes("int4", "bf16", 32)
MXFP4, NVFP4 = Codes("e2m1", "u8", 32), Codes("e2m1", "fp32", 16)
ARRANGED = Codes("e2m1", "u8", 32, arranged=True)
MXFP4_BY_CAPABILITY = {90: ARRANGED, 100: MXFP4}
FP8_ROWS = Codes("e4m3", "fp32", None)  # quantized at load


def _dequantize(outputs: int, inputs: int, codes: Codes) -> Variant:
    given = codes.pointers("code_ptr", "scale_ptr", "zero_ptr") | {"weight_ptr": "*bf16:16"}
    constexprs = codes.constexprs(inputs) | {"OUTPUTS": outputs, "INPUTS": inputs, "COLUMNS": 64, "STEP": 128}
    return Variant("_dequantize", given, constexprs | ({} if codes.zeros else {"zero_ptr": None}))


def _product(
    outputs: int,
    inputs: int,
    rows: int,
    fused: str = "",
    *,
    dtype: str = "bf16",
    one_alone: bool = False,
    quantised: bool = False,
    codes: Codes | None = None,
    wgmma: bool = True,
    most_instructions: tuple[int, int] | None = None,
) -> Variant:
    """Return a product with `fused`: bias, norm, gate, residual (with squares), layers (of a context).

    `rows` are of its tile. With `one_alone`, a program adds up all splits; with `quantised`, weights are
    e4m3 with a scale per row.
    """
    gated = "gate" in fused
    of_weight = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    of_weight = torch.float8_e4m3fn if quantised or codes else of_weight
    plan = plan_product(outputs, inputs, of_weight, gated=gated)
    given = dict.fromkeys(("x_ptr", "weight_ptr", "y_ptr"), f"*{dtype}:16")
    given |= {"weight_ptr": "*fp8e4nv:16", "scale_ptr": "*fp32:16"} if quantised else {}
    given |= {} if codes is None else codes.pointers("weight_ptr", "group_scale_ptr", "group_zero_ptr")
    given |= {"x_ptr": "*i32:16"} if codes is not None and codes.takes_words else {}
    given |= {"sums_ptr": "*fp32:16", "arrived_ptr": "*i32:16"}
    given |= {"eps": "fp32", "num_rows": "i32", "x_stride": "i32:16", "residual_stride": "i32:16"}
    given |= dict.fromkeys(("part_stride", "layer_stride", "row_stride"), "i32:16")
    given |= {"bias_ptr": f"*{dtype}:16"} if "bias" in fused else {}
    given |= {"norm_ptr": f"*{dtype}:16", "squares_ptr": "*fp32:16"} if "norm" in fused else {}
    more = {"residual_ptr": f"*{dtype}:16", "new_squares_ptr": "*fp32:16"}
    given |= more if "residual" in fused else {}
    optional = ("scale_ptr", "bias_ptr", "norm_ptr", "squares_ptr", "residual_ptr", "new_squares_ptr")
    optional += ("group_scale_ptr", "group_zero_ptr")
    step, split_tiles, stages = plan.stepping(rows)
    layers = 5 if "layers" in fused else 1
    constexprs = {
        "INPUTS": inputs,
        "OUTPUTS": outputs,
        "LAYERS": layers,
        "SPAN": outputs // (2 * layers) if layers > 1 else outputs,
        "GATED": gated,
        "GELU": False,
        "SQUARES": 64,
        "SPLITS": plan.splits,
        "SPLIT_TILES": split_tiles,
        "PROGRAMS": 1 if one_alone else plan.splits,
        "ROWS": rows,
        "COLUMNS": 64,
        "STEP": step,
        "PDL": True,
        **(Codes.none() if codes is None else codes.constexprs(inputs)),
    } | {name: None for name in optional if name not in given}
    bound = {"side_by_side": 3, "most_instructions": most_instructions}
    return Variant("_multiply", given, constexprs, 4, stages, wgmma, **bound)


def _experts(
    outputs: int,
    inputs: int,
    height: int,
    *,
    activation: str | None = None,
    dtype: str = "bf16",
    codes: Codes | None = None,
    is_scaled: bool = False,
    most_instructions: tuple[int, int] | None = None,
) -> Variant:
    """Return a product of tiles of pairs: gate and up with an activation, else down.

    MXFP4 has biases, and `is_scaled` means by block-scaled products.
    """
    torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    is_arranged = codes is not None and codes.arranged
    cut = cut_weight(
        height, torch_dtype, packed=codes is not None, is_scaled=is_scaled, is_arranged=is_arranged
    )
    words = {2: "i32", 4: "i64"}[torch_dtype.itemsize]
    takes_words = codes is not None and codes.takes_words and not is_scaled
    given = {"x_ptr": f"*{words if takes_words else dtype}:16", "weight_ptr": f"*{dtype}:16"}
    given |= {} if codes is None else codes.pointers("weight_ptr", "scale_ptr", "zero_ptr")
    given |= {"bias_ptr": f"*{dtype}:16"} if codes in (MXFP4, ARRANGED) else {}
    given |= {"y_ptr": f"*{dtype}:16"} | _pointers(i32="pairs_ptr experts_ptr count_ptr")
    given |= {"limit": "fp32", "num_pairs": "i32", "x_stride": "i32:16"}
    constexprs = {
        "PLACES": 8 if activation else 1,
        "INPUTS": inputs,
        "OUTPUTS": outputs,
        "ACTIVATION": activation,
        "HEIGHT": height,
        "COLUMNS": cut.columns,
        "STEP": cut.step,
        "PDL": True,
        **(Codes.none() if codes is None else codes.constexprs(inputs)),
    } | {name: None for name in ("scale_ptr", "zero_ptr", "bias_ptr") if name not in given}
    constexprs |= {"PACK": 0} if is_scaled else {}
    maximum = 1 if height == HEIGHTS[-1] else 2 if is_scaled or (is_arranged and height == 64) else 3
    bound = {"wgmma": True, "side_by_side": maximum, "most_instructions": most_instructions}
    bound |= {"only": 100} if is_scaled else {}
    return Variant("_multiply_tiles", given, constexprs, cut.warps, cut.stages, **bound)


def _choose_experts(
    experts: int,
    places: int,
    *,
    score: str = "softmax",
    choose_first: bool = False,
    groups: int = 1,
    top_groups: int = 1,
    correction: bool = False,
    padding: bool = False,
) -> Variant:
    """Return the choice of experts; with `padding` in a pass that may have it, as graphs do."""
    signature = _pointers(bf16="logits_ptr", i32="ids_ptr", fp32="weights_ptr")
    signature |= {"scale": "fp32", "row_stride": "i32:16"}
    signature |= _pointers(fp32="correction_ptr") if correction else {}
    signature |= _pointers(i32="owners_ptr") if padding else {}
    constexprs = {
        "EXPERTS": experts,
        "LANES": experts,
        "CHOSEN": places,
        "CHOSEN_LANES": places,
        "SIGMOID": score == "sigmoid",
        "CHOOSE_FIRST": choose_first,
        "RENORMALIZE": True,
        "GROUPS": groups,
        "TOP_GROUPS": top_groups,
        "PDL": True,
        "expert_scale_ptr": None,
    } | {name: None for name in ("correction_ptr", "owners_ptr") if name not in signature}
    return Variant("_choose", signature, constexprs, 1)


def _list_tiles(experts: int, height: int) -> Variant:
    signature = _pointers(i32="ids_ptr pairs_ptr experts_ptr count_ptr reads_ptr") | {"num_pairs": "i32"}
    bins = 1 << experts.bit_length()
    constexprs = {"FIRST": 0, "EXPERTS": experts, "BINS": bins, "HEIGHT": height, "CHUNK": 1024, "PDL": True}
    return Variant("_list_tiles", signature, constexprs)


def _add_up(width: int, places: int, dtype: str = "bf16") -> Variant:
    signature = {"outputs_ptr": f"*{dtype}:16", "y_ptr": f"*{dtype}:16"}
    signature |= _pointers(i32="ids_ptr", fp32="weights_ptr")
    constexprs = {"FIRST": 0, "EXPERTS": 128, "PLACES": places, "WIDTH": width, "BLOCK": 1024, "PDL": True}
    return Variant("_add_up", signature, constexprs)


def _delta(
    kernel: str, heads: tuple[int, int], dtype: str = "bf16", *, saves: bool = False, **how: Any
) -> Variant:
    """Return a kernel of a gated delta layer with key and value heads of 128, four taps and 15 drafts."""
    keys, values = heads
    lists = "slots cu_rows num_drafts pendings firsts"
    signature = {"mixed": f"*{dtype}:16", "row_stride": "i32:16"} | _pointers(fp32="qkv")
    signature |= dict.fromkeys(lists.split(), "*i32")
    constexprs: dict[str, object] = {"KEYS": keys, "KEY_DIM": 128, "VALUES": values, "VALUE_DIM": 128}
    constexprs |= {"MAX_DRAFTS": 15, "PDL": True}
    if kernel != "_gate_outputs":
        signature |= {"saves_stride": "i32"} | ({"saves": "*i32"} if saves else {})
        constexprs |= {"SAVES": 3} | ({} if saves else {"saves": None})
    match kernel:
        case "_take_in":
            signature |= _pointers(fp32="kernel") | dict.fromkeys(("windows", "inputs"), f"*{dtype}:16")
            constexprs |= {"WIDTH": 128, "TAPS": 4, "DRAFTS": 16, "EPS": 1e-6, "ROWS": 16}
        case "_gate_outputs":
            signature |= _pointers(fp32="read norm rates dt_biases k_records g_records")
            signature |= {"y": f"*{dtype}:16", "eps": "fp32", "num_requests": "i32", "num_rows": "i32"}
            del signature["pendings"], signature["firsts"]
            constexprs |= {"KEY_WIDTH": 128, "VALUE_WIDTH": 128, "ROWS": 16}
        case _:
            signature |= _pointers(fp32="rates dt_biases states k_records u_records g_records")
            fp32, in_rows, prepares = dtype == "fp32", kernel == "_run_rows", kernel == "_prepare"
            signature |= _pointers(
                fp32=" ".join((["writes", "reads"] * (not in_rows)) + ["read"] * (not prepares))
            )
            constexprs |= {"KEY_WIDTH": 128, "MOST_ROWS": 16}
            cut = (
                {"CHUNK": 16, "PRODUCT": "ieee" if prepares else "tf32x3"}
                if fp32
                else {"CHUNK": 32, "PRODUCT": "tf32"}
            )
            constexprs |= {} if in_rows else cut
            constexprs |= {} if prepares else {"COLUMNS": 64 if fp32 and not in_rows else 16}
    how = {"warps": 1 if kernel == "_run_rows" else 4} | how
    return Variant(kernel, signature, constexprs, **how)


def _copy_states(kernel: str, lists: str, *, i32: str) -> Variant:
    """Return the kernel at Qwen3.5-9B's shape, with 15 drafts."""
    signature = _pointers(fp32="states k_records u_records g_records", bf16="windows x_records", i32=lists)
    signature |= dict.fromkeys(i32.split(), "i32")
    sizes = {"STATE": 32 * 128 * 128, "WINDOW": 3 * 8192, "K": 15 * 2048, "U": 15 * 4096, "G": 15 * 32}
    constexprs: dict[str, object] = {"SLOTS": 128, "BLOCK": 1024, "X": 15 * 8192, **sizes}
    return Variant(kernel, signature, constexprs | ({"SAVES": 3} if kernel == "_save_accepted" else {}))


def _likely_children(candidates: int) -> Variant:
    signature = _pointers(fp32="scores request_biases biases slopes factors chances", i32="cu_rows places")
    signature |= {"num_before": "i32", "count": "i32"}
    return Variant("_likely_children", signature, {"FIRST": 1, "W": 4, "CANDIDATES": candidates}, 1)


def _tree_scores(top_k: int, *, pairs: bool, filters: bool, dtype: str = "bf16") -> Variant:
    signature = _SETTINGS | _pointers(i64="positions ids token_ids seeds", i32="cu_rows")
    signature |= _pointers(fp32="ranked z floors scores margins") | {"num_before": "i32"}
    constexprs = {"FILTERS": filters, "FIRST": 1, "RANK": 256 if pairs else 1, "TOP_K": top_k}
    constexprs |= {"RANKS": constexprs["RANK"], "PLACES": top_k}
    codebooks = ("gates", "predecessors", "successors")
    if pairs:
        return Variant("_tree_scores", signature | dict.fromkeys(codebooks, f"*{dtype}:16"), constexprs, 4)
    return Variant("_tree_scores", signature, constexprs | dict.fromkeys(codebooks), 1)


def _trees(i32: str, **others: str) -> dict[str, str]:
    """Return pointers that have any alignment, as columns of trees have, and their stride."""
    unaligned = {name: f"*{dtype}" for dtype, names in others.items() for name in names.split()}
    return dict.fromkeys(i32.split(), "*i32") | unaligned | {"tree_stride": "i32"}


def _row_squares(first: int, second: int) -> Variant:
    signature = {"x_ptr": "*bf16:16", "squares_ptr": "*fp32:16", "x_stride": "i32:16"}
    constexprs = {"FIRST": first, "SECOND": second, "BLOCK": 1024, "PDL": True}
    return Variant("_row_squares", signature, constexprs)


def _gate(inner: int, dtype: str = "bf16", *, gelu: bool = False) -> Variant:
    signature = dict.fromkeys(("gate_up_ptr", "product_ptr"), f"*{dtype}:16") | {"row_stride": "i32:16"}
    return Variant("_gate_mul", signature, {"INNER": inner, "BLOCK": 1024, "GELU": gelu, "PDL": True})


def _write(
    heads: int,
    kv_heads: int,
    dim: int,
    group: int,
    *,
    v_dim: int | None = None,
    normed: bool = True,
    v_norm: bool = False,
    rotated: bool = True,
    dtype: str = "bf16",
    weight: str | None = None,
    kv: str | None = None,
) -> Variant:
    norms, tables = ("q_norm_ptr", "k_norm_ptr"), ("cos_ptr", "sin_ptr")
    given = ("qkv_ptr", "k_ptr", "v_ptr", *(tables if rotated else ()))
    signature = dict.fromkeys(given, f"*{dtype}:16") | _ROW_ARGUMENTS | {"slot_stride": "i32:16"}
    signature |= dict.fromkeys(("k_ptr", "v_ptr"), f"*{kv or dtype}:16")
    signature |= dict.fromkeys(("k_scale", "v_scale"), "fp32")
    signature |= dict.fromkeys(norms if normed else (), f"*{weight or dtype}:16")
    widths = {"HALF": dim // 2, "WIDTH": tile_width(dim) // 2}
    widths |= {"V_HALF": (v_dim or dim) // 2, "V_WIDTH": tile_width(v_dim or dim) // 2}
    constexprs = {"NUM_Q": heads, "NUM_KV": kv_heads, **widths, "GROUP": group}
    constexprs |= {"V_NORM": v_norm, "PDL": True}
    absent = (*(() if normed else norms), *(() if rotated else tables))
    return Variant("_norm_rotate_write", signature, constexprs | dict.fromkeys(absent), 1)


def _sum_add_norm(width: int, ranks: int, dtype: str = "bf16") -> Variant:
    signature = dict.fromkeys(("part_ptr", "x_ptr", "weight_ptr", "sum_ptr", "normed_ptr"), f"*{dtype}:16")
    signature |= _pointers(i64="values_ptr signals_ptr", i32="launches_ptr")
    signature |= dict.fromkeys(("part_stride", "x_stride", "half_values"), "i32:16")
    signature |= {"rank": "i32", "spins": "i32", "eps": "fp32"}
    block = tile_width(width)
    constexprs = {"WORLD": ranks, "RANKS": ranks, "WIDTH": width, "BLOCK": block, "scalar": None, "PDL": True}
    return Variant("_sum_add_norm", signature, constexprs, warps_for(block))


def _write_latents(
    heads: int, rank: int, rotated: int, dtype: str = "bf16", kv: str | None = None
) -> Variant:
    pointers = ("q_ptr", "latent_ptr", "norm_ptr", "cos_ptr", "sin_ptr", "pages_ptr")
    signature = dict.fromkeys(pointers, f"*{dtype}:16") | _ROW_ARGUMENTS
    signature["pages_ptr"] = f"*{kv or dtype}:16"
    del signature["row_stride"]
    signature |= dict.fromkeys(("q_stride", "latent_stride", "slot_stride"), "i32:16")
    constexprs = {"HEADS": heads, "NOPE": 128, "RANK": rank, "RANK_WIDTH": rank, "HALF": rotated // 2}
    constexprs |= {"WIDTH": rotated // 2, "AT_ONCE": 8, "PDL": True}
    return Variant("_norm_rotate_write_latents", signature, constexprs, 1)


def _gather_latents(values: int, page: int, dtype: str = "bf16", kv: str | None = None) -> Variant:
    signature = dict.fromkeys(("pages_ptr", "out_ptr"), f"*{dtype}:16") | _pointers(i32="keys_before_ptr")
    signature |= dict.fromkeys(("slots_ptr", "page_table_ptr"), "*i32")
    signature |= dict.fromkeys(("begin", "count", "num_requests", "table_stride"), "i32")
    signature |= dict.fromkeys(("page_stride", "token_stride"), "i32:16")
    signature["pages_ptr"] = f"*{kv or dtype}:16"
    constexprs = {"VALUES": values, "WIDTH": tile_width(values), "PAGE": page, "TOKENS": 8, "PDL": True}
    return Variant("_gather_latents", signature, constexprs)


_OF_TILES = _pointers(i32="rows_before_ptr tiles_before_ptr") | {
    **dict.fromkeys(("cu_rows_ptr", "kv_lengths_ptr"), "*i32"),
    **dict.fromkeys(("num_sums", "num_splits", "num_requests"), "i32"),
}


def _add_splits(heads: int) -> Variant:
    signature = _pointers(bf16="out_ptr", fp32="max_ptr sum_ptr partial_ptr") | _OF_TILES
    constexprs = {"HEADS": heads, "V_DIM": 128, "V_WIDTH": 128, "BLOCK_ROWS": 128, "BLOCK_KEYS": 64}
    return Variant("_add_splits", signature, constexprs | {"PDL": True}, 16)


def _attend_expanded(heads: int, dtype: str = "bf16") -> Variant:
    """Return the kernel at Kimi K2's and DeepSeek-V3's sizes."""
    signature = dict.fromkeys(("q_ptr", "latents_ptr", "heads_ptr", "out_ptr"), f"*{dtype}:16")
    signature |= _pointers(fp32="max_ptr sum_ptr partial_ptr", i32="keys_before_ptr") | _OF_TILES
    signature |= dict.fromkeys(("piece_begin", "piece_end", "num_tiles"), "i32") | {"scale": "fp32"}
    signature |= dict.fromkeys(("q_row_stride", "q_head_stride"), "i32:16")
    constexprs = {"HEADS": heads, "NOPE": 128, "NOPE_WIDTH": 128, "ROTATED": 64, "ROTATED_WIDTH": 64}
    constexprs |= {"V_DIM": 128, "V_WIDTH": 128, "RANK": 512, "PDL": True}
    rows, keys, warps, stages = (16, 32, 4, 2) if dtype == "fp32" else (128, 64, 8, 3)
    constexprs |= {"BLOCK_ROWS": rows, "BLOCK_KEYS": keys}
    return Variant("_attend_expanded", signature, constexprs, warps, stages, wgmma=rows >= 64)


def _write_context(
    layers: int, kv_heads: int, dim: int, group: int, kv: str = "bf16", *, scaled: bool = False
) -> Variant:
    pointers = dict.fromkeys(("kv_ptr", "k_norm_ptr", "cos_ptr", "sin_ptr", "pages_ptr"), "*bf16:16")
    signature = pointers | _ROW_ARGUMENTS | {"layer_stride": "i64:16", "pages_ptr": f"*{kv}:16"}
    signature |= {"scales_ptr": "*fp32:16"} if scaled else {}
    widths = {"HALF": dim // 2, "WIDTH": dim // 2}
    constexprs = {"NUM_LAYERS": layers, "NUM_KV": kv_heads, **widths, "GROUP": group, "PDL": True}
    constexprs |= {} if scaled else {"scales_ptr": None}
    return Variant("_write_context", signature, constexprs, 1)


_ROW_ARGUMENTS = {
    "positions_ptr": "*i64",
    "slots_ptr": "*i64",
    "eps": "fp32",
    "row_stride": "i32:16",
}


VARIANTS: dict[str, list[Variant]] = {
    "step.gpu_triton.sampling.sampler": [
        _choose("bf16", filters=False),
        _choose("bf16", filters=True),
        _choose("bf16", filters=False, seconds=True),
        _choose("bf16", filters=True, seconds=True, vocab=262144),  # Gemma 3
        _choose("fp32", filters=True),
        _choose("fp32", filters=True, seconds=True),
    ],
    "step.gpu_triton.sampling.logits_processors": [
        _apply_rules("bf16", drafts=False),
        _apply_rules("fp32", drafts=True),
    ],
    "step.gpu_triton.sampling.selector": [
        _best_of_chunk("bf16", filters=False),
        _best_of_chunk("bf16", filters=True),
        _best_of_chunk("fp32", filters=True),
        _best_of_row("bf16"),
        _best_of_row("bf16", vocab=262144),
        _walk("bf16", filters=False),  # Muse-Glimmer's, Qwen3.8's
        _walk("bf16", filters=True),
        _walk("fp32", filters=True),
        _best_of_chunk("bf16", filters=False, top_k=64),  # DSpark's
        _best_of_row("bf16", top_k=64),
        _walk("bf16", filters=True, top_k=64, first=0),
    ],
    "step.gpu_triton.ngram_lookup": [
        Variant(
            "_look_up",
            _STEP | _pointers(i32="num_drafts") | {"shortest": "i32", "longest": "i32"},
            {"PLACES": 1024, "LANES": 8},
        ),
    ],
    "step.gpu_triton.sampling.grammar_masks": [
        _mask("bf16"),
        _mask("fp32"),
        Variant(
            "_force_ends",
            _pointers(i64="ids", fp32="scores", i32="places") | {"end_id": "i32", "num_rows": "i32"},
            {"ROWS": 256},
            4,
        ),
    ],
    "step.gpu_triton.inputs.row_layout": [
        _lay_out(is_block=True),
        _lay_out(is_block=False),
        _lay_out(is_block=False, groups=3),
        Variant(
            "_write_drafts",
            _STEP | _pointers(i64="chosen positions") | {"num_rows": "i32"},
            {"ROWS": 32},
            1,
        ),
    ],
    "step.gpu_triton.verification": [
        Variant(
            "_accept_and_advance",
            _STEP
            | _pointers(i64="chosen", i32="cu_rows first_chosen num_drafts samples outcome")
            | {"width": "i32"},
            {"LANES": 32},
            1,
        ),
        Variant(
            "_mark_not_numbers",
            _pointers(bf16="hidden", i32="cu_rows") | {"outcome": "*i32"},
            {"WIDTH": 4096, "BLOCK": 4096},
        ),
        _trim(256, 15, budget=2048),
        _trim(1, 15, budget=16),
    ],
    "step.gpu_triton.draft_trees": [
        _likely_children(32),
        _likely_children(64),  # DSpark's Markov head
        _tree_scores(16, pairs=False, filters=False),
        _tree_scores(16, pairs=False, filters=True),
        _tree_scores(16, pairs=True, filters=True),
        _tree_scores(64, pairs=True, filters=False),
        Variant(
            "_grow",
            _pointers(fp32="chances factors", i64="ids", i32="places cu_rows max_nodes")
            | _trees("tokens parents ranks num_nodes", fp32="survivals")
            | dict.fromkeys(("num_before", "num_candidates", "most"), "i32"),
            {"FIRST": 1, "W": 4, "LANES": 64},
            1,
        ),
    ],
    "step.gpu_triton.tree_rows": [
        Variant(
            "_trim_trees",
            _pointers(i32="cu_rows num_drafts block_cu_rows kept_before new_cu_rows")
            | _pointers(fp32="weights margins worths")
            | _trees("new_num_drafts", fp32="survivals margins_home")
            | dict.fromkeys(("num_requests", "room", "nodes", "depth"), "i32"),
            {"REQUESTS": 128, "PLACES": 2048, "TREES": 8, "LANES": 64},
            8,
        ),
        Variant(
            "_place_rows",
            _STEP
            | _pointers(i32="cu_rows paths", i64="positions row_tokens")
            | _trees("num_drafts tokens parents")
            | {"max_depth": "i32"},
            {"LANES": 64},
            1,
        ),
        Variant(
            "_accept_paths",
            _STEP
            | _pointers(i64="chosen kv_slots skip_slots sources targets")
            | _pointers(i32="first_chosen cu_rows samples outcome")
            | _trees("num_drafts parents paths")
            | dict.fromkeys(("kv_stride", "num_requests", "depth"), "i32"),
            {"GROUPS": 2, "LANES": 64},
            1,
        ),
        Variant(
            "_path_rows",
            _pointers(i32="cu_rows", i64="rows")
            | _trees("num_tokens paths")
            | dict.fromkeys(("num_requests", "num_places", "token_stride"), "i32"),
            {"REQUESTS": 128, "LANES": 32},
            1,
        ),
    ],
    "step.gpu_triton.recurrent_states": [
        Variant(
            "_build_rows",
            _pointers(i32="slots cu_rows num_computed states positions")
            | dict.fromkeys(("num_drafts", "saves", "state_slots", "pendings", "firsts"), "*i32")
            | {"saves_stride": "i32"},
            {"MAX_DRAFTS": 15, "SAVES": 3},
            1,
        ),
        _copy_states("_admit_states", "positions", i32="source target num_tokens"),
        _copy_states(
            "_save_accepted", "positions num_computed states_of_slots slots saves", i32="saves_stride"
        ),
    ],
    "step.gpu_triton.inputs.transfers": [
        Variant("_write_words", _pointers(i32="changes arena") | {"count": "i32"}, {"CHANGES": 1024}),
        Variant("_stamp", _pointers(i64="times") | {"index": "i32"}, {}, 1),
    ],
    "compute.gpu_triton.attention.paged_attention": [
        # Qwen3-8B, a block of 16 rows: a thread copies 256 bytes of K and V, and a page number
        replace(_attention(32, 8, 128), copies=17, most_instructions=(705, 810)),
        # a prompt: tiles of 128, eight warps
        replace(_attention(32, 8, 128, rows=2048), copies=9, most_instructions=(615, 675)),
        replace(_attention(32, 8, 128, kv="fp8e4nv"), copies=9, most_instructions=(855, 895)),
        _attention(32, 8, 128, rows=2048, kv="fp8e4nv"),
        replace(
            _attention(8, 1, 512, tail=64, tile_rows=16, kv="fp8e4nv"),
            copies=11,
            most_instructions=(1045, 1050),
        ),
        replace(
            _attention(8, 1, 512, tail=64, batch_invariant=True, kv="fp8e4nv"),
            copies=7,
            spills_beside_loop=True,
        ),
        _attention(64, 8, 64, window=128, sinks=True, kv="fp8e4nv"),
        _attention(32, 8, 128, batch_invariant=True, kv="fp8e4nv"),
        _attention(32, 8, 128, causal=False, window=2048),  # its drafter
        _attention(32, 8, 128, batch_invariant=True),
        _attention(32, 8, 128, rows=1),  # plain decoding
        _attention(32, 8, 128, rows=1, first_key=1),  # a link of an EAGLE-3 chain
        _attention(64, 8, 64, window=128, sinks=True),  # gpt-oss
        _attention(16, 4, 256, page=256),
        _attention(32, 8, 128, dtype="fp32"),
        _attention(32, 4, 512),  # Gemma 4's full layers
        _attention(64, 8, 192, v_dim=128, window=128, sinks=True, batch_invariant=True),  # MiMo-V2
        # Kimi K2 on eight ranks: a thread copies 144 bytes of latents and 2 page numbers
        replace(_attention(8, 1, 512, tail=64), copies=11, most_instructions=(830, 810)),
        replace(_attention(8, 1, 512, tail=64, tile_rows=64), copies=11, only=90, most_instructions=(875, 0)),
        replace(
            _attention(8, 1, 512, tail=64, tile_rows=64),
            copies=11,
            only=100,
            most_instructions=(0, 770),
            spills_beside_loop=True,  # a few instructions per item
        ),
        # plain decoding: 16 rows, four warps
        replace(_attention(8, 1, 512, tail=64, rows=1), copies=20, most_instructions=(990, 1005)),
        replace(_attention(64, 1, 512, tail=64, rows=1, tile_rows=64), copies=11, only=90),
        _attention(64, 1, 512, tail=64, rows=1),  # and on one, in two tiles of heads
        _attention(8, 1, 512, tail=64, batch_invariant=True),
        _attention(8, 1, 512, tail=64, tree=True),
        _attention(32, 8, 128, tree=True, batch_invariant=True),
        _attention(32, 8, 128, tree=True),
    ],
    "compute.gpu_triton.attention.attention_tiles": [
        _work(split_keys=0, run_splits=0),
        _work(split_keys=256, run_splits=16),
    ],
    "compute.gpu_triton.common.element_ops": [
        _norm(4096, 16),
        _norm(4096, 16, add=False),
        _norm(2880, 16),
        _row_squares(6144, 1024),  # MiniMax-M2
        _norm(192, 1),
        _norm(8192, 16, dtype="fp32"),
        _norm(3840, 16, weight="fp32"),  # Gemma 3
        _norm(3840, 16, weight="fp32", add=False),
        _norm(5376, 16, weight="fp32", scaled=True),  # Gemma 4
        *(_gate(12288, dtype, gelu=gelu) for dtype in ("bf16", "fp32") for gelu in (False, True)),
    ],
    "compute.gpu_triton.delta_net.dynamic_convolution": [
        _convolve(6656, residual=False),
        _convolve(6656, residual=True),
        _convolve(5120, residual=True, dtype="fp32"),
    ],
    "compute.gpu_triton.linear.skinny_gemm": [
        _product(6144, 4096, 16, "norm"),  # Qwen3-8B: qkv
        _product(4096, 12288, 16, "residual"),  # down
        _product(12288, 4096, 16, "norm gate", most_instructions=(195, 190)),
        _product(12288, 4096, 64, "norm gate"),
        _product(10240, 4096, 32, "layers"),  # its drafter's context
        _product(4096, 4096, 64, "residual bias", one_alone=True),  # batch-invariant
        _product(4096, 4096, 16, "norm", dtype="fp32"),
        _product(12288, 4096, 16, "norm gate", quantised=True, most_instructions=(335, 305)),
        _product(4096, 12288, 64, "residual bias", quantised=True),
        _product(4096, 12288, 64, "residual bias", quantised=True, one_alone=True),  # 65 to 128 rows
        # weights of published checkpoints
        _product(12288, 4096, 16, "norm gate", codes=W4A16, most_instructions=(370, 400)),
        _product(12288, 4096, 16, "norm gate", codes=AWQ, most_instructions=(555, 555)),
        _product(12288, 4096, 16, "norm gate", codes=FP8_BLOCKS, most_instructions=(410, 346)),
        _product(12288, 4096, 16, "norm gate", codes=NVFP4, most_instructions=(535, 517)),
        *(
            replace(_product(12288, 4096, 16, "norm gate", codes=codes), only=only)
            for only, codes in MXFP4_BY_CAPABILITY.items()
        ),
        _product(12288, 4096, 16, "norm gate", codes=W8A16, most_instructions=(480, 555)),
        _product(4096, 12288, 64, "residual bias", codes=W4A16),
        _product(4096, 12288, 64, "residual bias", codes=FP8_BLOCKS),
    ],
    "compute.gpu_triton.linear.packed_codes": [
        _dequantize(4096, 12288, AWQ),
        replace(_dequantize(4096, 12288, ARRANGED), only=90),
        _dequantize(4096, 12288, NVFP4),
        _dequantize(4096, 12288, FP8_BLOCKS),
        _dequantize(4096, 12288, W8A16),
        _dequantize(4096, 12288, FP8_ROWS),
    ],
    "compute.gpu_triton.moe.topk_routing": [
        _choose_experts(128, 8, padding=True),  # Qwen3-30B-A3B
        _choose_experts(128, 8),
        _choose_experts(128, 4, choose_first=True),  # gpt-oss
        _choose_experts(256, 8, score="sigmoid", groups=8, top_groups=4, correction=True),  # DeepSeek-V3
    ],
    "compute.gpu_triton.moe.moe_align": [_list_tiles(128, 16), _list_tiles(512, 64)],
    "compute.gpu_triton.moe.grouped_gemm": [
        _experts(1536, 2048, 16, activation="silu"),  # Qwen3-30B-A3B: gate and up of a verified block
        _experts(2048, 768, 16),  # down
        _experts(512, 7168, 16, activation="silu", most_instructions=(142, 162)),  # DeepSeek-V3
        _experts(1536, 2048, 64, activation="silu"),
        _experts(1408, 2816, 128, activation="gelu_tanh"),  # Gemma 4 26B: a prompt
        # gpt-oss; an iteration takes 16,384 arranged codes, 32,768 by block-scaled products, or else 8,192
        replace(
            _experts(5760, 2880, 16, activation="swiglu_clamped", codes=ARRANGED),
            only=90,
            most_instructions=(415, 0),
            copies=9,
        ),
        replace(
            _experts(5760, 2880, 32, activation="swiglu_clamped", codes=ARRANGED),
            only=90,
            most_instructions=(435, 0),
            copies=13,
        ),
        replace(
            _experts(5760, 2880, 16, activation="swiglu_clamped", codes=MXFP4, is_scaled=True),
            most_instructions=(0, 675),
        ),
        replace(
            _experts(5760, 2880, 32, activation="swiglu_clamped", codes=MXFP4, is_scaled=True),
            most_instructions=(0, 1060),
        ),
        *(
            replace(_experts(2880, 2880, 64, codes=codes, most_instructions=(445, 400)), only=only)
            for only, codes in MXFP4_BY_CAPABILITY.items()
        ),
        *(
            replace(
                _experts(5760, 2880, 128, activation="swiglu_clamped", codes=codes),
                only=only,
                most_instructions=(160, 250),
            )
            for only, codes in MXFP4_BY_CAPABILITY.items()
        ),
        # Kimi K2 on eight ranks
        _experts(512, 7168, 16, activation="silu", codes=INT4, most_instructions=(285, 315)),
        _experts(7168, 256, 64, codes=INT4),
        _experts(512, 7168, 128, activation="silu", codes=INT4),
        # DeepSeek-V3 on eight ranks; Qwen3-30B-A3B in NVFP4, AWQ, and by channel
        _experts(512, 7168, 16, activation="silu", codes=FP8_BLOCKS, most_instructions=(350, 295)),
        _experts(7168, 256, 64, codes=FP8_BLOCKS),
        _experts(512, 7168, 128, activation="silu", codes=FP8_BLOCKS),
        _experts(1536, 2048, 16, activation="silu", codes=NVFP4, most_instructions=(440, 435)),
        _experts(1536, 2048, 128, activation="silu", codes=NVFP4),
        _experts(1536, 2048, 16, activation="silu", codes=AWQ),
        _experts(1536, 2048, 16, activation="silu", codes=FP8_ROWS),
        _experts(1536, 2048, 16, activation="silu", codes=W8A16, most_instructions=(435, 505)),
        _experts(1536, 2048, 16, activation="silu", dtype="fp32"),
        *(
            replace(
                _experts(5760, 2880, 64, activation="swiglu_clamped", codes=codes, dtype="fp32"),
                side_by_side=2,
                only=only,
            )
            for only, codes in MXFP4_BY_CAPABILITY.items()
        ),
        _add_up(2048, 8),
        _add_up(2880, 4),
    ],
    "compute.gpu_triton.attention.mla": [
        _write_latents(8, 512, 64),
        _write_latents(64, 512, 64, "fp32"),
        _write_latents(8, 512, 64, kv="fp8e4nv"),
    ],  # Kimi K2
    "compute.gpu_triton.attention.mla_prefill_plan": [
        _gather_latents(576, 64),
        _gather_latents(576, 64, "fp32"),
        _gather_latents(576, 64, kv="fp8e4nv"),
    ],
    "compute.gpu_triton.attention.mla_prefill": [
        replace(_attend_expanded(8), copies=10, most_instructions=(675, 765)),
        _attend_expanded(64, "fp32"),
        _add_splits(8),
    ],
    # Of Qwen3.5-9B and 35B-A3B, of 27B, and of a rank of many.
    "compute.gpu_triton.delta_net.conv_and_qk_norm": [
        _delta("_take_in", (16, 32)),
        _delta("_take_in", (16, 48), "fp32", saves=True),
    ],
    "compute.gpu_triton.delta_net.recurrent_delta_rule": [
        _delta("_run_rows", (16, 32), side_by_side=12),
        _delta("_run_rows", (16, 48), side_by_side=12),
        _delta("_run_rows", (2, 4), "fp32", saves=True, side_by_side=12),
    ],
    "compute.gpu_triton.delta_net.chunk_delta_rule": [
        _delta("_prepare", (16, 32), warps=8),
        _delta("_prepare", (16, 48), "fp32", warps=8),
        _delta("_run_chunks", (16, 32), stages=2, wgmma=True, side_by_side=2),
        _delta("_run_chunks", (16, 48), saves=True, stages=2, wgmma=True, side_by_side=2),
        _delta("_run_chunks", (16, 48), "fp32", warps=8, stages=2, wgmma=True),
    ],
    "compute.gpu_triton.delta_net.gated_norm": [
        _delta("_gate_outputs", (16, 32)),
        _delta("_gate_outputs", (16, 48), "fp32"),
    ],
    "compute.gpu_triton.linear.all_reduce_norm": [
        _sum_add_norm(2880, 8),  # gpt-oss
        _sum_add_norm(4096, 2, "fp32"),
    ],
    "compute.gpu_triton.attention.norm_rope_kv_write": [
        _write(32, 8, 128, 4),  # Qwen3-8B
        _write(32, 8, 128, 4, normed=False),
        _write(8, 1, 64, 8),
        _write(16, 4, 256, 2, dtype="fp32"),
        _write(16, 8, 256, 2, weight="fp32"),  # Gemma 3
        _write(32, 16, 256, 2, weight="fp32", v_norm=True),  # Gemma 4
        _write(32, 4, 512, 1, weight="fp32", v_norm=True),
        _write(64, 4, 192, 2, v_dim=128, normed=False),  # MiMo-V2
        _write(32, 2, 128, 4, weight="fp32", rotated=False),  # Muse-Glimmer
        _write_context(5, 8, 128, 4, kv="fp8e4nv", scaled=True),
        _write(32, 8, 128, 4, kv="fp8e4nv"),
        _write_context(5, 8, 128, 4),
    ],
    "compute.gpu_triton.attention.compact_rows": [_compact("i16", 2048, 16), _compact("u8", 576, 8)],
}


def chosen(module: str, capability: int, *, whole: bool = WHOLE) -> list[Variant]:
    """Return the shapes of a module that are compiled for a capability."""
    variants = VARIANTS[module] if whole else _few(VARIANTS[module])
    parity = CAPABILITIES.index(capability) + list(VARIANTS).index(module)

    def is_chosen(i: int, variant: Variant) -> bool:
        if variant.only is not None:
            return variant.only == capability
        return whole or (i + parity) % len(CAPABILITIES) == 0

    return [variant for i, variant in enumerate(variants) if is_chosen(i, variant)]


def _few(variants: list[Variant]) -> list[Variant]:
    """Return every second shape whose instructions are counted, or the first one, of every kernel."""
    by_kernel: dict[str, list[Variant]] = {}
    for variant in variants:
        by_kernel.setdefault(variant.kernel, []).append(variant)
    few: list[Variant] = []
    for shapes in by_kernel.values():
        few += [shape for shape in shapes if shape.most_instructions][::2] or shapes[:1]
    return few


@pytest.fixture(scope="module")
def compile_all(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str, int], list[dict[str, Any]]]]:
    """The result of each variant of a module; its process compiles one module after the other."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "TRITON_DUMP_PTXAS_LOG": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with (
        (folder / "log").open("w+") as log,
        subprocess.Popen([sys.executable, __file__], stderr=log, **pipes) as process,
    ):

        def compile_module(module: str, capability: int) -> list[dict[str, Any]]:
            assert process.stdin is not None and process.stdout is not None
            if process.poll() is None:
                print(capability, module, file=process.stdin, flush=True)
            said = process.stdout.readline()
            assert said, (folder / "log").read_text()[-3000:]
            return json.loads(said)

        yield compile_module
        process.kill()


@pytest.mark.parametrize("module", VARIANTS)
def test_every_kernel_is_in_the_short_form(module: str) -> None:
    few = {
        variant.kernel for capability in CAPABILITIES for variant in chosen(module, capability, whole=False)
    }
    assert few == {variant.kernel for variant in VARIANTS[module]}


@pytest.mark.parametrize(
    ("module", "capability"),
    [(module, each) for module in VARIANTS for each in CAPABILITIES if chosen(module, each)],
)
def test_kernels_compile_without_spills_or_slow_conversions(
    module: str, capability: int, compile_all: Callable[[str, int], list[dict[str, Any]]]
):
    for variant, found in zip(chosen(module, capability), compile_all(module, capability), strict=True):
        assert "error" not in found, (variant, found)
        assert found["spilled_bytes"] == 0 or variant.spills_beside_loop, (variant, found)
        assert found["spills"] == 0, (variant, found)
        assert variant.side_by_side * (found["shared_bytes"] + 1024) <= SHARED_MEMORY_BYTES, (variant, found)
        assert variant.side_by_side * found["registers"] * 32 * variant.warps <= REGISTERS, (variant, found)
        assert found["wgmma"] == variant.wgmma, (variant, found)
        assert found["waits_first"] == bool(variant.constexprs.get("PDL")), (variant, found)
        prefetches = variant.kernel == "_multiply" and variant.constexprs["CODE"] is None
        assert found["prefetches_first"] == prefetches, (variant, found)
        assert found["slow_conversions"] == 0, (variant, found)
        assert not (variant.constexprs.get("PACK") and found["flushes"]), "codes are subnormal floats"
        if variant.most_instructions is not None:
            most = variant.most_instructions[CAPABILITIES.index(capability)]
            assert 0 < found["instructions"] <= most, (variant, found)
            assert found["copies"] > 0, (variant, found)
        if variant.copies is not None:
            assert (found["copies"], found["loads"]) == (variant.copies, 0), (variant, found)


def test_blocks_and_prompts_of_qwen3_8b_use_hoppers_matrix_instructions():
    block, prompt = VARIANTS["compute.gpu_triton.attention.paged_attention"][:2]
    assert (block.constexprs["BLOCK_ROWS"], prompt.constexprs["BLOCK_ROWS"]) == (64, 128)
    assert block.wgmma and prompt.wgmma


def _compile(module: str, variant: Variant, capability: int) -> dict[str, int | bool]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"manta.drafter.{module}"), variant.kernel)
    types = {name: variant.signature.get(name, "constexpr").split(":")[0] for name in kernel.arg_names}
    aligned = [kernel.arg_names.index(name) for name, kind in variant.signature.items() if ":16" in kind]
    constexprs = dict(variant.constexprs)
    if constexprs.get("PACK") and capability >= 100:  # as `unpack_codes.bytes_at_once`
        constexprs["PACK"] = 4
    source = ASTSource(kernel, types, constexprs, {(i,): [["tt.divisibility", 16]] for i in aligned})
    log = io.StringIO()  # ptxas reports there
    with contextlib.redirect_stdout(log):
        target = GPUTarget("cuda", capability, 32)
        options = {"num_warps": variant.warps, "enable_fp_fusion": variant.fp_fusion}
        if variant.stages is not None:
            options["num_stages"] = variant.stages
        if variant.registers is not None:
            options["maxnreg"] = variant.registers
        compiled = triton.compile(source, target=target, options=options)
    spilled = re.findall(r"(\d+) bytes spill", log.getvalue())
    assert spilled, f"ptxas reported nothing: {log.getvalue()!r}"
    loop = _hot_loop(compiled.asm["cubin"])
    return {
        "spilled_bytes": sum(map(int, spilled)),
        "registers": int(re.findall(r"Used (\d+) registers", log.getvalue())[-1]),
        "shared_bytes": compiled.metadata.shared,
        "wgmma": any(name in compiled.asm["ptx"] for name in ("wgmma.mma_async", "tcgen05.mma")),
        "waits_first": _waits_first(compiled.asm["ptx"]),
        "prefetches_first": -1
        < compiled.asm["ptx"].find("prefetch.global.L2")
        < compiled.asm["ptx"].find("griddepcontrol.wait"),
        "instructions": len(loop),
        "slow_conversions": sum(name in ("I2F", "F2F", "F2I") for name in loop),
        "spills": loop.count("LDL") + loop.count("STL"),
        "copies": loop.count("LDGSTS"),
        "loads": loop.count("LDG"),
        "flushes": re.search(r"(?<!rsqrt\.approx)\.ftz", compiled.asm["ptx"]) is not None,
    }


def _hot_loop(cubin: bytes) -> list[str]:
    """The instructions of the loop with matrix products; none if it is unrolled or there are none.

    A loop ends with a conditional branch back; waits are out of line, and come back unconditionally.
    """
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(@!?U?P\w+ )?\s*(\S+?)(?:\.\S+)? (.*?);", listing, re.M)
    places = {int(address, 16): i for i, (address, *_) in enumerate(lines)}
    names = [name for _, _, name, _ in lines]
    for i, (address, predicate, name, operands) in enumerate(lines):
        if name != "BRA" or not (predicate or "UP" in operands):
            continue
        target = int(re.findall(r"0x([0-9a-f]+)", operands)[-1], 16)
        body = names[places[target] : i + 1] if target < int(address, 16) else []
        if any(name.endswith("MMA") for name in body):
            return body
    return []


def _waits_first(ptx: str) -> bool:
    """Whether a kernel accesses global memory only after its wait for the previous kernel."""
    touched = re.search(r"\b(?:cp|(?:ld|st|atom|red)(?!\S*\.(?:param|shared)))\.", ptx)
    assert touched is not None, "a kernel that does nothing: it may be a trap"
    return -1 < ptx.find("griddepcontrol.wait") < touched.start()


def _compile_or_explain(module: str, variant: Variant, capability: int) -> dict[str, Any]:
    try:
        return _compile(module, variant, capability)
    except Exception:
        return {"error": traceback.format_exc()[-3000:]}


if __name__ == "__main__":
    for line in sys.stdin:
        number, asked = line.split()
        results = [_compile_or_explain(asked, variant, int(number)) for variant in chosen(asked, int(number))]
        print(json.dumps(results), flush=True)
