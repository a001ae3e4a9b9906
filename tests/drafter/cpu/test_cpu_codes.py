"""Products with weights of 8 and 4 bits: a row's bits, and their distance to the exact product.

`test_cpu_compiled.py` runs them again with other instruction sets.

Legend: O outputs, I inputs.
"""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from manta.drafter.compute.checkpoint.packed_codes import PackedCodes, stack
from manta.drafter.compute.checkpoint.quantized_matrix import (
    JoinedRows,
    QuantizedAtLoad,
    QuantizedMatrix,
    cat_rows,
    join_rows,
    quantize,
)
from manta.drafter.compute.cpu_fused.backend import FusedCpuBackend
from manta.drafter.compute.cpu_fused.operators import PackedLinear
from manta.drafter.compute.cpu_fused.packed_weight import pack
from manta.drafter.compute.cpu_fused.tiles.isa_dispatch import has_tiles
from manta.drafter.compute.cpu_numba.cpu_features import bf16_instructions
from manta.drafter.compute.layers.moe import ExpertWeights, MoeRouter, RouterWeights
from support.oracles.random_codes import MATRICES, bytes_of, random, scales
from torch import Tensor

pytestmark = pytest.mark.skipif(bf16_instructions() is None, reason="this CPU has no products of bf16")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def assert_product(y_NO: Tensor, x_NI: Tensor, matrix: QuantizedMatrix, *added: Tensor) -> None:
    """Assert that y is the product with the values that the format defines, in fp32 and rounded once.

    With AMX these values are rounded to bf16 first.
    """
    x, values = x_NI.double(), matrix.dequantized(torch.bfloat16 if has_tiles() else torch.float32).double()
    offsets = 0 if matrix.offsets_OG is None else matrix.offsets_OG.float().abs().max()
    exact = x @ values.T
    sizes = x.abs() @ (values.abs() + offsets).T
    for each in added:
        exact, sizes = exact + each.double(), sizes + each.double().abs()
    lost = 2**-19 * sizes  # by sums in fp32, at most
    assert ((exact - lost).bfloat16() <= y_NO).all() and (y_NO <= (exact + lost).bfloat16()).all()


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize(("outputs", "inputs"), [(300, 192), (33, 1088)])
def test_a_product_is_exact_but_for_fp32_and_has_the_same_bits_among_any_number_of_rows(
    name: str, outputs: int, inputs: int
) -> None:
    matrix = MATRICES[name](outputs, inputs)
    assert matrix.can_stay_packed()
    bias, residual = torch.randn(outputs).bfloat16(), torch.randn(200, outputs).bfloat16()
    x = torch.randn(200, inputs).bfloat16()
    layers = [PackedLinear(matrix, bias, threads) for threads in (2, 1, 3)]
    y = layers[0](x, residual)
    assert y.isfinite().all() and y.float().std() > 0.1
    assert_product(y, x, matrix, bias, residual)
    for count in range(1, 201) if inputs < 1000 else (1, 2, 5, 6, 7, 12, 13, 113):
        layer = layers[count % 3]
        assert layer(x[:count], residual[:count]).equal(y[:count]), count
        assert layer(x[-count:], residual[-count:]).equal(y[-count:]), count
    plain = matrix.dequantized(torch.bfloat16)
    assert layers[0].weight.num_bytes < 0.7 * pack(plain).num_bytes
    if has_tiles():
        assert PackedLinear(plain, bias, 2)(x, residual).equal(y)


@pytest.mark.parametrize("name", MATRICES)
def test_an_embedding_that_shares_the_heads_codes_has_the_rows_of_the_dequantized_matrix(name: str) -> None:
    matrix, backend = MATRICES[name](90, 128), FusedCpuBackend(1)
    ids = torch.tensor([0, 89, 17, 17, 15, 16, 31])
    head = backend.head(matrix)
    expected = matrix.dequantized(torch.bfloat16)
    for tied in (head, None):
        held = backend.weight_bytes
        assert backend.embedding(matrix, tied)(ids).equal(expected[ids])
        assert (backend.weight_bytes == held) == (tied is head)
    assert backend.embedding(expected)(ids).equal(expected[ids])


@pytest.mark.parametrize("name", MATRICES)
def test_experts_are_close_to_dequantized_ones_and_do_not_depend_on_the_number_of_rows(name: str) -> None:
    """Routed rows: 5 experts, of which each has a part of up to 40 rows."""
    held = (stack((MATRICES[name](*shape) for _ in range(5)), 5) for shape in ((128, 192), (192, 64)))
    gate_up, down = held
    assert isinstance(gate_up, PackedCodes) and isinstance(down, PackedCodes)
    weights, backend = ExpertWeights(gate_up=gate_up, down=down), FusedCpuBackend(2)
    packed, plain = (backend.experts(each) for each in (weights, weights.dequantized(torch.bfloat16)))
    x, ids = torch.randn(40, 192).bfloat16(), torch.rand(40, 5).argsort(1)[:, :2].to(torch.int32)
    shares = torch.rand(40, 2)
    expected, found = (experts(x, ids, shares) for experts in (plain, packed))
    assert expected.isfinite().all() and expected.float().std() > 1e-3
    assert (found - expected).norm() <= (0 if has_tiles() else 0.01) * expected.norm()
    for count in (1, 2, 7, 40):
        assert packed(x[:count], ids[:count], shares[:count]).equal(found[:count]), count
    assert (backend.num_expert_codes, backend.num_expert_plain) == (2, 2)


@pytest.mark.parametrize(("kind", "code", "bits"), [("int8", "int8", 8.25), ("int4", "uint4", 5)])
def test_experts_are_quantized_at_load_and_routers_are_not(
    kind: QuantizedAtLoad, code: Literal["int8", "uint4"], bits: float
) -> None:
    plain = ExpertWeights(
        gate_up=0.05 * torch.randn(3, 128, 64).bfloat16(), down=0.05 * torch.randn(3, 64, 64).bfloat16()
    )
    backend = FusedCpuBackend(1, kind)
    x, ids = torch.randn(4, 64).bfloat16(), torch.tensor([[0, 2], [1, 0], [2, 1], [1, 2]], dtype=torch.int32)
    shares = torch.rand(4, 2)
    found = backend.experts(plain)(x, ids, shares)
    assert backend.weight_bytes == 3 * 3 * 64 * 64 * bits / 8
    assert found.equal(FusedCpuBackend(1).experts(plain.quantized(code))(x, ids, shares))
    router = RouterWeights(
        rule=MoeRouter(num_experts=3, top_k=2, score="softmax"), weight_EH=torch.randn(3, 64).bfloat16()
    )
    routed = [each.route(router)(x, x) for each in (backend, FusedCpuBackend(1))]
    assert all(mine.equal(theirs) for mine, theirs in zip(*routed, strict=True))


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.0085), ("int4", 0.09)])
def test_quantizing_is_close_and_exact_in_bf16(kind, most: float) -> None:
    weight = random(64, 512)
    weight[3], weight[5, :32], weight[6, 7] = 0.0, 1e-35, 4.0
    matrix = quantize(weight, kind)
    exact = matrix.dequantized(torch.float32)
    assert exact.equal(matrix.dequantized(torch.bfloat16).float()) and matrix.can_stay_packed()
    usual = torch.ones(64, dtype=torch.bool)
    usual[[3, 5, 6]] = False
    error = (exact - weight)[usual].norm() / weight[usual].norm()
    assert 0.3 * most < error < most
    assert exact[3].count_nonzero() == 0 and exact[6, 7] == 4.0


def test_a_scale_and_an_offset_are_the_least_squares_of_their_codes() -> None:
    weight = random(64, 512)
    matrix = quantize(weight, "uint4")
    found, int4 = (quantize(weight, code).dequantized(torch.float32) for code in ("uint4", "int4"))
    assert (found - weight).norm() < 0.88 * (int4 - weight).norm()
    codes, given = (each.reshape(-1, 32, 1) for each in (matrix.codes_OI.float(), weight))
    inputs = torch.cat((codes, torch.ones_like(codes)), 2)
    least = (inputs @ torch.linalg.lstsq(inputs, given).solution - given).norm()
    assert least <= (found - weight).norm() < 1.01 * least


def test_weights_on_a_grid_of_sixteen_values_are_kept_by_a_scale_and_an_offset() -> None:
    weight = torch.zeros(5, 64)
    weight[1, :32], weight[2] = 1e-35, 4.0
    weight[3] = (torch.arange(64) * 7 % 16) * 0.0625 - 0.375
    weight[4, 7] = 1e6  # beyond fp16
    matrix = quantize(weight, "uint4")
    found = matrix.dequantized(torch.float32)
    assert matrix.can_stay_packed() and found[4].isfinite().all()
    assert found[[0, 2, 3]].equal(weight[[0, 2, 3]]) and not found[1].any()


@pytest.mark.parametrize("name", MATRICES)
def test_joined_rows_are_those_of_the_parts(name: str) -> None:
    parts = [MATRICES[name](outputs, 128) for outputs in (32, 64)]
    joined = cat_rows(parts, torch.bfloat16)
    assert isinstance(joined, QuantizedMatrix)
    expected = torch.cat([part.dequantized(torch.bfloat16) for part in parts])
    assert joined.dequantized(torch.bfloat16).equal(expected)
    plain = MATRICES["int8 at load"](32, 128).dequantized(torch.bfloat16)
    other = cat_rows([parts[0], plain], torch.bfloat16)

    assert isinstance(other, Tensor) and other[:32].equal(expected[:32])


@pytest.mark.parametrize(
    "names", [("uint4", "int8 in blocks"), ("int4", "plain", "e2m1"), ("plain", "uint4")]
)
def test_rows_of_several_forms_are_one_product_with_the_bits_of_their_parts(names: tuple[str, ...]) -> None:
    sizes = (96, 64, 40) if len(names) == 3 else (96, 40)
    makes = MATRICES | {"plain": lambda o, i: random(o, i).bfloat16()}  # type: ignore[dict-item]
    joined = join_rows(
        [makes[name](size, 192) for name, size in zip(names, sizes, strict=True)], torch.bfloat16
    )
    assert isinstance(joined, JoinedRows)
    bias, x = torch.randn(sum(sizes)).bfloat16(), torch.randn(130, 192).bfloat16()
    backend = FusedCpuBackend(2)
    packed = backend.linear_of_either(joined, bias)
    assert (backend.num_codes, backend.num_plain) == (1, 0)
    parts = [PackedLinear(w, b, 2) for w, b in zip(joined.parts, bias.split(sizes), strict=True)]
    for count in (*range(1, 18), 64, 130):
        alone = torch.cat([part(x[:count]) for part in parts], dim=1)
        assert packed(x[:count]).equal(alone), count
    odd = join_rows([MATRICES["int4"](40, 192), MATRICES["uint4"](32, 192)], torch.bfloat16)
    assert isinstance(odd, JoinedRows)
    assert backend.linear_of_either(odd)(x).equal(PackedLinear(odd.plain(), None, 2)(x))
    assert (backend.num_codes, backend.num_plain) == (1, 1)


@pytest.mark.parametrize(
    "matrix",
    [
        QuantizedMatrix("int8", bytes_of(32, 96).view(torch.int8), scales(32, 2)),
        QuantizedMatrix("int8", bytes_of(32, 64).view(torch.int8), 1e-38 * scales(32, 1)),
        QuantizedMatrix("int8", bytes_of(32, 64).view(torch.int8), scales(32, 1) / 0.0),
        QuantizedMatrix("e4m3", torch.full((32, 64), 0x7F, dtype=torch.uint8), scales(32, 1)),
    ],
    ids=["groups of 48", "tiny scales", "infinite scales", "NaN"],
)
def test_values_that_compiled_products_would_change_are_not_packed(matrix: QuantizedMatrix) -> None:
    assert not matrix.can_stay_packed()


def test_the_head_keeps_eight_bits_and_other_weights_have_as_many_as_asked_for() -> None:
    backend = FusedCpuBackend(1, "int4")
    weight = random(64, 128).bfloat16()
    assert backend.linear(weight).weight.num_bytes == 64 * 128 * 5 / 8  # type: ignore[attr-defined]
    assert backend.head(weight).weight.num_bytes == 64 * 128 * 8.25 / 8  # type: ignore[attr-defined]
    assert backend.quantizing(None).linear(weight).weight.num_bytes == pack(weight).num_bytes  # type: ignore[attr-defined]
    assert backend.weight_bytes == 64 * 128 * 13.25 / 8
