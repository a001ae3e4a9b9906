"""Gemma 4 as published and as transformers saves it: keys, names, two forms of experts, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from manta.actors.targets.families import read_model
from manta.actors.targets.model.mlp_spec import ParallelMlpSpec
from manta.actors.targets.model.mlp_weights import MlpTensors, ParallelMlpTensors
from manta.actors.targets.model.model_spec import ModelSpec
from manta.actors.targets.model.tensor_parallel import Sharding
from manta.actors.targets.model.weights import TargetWeights, target_shapes
from manta.cluster.errors import CheckpointError
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny import make_tiny_target
from support.oracles.decoder_requests import computed, load, oracle

CPU = torch.device("cpu")
FULL_EVERY_6TH = (["sliding_attention"] * 5 + ["full_attention"]) * 10
ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
# The text parts of google/gemma-4-31B-it, -26B-A4B-it and -12B-it.
COMMON = {
    "attention_bias": False,
    "attention_k_eq_v": True,
    "dtype": "bfloat16",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 262144,
    "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": ROPES,
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
    "vocab_size": 262144,
}
DENSE_31B = COMMON | {
    "enable_moe_block": False,
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504,
    "layer_types": FULL_EVERY_6TH,
    "num_attention_heads": 32,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
}
MIXTURE_26B = COMMON | {
    "enable_moe_block": True,
    "hidden_size": 2816,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 2112,
    "layer_types": FULL_EVERY_6TH[:30],
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "top_k_experts": 8,
}
UNIFIED_12B = COMMON | {
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "layer_types": FULL_EVERY_6TH[:48],
    "num_attention_heads": 16,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
}
PUBLISHED = {
    "Gemma4ForConditionalGeneration": DENSE_31B,
    "Gemma4UnifiedForConditionalGeneration": UNIFIED_12B,
}


def published(folder: Path, text: dict, architecture: str = "Gemma4ForConditionalGeneration") -> ModelSpec:
    folder.mkdir(exist_ok=True)
    config = {"architectures": [architecture], "dtype": "bfloat16", "text_config": text, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 106, 50]}))
    return read_model(folder)


@pytest.mark.parametrize(
    ("text", "architecture", "kv", "parameters"),
    [
        (DENSE_31B, "Gemma4ForConditionalGeneration", ((16, 256), (4, 512)), 30.7e9),
        (MIXTURE_26B, "Gemma4ForConditionalGeneration", ((8, 256), (2, 512)), 25.2e9),
        (UNIFIED_12B, "Gemma4UnifiedForConditionalGeneration", ((8, 256), (1, 512)), 11.9e9),
    ],
    ids=["31B", "26B-A4B", "12B"],
)
def test_a_published_gemma4_config_is_read(
    tmp_path: Path, text: dict, architecture: str, kv: tuple, parameters: float
) -> None:
    spec = published(tmp_path, text, architecture)
    assert (spec.eos_token_ids, spec.logit_cap, spec.tied_head) == ((1, 106, 50), 30.0, True)
    assert spec.embed_scale == text["hidden_size"] ** 0.5 and spec.dtype == "bfloat16"
    for layer, kind in zip(spec.layers, text["layer_types"], strict=True):
        mixer, is_full = layer.mixer, kind == "full_attention"
        assert (mixer.num_kv_heads, mixer.head_dim) == kv[is_full]
        assert (mixer.window, mixer.k_is_v) == ((None, True) if is_full else (1024, False))
        assert mixer.rope is not None and mixer.rope.kind == ROPES[kind]["rope_type"]
        assert mixer.rope.theta == ROPES[kind]["rope_theta"] and mixer.scale == 1.0
        assert (layer.sandwich, layer.scalar, mixer.qk_norm, mixer.v_norm) == (True,) * 4
    sizes = [torch.Size(shape).numel() for shape in target_shapes(spec).values()]
    assert abs(sum(sizes) / parameters - 1) < 0.01


def test_the_mixture_is_a_dense_mlp_next_to_its_experts(tmp_path: Path) -> None:
    mlp = published(tmp_path, MIXTURE_26B).layers[7].mlp
    assert isinstance(mlp, ParallelMlpSpec)
    assert (mlp.dense.inner_size, mlp.routed.inner_size) == (2112, 704)
    router = mlp.routed.router
    assert (router.num_experts, router.top_k, router.score) == (128, 8, "softmax")
    assert router.renormalize and router.normed_input and router.expert_scale


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_omitted_keys_have_transformers_defaults(tmp_path: Path, architecture: str) -> None:
    import transformers

    said = ("hidden_size", "intermediate_size", "num_hidden_layers", "hidden_size_per_layer_input")
    text = {key: value for key, value in PUBLISHED[architecture].items() if key in said}
    spec = published(tmp_path, text, architecture)
    config = {
        "Gemma4ForConditionalGeneration": transformers.Gemma4TextConfig,
        "Gemma4UnifiedForConditionalGeneration": transformers.Gemma4UnifiedTextConfig,
    }[architecture]
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
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save as transformers does: `per_layer_config`, experts in one tensor."""
    return make_tiny_target(tmp_path_factory.mktemp("gemma4"), "gemma4")


def rewritten(folder: Path, copy: Path, **changes: object) -> Path:
    """Return a copy of the folder with changed values in its config.json; None removes a key."""
    shutil.copytree(folder, copy)
    keys = json.loads((copy / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps({k: v for k, v in keys.items() if v is not None}))
    return copy


HUB_KEYS = {"per_layer_config": None, "global_head_dim": 32, "num_global_key_value_heads": 1}


def test_saved_and_published_keys_mean_the_same(saved: Path, tmp_path: Path) -> None:
    hub = rewritten(saved, tmp_path / "hub", **HUB_KEYS)
    assert read_model(hub) == read_model(saved)


def test_gemma4_12b_computes_as_its_own_class(tmp_path: Path) -> None:
    dense = make_tiny_target(tmp_path / "dense", "gemma4", enable_moe_block=False, num_experts=None)
    unified = {"architectures": ["Gemma4UnifiedForCausalLM"], "model_type": "gemma4_unified_text"}
    folder = rewritten(dense, tmp_path / "12B", **unified, hidden_size_per_layer_input=None)
    requests = computed(load(folder))
    for tokens, logits in zip(requests.tokens, requests.logits, strict=True):
        expected, _ = oracle(folder, tokens)
        torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=1e-4)


def test_the_last_layer_has_full_attention_as_in_transformers(saved: Path, tmp_path: Path) -> None:
    odd = rewritten(saved, tmp_path / "odd", layer_types=["sliding_attention"] * 4, **HUB_KEYS)
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
    fused, split = (parallel_mlp(weights_of(folder, rank).layer(1).mlp).routed.experts for folder in folders)
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


def weights_of(folder: Path, rank: int | None = None, dtype: torch.dtype = torch.float32) -> TargetWeights:
    spec = read_model(folder)
    sharding = Sharding(spec, 0, 1) if rank is None else Sharding(spec, rank, 2)
    return TargetWeights(folder, spec, sharding, dtype, CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input=256 must be 0: per-layer embed"),
        ({"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input is missing; it must be 0"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers=2 must be 0: layers that share K and V"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' must be absent or"),
        ({"hidden_activation": "silu"}, "hidden_activation='silu' must be 'gelu_pytorch_tanh'"),
        ({"top_k_experts": None}, "top_k_experts is missing; it must be a positive integer"),
        ({"top_k_experts": 9}, r"top_k_experts=9 must be at most num_experts \(8\)"),
        (HUB_KEYS | {"num_global_key_value_heads": 3}, "num_global_key_value_heads=3 must be a divisor"),
        (HUB_KEYS | {"global_head_dim": 31}, "global_head_dim=31 must be even"),
        ({"per_layer_config": {"1": {"sliding_window": 4}}}, "per_layer_config.1.sliding_window=4 must be"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.sliding_attention is missing"),
    ],
)
def test_unsupported_features_are_refused_by_name(
    saved: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    folder = rewritten(saved, tmp_path / "changed", **changes)
    with pytest.raises(CheckpointError, match=message):
        read_model(folder)
