"""The reason that each backend gives for a model or machine that it does not support."""

from __future__ import annotations

import logging
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
import torch
from manta.actors.targets.loading.backend_selection import choose_backend
from manta.cluster.config import EngineConfig
from manta.drafter.compute.backend import DeviceCapabilities, Feature, ModelStackSpec
from manta.drafter.compute.cpu_fused import backend as compiled
from manta.drafter.compute.cpu_numba import backend as loops
from manta.drafter.compute.cpu_numba.cpu_features import Instructions
from manta.drafter.compute.eager import backend as eager
from manta.drafter.compute.gpu_triton import backend as triton
from manta.jobs.doctor.cases.checks import examine
from manta.jobs.doctor.machine import machine_checks

SPEC = ModelStackSpec(name="target", sizes=frozenset({4096, 12288}), head_dims=frozenset({128}))
ALL_FEATURES: frozenset[Feature] = frozenset(get_args(Feature))
GEMMA_3: frozenset[Feature] = frozenset(
    ("norms after attention and MLP", "GELU", "norm weights in fp32", "layers that rotate differently")
)
CPU = DeviceCapabilities(torch.device("cpu"), torch.bfloat16, page_size=16, num_ranks=1)
GPU = replace(CPU, device=torch.device("cuda"))


def with_features(*features: Feature) -> ModelStackSpec:
    return replace(SPEC, features=frozenset(features))


@dataclass(frozen=True)
class Case:
    """A model and machine; `says` is a part of the refusal, or None if the backend is accepted."""

    backend: ModuleType
    says: str | None
    spec: ModelStackSpec = SPEC
    machine: DeviceCapabilities = CPU


CASES = {
    "eager on a CPU": Case(eager, None),
    "eager, anything": Case(
        eager,
        None,
        replace(SPEC, sizes=frozenset({7}), head_dims=frozenset({72}), features=ALL_FEATURES),
        replace(GPU, dtype=torch.float16, page_size=3, num_ranks=4),
    ),
    "loops in bf16": Case(loops, None),
    "loops in fp32": Case(loops, None, machine=replace(CPU, dtype=torch.float32, num_ranks=2)),
    "loops know every feature": Case(loops, None, with_features(*ALL_FEATURES)),
    "loops in fp16": Case(
        loops, "computes float32 and bfloat16 on CPUs", machine=replace(CPU, dtype=torch.float16)
    ),
    "loops on a GPU": Case(loops, "computes float32 and bfloat16 on CPUs", machine=GPU),
    "compiled": Case(compiled, None),
    "compiled on a GPU": Case(compiled, "computes bfloat16 on CPUs", machine=GPU),
    "compiled in fp32": Case(
        compiled, "computes bfloat16 on CPUs", machine=replace(CPU, dtype=torch.float32)
    ),
    "compiled with K/V in FP8": Case(
        compiled, "keeps K/V in bfloat16", machine=replace(CPU, kv_dtype=torch.float8_e4m3fn)
    ),
    "loops with K/V in FP8": Case(loops, None, machine=replace(CPU, kv_dtype=torch.float8_e4m3fn)),
    "triton with K/V in FP8": Case(triton, None, machine=replace(GPU, kv_dtype=torch.float8_e4m3fn)),
    "compiled on two ranks": Case(compiled, "tensor_parallel_size=1", machine=replace(CPU, num_ranks=2)),
    "compiled with odd pages": Case(compiled, "page_size", machine=replace(CPU, page_size=24)),
    "compiled with larger pages": Case(compiled, None, machine=replace(CPU, page_size=64)),
    "compiled with an odd size": Case(
        compiled, "not all of the target's are", replace(SPEC, sizes=frozenset({4096, 1000}))
    ),
    "compiled with odd heads": Case(
        compiled, "not all of the drafter's are", replace(SPEC, name="drafter", head_dims=frozenset({72}))
    ),
    "compiled with heads of 96": Case(compiled, None, replace(SPEC, head_dims=frozenset({96}))),
    **{
        f"compiled with {feature}": Case(
            compiled, f"has no {feature}, which the target needs", with_features(feature)
        )
        for feature in sorted(ALL_FEATURES - GEMMA_3)
    },
    "compiled with Gemma 3's features": Case(compiled, None, with_features(*GEMMA_3)),
    "triton": Case(triton, None, machine=GPU),
    "triton knows every feature": Case(triton, None, with_features(*ALL_FEATURES), replace(GPU, num_ranks=8)),
    "triton on a CPU": Case(triton, "runs on GPUs"),
    "triton with heads of 72 and 512": Case(triton, None, replace(SPEC, head_dims=frozenset({72, 512})), GPU),
    "triton with heads of 576": Case(
        triton,
        "no head_dim above 512, the drafter's is 576",
        replace(SPEC, name="drafter", head_dims=frozenset({96, 576})),
        GPU,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_backend_names_the_features_it_lacks(case: Case, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "bf16_instructions", lambda: Instructions.AVX512)
    monkeypatch.setattr(triton, "why_not_launch", lambda: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = case.backend.why_not(case.spec, case.machine)
    assert found is None if case.says is None else found is not None and case.says in found


def test_passes_are_not_compiled_for_a_cpu_without_wide_vectors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "bf16_instructions", lambda: None)
    assert compiled.why_not(SPEC, CPU) == "needs Linux on a CPU with AVX2 and FMA, AVX-512, AMX or NEON"


def test_tritons_interpreter_runs_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton.why_not(SPEC, CPU) is None


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine whose PATH is one empty folder."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "Python.h").touch()
    return tmp_path


def test_triton_on_a_gpu_needs_a_c_compiler_and_pythons_headers(
    no_compiler: Path, monkeypatch: pytest.MonkeyPatch
):
    assert "needs a C compiler" in str(triton.why_not(SPEC, GPU))
    (no_compiler / "clang").touch(mode=0o755)
    assert triton.why_not(SPEC, GPU) is None
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "set CC" in str(triton.why_not(SPEC, GPU)), "Triton takes no other one then"
    monkeypatch.delenv("CC")
    (no_compiler / "Python.h").unlink()
    assert "needs Python.h" in str(triton.why_not(SPEC, GPU))


def test_the_doctor_names_the_compiler_or_what_to_install(no_compiler: Path, monkeypatch: pytest.MonkeyPatch):
    (check,) = (check for check in machine_checks() if check.name == "C compiler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = examine(check)
    assert found.status == "failed" and "gcc" in found.remedy
    (no_compiler / "gcc").touch(mode=0o755)
    found = examine(check)
    assert (found.status, found.measured) == ("fact", str(no_compiler / "gcc"))


def test_a_gpu_that_falls_back_to_pytorchs_operators_is_warned_of(
    no_compiler: Path, caplog: pytest.LogCaptureFixture
):
    config = EngineConfig.from_dict({"model": "none", "device": "cuda"})
    with caplog.at_level(logging.WARNING):
        assert choose_backend(config, [SPEC], GPU) == "torch"
    assert "triton needs a C compiler" in caplog.text
    caplog.clear()
    (no_compiler / "gcc").touch(mode=0o755)
    assert choose_backend(config, [SPEC], GPU) == "triton"
    assert not caplog.text
