"""Gemma 4 as published and as transformers saves it: keys, names, two forms of experts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from manta.actors.targets.families import read_model
from manta.actors.targets.model.mlp_spec import ParallelMlpSpec
from manta.actors.targets.model.mlp_weights import MlpTensors, ParallelMlpTensors
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny import changed, make_tiny_target
from support.oracles.decoder_requests import computed, load, oracle, weights_of
from support.published.published import CONFIGS, published_spec, spec_of_config


def test_the_mixture_is_a_dense_mlp_next_to_its_experts() -> None:
    mlp = published_spec("gemma-4-26B-A4B-it").layers[7].mlp
    assert isinstance(mlp, ParallelMlpSpec)
    assert (mlp.dense.inner_size, mlp.routed.inner_size) == (2112, 704)
    router = mlp.routed.router
    assert (router.num_experts, router.top_k, router.score) == (128, 8, "softmax")
    assert router.renormalize and router.normed_input and router.expert_scale


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gemma-4-31B-it", transformers.Gemma4TextConfig),
        ("gemma-4-12B-it", transformers.Gemma4UnifiedTextConfig),
    ],
)
def test_omitted_keys_have_transformers_defaults(tmp_path: Path, name: str, config: type) -> None:
    said = ("hidden_size", "intermediate_size", "num_hidden_layers", "hidden_size_per_layer_input")
    text = {key: value for key, value in CONFIGS[name]["text_config"].items() if key in said}
    spec = spec_of_config({**CONFIGS[name], "text_config": text}, tmp_path)
    theirs = config(**text)
    assert spec.max_position_embeddings == theirs.max_position_embeddings
    assert (spec.vocab_size, spec.logit_cap, spec.tied_head) == (theirs.vocab_size, None, True)
    for i, (layer, kind) in enumerate(zip(spec.layers, theirs.layer_types, strict=True)):
        mixer, own, rope = layer.mixer, theirs.per_layer_config[i], theirs.rope_parameters[kind]
        heads = (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim)
        assert heads == (theirs.num_attention_heads, own.num_key_value_heads, own.head_dim)
        assert mixer.window == (theirs.sliding_window if kind == "sliding_attention" else None)
        assert mixer.rope is not None and not mixer.k_is_v
        assert (mixer.rope.kind, mixer.rope.theta) == (rope["rope_type"], rope["rope_theta"])


@pytest.fixture(scope="module")
def saved(tiny_target: Callable[[str], Path]) -> Path:
    """Save as transformers does: `per_layer_config`, experts in one tensor."""
    return tiny_target("gemma4")


HUB_KEYS = {"per_layer_config": None, "global_head_dim": 32, "num_global_key_value_heads": 1}


def test_saved_and_published_keys_mean_the_same(saved: Path, tmp_path: Path) -> None:
    hub = changed(saved, tmp_path / "hub", **HUB_KEYS)
    assert read_model(hub) == read_model(saved)


def test_gemma4_12b_computes_as_its_own_class(tmp_path: Path) -> None:
    dense = make_tiny_target(tmp_path / "dense", "gemma4", enable_moe_block=False, num_experts=None)
    unified = {"architectures": ["Gemma4UnifiedForCausalLM"], "model_type": "gemma4_unified_text"}
    folder = changed(dense, tmp_path / "12B", **unified, hidden_size_per_layer_input=None)
    requests = computed(load(folder))
    for tokens, logits in zip(requests.tokens, requests.logits, strict=True):
        expected, _ = oracle(folder, tokens)
        torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=1e-4)


def test_the_last_layer_has_full_attention_as_in_transformers(saved: Path, tmp_path: Path) -> None:
    odd = changed(saved, tmp_path / "odd", layer_types=["sliding_attention"] * 4, **HUB_KEYS)
    assert [layer.mixer.window for layer in read_model(odd).layers] == [9, 9, 9, None]


@pytest.mark.parametrize("rank", [0, 1])
def test_experts_in_separate_tensors_equal_those_in_one_tensor(
    saved: Path, tmp_path: Path, rank: int
) -> None:
    shutil.copytree(saved, tmp_path / "split")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(saved / "model.safetensors").items():
        at, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for e, rows in enumerate(tensor):
                gate, up = rows.chunk(2)
                tensors[f"{at}.{e}.gate_proj.weight"] = gate.contiguous()
                tensors[f"{at}.{e}.up_proj.weight"] = up.contiguous()
        elif kind == "down_proj":
            tensors |= {f"{at}.{e}.down_proj.weight": rows.clone() for e, rows in enumerate(tensor)}
        else:
            tensors[name] = tensor
    save_file(tensors, tmp_path / "split" / "model.safetensors")
    folders = (saved, tmp_path / "split")
    fused, split = (
        parallel_mlp(weights_of(folder, rank=rank, ranks=2).layer(1).mlp).routed.experts for folder in folders
    )
    assert torch.equal(fused.gate_up, split.gate_up) and torch.equal(fused.down, split.down)


def test_norms_and_scales_are_read_in_their_compute_dtype(saved: Path) -> None:
    """Norms multiply before they round, in fp32; the router's includes 1 / sqrt(H)."""
    stored = load_file(saved / "model.safetensors")
    layer, at = weights_of(saved, dtype=torch.bfloat16).layer(1), "model.layers.1."
    mlp = parallel_mlp(layer.mlp)
    router = mlp.routed.router
    assert router.norm is not None and router.expert_scale_E is not None
    assert torch.equal(layer.attention_norm_H, stored[at + "input_layernorm.weight"])
    assert torch.equal(mlp.routed_norm_H, stored[at + "pre_feedforward_layernorm_2.weight"])
    assert torch.equal(router.norm.weight_H, stored[at + "router.scale"] * 72**-0.5)
    assert torch.equal(router.expert_scale_E, stored[at + "router.per_expert_scale"])
    assert layer.scalar_1 == stored[at + "layer_scalar"].bfloat16()
    _, k, v = layer.qkv_OH.split((128, 32, 32))
    assert torch.equal(k, v) and torch.equal(k, stored[at + "self_attn.k_proj.weight"].bfloat16())


def parallel_mlp(mlp: MlpTensors) -> ParallelMlpTensors:
    assert isinstance(mlp, ParallelMlpTensors)
    return mlp
