"""Every Triton kernel compiles for Hopper (sm_90) and Blackwell (sm_100, sm_103) without a GPU and spills.

The machine code is counted, too: a loop over weights that takes longer to issue than the memory takes to read
them is bound by its instructions, which no other test shows.

`SHAPES` lists, for each module of `compute/gpu_triton` and `step/gpu_triton`, few representative shapes,
because each costs seconds. What is compiled is recorded from the product's launch functions
(`support/kernels/`), in one process without Triton's interpreter: this file as a script. The short form has
one shape of every kernel, for sm_90 and sm_100 in turn, and `ATOMICS` for all. `make kernels` compiles all
shapes for all three.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.kernels import layer_launches as layers
from support.kernels import step_launches as steps
from support.kernels.layer_launches import E4M3, FP32, MXFP4, Call, attention, experts, latents, product

CAPABILITIES = (90, 100)  # H100 and H200; B200
LIKE_100 = 103  # B300
SHARED_MEMORY_BYTES = 228 * 1024  # of their multiprocessors; each program takes 1 KiB more
REGISTERS = 65536
WHOLE = os.environ.get("MANTA_GRID") == "whole"
# Ordering atomics of kernels that always have them, in the order of the code, by module. Compiled for all
# capabilities in the short form, too.
ATOMICS = {
    "compute.gpu_triton.linear.all_reduce_norm": ["release.sys", "acquire.sys"],
    "step.gpu_triton.sampling.sampler": ["acq_rel.gpu"],
}
# Kernels whose products are made by Hopper's and Blackwell's own matrix instructions at any height of a tile.
OWN_INSTRUCTIONS = ("_multiply", "_multiply_tiles", "_run_chunks")


@dataclass(frozen=True)
class Shape:
    """One kernel at the shapes of a call's launches.

    Attributes:
        kernel: name of the jitted function in its module.
        launch: calls the product's functions that launch it, perhaps beside others, on a device.
        side_by_side: programs that a multiprocessor must have room for.
        copies: asynchronous ones of an iteration of its loop, which has no other loads then.
        only: the capability that the shape is for, 100 also for sm_103; None for all.
        most_instructions: of an iteration of its loop, by capability; a warp issues one per cycle.
        spills_beside_loop: whether registers may be spilled, but not in the loop.
    """

    kernel: str
    launch: Call
    side_by_side: int = 1
    copies: int | None = None
    only: int | None = None
    most_instructions: tuple[int, int] | None = None
    spills_beside_loop: bool = False


def _attend(launch: Call, **expected: Any) -> Shape:
    return Shape("_attend", launch, **expected)


def _product(
    *sizes: Any, most: tuple[int, int] | None = None, room: int = 3, only: int | None = None, **how: Any
) -> Shape:
    """Return a shape of which `room` programs run side by side: one of more than 64 rows."""
    return Shape("_multiply", product(*sizes, **how), room, only=only, most_instructions=most)


def _experts(
    *sizes: int,
    most: tuple[int, int] | None = None,
    room: int = 3,
    copies: int | None = None,
    only: int | None = None,
    **how: Any,
) -> Shape:
    """Return a shape of which `room` programs run side by side: one of a prompt's."""
    return Shape("_multiply_tiles", experts(*sizes, **how), room, copies, only, most)


SHAPES: dict[str, list[Shape]] = {
    "step.gpu_triton.sampling.sampler": [Shape("_choose", steps.choose)],
    "step.gpu_triton.sampling.logits_processors": [Shape("_apply", steps.apply_rules)],
    "step.gpu_triton.sampling.selector": [
        Shape("_best_of_chunk", steps.find_candidates),
        Shape("_best_of_row", steps.find_candidates),
        Shape("_walk", steps.walk_paths),
    ],
    "step.gpu_triton.ngram_lookup": [Shape("_look_up", steps.look_up)],
    "step.gpu_triton.sampling.grammar_masks": [
        Shape("_mask", steps.mask_tokens),
        Shape("_force_ends", steps.mask_tokens),
    ],
    "step.gpu_triton.inputs.row_layout": [
        Shape("_lay_out_rows", steps.lay_out),
        Shape("_write_drafts", steps.lay_out),
    ],
    "step.gpu_triton.verification": [
        Shape("_accept_and_advance", steps.verify),
        Shape("_mark_not_numbers", steps.verify),
        Shape("_trim_drafts", steps.verify),
    ],
    "step.gpu_triton.draft_trees": [
        Shape("_likely_children", steps.grow_trees),
        Shape("_tree_scores", steps.grow_trees),
        Shape("_grow", steps.grow_trees),
    ],
    "step.gpu_triton.tree_rows": [
        Shape("_trim_trees", steps.follow_trees),
        Shape("_place_rows", steps.follow_trees),
        Shape("_accept_paths", steps.follow_trees),
        Shape("_path_rows", steps.follow_trees),
    ],
    "step.gpu_triton.recurrent_states": [
        Shape("_build_rows", steps.copy_states),
        Shape("_admit_states", steps.copy_states),
        Shape("_save_accepted", steps.copy_states),
    ],
    "step.gpu_triton.inputs.transfers": [
        Shape("_write_words", steps.transfer),
        Shape("_stamp", steps.transfer),
    ],
    "compute.gpu_triton.attention.paged_attention": [
        # Qwen3-8B, a block of 16 rows: a thread copies 256 bytes of K and V, and a page number
        _attend(attention(32, 8, 128), copies=17, most_instructions=(705, 810)),
        # a prompt: tiles of 128, eight warps
        _attend(attention(32, 8, 128, rows=2048), copies=9, most_instructions=(615, 675)),
        _attend(attention(32, 8, 128, kv=E4M3), copies=9, most_instructions=(855, 895)),
        _attend(attention(32, 8, 128, rows=2048, kv=E4M3)),
        _attend(latents(8, tile_rows=16, kv=E4M3), copies=11, most_instructions=(1045, 1050)),
        _attend(latents(8, batch_invariant=True, kv=E4M3), copies=7, spills_beside_loop=True),
        _attend(attention(64, 8, 64, window=128, sinks=True, kv=E4M3)),
        _attend(attention(32, 8, 128, batch_invariant=True, kv=E4M3)),
        _attend(attention(32, 8, 128, causal=False, window=2048)),  # its drafter
        _attend(attention(32, 8, 128, batch_invariant=True)),
        _attend(attention(32, 8, 128, rows=1)),  # plain decoding
        _attend(attention(32, 8, 128, rows=1, first_key=1)),  # a link of an EAGLE-3 chain
        _attend(attention(64, 8, 64, window=128, sinks=True)),  # gpt-oss
        _attend(attention(16, 4, 256, page=256)),
        _attend(attention(32, 8, 128, dtype=FP32)),
        _attend(attention(32, 4, 512)),  # Gemma 4's full layers
        _attend(attention(64, 8, 192, v_dim=128, window=128, sinks=True, batch_invariant=True)),  # MiMo-V2
        # Kimi K2 on eight ranks: a thread copies 144 bytes of latents and 2 page numbers
        _attend(latents(8), copies=11, most_instructions=(830, 810)),
        _attend(latents(8, tile_rows=64), copies=11, only=90, most_instructions=(875, 0)),
        # a few instructions per item are spilled
        _attend(
            latents(8, tile_rows=64), copies=11, only=100, most_instructions=(0, 770), spills_beside_loop=True
        ),
        # plain decoding: 16 rows, four warps
        _attend(latents(8, rows=1), copies=20, most_instructions=(990, 1005)),
        _attend(latents(64, rows=1, tile_rows=64), copies=11, only=90),
        _attend(latents(64, rows=1)),  # and on one, in two tiles of heads
        _attend(latents(8, batch_invariant=True)),
        _attend(latents(8, tree=True)),
        _attend(attention(32, 8, 128, tree=True, batch_invariant=True)),
        _attend(attention(32, 8, 128, tree=True)),
    ],
    "compute.gpu_triton.attention.attention_tiles": [
        Shape("_list_work", attention(32, 8, 128, window=2048)),
        Shape("_list_work", attention(32, 8, 128, window=2048, batch_invariant=True)),
    ],
    "compute.gpu_triton.common.element_ops": [
        Shape("_rms_norm", layers.norm),
        Shape("_row_squares", layers.norm),
        Shape("_gate_mul", layers.gate),
    ],
    "compute.gpu_triton.delta_net.dynamic_convolution": [Shape("_convolve", layers.convolve_rows)],
    "compute.gpu_triton.linear.skinny_gemm": [
        _product(6144, 4096, 16, "norm"),  # Qwen3-8B: qkv
        _product(4096, 12288, 16, "residual"),  # down
        _product(12288, 4096, 16, "norm gate", most=(195, 190)),
        _product(12288, 4096, 64, "norm gate"),
        _product(10240, 4096, 32, layers=5),  # its drafter's context
        _product(4096, 4096, 100, "residual bias", one_tile=True),  # batch-invariant
        _product(4096, 4096, 16, "norm", dtype=FP32),
        _product(12288, 4096, 16, "norm gate", scaled_rows=True, most=(335, 305)),
        _product(4096, 12288, 64, "residual bias", scaled_rows=True),
        _product(12288, 4096, 128, "norm gate", room=1, most=(250, 226)),
        _product(4096, 12288, 100, "residual bias", room=1),
        _product(4096, 4096, 100, "residual bias", dtype=FP32, room=1),  # two tiles of 64 rows
        _product(12288, 4096, 128, "norm gate", scaled_rows=True, room=1, most=(330, 276)),
        _product(4096, 12288, 200, "residual bias", scaled_rows=True, room=1),  # two tiles
        # weights of published checkpoints
        _product(12288, 4096, 16, "norm gate", codes=layers.W4A16, most=(370, 400)),
        _product(12288, 4096, 16, "norm gate", codes=layers.AWQ, most=(555, 555)),
        _product(12288, 4096, 16, "norm gate", codes=layers.FP8_BLOCKS, most=(410, 346)),
        _product(12288, 4096, 16, "norm gate", codes=layers.NVFP4, most=(535, 517)),
        _product(12288, 4096, 16, "norm gate", codes=MXFP4),
        _product(12288, 4096, 16, "norm gate", codes=layers.W8A16, most=(480, 555)),
        _product(4096, 12288, 64, "residual bias", codes=layers.W4A16),
        _product(4096, 12288, 64, "residual bias", codes=layers.FP8_BLOCKS),
        _product(12288, 4096, 128, "norm gate", codes=layers.W4A16, room=1, most=(355, 403)),
        _product(12288, 4096, 128, "norm gate", codes=layers.AWQ, room=1, most=(450, 489)),
        _product(12288, 4096, 128, "norm gate", codes=layers.FP8_BLOCKS, room=1, most=(364, 303)),
        _product(12288, 4096, 128, "norm gate", codes=layers.NVFP4, room=1, most=(442, 453)),
        _product(12288, 4096, 128, "norm gate", codes=MXFP4, room=1, most=(300, 401)),
        _product(12288, 4096, 128, "norm gate", codes=layers.W8A16, room=1, most=(397, 414)),
        _product(4096, 12288, 256, "residual bias", codes=layers.W4A16, room=1, most=(203, 251)),
        _product(4096, 4096, 256, "residual bias", codes=layers.NVFP4, dtype=FP32, room=1),
    ],
    "compute.gpu_triton.linear.packed_codes": [Shape("_dequantize", layers.dequantize_codes)],
    "compute.gpu_triton.moe.topk_routing": [Shape("_choose", layers.route)],
    "compute.gpu_triton.moe.moe_align": [Shape("_list_tiles", layers.route)],
    "compute.gpu_triton.moe.grouped_gemm": [
        _experts(1536, 2048, 16, activation="silu"),  # Qwen3-30B-A3B: gate and up of a verified block
        _experts(2048, 768, 16),  # down
        _experts(512, 7168, 16, activation="silu", most=(142, 162)),  # DeepSeek-V3
        _experts(1536, 2048, 64, activation="silu"),
        _experts(1408, 2816, 128, activation="gelu_tanh", room=1),  # Gemma 4 26B: a prompt
        # gpt-oss: an iteration takes 16,384 arranged codes of Hopper's, 32,768 by Blackwell's block-scaled
        # products of up to 32 rows, or else 8,192
        _experts(5760, 2880, 16, activation="swiglu_clamped", codes=MXFP4, only=90, most=(415, 0), copies=9),
        _experts(5760, 2880, 32, activation="swiglu_clamped", codes=MXFP4, only=90, most=(435, 0), copies=13),
        _experts(5760, 2880, 16, activation="swiglu_clamped", codes=MXFP4, only=100, most=(0, 675), room=2),
        _experts(5760, 2880, 32, activation="swiglu_clamped", codes=MXFP4, only=100, most=(0, 1060), room=2),
        _experts(2880, 2880, 64, codes=MXFP4, only=90, most=(445, 0), room=2),
        _experts(2880, 2880, 64, codes=MXFP4, only=100, most=(0, 400)),
        _experts(5760, 2880, 128, activation="swiglu_clamped", codes=MXFP4, most=(160, 250), room=1),
        # Kimi K2 on eight ranks
        _experts(512, 7168, 16, activation="silu", codes=layers.INT4, most=(285, 315)),
        _experts(7168, 256, 64, codes=layers.INT4),
        _experts(512, 7168, 128, activation="silu", codes=layers.INT4, room=1),
        # DeepSeek-V3 on eight ranks; Qwen3-30B-A3B in NVFP4, AWQ, and by channel
        _experts(512, 7168, 16, activation="silu", codes=layers.FP8_BLOCKS, most=(350, 295)),
        _experts(7168, 256, 64, codes=layers.FP8_BLOCKS),
        _experts(512, 7168, 128, activation="silu", codes=layers.FP8_BLOCKS, room=1),
        _experts(1536, 2048, 16, activation="silu", codes=layers.NVFP4, most=(440, 435)),
        _experts(1536, 2048, 128, activation="silu", codes=layers.NVFP4, room=1),
        _experts(1536, 2048, 16, activation="silu", codes=layers.AWQ),
        _experts(1536, 2048, 16, activation="silu", codes=layers.FP8_ROWS),
        _experts(1536, 2048, 16, activation="silu", codes=layers.W8A16, most=(435, 505)),
        _experts(1536, 2048, 16, activation="silu", dtype=FP32),
        _experts(5760, 2880, 64, activation="swiglu_clamped", codes=MXFP4, dtype=FP32, room=2),
        Shape("_add_up", layers.route),
    ],
    "compute.gpu_triton.attention.mla": [Shape("_norm_rotate_write_latents", layers.write_latents)],
    "compute.gpu_triton.attention.mla_prefill_work": [
        Shape("_gather_latents", layers.expanded_latents(8)),
        Shape("_gather_latents", layers.expanded_latents(8, FP32)),
        Shape("_gather_latents", layers.expanded_latents(8, kv=E4M3)),
    ],
    "compute.gpu_triton.attention.mla_prefill": [
        Shape("_attend_expanded", layers.expanded_latents(8), copies=10, most_instructions=(675, 765)),
        Shape("_attend_expanded", layers.expanded_latents(64, FP32)),
        Shape("_add_splits", layers.expanded_latents(8)),
    ],
    # Of Qwen3.5-9B and 35B-A3B, and of 27B
    "compute.gpu_triton.delta_net.conv_and_qk_norm": [
        Shape("_take_in", layers.delta_net(16, 32)),
        Shape("_take_in", layers.delta_net(16, 48, FP32, saves=True)),
    ],
    "compute.gpu_triton.delta_net.recurrent_delta_rule": [
        Shape("_run_rows", layers.delta_net(16, 32), 12),
        Shape("_run_rows", layers.delta_net(16, 48), 12),
        Shape("_run_rows", layers.delta_net(2, 4, FP32, saves=True), 12),  # of a rank of many
    ],
    "compute.gpu_triton.delta_net.chunk_delta_rule": [
        Shape("_prepare", layers.delta_net(16, 32)),
        Shape("_prepare", layers.delta_net(16, 48, FP32)),
        Shape("_run_chunks", layers.delta_net(16, 32), 2),
        Shape("_run_chunks", layers.delta_net(16, 48, saves=True), 2),
        Shape("_run_chunks", layers.delta_net(16, 48, FP32)),
    ],
    "compute.gpu_triton.delta_net.gated_norm": [
        Shape("_gate_outputs", layers.delta_net(16, 32)),
        Shape("_gate_outputs", layers.delta_net(16, 48, FP32)),
    ],
    "compute.gpu_triton.linear.all_reduce_norm": [Shape("_sum_add_norm", layers.sum_over_ranks)],
    "compute.gpu_triton.attention.norm_rope_kv_write": [
        Shape("_norm_rotate_write", layers.write_heads),
        Shape("_write_context", layers.write_heads),
    ],
    "compute.gpu_triton.attention.compact_rows": [Shape("_compact", layers.move_rows)],
}


def chosen(module: str, capability: int, *, whole: bool = WHOLE) -> list[Shape]:
    """Return the shapes of a module that are compiled for a capability."""
    shapes = SHAPES[module] if whole else _one_of_each_kernel(SHAPES[module])
    if capability == LIKE_100:
        return [shape for shape in shapes if (whole or module in ATOMICS) and shape.only != CAPABILITIES[0]]
    parity = CAPABILITIES.index(capability) + list(SHAPES).index(module)

    def is_chosen(i: int, shape: Shape) -> bool:
        if shape.only is not None:
            return shape.only == capability
        return whole or module in ATOMICS or (i + parity) % len(CAPABILITIES) == 0

    return [shape for i, shape in enumerate(shapes) if is_chosen(i, shape)]


def _one_of_each_kernel(shapes: list[Shape]) -> list[Shape]:
    """Return the first shape of every kernel, if possible one whose instructions are counted."""
    found: dict[str, Shape] = {}
    for shape in sorted(shapes, key=lambda shape: shape.most_instructions is None):
        found.setdefault(shape.kernel, shape)
    return list(found.values())


@pytest.fixture(scope="module")
def compile_all(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str, int], list[list[dict[str, Any]]]]]:
    """The results of each shape of a module; its process compiles one module after the other."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "TRITON_DUMP_PTXAS_LOG": "1"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with (
        (folder / "log").open("w+") as log,
        subprocess.Popen([sys.executable, __file__], stderr=log, **pipes) as process,
    ):

        def compile_module(module: str, capability: int) -> list[list[dict[str, Any]]]:
            assert process.stdin is not None and process.stdout is not None
            if process.poll() is None:
                print(capability, module, file=process.stdin, flush=True)
            said = process.stdout.readline()
            assert said, (folder / "log").read_text()[-3000:]
            return json.loads(said)

        yield compile_module
        process.kill()


@pytest.mark.parametrize(
    ("module", "capability"),
    [(module, each) for module in SHAPES for each in (*CAPABILITIES, LIKE_100) if chosen(module, each)],
)
def test_kernels_compile_without_spills_or_slow_conversions(
    module: str, capability: int, compile_all: Callable[[str, int], list[list[dict[str, Any]]]]
):
    shapes, results = chosen(module, capability), compile_all(module, capability)
    pairs = [(shape, found) for shape, of in zip(shapes, results, strict=True) for found in of]
    for shape, found in pairs:
        assert "error" not in found, (shape, found)
        assert found["spilled_bytes"] == 0 or shape.spills_beside_loop, (shape, found)
        assert found["spills"] == 0, (shape, found)
        assert shape.side_by_side * (found["shared_bytes"] + 1024) <= SHARED_MEMORY_BYTES, (shape, found)
        assert shape.side_by_side * found["registers"] * 32 * found["warps"] <= REGISTERS, (shape, found)
        is_tall = shape.kernel in ("_attend", "_attend_expanded") and found["constants"]["BLOCK_ROWS"] >= 64
        assert found["wgmma"] == (is_tall or shape.kernel in OWN_INSTRUCTIONS), (shape, found)
        assert found["waits_first"] == bool(found["constants"].get("PDL")), (shape, found)
        prefetches = shape.kernel == "_multiply" and found["constants"]["CODE"] is None
        assert found["prefetches_first"] == prefetches, (shape, found)
        assert found["ordered"], (shape, found)
        assert found["atomics"] == ATOMICS.get(module, found["atomics"]), (shape, found)
        assert found["slow_conversions"] == 0, (shape, found)
        assert not (found["constants"].get("PACK") and found["flushes"]), "codes are subnormal floats"
        if shape.most_instructions is not None:
            most = shape.most_instructions[capability >= CAPABILITIES[1]]
            assert 0 < found["instructions"] <= most, (shape, found)
            assert found["copies"] > 0, (shape, found)
        if shape.copies is not None:
            assert (found["copies"], found["loads"]) == (shape.copies, 0), (shape, found)


def test_a_missing_barrier_beside_an_atomic_is_found() -> None:
    store, barrier, load = "st.global.v4.b32 [%rd1], {};", "bar.sync 0;", "ld.global.b32 %r1, [%rd2];"
    release, acquire = "atom.global.sys.release.add.u32 %r2;", "atom.global.gpu.acq_rel.add.u32 %r3;"
    assert _is_ordered("\n".join((store, barrier, release, barrier, acquire, barrier, load)))
    assert not _is_ordered("\n".join((barrier, store, release, barrier, load)))
    assert not _is_ordered("\n".join((store, barrier, acquire, load, barrier)))
    assert _ordering_atomics(f"{release}\n{acquire}") == ["release.sys", "acq_rel.gpu"]
    assert _ordering_atomics(release.replace("release", "relaxed")) == []


@pytest.mark.if_changed
def test_compiled_kernels_are_counted_and_those_on_disk_are_not(tmp_path: Path) -> None:
    program = """
from manta.drafter.compute.gpu_triton.common.compilations import count_compilations
from support.kernels.layer_launches import norm
from support.kernels.recorded_launches import record

launches = {launch.key: launch for launch in record(norm, 90)}.values()
for _ in range(2):
    with count_compilations() as found:
        for launch in launches:
            launch.compiled(90)
    print(found.num_kernels == len(launches), bool(found), found.seconds > 0, str(found))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    fresh, again = done.stdout.splitlines()
    assert fresh.startswith("True True True Triton compiled") and str(tmp_path) in fresh
    assert again.startswith("False False False Triton compiled 0 kernels")


def recorded(module: str, shape: Shape, capability: int) -> list[Any]:
    """Return the different launches of the shape's kernel; the first one in the short form."""
    from support.kernels.recorded_launches import record

    launches = record(shape.launch, capability)
    named = f"manta.drafter.{module}", shape.kernel
    found = [each for each in launches if (each.kernel.fn.__module__, each.kernel.fn.__name__) == named]
    assert found, f"launched were {[each.kernel for each in launches]}"
    return list({each.key: each for each in found}.values()) if WHOLE else found[:1]


def _compile(launch: Any, capability: int) -> dict[str, Any]:
    log = io.StringIO()
    with contextlib.redirect_stdout(log):  # ptxas reports there
        compiled = launch.compiled(capability)
    spilled = re.findall(r"(\d+) bytes spill", log.getvalue())
    assert spilled, f"ptxas reported nothing: {log.getvalue()!r}"
    loop = _hot_loop(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    return {
        "constants": {name: value for name, value in launch.constants.items() if name.isupper()},
        "warps": compiled.metadata.num_warps,
        "spilled_bytes": sum(map(int, spilled)),
        "registers": int(re.findall(r"Used (\d+) registers", log.getvalue())[-1]),
        "shared_bytes": compiled.metadata.shared,
        "wgmma": any(name in ptx for name in ("wgmma.mma_async", "tcgen05.mma")),
        "waits_first": _waits_first(ptx),
        "prefetches_first": -1 < ptx.find("prefetch.global.L2") < ptx.find("griddepcontrol.wait"),
        "instructions": len(loop),
        "ordered": _is_ordered(ptx),
        "atomics": _ordering_atomics(ptx),
        "slow_conversions": sum(name in ("I2F", "F2F", "F2I") for name in loop),
        "spills": loop.count("LDL") + loop.count("STL"),
        "copies": loop.count("LDGSTS"),
        "loads": loop.count("LDG"),
        "flushes": re.search(r"(?<!rsqrt\.approx)\.ftz", ptx) is not None,
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


def _ordering_atomics(ptx: str) -> list[str]:
    """Return the order and scope of each atomic that is not relaxed."""
    found = re.findall(r"\batom\.global\.(\w+)\.(acq_rel|release|acquire)\.", ptx)
    return [f"{order}.{scope}" for scope, order in found]


def _is_ordered(ptx: str) -> bool:
    """Whether a barrier is between a tile's stores and a release, and between an acquire and loads after it.

    One thread makes an atomic. What it alone has stored before needs no barrier.
    """
    atomics = re.finditer(r"\batom\.\S*?(acq_rel|release|acquire)\S*", ptx)
    for kind, before, after in ((at[1], ptx[: at.start()], ptx[at.end() :]) for at in atomics):
        if kind != "acquire" and "st.global.v" in before.rpartition("bar.sync")[2]:
            return False
        if kind != "release" and "ld.global" in after.partition("bar.sync")[0]:
            return False
    return True


def _compile_or_explain(module: str, shape: Shape, capability: int) -> list[dict[str, Any]]:
    try:
        return [_compile(launch, capability) for launch in recorded(module, shape, capability)]
    except Exception:
        return [{"error": traceback.format_exc()[-3000:]}]


if __name__ == "__main__":
    for line in sys.stdin:
        number, asked = line.split()
        results = [_compile_or_explain(asked, shape, int(number)) for shape in chosen(asked, int(number))]
        print(json.dumps(results), flush=True)
