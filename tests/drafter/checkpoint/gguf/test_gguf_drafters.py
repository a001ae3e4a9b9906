"""Drafters in GGUF files as llama.cpp's converter writes them are those that were converted."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from manta import LLM, SamplingParams
from manta.cluster.errors import CheckpointError
from manta.drafter.compute.checkpoint.gguf.gguf_file import GgufFile
from manta.drafter.compute.checkpoint.gguf.gguf_folder import GgufFolder
from manta.drafter.compute.checkpoint.hf_config import read_json
from manta.drafter.compute.layers.linear import Linear
from manta.drafter.dflash.checkpoint import check_drafter, load_drafter
from manta.drafter.dflash.target_features import EmbeddingCopies, TargetFacts
from manta.drafter.drafter_spec import DrafterShape
from manta.drafter.eagle3.checkpoint import check_eagle3
from manta.drafter.eagle3.config import Eagle3Config
from safetensors.torch import load_file, save_file
from support.checkpoints.broken_pairs import DRAFTER, TARGET
from support.checkpoints.drafters import (
    EAGLE3,
    HIDDEN,
    TARGET_LAYERS,
    VARIANTS,
    VOCAB,
    drafter_tensors,
    write_drafter,
    z_lab,
)
from support.checkpoints.families import TINY_VOCAB
from support.checkpoints.gguf_checkpoints import publish_gguf
from support.checkpoints.gguf_drafters import publish_drafter
from support.checkpoints.tiny import changed
from support.oracles.drafter_requests import Requests, random_taps

FACTS = TargetFacts(HIDDEN, TARGET_LAYERS, VOCAB, 128, 1.0)
FACTS_EAGLE3 = TargetFacts(64, 6, TINY_VOCAB, 512, 1.0)
DFLASH = (
    "z-lab full attention",
    "z-lab causal everywhere",
    "z-lab sliding layers are causal",
    "z-lab sliding but bidirectional",
    "z-lab scales and cap",
    "z-lab partly rotated",
    "z-lab ungrouped heads",
    "z-lab own vocabulary",
    "z-lab second",
    "z-lab second, three taps",
    "specforge dspark",
    "speculators dspark",
    "speculators dspark, masks alone",
)
OF_EAGLE3 = (
    "sglang whole vocabulary, lent head",
    "sglang vLLM's ids",
    "speculators",
    "speculators normed before fc",
    "speculators narrower",
)
# What a file does not say, or says otherwise.
APART = {"file", "layout", "num_target_layers", "target_hidden_size", "quantization"}


def meaning(config: DrafterShape) -> dict[str, object]:
    found = {each.name: getattr(config, each.name) for each in fields(config)}
    return {name: value for name, value in found.items() if name not in APART}


@pytest.mark.parametrize("name", DFLASH)
def test_a_dflash_drafter_is_the_one_that_was_converted(name: str, tmp_path: Path) -> None:
    config = VARIANTS[name]
    source = write_drafter(tmp_path / "source", config)
    shown = publish_drafter(config, tmp_path / "drafter.gguf")
    found, expected = check_drafter(shown, FACTS), check_drafter(source, FACTS)
    if found.input_embedding_scale is None:  # the target's, which Speculators' format names
        found = replace(found, input_embedding_scale=expected.input_embedding_scale)
    assert meaning(found) == meaning(expected)
    same_tensors(tmp_path / "drafter.gguf", config)


@pytest.mark.parametrize("name", OF_EAGLE3)
def test_an_eagle3_drafter_is_the_one_that_was_converted(name: str, tmp_path: Path) -> None:
    config = EAGLE3[name]
    source = write_drafter(tmp_path / "source", config)
    shown = publish_drafter(config, tmp_path / "drafter.gguf")
    assert meaning(check_eagle3(shown, FACTS_EAGLE3)) == meaning(check_eagle3(source, FACTS_EAGLE3))
    assert Eagle3Config.load(shown, None).target_hidden_size == 64
    same_tensors(tmp_path / "drafter.gguf", config)


def same_tensors(file: Path, config: dict[str, object]) -> None:
    found, expected = GgufFolder(file.parent, GgufFile(file)), drafter_tensors(config)
    expected = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in expected.items()}
    assert found.shapes.keys() == expected.keys() - {"t2d"}
    for name in found.shapes:
        assert torch.equal(found.get(name), expected[name]), name


def test_packed_matrices_and_tables_have_their_values(tmp_path: Path) -> None:
    wide = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    second = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 32, "selector_top_k": 5}
    config = z_lab(architectures=["DFlash2DraftModel"], is_causal=False, **wide, dflash=second)
    shown = publish_drafter(config, tmp_path / "drafter.gguf", type="Q8_0")
    checked = check_drafter(shown, TargetFacts(64, TARGET_LAYERS, VOCAB, 512, 1.0))
    assert str(checked.quantization) == "gguf: Q8_0"
    folder = GgufFolder(shown, GgufFile(tmp_path / "drafter.gguf"))
    for name, tensor in drafter_tensors(config).items():
        if "codebook" in name:
            assert folder.dtypes[name] == "F32" and folder.get(name).shape == tensor.shape
            torch.testing.assert_close(folder.get(name), tensor, rtol=0, atol=0.05)


def test_an_embedding_without_a_head_is_the_head_as_in_llama_cpp(tmp_path: Path) -> None:
    config = z_lab()
    tensors = drafter_tensors(config) | {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN)}
    shown = publish_drafter(config, tmp_path / "drafter.gguf", tensors=tensors)
    folder = GgufFolder(shown, GgufFile(tmp_path / "drafter.gguf"))
    assert torch.equal(folder.get("lm_head.weight"), tensors["embed_tokens.weight"])


REFUSED = {
    "no mask token": ({"tokenizer.ggml.mask_token_id": None}, "mask_token_id"),
    "a mask token beyond the vocabulary": ({"tokenizer.ggml.mask_token_id": 96}, "mask_token_id=96"),
    "a tap beyond the target": ({"dflash.target_layers": [2, 4, 7]}, r"target_layer_ids=\[1, 3, 6\]"),
    "no taps": ({"dflash.target_layers": None}, "dflash.target_layers"),
    "no list of taps": ({"dflash.target_layers": 3}, "dflash.target_layers"),
    "no block size": ({"dflash.block_size": None}, "dflash.block_size"),
    "windows of no layers": ({"dflash.attention.sliding_window": 9}, "sliding_window_pattern"),
    "values of another size": ({"dflash.attention.value_length": 16}, "attention.value_length"),
    "blocks of Gemma 4": ({"dflash.hidden_activation": "gelu_pytorch_tanh"}, "hidden_activation"),
    "blocks of DeepSeek-V4": ({"dflash.hyper_connection.count": 4}, "hyper_connection.count"),
    "a scale of scores": ({"dflash.attention.scale": 1.0}, "attention.scale"),
    "a vocabulary that is not the target's": ({"tokenizer.ggml.tokens": ["a"] * 95}, "vocab_size=95"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_broken_drafter_is_refused_in_one_sentence(what: str, tmp_path: Path) -> None:
    changes, said = REFUSED[what]
    with pytest.raises(CheckpointError, match=said) as raised:
        check_drafter(publish_drafter(z_lab(), tmp_path / "drafter.gguf", changes=changes), FACTS)
    assert "\n" not in str(raised.value)


def test_an_unknown_head_is_refused_by_name(tmp_path: Path) -> None:
    shown = publish_drafter(z_lab(), tmp_path / "drafter.gguf", further={"gru.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match=r"gru\.weight is no tensor of dflash"):
        check_drafter(shown, FACTS)


def test_a_map_of_the_vocabulary_in_floats_is_refused(tmp_path: Path) -> None:
    config = z_lab()
    shown = publish_drafter(config, tmp_path / "drafter.gguf", further={"d2t": torch.zeros(40)})
    with pytest.raises(CheckpointError, match="d2t='F32' must be stored as integers"):
        check_drafter(shown, FACTS)


@pytest.mark.parametrize("name", DFLASH)
def test_the_logits_of_blocks_are_those_of_the_converted_drafter(name: str, tmp_path: Path) -> None:
    config, lengths = VARIANTS[name], [1, 40, 5]
    embedding, head = torch.randn(2, VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))
    shared, taps = EmbeddingCopies(embedding, Linear(head)), random_taps(lengths)
    found, expected = (
        Requests(load_drafter(folder, FACTS, shared, torch.float32, "cpu"), lengths, taps).block_logits(
            [7, 3, 7]
        )
        for folder in (
            publish_drafter(config, tmp_path / "drafter.gguf"),
            write_drafter(tmp_path / "source", config),
        )
    )
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("of_target", ["gguf", "safetensors"])
def test_the_shipped_drafter_drafts_as_it_does_from_safetensors(of_target: str, tmp_path: Path) -> None:
    file = tmp_path / "drafter.gguf"
    publish_drafter(
        dict(read_json(DRAFTER, param="drafter")), file, tensors=load_file(DRAFTER / "model.safetensors")
    )
    target = TARGET
    if of_target == "gguf":
        plain = changed(TARGET, tmp_path / "plain", eos_token_id=0)
        tensors = {name: each.float() for name, each in load_file(TARGET / "model.safetensors").items()}
        save_file(tensors, plain / "model.safetensors")
        publish_gguf(plain, tmp_path / "target", "qwen3", ["F32"])
        target = tmp_path / "target" / "model.gguf"
    params = [SamplingParams(temperature=heat, seed=3, max_tokens=24, ignore_eos=True) for heat in (0.0, 1.0)]
    prompts = [{"prompt_token_ids": list(range(40, 90))}, {"prompt_token_ids": list(range(300, 310))}]
    outcomes: list[list[object]] = []
    for model, drafter in ((TARGET, DRAFTER), (target, file)):
        small = {"max_num_seqs": 4, "max_model_len": 128, "num_threads": 1, "dtype": "float32"}
        spec = {"model": str(drafter), "adaptive": False}
        with LLM(str(model), speculative_config=spec, skip_tokenizer_init=True, **small) as llm:
            outputs = llm.generate(prompts, params, trace=True)
            assert llm.stats().num_accepted_tokens > 0
        outcomes.append([(output.outputs[0].token_ids, output.metrics.trace) for output in outputs])
    assert outcomes[0] == outcomes[1]
