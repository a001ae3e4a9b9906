"""Linear, norms, rotary positions: against formulas and transformers."""

from __future__ import annotations

import pytest
import torch
from manta.cluster.errors import CheckpointError
from manta.drafter.compute.layers import HeadNorm, Linear, RMSNorm, silu_mul
from manta.drafter.compute.rope import RopeConfig, RotaryEmbedding


def rope_of(config: dict, head_dim: int = 16) -> RopeConfig:
    return RopeConfig.read(config, head_dim, "config.json")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_multiplies_and_adds(dtype: torch.dtype, bias: bool):
    torch.manual_seed(0)
    w, x, residual = torch.randn(48, 64), torch.randn(7, 64), torch.randn(7, 48)
    b = torch.randn(48).to(dtype) if bias else None
    layer = Linear(w.to(dtype), b)
    exact = x.to(dtype).double() @ w.to(dtype).double().T + (0 if b is None else b.double())
    tolerance = 1e-4 if dtype is torch.float32 else 0.15
    assert (layer(x.to(dtype)).double() - exact).abs().max() < tolerance
    total = layer(x.to(dtype), residual.to(dtype))
    assert (total.double() - exact - residual.to(dtype).double()).abs().max() < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_follow_their_formula(dtype: torch.dtype):
    torch.manual_seed(1)
    x, weight = torch.randn(5, 6, 16).to(dtype), torch.rand(6, 16).to(dtype) + 0.5
    normed = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    tolerance = 1e-5 if dtype is torch.float32 else 0.04
    one = RMSNorm(weight[0], 1e-6)(x)
    assert (one.double() - normed * weight[0].double()).abs().max() < tolerance
    per_head = HeadNorm(weight, 1e-6)(x)
    assert (per_head.double() - normed * weight.double()).abs().max() < tolerance


def test_the_gated_product_is_silu_of_the_first_half_times_the_second():
    x = torch.randn(3, 10)
    expected = x[:, :5] * torch.sigmoid(x[:, :5]) * x[:, 5:]
    assert torch.allclose(silu_mul(x.clone()), expected)


ROPES = {
    "default": {"rope_theta": 10000.0},
    "parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "llama3": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        }
    },
}


@pytest.mark.parametrize("kind", sorted(ROPES))
def test_rotations_equal_transformers(kind: str):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    shape = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "max_position_embeddings": 1024}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**shape, **ROPES[kind]))
    positions = torch.tensor([0, 1, 5, 300, 999])
    x = torch.randn(5, 4, 16)
    cos, sin = theirs(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    rope = rope_of({"max_position_embeddings": 1024, **ROPES[kind]})
    rotation = RotaryEmbedding(rope, 1024, torch.float32, "cpu").at(positions)
    assert torch.allclose(rotation.rotate(x), expected[0].transpose(0, 1), atol=3e-5)
    buffer = x.clone()
    rotation.rotate(x, out_NJD=buffer)
    assert torch.equal(buffer, rotation.rotate(x))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    ],
)
def test_unknown_or_incomplete_rotary_settings_are_refused(config: dict, words: str):
    with pytest.raises(CheckpointError, match=words):
        rope_of(config)
