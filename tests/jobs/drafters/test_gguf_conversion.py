"""`manta drafter convert --to gguf` writes what llama.cpp's converter writes, and it reads back the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from manta import LLM, SamplingParams
from manta.actors.checkpoints.checkpoint_paths import resolve_checkpoint
from manta.cluster.errors import CheckpointError, ConfigError
from manta.drafter.compute.checkpoint.gguf.gguf_file import GgufFile
from manta.drafter.compute.checkpoint.loading.quantized_tensors import open_folder
from manta.drafter.compute.layers.linear import Linear
from manta.drafter.dflash.checkpoint import check_drafter, load_drafter
from manta.drafter.dflash.target_features import EmbeddingCopies, TargetFacts
from manta.jobs.cli import app
from manta.jobs.drafters.common.drafter_files import open_drafter
from manta.jobs.drafters.common.gguf_conversion import convert_to_gguf
from manta.jobs.drafters.drafter_summary import summarize_drafter
from manta.jobs.drafters.validate.validate_pair import validate_pair
from support.checkpoints.broken_pairs import DRAFTER, TARGET
from support.checkpoints.drafters import (
    EAGLE3,
    HIDDEN,
    TARGET_LAYERS,
    VARIANTS,
    VOCAB,
    Config,
    drafter_tensors,
    write_drafter,
    z_lab,
)
from support.checkpoints.families import TINY_VOCAB
from support.checkpoints.gguf_drafters import publish_drafter
from support.oracles.drafter_requests import FACTS, Requests, random_taps
from tokenizers import Tokenizer
from tokenizers.models import BPE
from typer.testing import CliRunner

LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256},
}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    **{"beta_fast": 16.0, "beta_slow": 2.0},
}
CONFIGS: dict[str, Config] = {
    **VARIANTS,
    "linear": z_lab(
        rope_theta=None, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    ),
    "llama3": z_lab(rope_theta=None, rope_parameters=LLAMA3),
    "yarn": z_lab(rope_theta=None, rope_parameters=YARN),
}
REFUSED = {
    "z-lab biases": "biases",
    "z-lab sinks and scaled values": "biases",
    "z-lab mask embedding": "mask_embedding",
    "z-lab convolutions alone": "convolutions",
    "deepspec dflash": "an anchor that predicts",
    "deepspec dspark for gemma 4": "Gemma 4",
    "deepspec dspark for gemma 4, own values": "Gemma 4",
    "specforge dspark, confidence of hidden states": "confidence head",
}
# The tensors are those of the drafter, in another order or with further ones.
CHANGED = ("z-lab interleaved pairs", "z-lab interleaved pairs, partly rotated", "z-lab selector alone")
# Of which llama.cpp's converter writes the keys as the test's writer does, with a scale and a causal flag.
ALIKE = (
    "z-lab sliding but bidirectional",
    "z-lab causal everywhere",
    "z-lab second",
    "specforge dspark",
)
REFUSED_EAGLE3 = {"sglang biases": "biases", "speculators of a Qwen3": "norms of heads"}


def write_target(folder: Path, **sizes: int) -> Path:
    """Write the configuration of the shipped target with other sizes, and a tokenizer of three tokens."""
    raw = json.loads((TARGET / "config.json").read_text()) | sizes | {"eos_token_id": 1}
    raw |= {"max_window_layers": TARGET_LAYERS, "layer_types": ["full_attention"] * TARGET_LAYERS}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": TARGET_LAYERS}))
    tokenizer = Tokenizer(BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.add_tokens(["word"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_target(tmp_path_factory.mktemp("of") / "target", hidden_size=HIDDEN, vocab_size=VOCAB))


@pytest.fixture(scope="module")
def target_of_eagle3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_target(tmp_path_factory.mktemp("of") / "target", hidden_size=64, vocab_size=TINY_VOCAB))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_what_was_written_reads_back_as_the_same_bits(
    name: str, dtype: torch.dtype, target: str, tmp_path: Path
) -> None:
    config, file = CONFIGS[name], tmp_path / "drafter.gguf"
    tensors = {k: v.to(dtype) if v.is_floating_point() else v for k, v in drafter_tensors(config).items()}
    mask = torch.zeros(config["hidden_size"]) if "mask embedding" in name else None
    source = write_drafter(tmp_path / "source", config, tensors, mask)
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            convert_to_gguf(str(source), target, file)
        assert not file.exists()
        return
    convert_to_gguf(str(source), target, file)
    read_back(file, tensors, changed=name in CHANGED)
    problems = validate_pair(str(file), target)
    assert not [each for each in problems if each.fatal]
    # Norms are in F32 in every GGUF file; of a target in bf16 only fp16 loses values.
    assert ("dtype" in {each.what for each in problems}) == (dtype is torch.float16)


@pytest.mark.parametrize("name", EAGLE3)
def test_an_eagle3_drafter_reads_back_as_the_same_bits(
    name: str, target_of_eagle3: str, tmp_path: Path
) -> None:
    config, file = EAGLE3[name], tmp_path / "drafter.gguf"
    source = write_drafter(tmp_path / "source", config)
    if name in REFUSED_EAGLE3:
        with pytest.raises(ConfigError, match=REFUSED_EAGLE3[name]):
            convert_to_gguf(str(source), target_of_eagle3, file)
        assert not file.exists()
        return
    convert_to_gguf(str(source), target_of_eagle3, file)
    read_back(file, drafter_tensors(config))
    assert validate_pair(str(file), target_of_eagle3) == []


@pytest.mark.parametrize("name", CHANGED)
def test_a_form_that_llama_cpp_needs_has_the_same_logits(name: str, target: str, tmp_path: Path) -> None:
    source, lengths = write_drafter(tmp_path / "source", VARIANTS[name]), [3, 40]
    convert_to_gguf(str(source), target, tmp_path / "drafter.gguf")
    embedding, head = torch.randn(2, VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))
    shared, taps = EmbeddingCopies(embedding, Linear(head)), random_taps(lengths)
    found, expected = (
        Requests(load_drafter(folder, FACTS, shared, torch.float32, "cpu"), lengths, taps).block_logits(
            [7, 3]
        )
        for folder in (resolve_checkpoint(str(tmp_path / "drafter.gguf"), field="drafter"), source)
    )
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=3e-5)


def read_back(file: Path, tensors: dict[str, torch.Tensor], *, changed: bool = False) -> None:
    folder = resolve_checkpoint(str(file), field="drafter")
    files = open_folder(folder, open_drafter(str(file)).config.quantization)
    ours = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    ours = {name.replace("encoder.output_norm_enc", "hidden_norm"): each for name, each in ours.items()}
    ours = {name.removeprefix("encoder."): each for name, each in ours.items() if name != "t2d"}
    assert files.shapes.keys() >= ours.keys() if changed else files.shapes.keys() == ours.keys()
    for name, tensor in ours.items():
        if not (
            changed and name.endswith(("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight"))
        ):
            assert torch.equal(files.get(name).to(tensor.dtype), tensor), name


@pytest.mark.parametrize("name", [*ALIKE, "speculators", "speculators normed before fc"])
def test_a_file_has_the_keys_and_bytes_of_llama_cpps_converter(
    name: str, target: str, target_of_eagle3: str, tmp_path: Path
) -> None:
    config = VARIANTS[name] if name in ALIKE else EAGLE3[name]
    source = write_drafter(tmp_path / "source", config)
    publish_drafter(config, tmp_path / "theirs.gguf")
    convert_to_gguf(str(source), target if name in ALIKE else target_of_eagle3, tmp_path / "ours.gguf")
    ours, theirs = GgufFile(tmp_path / "ours.gguf"), GgufFile(tmp_path / "theirs.gguf")
    assert ours.tensors.keys() == theirs.tensors.keys()
    for tensor, info in theirs.tensors.items():
        assert (ours.tensors[tensor].type, ours.tensors[tensor].shape) == (info.type, info.shape), tensor
        assert np.array_equal(ours.blocks(tensor), theirs.blocks(tensor)), tensor
    for key, value in theirs.metadata.items():
        if not key.startswith("tokenizer.ggml.tokens") and not key.endswith("rope.dimension_count"):
            assert same(ours.metadata[key], value), key


def same(one: Any, other: Any) -> bool:  # Any: values of the metadata
    return type(one) is type(other) and bool(np.all(one == other))


def test_the_vocabulary_is_the_targets_with_unused_tokens_to_its_size(target: str, tmp_path: Path) -> None:
    source = write_drafter(tmp_path / "source", z_lab())
    convert_to_gguf(str(source), target, tmp_path / "drafter.gguf")
    found: dict[str, Any] = {  # Any: values of the metadata
        key.removeprefix("tokenizer.ggml."): value
        for key, value in GgufFile(tmp_path / "drafter.gguf").metadata.items()
    }
    tokens, types = found["tokens"], found["token_type"]
    assert tokens[:6] == ["a", "b", "ab", "<end>", "word", "[PAD5]"] and len(tokens) == len(types) == VOCAB
    assert types[:6].tolist() == [1, 1, 1, 3, 4, 5]
    assert (found["model"], found["merges"], found["eos_token_id"]) == ("gpt2", ["a b"], 1)
    assert found["mask_token_id"] == 90


def test_a_target_without_tokens_is_refused(tmp_path: Path) -> None:
    bare = write_target(tmp_path / "target", hidden_size=HIDDEN, vocab_size=VOCAB)
    (bare / "tokenizer.json").unlink()
    source = write_drafter(tmp_path / "source", z_lab())
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        convert_to_gguf(str(source), str(bare), tmp_path / "drafter.gguf")
    with pytest.raises(ConfigError, match=r"new file that ends in \.gguf"):
        convert_to_gguf(str(source), str(bare), tmp_path / "drafter")
    with pytest.raises(CheckpointError, match="target's hidden_size 192"):
        convert_to_gguf(str(source), str(TARGET), tmp_path / "drafter.gguf")


def test_the_shipped_drafter_drafts_from_the_file_with_fewer_candidates(tmp_path: Path) -> None:
    file = tmp_path / "drafter.gguf"
    words = ["drafter", "convert", str(DRAFTER), "--target", str(TARGET), "--to", "gguf", "-o", str(file)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and done.stdout == f"{file}\n"
    assert "13 candidates instead of 16" in done.stderr
    checked = check_drafter(
        resolve_checkpoint(str(file), field="drafter"), TargetFacts(192, 18, 4096, 0, 1.0)
    )
    assert checked.selector is not None and checked.selector.top_k == 13
    summary = summarize_drafter(open_drafter(str(file)))
    assert (summary["format"], summary["licence"]) == ("gguf", "psf-2.0")
    assert summary["tensor_types"] == ("40 BF16", "26 F32")
    assert summarize_drafter(open_drafter(str(DRAFTER)))["licence"] == "psf-2.0"
    done = CliRunner().invoke(app, ["drafter", "validate", str(file), "--target", str(TARGET)])
    assert done.exit_code == 0 and "format gguf; tensors 40 BF16, 26 F32; licence psf-2.0." in done.stdout
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    tokens: list[list[int]] = []
    for drafter in (DRAFTER, file):
        spec = {"model": str(drafter), "adaptive": False}
        small = {"max_num_seqs": 2, "max_model_len": 128, "num_threads": 1, "dtype": "float32"}
        with LLM(str(TARGET), speculative_config=spec, **small) as llm:
            tokens.append(llm.generate("def __init__(self, name", params)[0].outputs[0].token_ids)
            assert llm.stats().num_accepted_tokens > 0
    assert tokens[0] == tokens[1]
