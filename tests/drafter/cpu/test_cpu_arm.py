"""The fused pass compiles for ARM; it is not run here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from llvmlite import binding, ir
from manta.drafter.compute.cpu_fused.tiles import code_tiles
from manta.drafter.compute.cpu_fused.tiles import simd_tiles as row_tiles
from manta.drafter.compute.cpu_fused.tiles import simd_vectors as vectors
from manta.drafter.compute.cpu_numba import llvm_intrinsics as llvm
from manta.drafter.compute.cpu_numba.cpu_features import Instructions

Emit = Callable[[Any, Sequence[Any]], None]
EMITTED: dict[str, tuple[int, Emit]] = {
    "products": (1, lambda builder, args: row_tiles.emit_products(builder, args[0], row_tiles._BF16)),
    **{
        f"products with {code}": (2, code_tiles.emit_product(code))
        for code in ("int8", "int4", "e4m3", "e2m1")
    },
    "scores": (8, row_tiles._emit_scores),
    "combinations": (7, row_tiles._emit_combination),
    "packing": (6, row_tiles._emit_pack),
    "softmax": (7, vectors._emit_soften_row),
    "gates": (2, lambda builder, args: vectors._emit_gate(builder, args, vectors._gelu_tanh)),
    "norms": (5, lambda builder, args: vectors._emit_norm(builder, args, adds=True)),
    "rotations": (6, lambda builder, args: vectors._emit_rotate(builder, args, norms=True)),
    "rounding": (4, vectors._emit_scale),
    "pauses": (0, llvm._emit_pause),
}


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch) -> binding.TargetMachine:
    for module in (row_tiles, vectors, code_tiles):
        monkeypatch.setattr(module, "bf16_instructions", lambda: Instructions.NEON)
    monkeypatch.setattr(llvm.platform, "machine", lambda: "aarch64")
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        target = binding.Target.from_triple("aarch64-unknown-linux-gnu")
    except RuntimeError:
        pytest.skip("this LLVM compiles for x86 alone")
    return target.create_target_machine(cpu="neoverse-n1", opt=3)


@pytest.mark.parametrize("name", EMITTED)
def test_emitted_code_is_for_arm(name: str, arm: binding.TargetMachine) -> None:
    num_args, emit = EMITTED[name]
    module = ir.Module(name)
    module.triple = arm.triple
    kind = ir.FunctionType(llvm.VOID, [llvm.INT64] * num_args)
    function = ir.Function(module, kind, name)
    builder = ir.IRBuilder(function.append_basic_block())
    emit(builder, function.args)
    builder.ret_void()
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    options = binding.create_pipeline_tuning_options(speed_level=3)
    binding.create_pass_builder(arm, options).getModulePassManager().run(
        parsed, binding.create_pass_builder(arm, options)
    )
    code = arm.emit_assembly(parsed)
    assert "x86" not in code
    if name in ("products", "scores", "combinations") or name.startswith("products with"):
        assert "fmla" in code and "ld1r" in code
