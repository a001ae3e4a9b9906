"""Losslessness over topologies: TP 1 and 2, drafter colocated, split or shared; real Ray."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from manta import LLM, SamplingParams
from manta.actors.targets.families import read_model
from manta.cluster.request.structured_outputs import StructuredOutputsParams
from manta.drafter.compute.cpu_numba.cpu_features import bf16_instructions
from support.checkpoints.families import FAMILIES
from support.checkpoints.mtp_targets import make_mtp_target
from support.checkpoints.text_pair import make_text_pair
from support.checkpoints.tiny import make_tiny_drafter, make_tiny_target
from support.engines.devices import ON_GPU
from support.engines.steps import short_warm_up
from support.oracles.sampling_cases import KNOBS as SAMPLING
from support.oracles.sampling_cases import params_of, prompts, tokens_of
from support.oracles.schemas import HELD

KNOBS = ("greedy", "warm", "all", "rules")
WHOLE = os.environ.get("MANTA_GRID") == "whole"  # how ranks cut other families, test_target_parallel.py says


@pytest.fixture(scope="module", params=FAMILIES if WHOLE else ["qwen3"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target"), request.param)


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_drafter(tmp_path_factory.mktemp("drafter"), hidden_size=read_model(target).hidden_size)


@pytest.fixture(scope="module")
def reference(target: Path) -> dict[str, list[list[int]]]:
    """Plain decoding in this process."""
    with LLM(str(target), skip_tokenizer_init=True, dtype="float32", max_model_len=256, num_threads=1) as llm:
        return {name: tokens_of(llm, prompts(8), params_of(name, 8)) for name in KNOBS}


@pytest.mark.parametrize(
    ("ranks", "placement", "ahead", "tree"),
    [
        pytest.param(1, "split", False, {}, marks=pytest.mark.slow),  # as test_ray_executor_drafter.py has it
        pytest.param(
            2, "colocated", True, {}, marks=pytest.mark.slow
        ),  # test_ray_executor.py has such a pair
        (2, "colocated", True, {"tree_width": 4, "tree_size": 31}),
        (2, "colocated", True, {"tree_width": 2, "tree_size": 15, "suffix_drafts": True}),
        (2, "split", True, {}),
        (2, "split", True, {"tree_width": 4, "tree_size": 31}),
        # test_ray_executor_drafter.py has one rank
        pytest.param(2, "shared", False, {}, marks=pytest.mark.slow),
        pytest.param(2, None, False, {}, marks=pytest.mark.slow),
    ],
)
def test_the_topology_changes_no_token(
    ray_session: None,
    target: Path,
    drafter: Path,
    reference: dict[str, list[list[int]]],
    ranks: int,
    placement: str | None,
    ahead: bool,
    tree: dict[str, int],
) -> None:
    drafts = {"model": str(drafter), "placement": placement, "adaptive": False, **tree}
    spec = None if placement is None else drafts
    with LLM(
        str(target),
        speculative_config=spec,
        tensor_parallel_size=ranks,
        async_scheduling=ahead,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_threads=1,
    ) as llm:
        for name in KNOBS:
            for size in (1, 8):
                got = tokens_of(llm, prompts(8)[:size], params_of(name, 8)[:size])
                assert got == reference[name][:size], f"{name}, batch of {size}"
        if placement is not None:
            deadline_s = time.monotonic() + 120.0  # a drafter apart may be away on a busy machine
            while not llm.stats().num_accepted_tokens:
                assert time.monotonic() < deadline_s
                assert tokens_of(llm, prompts(8), params_of("warm", 8)) == reference["warm"]


@pytest.mark.parametrize(
    ("placement", "copies"), [("colocated", False), ("colocated", True), ("split", False)]
)
def test_trees_of_two_ranks_change_no_token_of_a_constrained_answer(
    ray_session: None, tmp_path: Path, placement: str, copies: bool
) -> None:
    kinds = (
        StructuredOutputsParams(json=HELD["three properties"], disable_any_whitespace=True),
        StructuredOutputsParams(regex=r"[a-z]{3,9}@[a-z]{2,5}\.(com|org)"),
        StructuredOutputsParams(choice=("yes", "no", "yes, no")),
    )
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=40, structured_outputs=kind)
        for t in (0.0, 1.0)
        for i, kind in enumerate(kinds)
    ]
    target, drafter = make_text_pair(tmp_path)
    spec = {
        "model": str(drafter),
        "tree_width": 4,
        "tree_size": 31,
        "placement": placement,
        "suffix_drafts": copies,
        "adaptive": False,
    }
    how = {"dtype": "float32", "num_threads": 1, "max_model_len": 256, "max_num_seqs": 8}
    answers = []
    for more in ({}, {"speculative_config": spec, "tensor_parallel_size": 2}):
        with LLM(str(target), **how, **more) as llm:
            outputs = llm.generate(["Hello, this is"] * len(params), params)
            answers.append([output.outputs[0].token_ids for output in outputs])
            assert bool(more) == (llm.stats().num_trees > 0)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("method", ["MiMo's layers", "Gemma 4 by DSpark"])
def test_two_ranks_change_no_token_of_other_families(ray_session: None, tmp_path: Path, method: str) -> None:
    if method == "MiMo's layers":
        target = make_mtp_target(tmp_path / "target", "mimo_v2", seed=5, num_mtp_layers=3)
        spec: dict[str, object] = {"method": "mtp"}
    else:
        target = make_tiny_target(tmp_path / "target", "gemma4", seed=5)
        sizes = {"hidden_size": read_model(target).hidden_size, "sliding_window": 20}
        spec = {"model": str(make_tiny_drafter(tmp_path / "drafter", dspark=True, **sizes))}
    how = {"dtype": "float32", "num_threads": 1, "max_model_len": 256, "skip_tokenizer_init": True}
    answers = []
    for more in ({}, {"speculative_config": {**spec, "adaptive": False}, "tensor_parallel_size": 2}):
        with LLM(str(target), max_num_seqs=8, max_num_batched_tokens=64, **how, **more) as llm:
            answers.append([tokens_of(llm, prompts(8), params_of(name, 8)) for name in KNOBS])
            assert bool(more) == (llm.stats().num_accepted_tokens > 0)
    assert answers[0] == answers[1]


@pytest.mark.skipif(bf16_instructions() is None, reason="this CPU has no products of bf16")
def test_two_ranks_with_packed_weights_change_no_token(ray_session: None, tmp_path: Path) -> None:
    """Both ways in one engine over gloo, each request with drafts and without."""
    target = make_tiny_target(tmp_path / "target", "qwen3", head_dim=32)
    drafter = make_tiny_drafter(tmp_path / "drafter", head_dim=32)
    spec = {"model": str(drafter), "num_speculative_tokens": 3, "adaptive": False, "quantization": "int8"}
    sizes = {"max_model_len": 256, "max_num_seqs": 8, "num_threads": 1}
    with LLM(
        str(target),
        speculative_config=spec,
        quantization="int8",
        tensor_parallel_size=2,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        **sizes,
    ) as llm:
        batch = [{"prompt_token_ids": prompt} for prompt in prompts(8)]
        for name in KNOBS:
            num_drafted = llm.stats().num_draft_tokens
            plain = llm.generate(batch, params_of(name, 8), max_draft_tokens=0)
            assert llm.stats().num_draft_tokens == num_drafted
            expected = [output.outputs[0].token_ids for output in plain]
            assert tokens_of(llm, prompts(8), params_of(name, 8)) == expected, name
        assert llm.stats().num_accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="one GPU is no two ranks; ray_session has none")
@pytest.mark.parametrize(
    ("placement", "tree"),
    [
        (placement, tree)
        for placement in ("colocated", "split")
        for tree in ({}, {"tree_width": 2, "tree_size": 5})
    ],
    ids=str,
)
def test_kernels_of_two_ranks_change_no_token(
    ray_session: None, tiny_qwen3: Path, tmp_path: Path, placement: str, tree: dict[str, int]
) -> None:
    """Logits stay sharded until the target's token, and the candidates for a draft, are chosen."""
    pytest.importorskip("triton")
    from support.engines.device_engines import generate

    expected, _ = generate(tiny_qwen3, None, "torch")
    drafter = make_tiny_drafter(tmp_path, second=True)
    drafts = {"num_speculative_tokens": 2, "adaptive": False, "placement": placement, **tree}
    spec = {"model": str(drafter), **drafts}
    got, stats = generate(
        tiny_qwen3, None, "triton", speculative_config=spec, tensor_parallel_size=2, async_scheduling=True
    )
    assert got == expected and stats.num_drafts > 0 and bool(tree) == (stats.num_trees > 0)


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="ray_session has no GPU")
def test_kernels_with_trees_of_a_split_drafter_change_no_token(
    ray_session: None, tiny_qwen3: Path, tmp_path: Path
) -> None:
    """Steps planned ahead, with preemptions, at three temperatures, with filters and penalties."""
    pytest.importorskip("triton")
    from support.engines.device_engines import generate

    knobs = (
        SAMPLING["greedy"],
        replace(SAMPLING["all"], temperature=0.7),
        replace(SAMPLING["plain"], presence_penalty=0.4, repetition_penalty=1.2),
    )
    params = [replace(knob, seed=7 + i, max_tokens=5 + i) for i, knob in enumerate(knobs)]
    expected, _ = generate(tiny_qwen3, None, "torch", params)
    spec: dict[str, object] = {"model": str(make_tiny_drafter(tmp_path)), "placement": "split"}
    spec |= {"num_speculative_tokens": 3, "tree_width": 4, "tree_size": 8, "adaptive": False}
    how = {"async_scheduling": True, "num_pages": 3}
    got, stats = generate(tiny_qwen3, None, "triton", params, speculative_config=spec, **how)
    assert got == expected and stats.num_trees > 0 and stats.preemptions > 0


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="ray_session has no GPU")
@pytest.mark.parametrize("ranks", [1, 2])
def test_kernels_with_trees_of_a_split_drafter_keep_to_grammars(
    ray_session: None, tmp_path: Path, ranks: int
) -> None:
    """Their candidates are sent to the target, which grows the trees again."""
    pytest.importorskip("triton")
    target, drafter = make_text_pair(tmp_path)
    values = StructuredOutputsParams(json={"enum": [True, "of"]}, disable_any_whitespace=True)
    params = [
        SamplingParams(seed=2, max_tokens=2),
        SamplingParams(temperature=0.7, top_k=20, seed=3, max_tokens=8, structured_outputs=values),
    ]
    spec = {"model": str(drafter), "num_speculative_tokens": 3, "tree_width": 2, "tree_size": 6}
    spec |= {"placement": "split", "adaptive": False}
    how = {"dtype": "float32", "num_threads": 1, "page_size": 16, "max_num_seqs": 2, "max_model_len": 48}
    kernels = {"attention_backend": "triton", "speculative_config": spec, "tensor_parallel_size": ranks}
    answers = []
    for more in ({}, kernels):
        with short_warm_up(), LLM(str(target), **how, **more) as llm:
            llm.generate(["x"], SamplingParams(max_tokens=8))  # meanwhile the drafter's session begins
            outputs = llm.generate(["x", "So"], params)
            answers.append([output.outputs[0].token_ids for output in outputs])
            assert bool(more) == (llm.stats().num_trees > 0)
    assert answers[0] == answers[1]
