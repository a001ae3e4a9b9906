"""Products of a GPU with weights of 8 and 4 bits: those of dequantized matrices (device: `devices.py`).

Legend: N rows, K inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from manta.drafter.compute.checkpoint.packed_codes import PackedCodes
from manta.drafter.compute.checkpoint.quantized_matrix import ON_GPUS, QuantizedMatrix, quantize
from manta.drafter.compute.gpu_triton.backend import TritonBackend
from manta.drafter.compute.gpu_triton.common.element_ops import gate
from manta.drafter.compute.gpu_triton.linear.gemm_choice import choose_own
from manta.drafter.compute.gpu_triton.linear.gemm_tiles import MAX_PACKED_ROWS, ProductWorkspace
from manta.drafter.compute.gpu_triton.linear.packed_codes import dequantize, for_kernels
from manta.drafter.compute.gpu_triton.linear.projections import as_tensor, packed_projection
from manta.drafter.compute.layers.linear import RMSNorm
from support.engines.devices import DEVICE, HALVES
from support.oracles.random_codes import MATRICES, bytes_of, random
from torch import Tensor

pytestmark = pytest.mark.usefixtures("on_the_device")
DTYPES = (torch.float32, *HALVES)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
MANY_ROWS = (70, MAX_PACKED_ROWS, MAX_PACKED_ROWS + 1)
LONG = ("int4 with zeros", "e4m3", "mxfp4")
OUTPUTS, INPUTS = 90, 192  # neither is a multiple of a tile
# Powers of two as scales, as MXFP4 stores them, beside those that other backends are tested with.
ALL = {
    **{name: make for name, make in MATRICES.items() if make(16, 64).code in ON_GPUS},
    "mxfp4": lambda o, i: QuantizedMatrix(
        "e2m1", bytes_of(o, i, 16), torch.randint(118, 123, (o, i // 32), dtype=torch.uint8)
    ),
}


def make(name: str) -> QuantizedMatrix:
    return ALL[name](OUTPUTS, INPUTS).to("cpu")


def assert_near(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    largest = tolerance * float(expected.abs().max())
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=largest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.one_in(2)
def test_codes_have_their_values_bit_by_bit(name: str, dtype: torch.dtype) -> None:
    matrix = make(name)
    packed = for_kernels(PackedCodes.of(matrix.to(DEVICE)))
    expected = matrix.to(DEVICE).dequantized(dtype)
    assert dequantize(packed, dtype).equal(expected)
    if matrix.code == "e4m3":  # as where a device does not convert it
        assert dequantize(replace(packed, codes=packed.codes.view(torch.uint8)), dtype).equal(expected)
    assert packed.num_bytes < 0.7 * 2 * OUTPUTS * INPUTS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "rows"),
    [(name, 5) for name in ALL] + [(name, n) for name in LONG for n in MANY_ROWS],
)
@pytest.mark.one_in(2)
def test_a_product_equals_that_of_the_dequantized_matrix(name: str, rows: int, dtype: torch.dtype) -> None:
    """In one tile of rows, in two, and by PyTorch; everything that is fused, too. Kinds share the tiles."""
    matrix = make(name)
    packed, bias_O = for_kernels(PackedCodes.of(matrix.to(DEVICE))), torch.randn(OUTPUTS).to(dtype)
    own = packed_projection(packed, bias_O, ProductWorkspace(DEVICE), choose_own)
    weight_OK = matrix.to(DEVICE).dequantized(dtype).double()

    def product(x_NK: Tensor) -> Tensor:
        return (x_NK.double() @ weight_OK.T + bias_O.double()).to(dtype)

    x_NK = torch.randn(rows, INPUTS + 6).to(dtype)[:, 3:-3]  # of which words would begin within an element
    residual_NO = torch.randn(rows, OUTPUTS).to(dtype)
    assert_near(own(x_NK), product(x_NK))
    assert_near(own(x_NK, residual_NO), product(x_NK) + residual_NO)
    assert_near(own.gated(x_NK, "silu"), gate(product(x_NK), "silu"))
    before = TritonBackend(DEVICE, quantization="int4").linear(random(INPUTS, 64))
    small_NK = torch.randn(rows, 64).to(dtype)
    sum_NK, pending = before.added(small_NK, x_NK, RMSNorm((torch.rand(INPUTS) + 0.5).to(dtype), 1e-6))
    assert_near(own(pending), product(as_tensor(pending)))
    assert sum_NK.shape == x_NK.shape


def test_in_one_tile_a_rows_bits_do_not_depend_on_its_batch() -> None:
    own = TritonBackend(DEVICE, batch_invariant=True).linear_of_codes(make("int4"))
    x_NK = torch.randn(130, INPUTS)
    everything = own(x_NK)
    assert own(x_NK[:1]).equal(everything[:1]) and own(x_NK[65:]).equal(everything[65:])


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_weights_are_quantized_at_load_but_not_the_head(kind) -> None:
    backend = TritonBackend(DEVICE, quantization=kind)
    weight_OK, x_NK = random(64, 128), torch.randn(3, 128)
    expected = x_NK @ quantize(weight_OK, kind).dequantized(torch.float32).T
    assert_near(backend.linear(weight_OK)(x_NK), expected)
    assert_near(backend.linear_of_blocks(weight_OK.view(1, 2, 32, 128))(x_NK), expected)
    assert backend.weight_bytes == 2 * 64 * 128 * {"int8": 8.25, "int4": 4.5}[kind] / 8
    assert_near(backend.head(weight_OK)(x_NK), x_NK @ weight_OK.T)
