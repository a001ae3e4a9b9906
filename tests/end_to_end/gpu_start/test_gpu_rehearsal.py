"""The GPU path's start, from random weights to the last capture, on a pretended H200 (`support/rehearsal`).

What no other test sees: what captures forbid, kernels that a graph would compile, collectives that ranks
would not meet, pinned memory that is used too early, and memory that the profile has not counted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from manta.cluster.errors import ConfigError
from manta.cluster.hardware.step_time import LAUNCHES_AROUND, LAUNCHES_PER_LAYER
from manta.jobs.compile.device_guard import compile_guard
from support.oracles.quantized_checkpoints import FORMATS
from support.paths import ROOT, TESTS
from support.published.published import CONFIGS

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


def _layers(model: str, count: int, **changes: object) -> dict[str, Any]:
    """Return a published configuration with fewer layers."""
    return {**CONFIGS[model], "num_hidden_layers": count, **changes}


ALWAYS: dict[str, dict[str, Any]] = {
    "chains, and pages that are kept": {"tier": True},
    "trees with fewer nodes than a block": {"speculation": {"tree_width": 4, "tree_size": 12}},
}
IF_CHANGED: dict[str, dict[str, Any]] = {
    "trees with more nodes": {"speculation": {"tree_width": 8, "tree_size": 40}},
    "a swap of the drafter": {"swap": True},
    "plain": {"speculation": None},
    "FP8 K and V": {"engine": {"kv_cache_dtype": "fp8"}},
    "FP8 weights": {"engine": {"quantization": "fp8"}},
    "INT4 weights": {"engine": {"quantization": "int4"}},
    "batch-invariant": {"engine": {"batch_invariant": True}},
    "gpt-oss": {"model": GPT_OSS},
    **{
        f"{form} codes": {"model": {"quantization_config": FORMATS[form].config}}
        for form in ("ct_nvfp4", "mxfp4", "awq", "gptq", "ct_int8")
    },
    "latents of DeepSeek-V3": {"model": _layers("DeepSeek-V3", 2, first_k_dense_replace=1)},
    "recurrent states of Qwen3-Next": {
        "model": _layers("Qwen3-Coder-Next", 2, full_attention_interval=2),
        "engine": {"max_num_seqs": 2},
    },
}
# With the first expert of a rank as a constant, where ranks have whole experts (docs/benchmarks/gpu.md).
OF_EXPERTS = {"_list_tiles", "_add_up"}
# Ranks, and what they start.
OF_RANKS: dict[str, tuple[int, dict[str, Any]]] = {
    "two of gpt-oss": (2, {"model": GPT_OSS}),
    "two with a swap of the drafter": (2, {"swap": True}),
    "two with a split drafter": (2, {"speculation": {"placement": "split"}}),
    "four": (4, {}),
    "four with a split drafter": (4, {"speculation": {"placement": "split"}}),
    "four with trees": (4, {"speculation": {"tree_width": 4, "tree_size": 12}}),
    "eight of gpt-oss": (8, {"model": GPT_OSS}),
    "eight with a shared drafter": (8, {"speculation": {"placement": "shared"}}),
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
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled guard of a device."""
    try:
        return compile_guard(tmp_path_factory.mktemp("guard"))
    except ConfigError as error:
        pytest.skip(error.message)


@pytest.fixture
def rehearse(guard: Path) -> Rehearse:
    return partial(rehearsed, guard)


def rehearsed(guard: Path, **settings: object) -> dict[str, Any]:
    done = run(guard, **settings)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def run(guard: Path, **settings: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", FOLDER / "rehearse.py", guard, json.dumps(settings)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("settings", CASES)
def test_captures_contain_nothing_that_they_forbid(settings: dict[str, Any], rehearse: Rehearse) -> None:
    found = rehearse(**settings)
    assert found["violations"] == {} and found["new_in_capture"] == {}
    assert found["new_after_start"] == {}, "`manta compile` sees a start alone"
    assert len(found["graphs"]) > 10 and all(sum(graph.values()) > 3 for graph in found["graphs"])
    assert 0.98 < found["used_bytes"] / found["allowed_bytes"] <= 1
    assert (found["tier_hits"] > 0) == settings.get("tier", False)


def test_up_to_128_rows_a_step_has_the_launches_that_the_planner_charges(rehearse: Rehearse) -> None:
    """Blocks of eight requests; PyTorch's operators count, too, and filters take three launches more."""
    graphs = rehearse(engine={"max_num_seqs": 8})["graphs"]
    operators = {name for graph in graphs for name in graph if name.startswith("aten.")}
    assert operators == {"aten.index_select", "aten.stack", "aten.copy_"}  # embedding, taps, filters' copy
    num_layers = 1 + 5  # of the target and of its drafter
    for filters in (False, True):
        chosen = [graph for graph in graphs if ("_apply" in graph) == filters]
        draft, verify = (
            {sum(graph.values()) for graph in chosen if kernel in graph}
            for kernel in ("_write_drafts", "_trim_drafts")
        )
        assert len(draft) == len(verify) == 1, "as many for all numbers of rows"
        planned = LAUNCHES_PER_LAYER * num_layers + LAUNCHES_AROUND + 3 * filters
        assert draft.pop() + verify.pop() == planned


@pytest.mark.if_changed
def test_up_to_256_rows_no_weight_of_codes_is_dequantized(rehearse: Rehearse) -> None:
    engine = {"max_num_seqs": 16, "max_num_batched_tokens": 2**15, "quantization": "int4"}
    found = rehearse(engine=engine)
    assert found["violations"] == {} and "_dequantize" in found["variants"], "to be measured"
    assert not any("_dequantize" in graph for graph in found["graphs"])


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        pytest.param(2, {}, id="two"),
        *(pytest.param(*case, id=name, marks=pytest.mark.if_changed) for name, case in OF_RANKS.items()),
    ],
)
def test_ranks_meet_in_the_same_collectives(ranks: int, settings: dict[str, Any], rehearse: Rehearse) -> None:
    """From loading to the end of some requests, and to the captures after a swap of the drafter."""
    numbers = sorted({0, 1, ranks - 1})
    first, *others = (rehearse(**settings, ranks=ranks, rank=number) for number in numbers)
    kinds = {(kind, is_captured) for kind, _, _, is_captured in first["collectives"]}
    assert kinds == {
        (kind, when) for kind in ("all_reduce", "all_gather", "broadcast") for when in (False, True)
    }
    has_features = "placement" in settings.get("speculation", {})  # of a remote drafter: the first rank alone
    for found in (first, *others):
        assert found["violations"] == {} and found["new_in_capture"] == {} == found["new_after_start"]
        assert found["collectives"] == first["collectives"]
        others_kernels = {
            name for name, keys in found["variants"].items() if keys != first["variants"].get(name)
        }
        assert others_kernels <= OF_EXPERTS or has_features, "`manta compile` starts the first rank"
        assert not others_kernels or ranks > 2 or has_features, "ranks have parts of all experts"


@pytest.mark.if_changed
def test_kernels_depend_neither_on_memory_nor_on_measurements(rehearse: Rehearse) -> None:
    """What `manta compile` cannot know."""
    found = rehearse(speculation=None)["variants"]
    assert rehearse(speculation=None, engine={"gpu_memory_utilization": 0.53})["variants"] == found
    other = rehearse(speculation=None, library=True)["variants"]
    assert all(set(keys) <= set(found[name]) for name, keys in other.items())


def test_planted_faults_are_found(rehearse: Rehearse) -> None:
    found = rehearse(plant=True)
    assert [words for words in FOUND if not any(words in each for each in found["violations"])] == []
    assert found["new_in_capture"] == {"_rms_norm": 1}


@pytest.mark.if_changed
@pytest.mark.parametrize(
    ("wait", "place"),
    [("outcome", "in collect"), ("upload", "in _send_round"), ("pages", "in _checksum")],
)
def test_pinned_memory_that_is_used_too_early_ends_the_process(wait: str, place: str, guard: Path) -> None:
    done = run(guard, hurry=wait, tier=wait == "pages")
    assert done.returncode == -signal.SIGSEGV and place in done.stderr


@pytest.mark.if_changed
@pytest.mark.parametrize(("wait", "tier"), [("capture", False), ("steps", True)])
def test_streams_that_nothing_orders_are_found(wait: str, tier: bool, rehearse: Rehearse) -> None:
    assert any("work on two streams" in each for each in rehearse(hurry=wait, tier=tier)["violations"])
