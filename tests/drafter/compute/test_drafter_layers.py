"""Row operators of every CPU backend against their formulas in fp64, and row by row against themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from manta.drafter.compute.backend import Backend
from manta.drafter.compute.layers.linear import Activation, HeadNorm, Linear, RMSNorm
from torch import Tensor

EPS = 1e-6
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def normed(x: Tensor) -> Tensor:
    return x.double() / (x.double().pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def norm(backend: Backend, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, weight_H = (3 * torch.randn(shape)).to(dtype), (torch.rand(shape[1]) + 0.5).to(dtype)
    return backend.norm(RMSNorm(weight_H, EPS), x), normed(x) * weight_H.double()


def gated(
    backend: Backend, shape: tuple[int, ...], dtype: torch.dtype, activation: Activation
) -> tuple[Tensor, Tensor]:
    gate_NI, up_NI = 6 * torch.randn(2, *shape)
    gate_NI[0, :8] = torch.tensor([-3e38, -1000.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 3e38])
    gate_NI[1, :9] = torch.tensor([-90.0, 90.0, float("inf"), -0.0, -10.0, -5.0, -2.0, -0.5, 10.0])
    both = torch.cat((gate_NI, up_NI), dim=1).to(dtype)
    gate_NI, up_NI = both.double().chunk(2, dim=1)
    of_gate = {"silu": torch.nn.functional.silu, "gelu_tanh": torch.nn.GELU(approximate="tanh")}
    return backend.gated(torch.clone, both, activation), of_gate[activation](gate_NI) * up_NI


Operator = Callable[[Backend, tuple[int, ...], torch.dtype], tuple[Tensor, Tensor]]
CASES: dict[str, tuple[Operator, tuple[int, int]]] = {
    "norm of a row": (norm, (1, 192)),
    "norm": (norm, (16, 64)),
    "norm of an odd size": (norm, (5, 1000)),
    "norm of no row": (norm, (0, 64)),
    "silu": (lambda backend, shape, dtype: gated(backend, shape, dtype, "silu"), (7, 333)),
    "gelu_tanh": (lambda backend, shape, dtype: gated(backend, shape, dtype, "gelu_tanh"), (7, 333)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_an_operator_follows_its_formula(backend: Backend, name: str, dtype: torch.dtype) -> None:
    """Results equal to 5e-6 in fp32, and to a few ulp in bf16, because PyTorch rounds between operators."""
    operator, shape = CASES[name]
    found, exact = operator(backend, shape, dtype)
    assert found.dtype is dtype
    tolerance = 5e-6 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, exact.to(dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [192, 1000])
def test_norms_with_weights_in_fp32_round_bf16_once(backend: Backend, size: int) -> None:
    """Gemma's 1 + w is such a weight, which bf16 cannot represent."""
    x, weight_H = torch.randn(100, 6, size).bfloat16(), 1 + 0.003 * torch.randn(size)
    exact = (normed(x) * weight_H.double()).bfloat16()
    rows, expected = x.flatten(0, 1), exact.flatten(0, 1)
    for found, right in (
        (backend.norm(RMSNorm(weight_H, EPS), rows), expected),
        (HeadNorm(weight_H.expand(6, -1), EPS)(x), exact),
    ):
        assert found.dtype is torch.bfloat16
        assert (found == right).float().mean() > 0.999
    rounded = backend.norm(RMSNorm(weight_H.bfloat16(), EPS), rows)
    assert (rounded == expected).float().mean() < 0.9, "a weight in bf16 is another"


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_head_has_a_norm_of_its_own(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 6, 16).to(dtype), torch.rand(6, 16).to(dtype) + 0.5
    tolerance = 1e-5 if dtype is torch.float32 else 0.04
    assert (HeadNorm(weight, EPS)(x).double() - normed(x) * weight.double()).abs().max() < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_multiplies_and_adds(dtype: torch.dtype, bias: bool) -> None:
    w, x, residual = (torch.randn(*shape).to(dtype) for shape in ((48, 64), (7, 64), (7, 48)))
    b = torch.randn(48).to(dtype) if bias else None
    layer = Linear(w, b)
    exact = x.double() @ w.double().T + (0 if b is None else b.double())
    tolerance = 1e-4 if dtype is torch.float32 else 0.15
    assert (layer(x).double() - exact).abs().max() < tolerance
    assert (layer(x, residual).double() - exact - residual.double()).abs().max() < tolerance


@pytest.mark.parametrize("num_inputs", [64, 1024, 1100, 2880])
def test_a_row_of_fp32_has_the_same_bits_alone_and_among_others(num_inputs: int) -> None:
    layer, x, residual = Linear(torch.randn(96, num_inputs)), torch.randn(40, num_inputs), torch.randn(40, 96)
    together, added = layer(x), layer(x, residual)
    for count in (1, 2, 3, 16):
        assert torch.equal(layer(x[:count]), together[:count])
        assert torch.equal(layer(x[:count], residual[:count]), added[:count])
