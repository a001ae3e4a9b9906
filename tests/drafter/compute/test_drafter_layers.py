"""Linear and norms against their formulas."""

from __future__ import annotations

import pytest
import torch
from manta.drafter.compute.layers.linear import HeadNorm, Linear, RMSNorm, gate


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


@pytest.mark.parametrize("num_inputs", [64, 1024, 1100, 2880])
def test_a_row_of_fp32_has_the_same_bits_alone_and_among_others(num_inputs: int):
    torch.manual_seed(0)
    layer, x = Linear(torch.randn(96, num_inputs)), torch.randn(40, num_inputs)
    residual = torch.randn(40, 96)
    together, added = layer(x), layer(x, residual)
    for count in (1, 2, 3, 16):
        assert torch.equal(layer(x[:count]), together[:count])
        assert torch.equal(layer(x[:count], residual[:count]), added[:count])


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


@pytest.mark.parametrize("layer", [RMSNorm, HeadNorm])
def test_norms_with_weights_in_fp32_round_bf16_once(layer: type[RMSNorm] | type[HeadNorm]):
    """Gemma's 1 + w is such a weight, which bf16 cannot represent."""
    torch.manual_seed(1)
    x, weight = torch.randn(500, 6, 64).bfloat16(), 1 + 0.003 * torch.randn(64)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    got = layer(weight if layer is RMSNorm else weight.expand(6, -1), 1e-6)(x)
    assert got.dtype is torch.bfloat16
    assert (got == exact.bfloat16()).float().mean() > 0.9999
    rounded = layer(weight.bfloat16() if layer is RMSNorm else weight.bfloat16().expand(6, -1), 1e-6)(x)
    assert (rounded == exact.bfloat16()).float().mean() < 0.9, "a weight in bf16 is another"


def test_the_gated_product_is_silu_of_the_first_half_times_the_second():
    x = torch.randn(3, 10)
    expected = x[:, :5] * torch.sigmoid(x[:, :5]) * x[:, 5:]
    assert torch.allclose(gate(x.clone(), "silu"), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gated_product_is_tanh_gelu_if_configured(dtype: torch.dtype):
    x = (4 * torch.randn(3, 200)).to(dtype)
    expected = torch.nn.functional.gelu(x[:, :100], approximate="tanh") * x[:, 100:]
    assert torch.equal(gate(x.clone(), "gelu_tanh"), expected)
    assert not torch.allclose(expected, torch.nn.functional.gelu(x[:, :100]) * x[:, 100:], rtol=0, atol=1e-4)
