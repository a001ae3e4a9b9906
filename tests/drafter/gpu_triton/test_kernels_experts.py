"""Routed experts in Triton against the definition in fp64 (device: see `devices.py`).

Tested are tiles, products of plain and packed weights, and sums.

Legend: N rows, k experts chosen per row, P = N k pairs, E experts, O outputs, H hidden, I inner size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.actors.targets.families import read_model
from manta.actors.targets.model.decoder import Decoder
from manta.actors.targets.model.tensor_parallel import Sharding, SingleRank
from manta.actors.targets.model.weights import TargetWeights
from manta.cluster.errors import CheckpointError
from manta.drafter.compute.checkpoint.packed_codes import PackedCodes, stack
from manta.drafter.compute.checkpoint.quantized_matrix import ZERO, QuantizedMatrix
from manta.drafter.compute.eager import moe_routing as routing
from manta.drafter.compute.eager.backend import EagerBackend
from manta.drafter.compute.gpu_triton.backend import TritonBackend
from manta.drafter.compute.gpu_triton.common.arranged_codes import ARRANGED_PTX, arrange
from manta.drafter.compute.gpu_triton.common.unpack_codes import (
    E2M1_PTX,
    INT4_PTX,
    INT8_PTX,
    MAX_EXPONENT,
    split_e4m3,
)
from manta.drafter.compute.gpu_triton.linear import packed_codes
from manta.drafter.compute.gpu_triton.linear.packed_codes import for_kernels
from manta.drafter.compute.gpu_triton.moe.grouped_gemm import multiply_tiles
from manta.drafter.compute.gpu_triton.moe.grouped_gemm_tiles import (
    HEIGHTS,
    INVARIANT_HEIGHT,
    max_tiles,
    tile_height,
)
from manta.drafter.compute.gpu_triton.moe.moe_align import ExpertTiles, list_tiles
from manta.drafter.compute.gpu_triton.moe.topk_routing import choose
from manta.drafter.compute.layers.linear import Activation, RMSNorm, gate
from manta.drafter.compute.layers.moe import ExpertActivation, ExpertWeights, MoeRouter, RouterWeights
from manta.drafter.step.gpu_triton.inputs.row_layout import DeviceStepRows
from manta.jobs.doctor.cases.experts import exact_experts
from support.engines.devices import DEVICE, HALVES, ON_GPU, Launches
from support.oracles.random_codes import MATRICES, bytes_of, e4m3, scales
from torch import Tensor

pytestmark = pytest.mark.usefixtures("on_the_device")
DTYPES = (torch.float32, *HALVES)
TOLERANCE = {torch.float32: 3e-5 if ON_GPU else 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
PLACES = 2  # experts of a row
# Random matrices of each kind of codes; groups of 32 inputs at most, which divide all sizes here.
CODES: dict[str, Callable[[int, int], QuantizedMatrix]] = {
    "mxfp4": lambda o, i: QuantizedMatrix(
        "e2m1", bytes_of(o, i, 16), torch.randint(119, 123, (o, i // 32), dtype=torch.uint8)
    ),
    "int4": MATRICES["int4"],
    "int4 with zeros": lambda o, i: QuantizedMatrix(
        "int4", bytes_of(o, i, 16), scales(o, i // 32, torch.float16), bytes_of(o, i // 32, 17)
    ),
    "nvfp4": MATRICES["e2m1"],
    "fp8 in blocks": lambda o, i: QuantizedMatrix("e4m3", e4m3(o, i), 0.02 * scales(o, i // 32)),
    "fp8 by channel": lambda o, i: QuantizedMatrix("e4m3", e4m3(o, i), 0.02 * scales(o, 1)),
    "int8": MATRICES["int8 at load"],
}
FORMS = [None, *CODES]


def random_ids(rows: int, experts: int, places: int = PLACES) -> Tensor:
    return torch.rand(rows, experts).argsort(dim=1)[:, :places].to(torch.int32).contiguous()


def reads() -> Tensor:
    return torch.zeros(1, dtype=torch.int32)


def listed(tiles: ExpertTiles) -> list[tuple[int, list[int]]]:
    """Return the expert and pairs of each tile that is not idle."""
    count = int(tiles.count_1)
    found = zip(tiles.experts_T[:count].tolist(), tiles.pairs_TM[:count].tolist(), strict=True)
    return [(expert, [pair for pair in pairs if pair < tiles.num_pairs]) for expert, pairs in found]


def expected_tiles(ids: Tensor, num_experts: int, first: int, height: int) -> list[tuple[int, list[int]]]:
    tiles = []
    for expert in range(num_experts):
        pairs = (ids.flatten() == first + expert).nonzero().flatten().tolist()
        tiles += [(expert, pairs[at : at + height]) for at in range(0, len(pairs), height)]
    return tiles


@pytest.mark.parametrize(("rows", "experts", "first", "local"), [(1, 8, 0, 8), (70, 8, 2, 5), (600, 3, 1, 2)])
@pytest.mark.parametrize("height", (16, 64))
def test_pairs_are_in_tiles_of_their_experts_in_order(
    rows: int, experts: int, first: int, local: int, height: int
):
    """Pairs of other ranks' experts are in no tile; 1200 pairs are more than one program reads."""
    ids = random_ids(rows, experts)
    tiles = list_tiles(ids, local, first, height, reads_1 := reads())
    expected = expected_tiles(ids, local, first, height)
    assert listed(tiles) == expected
    list_tiles(ids, local, first, height, reads_1)
    assert int(reads_1) == 2 * len({expert for expert, _ in expected})


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.sampled_from(HEIGHTS))
@settings(max_examples=200)
def test_a_grid_fits_every_choice_exactly(counts: list[int], height: int):
    """`counts` are pairs by expert; the worst choice with as many pairs needs the whole grid."""
    needed, pairs, experts = sum(-(-count // height) for count in counts), sum(counts), len(counts)
    assert needed <= max_tiles(pairs, experts, height)
    used = min(pairs, experts)
    worst = [1 + height * ((pairs - used) // height) + (pairs - used) % height, *[1] * (used - 1)]
    if pairs:
        assert sum(-(-count // height) for count in worst) >= max_tiles(pairs, experts, height)


def test_tiles_grow_with_the_pairs_of_an_expert():
    heights = [tile_height(pairs, 128) for pairs in (8, 1024, 1032, 2048, 4096, 65536)]
    assert heights == [16, 16, 32, 32, 64, 128]
    for dtype, packed, tallest in (
        (torch.float32, True, 64),
        (torch.float32, False, 128),
        (torch.bfloat16, True, 128),
    ):
        assert tile_height(65536, 128, dtype, packed=packed) == tallest


RULES = {
    "softmax": MoeRouter(num_experts=160, top_k=8, score="softmax"),
    "not renormalized": MoeRouter(num_experts=12, top_k=3, score="softmax", renormalize=False),
    "choice first": MoeRouter(num_experts=32, top_k=4, score="softmax", choose_first=True),
    "sigmoid": MoeRouter(num_experts=16, top_k=4, score="sigmoid", correction=True, scale=2.8),
    "groups": MoeRouter(num_experts=24, top_k=3, score="sigmoid", correction=True, groups=4, top_groups=2),
    "scaled experts": MoeRouter(num_experts=8, top_k=2, score="softmax", expert_scale=True),
    "all": MoeRouter(num_experts=5, top_k=5, score="softmax"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.one_in(2)
def test_a_choice_of_experts_equals_pytorchs(rule: MoeRouter, dtype: torch.dtype):
    """Some rows' logits are small integers or zeros, so that there are ties."""
    logits_NE = torch.randn(12, rule.num_experts)
    logits_NE[2:5].round_()
    logits_NE[5] = 0
    logits_NE = logits_NE.to(dtype)
    correction_E = 0.3 * torch.randn(rule.num_experts) if rule.correction else None
    expert_scale_E = torch.rand(rule.num_experts) if rule.expert_scale else None
    ids_Nk, weights_Nk = choose(logits_NE, rule, correction_E, expert_scale_E)
    expected = routing.choose(logits_NE, rule, correction_E, expert_scale_E)
    assert torch.equal(ids_Nk, expected[0]) and ids_Nk.dtype is torch.int32
    torch.testing.assert_close(weights_Nk, expected[1], rtol=1e-5, atol=1e-7)
    alone = choose(logits_NE[7:8], rule, correction_E, expert_scale_E)
    assert torch.equal(alone[0][0], ids_Nk[7]) and torch.equal(alone[1][0], weights_Nk[7])


@pytest.mark.parametrize("rule", [RULES["choice first"], RULES["groups"]], ids=["choice first", "groups"])
def test_padding_rows_choose_no_expert(rule: MoeRouter):
    logits_NE, correction_E = torch.randn(5, rule.num_experts), torch.zeros(rule.num_experts)
    owners_N = torch.tensor([3, 0, 0, -1, -1], dtype=torch.int32)
    ids_Nk, weights_Nk = choose(logits_NE, rule, correction_E, owners_N=owners_N)
    expected = routing.choose(logits_NE, rule, correction_E, owners_N=owners_N)
    assert torch.equal(ids_Nk, expected[0]) and (ids_Nk[3:] == -1).all() and (ids_Nk[:3] >= 0).all()
    torch.testing.assert_close(weights_Nk, expected[1], rtol=1e-5, atol=1e-7)


@torch.no_grad()
def test_a_pass_reads_no_experts_for_its_padding(tiny_qwen3_moe: Path):
    """As in a graph for more rows than a step has; nothing else of the real rows changes."""
    spec, backend = read_model(tiny_qwen3_moe), TritonBackend(DEVICE, batch_invariant=True)
    weights = TargetWeights(tiny_qwen3_moe, spec, Sharding(spec, 0, 1), torch.float32, DEVICE)
    target = Decoder(weights, (), 64, SingleRank(), backend)

    def run(num_rows: int, num_marked: int) -> tuple[Tensor, int]:
        """The hidden states of two rows among `num_rows`, and the experts read."""
        cache, page = target.new_cache(2, 16), np.zeros((1, 1), np.int32)
        batch = backend.attention_batch(np.zeros(1, np.int32), np.full(1, 2), page, 16, DEVICE)
        number_N = torch.arange(num_rows)
        owners_N = torch.where(number_N < num_rows - num_marked, 0, -1).to(torch.int32)
        placed = DeviceStepRows(number_N, (number_N,), (batch,), 5 * number_N % 90, owners_N)
        before = 0 if backend.expert_reads is None else int(backend.expert_reads)
        hidden_NH, _ = target.forward(placed.token_ids_N, placed, cache)
        assert backend.expert_reads is not None
        return hidden_NH[:2], int(backend.expert_reads) - before

    alone, reads_alone = run(2, 0)
    among, reads_among = run(12, 10)
    assert torch.equal(among, alone) and reads_among == reads_alone
    assert run(12, 0)[1] > reads_alone, "rows that are not padding do read"


def test_a_router_may_read_the_residual_with_its_own_norm():
    rule = MoeRouter(num_experts=8, top_k=2, score="softmax", normed_input=True)
    norm = RMSNorm(torch.rand(32) + 0.5, 1e-6)
    weights = RouterWeights(rule=rule, weight_EH=torch.randn(8, 32), norm=norm)
    normed_NH, residual_NH = torch.randn(3, 32), torch.randn(3, 32)
    ids_Nk, weights_Nk = TritonBackend(DEVICE).route(weights)(normed_NH, residual_NH)
    expected = EagerBackend().route(weights)(normed_NH, residual_NH)
    assert torch.equal(ids_Nk, expected[0])
    torch.testing.assert_close(weights_Nk, expected[1], rtol=1e-4, atol=1e-6)


class Layer:
    """Random experts, packed or not, and rows for them."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        hidden: int = 160,
        inner: int = 96,
        experts: int = 5,
        codes: str | None = None,
        biases: bool = False,
        activation: ExpertActivation = "silu",
    ) -> None:
        self.dtype = dtype

        def make(experts: int, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor | PackedCodes:
            return (
                random_plain(experts, outputs, inputs, dtype)
                if codes is None
                else random_codes(codes, experts, outputs, inputs)
            )

        self.weights = ExpertWeights(
            gate_up=make(experts, 2 * inner, hidden, dtype),
            down=make(experts, hidden, inner, dtype),
            gate_up_bias_EI=torch.randn(experts, 2 * inner).to(dtype) if biases else None,
            down_bias_EH=torch.randn(experts, hidden).to(dtype) if biases else None,
            activation=activation,
            limit=1.0 if activation == "swiglu_clamped" else None,
        )

    def rows(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, the experts of its rows, and their weights."""
        experts, hidden, _ = self.weights.down.shape
        x_NH = torch.randn(count, hidden).to(self.dtype)
        return x_NH, random_ids(count, experts), torch.rand(count, PLACES)


def random_plain(experts: int, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    return (inputs**-0.5 * torch.randn(experts, outputs, inputs)).to(dtype)


def random_codes(name: str, experts: int, outputs: int, inputs: int) -> PackedCodes:
    codes = stack((CODES[name](outputs, inputs).to("cpu") for _ in range(experts)), experts)
    assert isinstance(codes, PackedCodes)
    return codes


def assert_near(actual: Tensor, exact: Tensor):
    assert actual.shape == exact.shape
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, exact.to(actual.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", FORMS)
@pytest.mark.parametrize("height", HEIGHTS)
@pytest.mark.one_in(3)
def test_tiles_of_every_height_give_the_same_products(height: int, codes: str | None, dtype: torch.dtype):
    layer = Layer(dtype, hidden=256, experts=2, codes=codes)
    weight, (x_NH, ids_Nk, _) = layer.weights.gate_up, layer.rows(20)
    given_ = weight if isinstance(weight, Tensor) else for_kernels(weight)
    got_PI = multiply_tiles(x_NH, given_, list_tiles(ids_Nk, 2, 0, height, reads()), activation="silu")
    plain_EIH = weight if isinstance(weight, Tensor) else weight.dequantized(torch.float32)
    for expert in range(2):
        exact_NI = gate(x_NH.double() @ plain_EIH[expert].double().T, "silu")
        assert_near(got_PI[ids_Nk.flatten() == expert], exact_NI)  # each row chose both


@pytest.mark.skipif(ON_GPU, reason="a device has block-scaled products or not")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("height", [16, 64])
def test_mxfp4_stays_as_published_where_a_device_has_block_scaled_products(
    height: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """Other dtypes and higher tiles are unpacked from it."""
    monkeypatch.setattr(packed_codes, "has_block_scaled", lambda device: True)
    layer = Layer(dtype, hidden=288, inner=80, experts=2, codes="mxfp4")
    weight, (x_NH, ids_Nk, _) = layer.weights.gate_up, layer.rows(20)
    assert isinstance(weight, PackedCodes) and for_kernels(weight) is weight
    got_PO = multiply_tiles(x_NH, weight, list_tiles(ids_Nk, 2, 0, height, reads()))
    for expert in range(2):
        exact_NO = x_NH.double() @ weight.dequantized(torch.float64)[expert].T
        assert_near(got_PO[ids_Nk.flatten() == expert], exact_NO)  # each row chose both


@pytest.mark.skipif(ON_GPU, reason="a device has such products or not")
@pytest.mark.parametrize(("height", "activation"), [(16, None), (32, "silu")])
def test_block_scaled_products_of_mxfp4_equal_the_definition(
    height: int, activation: Activation | None, launches: Launches
):
    """Inputs fill no step and rows of the weight no tile; a NaN or an infinity stays in its row."""
    layer = Layer(torch.bfloat16, hidden=288, inner=80, experts=2, codes="mxfp4")
    weight, (x_NH, ids_Nk, _) = layer.weights.gate_up, layer.rows(20)
    assert isinstance(weight, PackedCodes)
    x_NH[3, 7], x_NH[4, 280] = torch.nan, torch.inf
    tiles = list_tiles(ids_Nk, 2, 0, height, reads())
    got_PI = multiply_tiles(x_NH, weight, tiles, activation=activation)
    assert launches[-1][1]["PACK"] == 0
    for expert in range(2):
        exact_NO = x_NH.double() @ weight.dequantized(torch.float64)[expert].T
        if activation is not None:
            exact_NO = gate(exact_NO.bfloat16().double(), activation)
        got_NO = got_PI[ids_Nk.flatten() == expert]  # each row chose both
        assert got_NO[3:5].isnan().all()
        assert_near(got_NO[:3], exact_NO[:3])
        assert_near(got_NO[5:], exact_NO[5:])
        if activation is None:
            torch.testing.assert_close(got_NO[5:].double(), exact_NO[5:], rtol=2**-7, atol=1e-5)


@triton.jit
def _split(x_ptr, high_ptr, low_ptr, scales_ptr, STEP: tl.constexpr, HEIGHT: tl.constexpr):
    at_SM = tl.arange(0, STEP)[:, None] * HEIGHT + tl.arange(0, HEIGHT)[None, :]
    at_MG = tl.arange(0, HEIGHT)[:, None] * (STEP // 32) + tl.arange(0, STEP // 32)[None, :]
    high_SM, low_SM, high_MG, low_MG = split_e4m3(tl.load(x_ptr + at_SM))
    tl.store(high_ptr + at_SM, high_SM)
    tl.store(low_ptr + at_SM, low_SM)
    tl.store(scales_ptr + at_MG, high_MG)
    tl.store(scales_ptr + HEIGHT * STEP // 32 + at_MG, low_MG)


def test_bf16_is_the_sum_of_two_e4m3_values():
    """Exactly, unless it is below 2^-13 of its block's largest value."""
    x_SM = torch.randn(64, 16) * 2.0 ** torch.randint(-20, 3, (64, 16))
    x_SM = (x_SM * 2.0 ** torch.arange(-105, 119, 14)).bfloat16().to(DEVICE)
    x_SM[32:, 0], x_SM[:32, 1] = 0.0, -0.0
    parts = [torch.empty(64, 16, dtype=torch.float8_e4m3fn, device=DEVICE) for _ in range(2)]
    scales_2MG = torch.empty(2, 16, 2, dtype=torch.uint8, device=DEVICE)
    _split[(1,)](x_SM, *parts, scales_2MG, STEP=64, HEIGHT=16)
    factors_2MG = scales_2MG.view(torch.float8_e8m0fnu).double()
    total_SM = sum(
        part.double() * factors_MG.T.repeat_interleave(32, 0)
        for part, factors_MG in zip(parts, factors_2MG, strict=True)
    )
    largest_SM = x_SM.double().abs().unflatten(0, (2, 32)).amax(1).repeat_interleave(32, 0)
    error_SM = (total_SM - x_SM.double()).abs()
    assert (error_SM <= 2.0**-16 * largest_SM).all()
    assert not error_SM[x_SM.double().abs() >= 2.0**-13 * largest_SM].any()
    assert error_SM.any(), "none was so small"


@pytest.mark.parametrize("codes", FORMS)
@pytest.mark.one_in(2)
def test_ranks_with_some_of_the_experts_or_a_part_of_each_compute_their_own(codes: str | None):
    """Of a rank's parts of experts, only one rank's have the biases of the results."""
    (x_NH, ids_Nk, shares_Nk) = Layer(torch.float32, experts=6).rows(5)
    of = Layer(torch.float32, experts=3, codes=codes, biases=True).weights
    for rank in (of, replace(of, first_expert=3), replace(of, first_expert=3, down_bias_EH=None)):
        found_NH = TritonBackend(DEVICE).experts(rank)(x_NH, ids_Nk, shares_Nk)
        assert_near(found_NH, exact_experts(rank, x_NH, ids_Nk, shares_Nk))


def test_an_empty_batch_gives_no_rows():
    layer = Layer(torch.float32)
    assert TritonBackend(DEVICE).experts(layer.weights)(*layer.rows(0)).shape == (0, 160)


@pytest.mark.parametrize("codes", FORMS)
@pytest.mark.parametrize("dtype", (*HALVES, torch.float32) if ON_GPU else (torch.float32,))
@pytest.mark.one_in(2)
def test_in_tiles_of_one_height_a_rows_bits_do_not_depend_on_its_batch(
    dtype: torch.dtype, codes: str | None, launches: Launches
):
    """Compile-time constants are compared too: the interpreter would not show that a tile's height counts."""
    names = ("OUTPUTS", "HEIGHT", "COLUMNS", "STEP")
    layer = Layer(dtype, codes=codes, biases=True, experts=3)
    x_NH, ids_Nk, weights_Nk = layer.rows(150)  # a hundred pairs of each expert: more than a tile
    experts = TritonBackend(DEVICE, batch_invariant=True).experts(layer.weights)
    everything = experts(x_NH, ids_Nk, weights_Nk)
    for which in ([7], [149, 7, 90], list(range(149, -1, -1))):
        alone = experts(x_NH[which], ids_Nk[which], weights_Nk[which])
        assert torch.equal(alone, everything[which])
    cuts = {tuple(of[name] for name in names) for kernel, of in launches if kernel == "_multiply_tiles"}
    assert len(cuts) == 2 and {cut[1] for cut in cuts} == {INVARIANT_HEIGHT}, "one of each product"


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.one_in(2)
def test_every_weight_has_its_value_bit_by_bit(name: str, dtype: torch.dtype):
    weight, x_NH = random_codes(name, 2, 48, 160).matrix(1), torch.eye(160).to(dtype)
    packed = stack([weight], 1)
    assert isinstance(packed, PackedCodes)
    tiles = list_tiles(torch.zeros(len(x_NH), 1, dtype=torch.int32), 1, 0, 16, reads())
    got_NO = multiply_tiles(x_NH, for_kernels(packed), tiles)
    expected = weight.to(DEVICE).dequantized(dtype)
    assert torch.equal(got_NO.T, expected) and torch.equal(packed.dequantized(dtype)[0], expected)


def test_every_code_and_power_of_mxfp4_has_its_value():
    scales = torch.tensor([[1, 2, 100, 127, MAX_EXPONENT]] if not ON_GPU else [[100, 110, 120, 127, 128]])
    codes_J = torch.arange(16) + 16 * torch.arange(16).flip(0)
    weight = PackedCodes.mxfp4(codes_J.to(torch.uint8).expand(1, 1, 5, 16), scales.to(torch.uint8)[None])
    x_NH = torch.eye(5 * 32)
    tiles = list_tiles(torch.zeros(len(x_NH), 1, dtype=torch.int32), 1, 0, 16, reads())
    got_N1 = multiply_tiles(x_NH, for_kernels(weight), tiles)
    assert torch.equal(got_N1[:, 0], weight.dequantized(torch.float32)[0, 0])


@pytest.mark.parametrize(("name", "scale"), [("mxfp4", MAX_EXPONENT + 1), ("nvfp4", 2.5)])
def test_a_scale_beyond_the_kernels_range_is_refused_at_load(name: str, scale: float):
    layer = Layer(torch.float32, codes=name)
    assert isinstance(layer.weights.down, PackedCodes)
    layer.weights.down.scales[1, 2, 0] = scale
    with pytest.raises(CheckpointError, match=r"has the scale (4|2\.5);.*at most 2"):
        TritonBackend(DEVICE).experts(layer.weights)


def test_experts_are_quantized_at_load_and_their_bytes_are_counted():
    layer, backend = Layer(torch.float32), TritonBackend(DEVICE, quantization="int4")
    given_ = layer.rows(5)
    expected = exact_experts(layer.weights.quantized("int4"), *given_)
    assert_near(backend.experts(layer.weights)(*given_), expected)
    assert backend.weight_bytes == 5 * 3 * 96 * 160 * 4.5 / 8
    assert (backend.num_expert_codes, backend.num_expert_plain) == (2, 0)


def run_ptx(ptx: str, num_results: int, given: Tensor) -> list[Tensor]:
    """The result registers of integer instructions for each value of the last operand, in 64 bits."""
    registers = {f"${num_results}": given}

    def value(name: str) -> Tensor | int:
        return registers[name] if name in registers else int(name, 0)

    def selected(low: Tensor, high: int, selector: int) -> Tensor:
        """`prmt` in its default mode: bytes of both operands, a nibble of the selector for each."""
        both = low | high << 32
        return sum((both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))

    operations: dict[str, Callable[..., Tensor]] = {
        "prmt.b32": selected,
        "and.b32": lambda a, b: a & b,
        "or.b32": lambda a, b: a | b,
        "xor.b32": lambda a, b: a ^ b,
        "shr.u32": lambda a, b: a >> b,
        "shl.b32": lambda a, b: (a << b) & 0xFFFFFFFF,
        "mul.lo.u32": lambda a, b: (a * b) & 0xFFFFFFFF,
        "cvt.u32.u16": lambda a: a & 0xFFFF,
        "mov.b32": lambda a: a,
    }
    for line in ptx.strip().strip("{}").strip().splitlines():
        operation, _, operands = line.strip().rstrip(";").partition(" ")
        if operation != ".reg":
            result, *sources = operands.split(", ")
            registers[result] = operations[operation](*map(value, sources))
    return [registers[f"${i}"] for i in range(num_results)]


def test_int8_codes_are_unpacked_by_pairs():
    """All codes in both places, with the kernels' PTX in Python."""
    bytes_X2 = torch.stack((torch.arange(256), torch.arange(256).roll(1)), dim=1)
    (register_X,) = run_ptx(INT8_PTX.value, 1, bytes_X2[:, 0] | bytes_X2[:, 1] << 8)
    halves_X2 = torch.stack((register_X & 0xFFFF, register_X >> 16), dim=1)
    found_X2 = halves_X2.to(torch.uint16).view(torch.float16) - 1152.0
    assert torch.equal(found_X2, bytes_X2.to(torch.uint8).view(torch.int8).half())


@pytest.mark.parametrize("num_bytes", [2, 4])
@pytest.mark.parametrize("kind", ["e2m1", "int4"])
def test_codes_unpacked_by_pairs_are_those_that_are_dequantized(
    kind: Literal["e2m1", "int4"], num_bytes: int
):
    """All codes in all places, in bf16, with all scales: bit by bit. The kernels' PTX runs here in Python."""
    every = torch.arange(256)
    bytes_XB = torch.stack([every.roll(i) for i in range(num_bytes)], dim=1)
    word_X = sum(bytes_XB[:, i] << 8 * i for i in range(num_bytes))
    ptx = (E2M1_PTX if kind == "e2m1" else INT4_PTX)[num_bytes].value
    registers = torch.stack(run_ptx(ptx, num_bytes, word_X), dim=1)
    halves_X2P2 = torch.stack((registers & 0xFFFF, registers >> 16), dim=2).unflatten(1, (2, -1))
    bits_XB2 = halves_X2P2.flatten(2).transpose(1, 2)  # low and high code of each byte
    value_XB2 = bits_XB2.to(torch.uint16).view(torch.bfloat16)
    if kind == "e2m1":
        scales = torch.arange(MAX_EXPONENT + 1, dtype=torch.uint8)
        factor = ((scales.to(torch.int16) + 126) << 7).view(torch.bfloat16)
    else:
        scales = torch.tensor([3e-39, 1e-3, 0.0123, 1.0, 7.75, 3e36], dtype=torch.bfloat16)
        factor, value_XB2 = scales, value_XB2 - (128 + ZERO)
    got_XSI = value_XB2.flatten(1)[:, None] * factor[:, None]
    blocks = bytes_XB.to(torch.uint8).repeat(1, 16 // num_bytes)[:, None].expand(-1, len(scales), 16)
    packed = PackedCodes(kind, blocks, scales[:, None].expand(256, -1, 1))
    expected_XSI = packed.dequantized(torch.bfloat16)[..., : 2 * num_bytes]
    assert torch.equal(got_XSI.view(torch.int16), expected_XSI.contiguous().view(torch.int16))


def test_arranged_codes_are_unpacked_to_those_that_are_dequantized():
    """All codes in all places of a lane, in bf16, with all scales; the kernel's PTX runs here in Python."""
    number_OJ = torch.arange(2**16).view(-1, 8)
    codes_OI = torch.cat([number_OJ >> 4 * q & 15 for q in range(4)], dim=1).to(torch.uint8)
    scales_O1 = (torch.arange(len(codes_OI)) % (MAX_EXPONENT + 1)).to(torch.uint8)[:, None]
    packed = PackedCodes.of(QuantizedMatrix("e2m1", codes_OI, scales_O1))
    lanes_OJ = arrange(packed).codes.long() & 0xFFFF
    registers_4OT = torch.stack(run_ptx(ARRANGED_PTX.value, 4, lanes_OJ[:, ::2] | lanes_OJ[:, 1::2] << 16))
    halves_4OT2 = torch.stack((registers_4OT & 0xFFFF, registers_4OT >> 16), dim=-1)
    value_4OJ = halves_4OT2.to(torch.uint16).view(torch.bfloat16).flatten(2)
    got_4OJ = value_4OJ * ((scales_O1.to(torch.int16) + 126) << 7).view(torch.bfloat16)
    expected_OI = QuantizedMatrix("e2m1", codes_OI, scales_O1).dequantized(torch.bfloat16)
    assert torch.equal(got_4OJ.movedim(0, 1).flatten(1).view(torch.int16), expected_OI.view(torch.int16))
