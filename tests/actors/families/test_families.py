"""Families as published: nested configs, other prefixes, omitted keys.

`test_target_decoder.py` (rows and taps against transformers), `test_target_parallel.py` (ranks),
`test_lossless.py` and `test_device_runner.py` (Triton's kernels) test what all families compute.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from manta.actors.targets.families import FAMILIES
from manta.actors.targets.model.attention import TargetAttention
from manta.actors.targets.model.delta_net import DeltaNet
from manta.cluster.errors import CheckpointError
from manta.cluster.pages.recurrent_state_spec import RecurrentStateSpec
from safetensors.torch import load_file, save_file
from support.checkpoints.families import FAMILIES as TINY_FAMILIES
from support.checkpoints.tiny import changed, make_tiny_target
from support.oracles.decoder_requests import weights_of
from support.published.published import CONFIGS, published_spec, spec_of_config


def test_every_supported_family_has_a_row_of_tests() -> None:
    tested = {tiny.model.__name__ for tiny in TINY_FAMILIES.values()}
    # The language models of these are a tested family's (Gemma4Unified: test_gemma4.py, Kimi: test_kimi.py).
    assert set(FAMILIES) - tested == {
        "Gemma3ForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForCausalLM",
        "Gemma4UnifiedForConditionalGeneration",
        "KimiK25ForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    }


NAMES = [name for name, raw in CONFIGS.items() if raw["architectures"][0] in FAMILIES]
OF_ANOTHER_NAME = {"kimi_k2": "deepseek_v3"}
ROUTED = ("num_local_experts", "n_routed_experts", "num_experts")


@pytest.mark.parametrize("name", NAMES)
def test_a_published_config_is_read_as_by_transformers(name: str) -> None:
    """Sizes, windows, rotation and experts of every layer, also where the file leaves them to defaults."""
    spec, theirs = published_spec(name), text_config_of(CONFIGS[name])
    sizes = (theirs.hidden_size, theirs.vocab_size, theirs.num_hidden_layers, theirs.max_position_embeddings)
    assert (spec.hidden_size, spec.vocab_size, spec.num_layers, spec.max_position_embeddings) == sizes
    assert (spec.rms_norm_eps, spec.tied_head) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * spec.num_layers
    for i, (layer, kind) in enumerate(zip(spec.layers, kinds, strict=True)):
        if isinstance(layer.mixer, DeltaNet):
            assert kind == "linear_attention"
            check_states(layer.mixer, theirs)
        else:
            check_attention(layer.mixer, theirs, kind, i)
        if layer.routed is not None:
            num_experts = next(getattr(theirs, key) for key in ROUTED if hasattr(theirs, key))
            top_k = getattr(theirs, "num_experts_per_tok", None) or theirs.top_k_experts
            inner = getattr(theirs, "moe_intermediate_size", None) or theirs.intermediate_size
            router, scale = layer.routed.router, getattr(theirs, "routed_scaling_factor", None) or 1.0
            assert (router.num_experts, router.top_k, layer.routed.inner_size) == (num_experts, top_k, inner)
            assert router.scale == scale


def text_config_of(raw: dict[str, Any]) -> Any:  # Any: the class depends on the family
    """transformers' configuration of the text model, from a copy: it writes into what it is given."""
    keys = deepcopy(raw)
    kind = keys.pop("model_type")
    if "Unified" in keys["architectures"][0]:
        kind = "gemma4_unified"
    return transformers.AutoConfig.for_model(OF_ANOTHER_NAME.get(kind, kind), **keys).get_text_config()


def check_states(mixer: DeltaNet, theirs: Any) -> None:
    kind = mixer.geometry
    heads = (theirs.linear_num_key_heads, theirs.linear_num_value_heads)
    dims = (theirs.linear_key_head_dim, theirs.linear_value_head_dim, theirs.linear_conv_kernel_dim)
    assert kind == RecurrentStateSpec(*heads, *dims)


def check_attention(mixer: TargetAttention, theirs: Any, kind: str, i: int) -> None:
    own = theirs.per_layer_config[i] if getattr(theirs, "per_layer_config", None) else theirs
    if mixer.latent is None:
        kv_heads = own.num_key_value_heads
        if kind == "sliding_attention":
            kv_heads = getattr(theirs, "swa_num_key_value_heads", None) or kv_heads
        head_dim = getattr(own, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        heads = (theirs.num_attention_heads, kv_heads, head_dim)
        assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == heads
    window = getattr(theirs, "sliding_window", None) if kind == "sliding_attention" else None
    assert mixer.window == window
    rope = theirs.rope_parameters.get(kind, theirs.rope_parameters)
    if mixer.rope is not None:
        assert (mixer.rope.kind, mixer.rope.theta) == (rope["rope_type"], rope["rope_theta"])
        assert mixer.rope.scaling.get("factor") == rope.get("factor")
        if rope["rope_type"] == "default" and mixer.latent is None:
            rotated = mixer.rope.rotary_dim or mixer.head_dim
            assert rotated == int(mixer.head_dim * rope.get("partial_rotary_factor", 1.0))


@pytest.mark.parametrize(
    ("body", "head"),
    [("model.language_model.", "lm_head.weight"), ("language_model.model.", "language_model.lm_head.weight")],
)
@pytest.mark.parametrize("family", ["gemma3", "qwen3", "qwen3_5"])
def test_the_text_model_of_a_multimodal_checkpoint_is_found(
    tmp_path: Path, family: str, body: str, head: str
) -> None:
    plain = make_tiny_target(tmp_path / "plain", family, tie_word_embeddings=False)
    nested = tmp_path / "nested"
    nested.mkdir()
    keys = json.loads((plain / "config.json").read_text())
    outer = {"architectures": keys.pop("architectures"), "dtype": keys.pop("dtype"), "text_config": keys}
    (nested / "config.json").write_text(json.dumps({**outer, "vision_config": {"hidden_size": 8}}))
    tensors = load_file(plain / "model.safetensors")
    renamed = {n.replace("model.", body) if n.startswith("model.") else head: t for n, t in tensors.items()}
    renamed["vision_tower.embed.weight"] = torch.zeros(2)
    save_file(renamed, nested / "model.safetensors")

    weights = [weights_of(folder) for folder in (plain, nested)]
    assert torch.equal(weights[0].embedding(), weights[1].embedding())
    assert torch.equal(weights[0].head(), weights[1].head())
    assert torch.equal(weights[0].layer(2).qkv_OH, weights[1].layer(2).qkv_OH)
    assert torch.equal(weights[0].final_norm(), weights[1].final_norm())


# Tensors of which decisions, states and sums depend on more bits than those of 16.
IN_FP32 = {"router_correction", "expert_scale", "sinks", "delta_conv", "delta_rate", "delta_dt_bias"}


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_tensors_stored_in_fp32_get_the_computing_dtype(
    family: str, tiny_target: Callable[[str], Path]
) -> None:
    """Except for those that are kept in fp32 by name, and norms of families that keep them."""
    folder = tiny_target(family)
    weights = weights_of(folder, torch.bfloat16)
    spec = weights.spec
    for i, layer in enumerate(spec.layers):
        in_fp32 = IN_FP32
        if layer.routed is not None and layer.routed.router.score == "sigmoid":
            in_fp32 = in_fp32 | {"router"}
        for part in weights.spec.layer_parts(i):
            if weights.spec.tensors[part].constant is None:
                stays = part in in_fp32 or (part.endswith("norm") and spec.fp32_norms)
                expected = torch.float32 if stays else torch.bfloat16
                assert weights.part(part, i).dtype is expected, f"{part} of layer {i}"


def test_a_bias_missing_from_config_json_is_an_error(tmp_path: Path) -> None:
    biased = make_tiny_target(tmp_path / "biased", "llama", attention_bias=True)
    silent = changed(biased, tmp_path / "silent", attention_bias=None)
    with pytest.raises(CheckpointError, match=r"k_proj\.bias, but config.json declares none"):
        weights_of(silent)


def test_a_published_glm_4_5_has_a_shared_expert_after_three_dense_layers(tmp_path: Path) -> None:
    spec = published_spec("GLM-4.5")
    assert [layer.routed is None for layer in spec.layers] == [True] * 3 + [False] * 89
    mixer, routed = spec.layers[3].mixer, spec.layers[3].routed
    assert routed is not None and routed.shared is not None and routed.shared.inner_size == 1536
    silent = {key: value for key, value in CONFIGS["GLM-4.5"].items() if key != "partial_rotary_factor"}
    assert spec_of_config(silent, tmp_path).layers[0].mixer.rope == mixer.rope


def test_a_short_muse_glimmer_config_gets_its_pattern_from_the_last_layer(tmp_path: Path) -> None:
    from transformers import MuseGlimmerTextConfig

    text = {"num_hidden_layers": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    theirs = MuseGlimmerTextConfig(**text)
    shape = {"hidden_size": 6656, "intermediate_size": 19968, "num_attention_heads": 32}
    shape |= {"num_key_value_heads": 2, "head_dim": 128, "vocab_size": 202048}
    outer = {"architectures": ["MuseGlimmerForConditionalGeneration"], "dtype": "bfloat16"}
    text |= {"max_position_embeddings": 131072}
    spec = spec_of_config({**outer, "text_config": {**text, **shape}}, tmp_path)
    for layer, kind, theta in zip(spec.layers, theirs.layer_types, theirs.layer_rope_theta, strict=True):
        assert layer.mixer.window == (None if kind == "full_attention" else theirs.sliding_window)
        assert (layer.mixer.rope is None) == (theta == 0)
    assert (spec.logit_multiplier, spec.logit_cap) == (theirs.output_multiplier, 20.0)
    assert (spec.out_norm_eps, spec.rms_norm_eps) == (theirs.post_norm_eps, theirs.rms_norm_eps)
    assert spec.tensors["q_norm"].constant == theirs.qk_scale_factor


def test_a_short_mimo_v2_config_is_read_as_by_transformers(tmp_path: Path) -> None:
    from transformers import MiMoV2FlashConfig

    theirs = MiMoV2FlashConfig(num_hidden_layers=13)
    names = ("hidden_size", "intermediate_size", "moe_intermediate_size", "n_routed_experts", "vocab_size")
    names += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "num_hidden_layers")
    said = {name: getattr(theirs, name) for name in names}
    spec = spec_of_config({"architectures": ["MiMoV2FlashForCausalLM"], **said}, tmp_path)
    assert spec.rms_norm_eps == theirs.rms_norm_eps
    kinds = zip(spec.layers, theirs.layer_types, theirs.mlp_layer_types, strict=True)
    for layer, kind, mlp in kinds:
        mixer, rope = layer.mixer, theirs.rope_parameters[kind]
        assert mixer.window == (theirs.sliding_window if kind == "sliding_attention" else None)
        assert (layer.routed is not None) == (mlp == "sparse")
        assert (mixer.head_dim, mixer.value_dim) == (theirs.head_dim, theirs.v_head_dim)
        assert mixer.num_kv_heads == (8 if kind == "sliding_attention" else 4)
        assert mixer.rope is not None and mixer.rope.theta == rope["rope_theta"]
        assert mixer.rope.rotary_dim == int(theirs.head_dim * rope["partial_rotary_factor"])
    for scale, expected in ((None, 1.0), (0.5, 0.5), (..., theirs.attention_value_scale)):
        more = {} if scale is ... else {"attention_value_scale": scale}
        transform = (
            spec_of_config({"architectures": ["MiMoV2FlashForCausalLM"], **said, **more}, tmp_path)
            .tensors["v"]
            .transform
        )
        assert transform is not None and transform(torch.ones(1)).item() == pytest.approx(expected)
