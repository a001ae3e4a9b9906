"""A widened pair answers and drafts as the original, at any width."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from benchmarks.engine.widen import Width, widen_pair
from manta import LLM, SamplingParams
from manta.actors.targets.families import read_model
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.cluster.errors import CheckpointError, ConfigError
from manta.drafter.compute.checkpoint.safetensors_reader import TensorFolder
from manta.drafter.step.inputs.proposals import Proposals
from safetensors.torch import load_file, save_file
from support.engines.steps import Steps, open_runner
from support.paths import MODELS

WIDTHS = {
    "four times as wide, larger groups of queries": Width(256, 160, 12, 3),
    "not a multiple, equal groups": Width(100, 96, 6, 3),
    "a K/V head for each query": Width(64, 100, 5, 5),
}


def drafts_and_tokens(target: Path, drafter: Path) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Return the drafts and tokens of a few steps of one request."""
    runner, _ = open_runner(target, drafter)
    assert runner.drafts is not None
    steps, drafted = Steps(4), []
    propose = runner.drafts.propose

    def spy(*arguments: object) -> Proposals:
        proposals = propose(*arguments)  # type: ignore[arg-type]
        drafted.append(proposals.drafts_RK.clone())
        return proposals

    runner.drafts.propose = spy  # type: ignore[method-assign]
    prompt = [5, 17, 3, 99, 4, 42, 8]
    first = runner.execute(steps.plan([0], [0], [len(prompt)], admitted=[steps.admit(0, prompt)]))
    known, tokens = len(prompt), [first.token_ids[0, :1].tolist()]
    for _ in range(4):
        result = runner.execute(steps.plan([0], [known], [16], [15]))
        tokens.append(result.token_ids[0, : result.num_tokens[0]].tolist())
        known += int(result.num_tokens[0])
    return drafted[1:], tokens


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_drafts_and_tokens_equal_the_narrow_pairs(
    width: Width, tiny_qwen3: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    widen_pair(tiny_qwen3, tiny_drafter, tmp_path / "wide", width, layers=6, drafter_layers=3)
    drafts, tokens = drafts_and_tokens(tiny_qwen3, tiny_drafter)
    wide_drafts, wide_tokens = drafts_and_tokens(tmp_path / "wide" / "target", tmp_path / "wide" / "drafter")
    assert wide_tokens == tokens
    assert len(drafts) == 4 and len(drafts[0].unique()) > 1, "drafts that are all alike would show nothing"
    assert all(torch.equal(wide, narrow) for wide, narrow in zip(wide_drafts, drafts, strict=True))


@pytest.mark.slow
def test_the_shipped_pair_keeps_its_answers_and_acceptance(
    shipped_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    width = Width(hidden=384, inter=1024, heads=8, kv_heads=4)
    widen_pair(*shipped_pair, tmp_path / "wide", width, layers=20, drafter_layers=5)
    tokenizer = Tokenizer.load(shipped_pair[0])
    lines = (MODELS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:2]
    prompts = [tokenizer.encode(json.loads(line)["prompt"]) for line in lines]

    def run(target: Path, drafter: Path) -> list[tuple[list[int], int, int]]:
        spec = {"model": str(drafter), "adaptive": False}  # else acceptance hangs on measured times
        small = {"max_model_len": 512, "max_num_seqs": 2, "num_threads": 1}
        with LLM(str(target), speculative_config=spec, dtype="float32", **small) as llm:
            outputs = llm.generate(
                [{"prompt_token_ids": p} for p in prompts], SamplingParams(temperature=0.0, max_tokens=20)
            )
        return [(o.outputs[0].token_ids, o.metrics.num_accepted_tokens, o.metrics.num_steps) for o in outputs]

    narrow = run(*shipped_pair)
    assert run(tmp_path / "wide" / "target", tmp_path / "wide" / "drafter") == narrow
    assert sum(accepted for _, accepted, _ in narrow) > 4, "nothing accepted would show nothing"


def test_added_width_is_real_work_not_zeros(tiny_qwen3: Path, tiny_drafter: Path, tmp_path: Path) -> None:
    width = Width(128, 192, 8, 4)
    widen_pair(tiny_qwen3, tiny_drafter, tmp_path / "wide", width, layers=5, drafter_layers=2)
    spec = read_model(tmp_path / "wide" / "target")
    assert (spec.hidden_size, spec.num_layers, spec.layers[0].mixer.head_dim) == (128, 5, 16)
    for layer in spec.layers:
        assert (layer.mixer.num_heads, layer.mixer.num_kv_heads, layer.mlp.inner_size) == (8, 4, 192)
    wide = TensorFolder(tmp_path / "wide" / "target")
    for layer in (0, 4):
        for name in ("q_proj", "k_proj", "v_proj"):
            assert wide.get(f"model.layers.{layer}.self_attn.{name}.weight").count_nonzero(dim=1).min() == 128
        for name in ("gate_proj", "up_proj"):
            assert wide.get(f"model.layers.{layer}.mlp.{name}.weight").count_nonzero(dim=1).min() == 128


def test_a_pair_is_widened_with_its_tokenizer_but_not_its_card(
    shipped_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    widen_pair(*shipped_pair, tmp_path / "wide", Width(192, 512, 4, 2), layers=18, drafter_layers=4)
    files = {path.name for path in (tmp_path / "wide" / "target").iterdir()}
    assert {"tokenizer.json", "generation_config.json", "config.json"} <= files
    assert "README.md" not in files
    narrow, wide = (TensorFolder(f) for f in (shipped_pair[0], tmp_path / "wide" / "target"))
    assert narrow.shapes == wide.shapes
    for name in ("model.layers.3.mlp.down_proj.weight", "model.layers.9.self_attn.k_proj.weight"):
        assert torch.equal(narrow.get(name), wide.get(name))


@pytest.mark.parametrize(
    ("width", "layers", "message"),
    [
        (Width(32, 96, 4, 2), 4, "hidden=32 must be at least 64"),
        (Width(64, 96, 6, 4), 4, "kv_heads=4 must divide heads=6"),
        (Width(64, 96, 4, 4), 3, "layers=3 must be at least 4"),
        (Width(64, 96, 4, 2), 4, "is not empty"),
        (Width(64, 96, 3, 3), 4, "heads=3 must be at least 4"),
    ],
)
def test_impossible_sizes_are_refused_before_anything_is_written(
    width: Width, layers: int, message: str, tiny_qwen3: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(ConfigError, match=message):
        widen_pair(tiny_qwen3, tiny_drafter, tmp_path, width, layers=layers, drafter_layers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_split_group_needs_a_kv_head_for_every_part(
    tiny_qwen3: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    three = tmp_path / "three queries for each of two"
    widen_pair(tiny_qwen3, tiny_drafter, three, Width(64, 96, 6, 2), layers=4, drafter_layers=2)
    pair, two = (three / "target", three / "drafter"), tmp_path / "two"
    with pytest.raises(ConfigError, match="kv_heads=3 must be at least 4"):
        widen_pair(*pair, two, Width(64, 96, 6, 3), layers=4, drafter_layers=2)
    widen_pair(*pair, two, Width(64, 96, 8, 4), layers=4, drafter_layers=2)
    wide = drafts_and_tokens(two / "target", two / "drafter")
    narrow = drafts_and_tokens(tiny_qwen3, tiny_drafter)
    assert wide[1] == narrow[1] and all(map(torch.equal, wide[0], narrow[0]))


def test_models_of_another_kind_are_refused(tiny_llama: Path, tiny_drafter: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="LlamaForCausalLM"):
        widen_pair(
            tiny_llama, tiny_drafter, tmp_path / "wide", Width(64, 96, 4, 2), layers=4, drafter_layers=2
        )


def test_tensors_that_would_be_lost_are_refused(tiny_qwen3: Path, tiny_drafter: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_qwen3, tmp_path / "biased")
    file = tmp_path / "biased" / "model.safetensors"
    tensors = load_file(file) | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"q_proj\.bias"):
        widen_pair(
            tmp_path / "biased", tiny_drafter, tmp_path / "w", Width(64, 96, 4, 2), layers=4, drafter_layers=2
        )
