"""The GPU path's start, from random weights to the last capture, on a pretended H200 (`support/rehearsal`).

What no other test sees: what captures forbid, kernels that a graph would compile, collectives that ranks
would not meet.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT, TESTS
from torch.utils import cpp_extension

pytest.importorskip("triton")

FOLDER = TESTS / "support" / "rehearsal"
Rehearse = Callable[..., dict[str, Any]]
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201_088,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "attention_bias": True,
    "rope_theta": 150_000,
    "quantization_config": {"quant_method": "mxfp4"},
}
ALWAYS: dict[str, dict[str, Any]] = {
    "chains": {},
    "trees with fewer nodes than a block": {"speculation": {"tree_width": 4, "tree_size": 12}},
}
IF_CHANGED: dict[str, dict[str, Any]] = {
    "trees with more nodes": {"speculation": {"tree_width": 8, "tree_size": 40}},
    "plain": {"speculation": None},
    "FP8 K and V": {"engine": {"kv_cache_dtype": "fp8"}},
    "FP8 weights": {"engine": {"quantization": "fp8"}},
    "INT4 weights": {"engine": {"quantization": "int4"}},
    "batch-invariant": {"engine": {"batch_invariant": True}},
    "gpt-oss": {"model": GPT_OSS},
}
CASES = [
    *(pytest.param(settings, id=name) for name, settings in ALWAYS.items()),
    *(pytest.param(case, id=name, marks=pytest.mark.if_changed) for name, case in IF_CHANGED.items()),
]
# Words of a report for each of `rehearse.faults` but the new kernel.
FOUND = (
    "item makes the host wait",
    "to between host and device",
    "index between host and device",
    "by a mask",
    "an event is recorded",
    "an event is waited for",
    "the device is waited for",
    "the allocator's cache is emptied",
)


@pytest.fixture(scope="module")
def rehearse(tmp_path_factory: pytest.TempPathFactory) -> Rehearse:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("a pretended device needs a C++ compiler")
    guard = tmp_path_factory.mktemp("guard") / "device_guard.so"
    libraries = cpp_extension.library_paths()[0]
    command = [compiler, "-O0", "-shared", "-fPIC", "-std=c++20", "-o", guard, FOLDER / "device_guard.cpp"]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    command += [f"-L{libraries}", "-lc10", f"-Wl,-rpath,{libraries}"]
    subprocess.run(command, check=True, capture_output=True)
    return partial(rehearsed, guard)


def rehearsed(guard: Path, **settings: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, FOLDER / "rehearse.py", guard, json.dumps(settings)],
        env={**os.environ, "PYTHONPATH": str(TESTS), "TRITON_INTERPRET": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("settings", CASES)
def test_captures_contain_nothing_that_they_forbid(settings: dict[str, Any], rehearse: Rehearse) -> None:
    found = rehearse(**settings)
    assert found["violations"] == {} and found["new_in_capture"] == {}
    assert len(found["graphs"]) > 10 and all(sum(graph.values()) > 3 for graph in found["graphs"])


@pytest.mark.parametrize(
    "model", [{}, pytest.param(GPT_OSS, marks=pytest.mark.if_changed)], ids=["qwen3", "gpt-oss"]
)
def test_ranks_meet_in_the_same_collectives(model: dict[str, Any], rehearse: Rehearse) -> None:
    first, last = (rehearse(model=model, ranks=2, rank=rank) for rank in (0, 1))
    assert first["collectives"] == last["collectives"]
    kinds = {(kind, is_captured) for kind, _, _, is_captured in first["collectives"]}
    assert kinds == {
        (kind, when) for kind in ("all_reduce", "all_gather", "broadcast") for when in (False, True)
    }
    assert first["violations"] == last["violations"] == {}


def test_planted_faults_are_found(rehearse: Rehearse) -> None:
    found = rehearse(plant=True)
    assert [words for words in FOUND if not any(words in each for each in found["violations"])] == []
    assert found["new_in_capture"] == {"_rms_norm": 1}
