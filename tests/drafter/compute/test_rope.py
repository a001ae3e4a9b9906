"""Rotary positions: frequencies, tables and scores against transformers, in all spellings."""

from __future__ import annotations

import copy

import pytest
import torch
from manta.cluster.errors import CheckpointError
from manta.drafter.compute.layers.rope import RopeConfig, RotaryEmbedding
from support.checkpoints.rope_configs import GPT_OSS, KIMI, LLAMA3
from transformers import Gemma3TextConfig, Gemma4TextConfig, LlamaConfig, MiniMaxM2Config, Qwen3_5TextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.minimax_m2 import modeling_minimax_m2 as minimax
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256}
ROPES: dict[str, dict] = {
    "default": {"rope_theta": 10000.0},
    "parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "llama3": {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "proportional": {
        "rope_parameters": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    },
    "yarn": {"rope_parameters": YARN},
    "yarn of gpt-oss": {"rope_theta": 150000, "rope_scaling": GPT_OSS, "max_position_embeddings": 131072},
    "yarn of Kimi": {"rope_theta": 50000.0, "rope_scaling": KIMI, "max_position_embeddings": 262144},
    "yarn with unequal mscales": {"rope_theta": 50000.0, "rope_scaling": {**KIMI, "mscale_all_dim": 0.7}},
    "yarn without the second mscale": {"rope_theta": 50000.0, "rope_scaling": {**KIMI, "mscale_all_dim": 0}},
    "yarn with a stated factor of attention": {"rope_parameters": {**YARN, "attention_factor": 1.3}},
    "yarn of a factor below one": {"rope_parameters": {**YARN, "factor": 0.5}},
    "yarn whose length is the model's": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    "yarn without a factor": {"rope_parameters": {**YARN, "factor": None}},
    "yarn with a length beside it": {"rope_parameters": YARN, "original_max_position_embeddings": 512},
    "yarn of part of a head": {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
    "yarn in the old key beside default in the new": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        "rope_theta": 5e5,
    },
    "yarn in the old key, whose theta is the model's": {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    },
    "an empty old key": {"rope_parameters": YARN, "rope_scaling": {}},
    "linear of part of a head": {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5},
    },
}
LENGTH = {"max_position_embeddings": 1024}


def rope_of(config: dict, head_dim: int = 64, **options) -> RopeConfig:
    return RopeConfig.read(config, head_dim, "config.json", **options)


def llama_of(config: dict) -> LlamaConfig:
    return LlamaConfig(**{"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, **LENGTH, **config})


@pytest.mark.parametrize("kind", sorted(ROPES))
def test_frequencies_scale_and_rotations_equal_transformers(kind: str):
    config = ROPES[kind]
    theirs = llama_of(config)
    of_type = ROPE_INIT_FUNCTIONS.get(theirs.rope_parameters["rope_type"])
    found = of_type(theirs) if of_type else LlamaRotaryEmbedding.compute_default_rope_parameters(theirs)
    frequency, scale = found
    ours = rope_of({**LENGTH, **config})
    assert torch.allclose(ours.frequencies()[: len(frequency)], frequency, rtol=1e-6, atol=0)
    assert not ours.frequencies()[len(frequency) :].any()
    assert ours.attention_scale == pytest.approx(scale, rel=1e-12)
    assert ours.scaling["max_position_embeddings"] == {**LENGTH, **config}["max_position_embeddings"]
    if "part of a head" in kind:  # whose rotations PARTIAL has
        return
    positions, x = torch.tensor([0, 1, 5, 300, 999]), torch.randn(5, 4, 64)
    cos, sin = LlamaRotaryEmbedding(theirs)(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    assert ours.permutation() is None
    assert ours.arranged(x) is x
    rotation = RotaryEmbedding(ours, 1024, torch.float32, "cpu").at(positions)
    assert torch.allclose(rotation.rotate(x), expected[0].transpose(0, 1), atol=3e-5)
    buffer = x.clone()
    rotation.rotate(x, out_NJD=buffer)
    assert torch.equal(buffer, rotation.rotate(x))


def test_the_legacy_rope_key_changes_full_layers_of_gemma_as_in_transformers():
    parameters = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = {"rope_parameters": parameters, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    theirs = Gemma3TextConfig(**copy.deepcopy(config)).rope_parameters
    for kind in parameters:
        ours = rope_of({**LENGTH, **config}, layer_type=kind)
        assert (ours.kind, ours.theta) == (theirs[kind]["rope_type"], theirs[kind]["rope_theta"])
        assert ours.scaling.get("factor") == theirs[kind].get("factor")


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("beside", [{}, {"rope_parameters": YARN}, {"rope_scaling": YARN}])
def test_an_unknown_rope_type_is_refused_everywhere(key: str, beside: dict):
    config = {**LENGTH, **beside, key: {"rope_type": "nonsense", "factor": 2.0}}
    with pytest.raises(CheckpointError, match=rf"{key}\.rope_type='nonsense' must be one of default"):
        rope_of(config)
    nested = {**LENGTH, **beside, key: {"full_attention": {"rope_type": "nonsense"}}}
    with pytest.raises(CheckpointError, match=rf"{key}\.full_attention\.rope_type='nonsense'"):
        rope_of(nested, layer_type="full_attention")


# Theirs, its configuration, and the same as Hub checkpoints spell it.
MINIMAX = {"head_dim": 16, "num_attention_heads": 4, "rotary_dim": 8, "rope_theta": 5000000}
QWEN = {"head_dim": 32, "num_attention_heads": 4}
QWEN_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000000,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [2, 1, 1],
}
PARTIAL = {
    "rotary_dim": (minimax, minimax.MiniMaxM2RotaryEmbedding(MiniMaxM2Config(**MINIMAX)), MINIMAX),
    "factor in rope_parameters": (
        qwen3_5,
        qwen3_5.Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(**QWEN, rope_parameters=QWEN_ROPE)),
        {**QWEN, "rope_parameters": QWEN_ROPE},
    ),
    "yarn of a part": (
        minimax,
        minimax.MiniMaxM2RotaryEmbedding(
            MiniMaxM2Config(head_dim=16, rope_parameters={**YARN, "partial_rotary_factor": 0.75})
        ),
        {"head_dim": 16, "partial_rotary_factor": 0.75, "rope_scaling": YARN},
    ),
}


@pytest.mark.parametrize("case", sorted(PARTIAL))
def test_scores_of_partly_rotated_heads_equal_transformers(case: str):
    module, embedding, config = PARTIAL[case]
    dim = config["head_dim"]
    rope = rope_of({**LENGTH, **config}, dim)
    positions = torch.tensor([0, 3, 200, 777])
    inputs, weight_OH, bias_O, norm_D = (torch.randn(s) for s in ((4, 24), (2 * dim, 24), (2 * dim,), (dim,)))

    def heads(arrange) -> torch.Tensor:
        rows = inputs @ arrange(weight_OH).T + arrange(bias_O)
        return rows.unflatten(-1, (2, dim)) * arrange(norm_D)

    plain = heads(lambda rows: rows).transpose(0, 1)[None]
    cos, sin = embedding(plain, positions[None])
    expected, _ = module.apply_rotary_pos_emb(plain, plain, cos, sin)
    rotation = RotaryEmbedding(rope, 1024, torch.float32, "cpu").at(positions)
    found = rotation.rotate(heads(rope.arranged)).transpose(0, 1)
    order = rope.permutation()
    assert order is not None
    assert torch.equal(order.sort().values, torch.arange(dim))
    assert torch.allclose(found, expected[0][..., order], atol=1e-4)
    assert torch.allclose(found @ found.mT, expected[0] @ expected[0].mT, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(found @ found.mT, plain[0] @ plain[0].mT, rtol=1e-2)


GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA3 = {
    "for each type": {"rope_parameters": GEMMA3_ROPE},
    "older": {
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "as Gemma 3 on the Hub": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
}


@pytest.mark.parametrize("spelling", sorted(GEMMA3))
@pytest.mark.parametrize(("layer_type", "default"), [("full_attention", 1e6), ("sliding_attention", 1e4)])
def test_layer_types_have_their_own_settings(spelling: str, layer_type: str, default: float):
    theirs = Gemma3RotaryEmbedding(Gemma3TextConfig(head_dim=64, **GEMMA3[spelling]))
    ours = rope_of(GEMMA3[spelling], layer_type=layer_type, default_theta=default)
    assert torch.equal(ours.frequencies(), getattr(theirs, f"{layer_type}_inv_freq"))


@pytest.mark.parametrize(("layer_type", "dim"), [("full_attention", 64), ("sliding_attention", 32)])
def test_proportional_frequencies_equal_gemma_4(layer_type: str, dim: int):
    config = Gemma4TextConfig(head_dim=32, global_head_dim=64, num_hidden_layers=6)
    ours = rope_of({"rope_parameters": config.rope_parameters}, dim, layer_type=layer_type)
    theirs = Gemma4TextRotaryEmbedding(config)
    assert torch.equal(ours.frequencies(), getattr(theirs, f"{layer_type}_inv_freq"))
    assert ours.permutation() is None


def test_sliding_layers_keep_the_shared_part_of_a_head():
    config = {"rope_theta": 5e6, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.334}  # MiMo
    sliding = rope_of(config, 192, layer_type="sliding_attention")
    full = rope_of(config, 192, layer_type="full_attention")
    assert (sliding.theta, sliding.rotary_dim) == (1e4, 64)
    assert (full.theta, full.rotary_dim) == (5e6, 64)


@pytest.mark.parametrize(
    ("config", "key", "words"),
    [
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "rope_parameters.rope_type",
            "'longrope' must be one of default, linear, llama3, yarn, proportional",
        ),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0}},
            "rope_scaling.low_freq_factor",
            "is missing; it must be given for rope type 'llama3'",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor", "is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "8"}}, "rope_scaling.factor", "a positive number"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 8}},
            "rope_scaling.original_max_position_embeddings",
            "or else max_position_embeddings",
        ),
        ({"rope_scaling": 8}, "rope_scaling", "an object"),
        ({"rope_theta": 0}, "rope_theta", "a number above 1"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor", "above 0 and at most 1"),
        ({"partial_rotary_factor": 0.18}, "partial_rotary_factor", "an even part of a head's 64 dimensions"),
        ({"rotary_dim": 66}, "rotary_dim", "an even part of a head's 64 dimensions"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings", "a positive integer"),
        ({"rope_parameters": GEMMA3_ROPE}, "rope_parameters", "one setting for all layers"),
    ],
)
def test_unknown_or_incomplete_rotary_settings_are_refused(config: dict, key: str, words: str):
    with pytest.raises(CheckpointError, match=words) as caught:
        rope_of(config)
    assert caught.value.param == key


def test_settings_that_lack_a_type_of_layers_are_refused():
    with pytest.raises(CheckpointError, match=r"rope_parameters.chunked_attention is missing"):
        rope_of({"rope_parameters": GEMMA3_ROPE}, layer_type="chunked_attention")
