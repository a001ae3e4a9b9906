"""Products of few rows with all fused parts, against PyTorch in fp64 (device: see `devices.py`).

Where half precision rounds next to a product (the normed input, the product before gate and residual), so
does the reference: nearly all elements are equal bit by bit, and none is far.

Legend: N rows, K inputs, O outputs, I inner size, T tiles of outputs, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from manta.drafter.compute.checkpoint.packed_codes import PackedCodes
from manta.drafter.compute.checkpoint.quantized_matrix import quantize
from manta.drafter.compute.gpu_triton.common.element_ops import gate
from manta.drafter.compute.gpu_triton.linear import gemm_tiles
from manta.drafter.compute.gpu_triton.linear.fp8_linear import QuantisedWeight, quantised_projection
from manta.drafter.compute.gpu_triton.linear.gemm_choice import MeasuredChoice, choose_own
from manta.drafter.compute.gpu_triton.linear.gemm_tiles import (
    MAX_PACKED_ROWS,
    ROW_TILES,
    ProductWorkspace,
    choose_tiling,
    tile_columns,
)
from manta.drafter.compute.gpu_triton.linear.projections import (
    ChosenProjection,
    OwnProjection,
    PendingNorm,
    TorchProjection,
    as_tensor,
)
from manta.drafter.compute.gpu_triton.linear.skinny_gemm import multiply
from manta.drafter.compute.layers.linear import Linear, RMSNorm
from support.engines.devices import DEVICE, HALVES, ON_GPU, Launches
from support.engines.thread_ranks import ThreadRank, ThreadRanks
from support.oracles.sampling_cases import WHOLE
from torch import Tensor

pytestmark = pytest.mark.usefixtures("on_the_device")
DTYPES = (torch.float32, *HALVES)
# A GPU's products of fp32 are three of tf32.
TOLERANCE = {torch.float32: 1e-5 if ON_GPU else 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
EPS = 1e-6
WORKSPACE = ProductWorkspace(DEVICE)
QWEN3_8B = {  # outputs, inputs, gated
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate_up": (12288, 4096, True),
    "down": (4096, 12288, False),
    "lm_head": (151936, 4096, False),
    "fc": (4096, 20480, False),
    "context": (10240, 4096, False),
}


def assert_near(actual: Tensor, expected: Tensor):
    """Assert a bound of the largest difference from `expected` in fp64, rounded like `actual`."""
    assert actual.shape == expected.shape
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)
    if actual.dtype is not torch.float32:
        assert (actual == expected.to(actual.dtype)).float().mean() > 0.98


def tensor(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape)).to(dtype)


@dataclass
class Product:
    """A weight, perhaps a bias, and rows; and PyTorch's result."""

    rows: int
    inputs: int
    outputs: int
    dtype: torch.dtype
    bias: bool = False

    def __post_init__(self) -> None:
        self.x_NK = tensor(self.rows, self.inputs, dtype=self.dtype)
        self.weight_OK = tensor(self.outputs, self.inputs, dtype=self.dtype, scale=self.inputs**-0.5)
        self.bias_O = tensor(self.outputs, dtype=self.dtype) if self.bias else None
        self.own = OwnProjection(self.weight_OK[None, None], self.bias_O, WORKSPACE)

    def exact(self, x_NK: Tensor) -> Tensor:
        """Return the product of these rows, rounded once."""
        y_NO = x_NK.double() @ self.weight_OK.double().T
        return (y_NO if self.bias_O is None else y_NO + self.bias_O.double()).to(self.dtype)


def test_rows_and_residual_may_be_slices_or_empty():
    product = Product(5, 96, 70, torch.float32)
    wide_NK, residual_NO = tensor(5, 200, dtype=torch.float32), tensor(5, 99, dtype=torch.float32)[:, 20:90]
    got = product.own(wide_NK[:, 100:196], residual_NO)
    assert_near(got, product.exact(wide_NK[:, 100:196]) + residual_NO)
    assert product.own(wide_NK[:0, :96]).shape == (0, 70)


@pytest.mark.parametrize("columns", sorted({tile_columns(tile) for tile in ROW_TILES}))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.sanitized
def test_splits_are_added_in_order_by_the_last_or_a_single_program(
    dtype: torch.dtype, columns: int, launches: Launches
):
    """Also of two tiles of rows, of which each has its own sums."""
    inputs, outputs = 520 if dtype is torch.float32 else 2100, columns + 6
    product = Product(17, inputs, outputs, dtype, bias=True)
    plan = choose_tiling(outputs, inputs, dtype, columns=columns)
    assert plan.splits > 2 and plan.splits * plan.split_tiles * plan.step > inputs, "the last is not whole"
    small, num_sums = ProductWorkspace(DEVICE), plan.tiles * plan.splits * columns * 16
    small.sums_E = small.sums_E[:num_sums]

    def run(
        x_NK: Tensor, tile: int, workspace: ProductWorkspace = WORKSPACE
    ) -> tuple[Tensor, Tensor, object]:
        squares_NT = torch.full((len(x_NK), plan.tiles), torch.nan)
        more = {"bias_O": product.bias_O, "residual_NO": x_NK[:, :outputs], "squares_NT": squares_NT}
        y_NO = multiply(x_NK, product.weight_OK[None, None], plan, workspace, tile, **more)
        assert not workspace.arrived_E.any(), "ready for the next"
        return y_NO, squares_NT, launches[-1][1]["PROGRAMS"]

    together, squares, _ = run(product.x_NK, 32)
    assert_near(together, product.exact(product.x_NK) + product.x_NK[:, :outputs])
    few, few_squares, programs = run(product.x_NK[:16], 16, small)
    assert programs == plan.splits, "there is room"
    # Without room for two tiles of rows each program adds up all splits itself.
    for workspace, expected in ((WORKSPACE, plan.splits), (small, 1)):
        several, several_squares, programs = run(product.x_NK, 16, workspace)
        assert programs == expected
        assert torch.equal(several[:16], few) and torch.equal(several_squares[:16], few_squares)
        assert_near(several, product.exact(product.x_NK) + product.x_NK[:, :outputs])
    assert torch.allclose(squares[:16], few_squares, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", (65, 128, 130))
@pytest.mark.one_in(2)
def test_more_rows_than_64_have_all_fused_parts(rows: int, dtype: torch.dtype, launches: Launches):
    """In a tile of 128 rows and of as many of a weight, and in two; in fp32 in tiles of 64."""
    first, second = Product(rows, 200, 150, dtype, bias=True), Product(rows, 150, 146, dtype)
    residual_NH, norm = tensor(rows, 150, dtype=dtype), RMSNorm(torch.rand(150).to(dtype) + 0.5, EPS)
    sum_NH, left = first.own.added(first.x_NK, residual_NH, norm)
    assert_near(sum_NH, first.exact(first.x_NK) + residual_NH)
    normed_NH = norm(sum_NH)
    assert_near(second.own(left), second.exact(normed_NH))
    assert_near(second.own.gated(left, "silu"), gate(second.exact(normed_NH), "silu"))
    tiles = {(each["ROWS"], each["COLUMNS"]) for name, each in launches if name == "_multiply"}
    assert tiles == ({(64, 64)} if dtype is torch.float32 else {(128, 128)})


@pytest.mark.parametrize("dtype", (*HALVES, torch.float32) if ON_GPU else (torch.float32,))
def test_in_one_tile_a_rows_bits_do_not_depend_on_its_batch(dtype: torch.dtype, launches: Launches):
    """Compile-time constants are compared too: the interpreter would not show that a tile's height counts."""
    rows, names = 70, ("OUTPUTS", "GATED", "ROWS", "SPLITS", "SPLIT_TILES")  # more than a tile
    down, gate_up = Product(rows, 1100, 136, dtype), Product(rows, 136, 90, dtype, bias=True)
    for product in (down, gate_up):
        product.own = OwnProjection(product.weight_OK[None, None], product.bias_O, WORKSPACE, one_tile=True)
    residual_NH, norm = tensor(rows, 136, dtype=dtype), RMSNorm(torch.rand(136).to(dtype), EPS)

    def run(*which: int) -> Tensor:
        at = list(which)
        sum_NH, left = down.own.added(down.x_NK[at], residual_NH[at], norm)
        return torch.cat((sum_NH, gate_up.own(left), gate_up.own.gated(left, "silu")), dim=1)

    everything = run(*range(rows))
    assert torch.equal(run(0, 69, 33), everything[[0, 69, 33]])
    assert torch.equal(run(*range(40, 56)), everything[40:56])
    cuts = {tuple(constants[name] for name in names) for _, constants in launches}
    assert len(cuts) == 3, "one of each product, whatever the rows"


def test_rows_are_in_the_smallest_tile_that_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tile takes too much shared memory before Hopper, and fp32 too many registers after it."""
    half, whole = torch.bfloat16, torch.float32
    asked, workspace = (1, 16, 17, 32, 33, 64, 65, 128, 129), ProductWorkspace(DEVICE)
    small = [16, 16, 32, 32, 64, 64, 64, 64, 64]
    for capability, tiles in {(10, 0): [*small[:6], 128, 128, 128], (8, 9): small}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, it=capability: it)
        workspace.largest_tile = gemm_tiles._largest_tile(torch.device("cuda"))
        assert [workspace.row_tile(rows, half) for rows in asked] == tiles
        assert [workspace.row_tile(rows, whole) for rows in asked] == small


@pytest.mark.parametrize("processors", [132, 148])
@pytest.mark.parametrize("name", QWEN3_8B)
def test_the_split_of_a_weight_keeps_every_multiprocessor_busy(name: str, processors: int):
    """Two programs for nearly each, and most of the steps of a perfect division, on an H100 and a B200."""
    outputs, inputs, gated = QWEN3_8B[name]
    plan = choose_tiling(outputs, inputs, torch.bfloat16, gated=gated, processors=processors)
    programs = plan.tiles * plan.splits
    assert programs >= 1.89 * processors
    if processors == 132:
        assert plan.splits * plan.split_tiles * plan.step == inputs, "no step is in vain"
    ideal = plan.tiles * inputs / plan.step / processors
    assert ideal / (-(-programs // processors) * plan.split_tiles) > (0.92 if processors == 132 else 0.86)
    wide = choose_tiling(
        outputs, inputs, torch.bfloat16, gated=gated, processors=processors, columns=tile_columns(128)
    )
    programs = wide.tiles * wide.splits
    assert programs >= 0.95 * processors and (wide.splits == 1 or programs <= 4 * processors)
    ideal = wide.tiles * inputs / wide.step / processors
    assert ideal / (-(-programs // processors) * wide.split_tiles) > 0.7


def test_a_small_weight_is_split_further_to_use_more_multiprocessors():
    """gpt-oss's output projection on one of eight ranks has 45 tiles of 4 steps."""
    plan = choose_tiling(2880, 512, torch.bfloat16)
    assert (plan.tiles, plan.splits, plan.split_tiles) == (45, 2, 2)
    assert choose_tiling(2880 * 4, 512, torch.bfloat16).splits == 1


def test_products_are_planned_for_the_devices_multiprocessors():
    workspace = ProductWorkspace(DEVICE)
    assert ON_GPU or workspace.processors == 132
    weight_OK = torch.zeros(4096, 4096, dtype=torch.float16, device="meta")
    plans = []
    for processors in (132, 148):
        workspace.processors = processors
        plans.append(OwnProjection(weight_OK[None, None], None, workspace)._tiling(64).splits)
    assert plans[0] != plans[1]


class Clock:
    """Runs calls and reports scripted times."""

    def __init__(self, *milliseconds: float) -> None:
        self.left = list(milliseconds)

    def __call__(self, call: Callable[[], object]) -> float:
        call()
        return self.left.pop(0)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANTA_CACHE_DIR", str(tmp_path))


def test_the_faster_product_is_measured_once_per_weight_and_use(own_cache: None):
    product = Product(17, 64, 64, torch.float16)
    torch_s = TorchProjection(Linear(product.weight_OK))
    # ours and PyTorch's in turns
    clock = Clock(1, 2, 2, 1, 2, 1, 1, 2, *(1, 2) * 4, *(2, 1) * 4, *(1, 2) * 4)
    choice, asked = MeasuredChoice(clock), (1, 16, 17, 32, 33, 64, 65, 128, 129, 0)
    of = [rows for rows in asked if choice("plain", product.own, torch_s, rows, torch.float16)]
    assert of == [1, 16, 65, 128]
    assert len(clock.left) == 24
    chosen = ChosenProjection(product.own, torch_s, choice)
    sum_NH, left = chosen.added(product.x_NK, product.x_NK, RMSNorm(torch.ones(64).half(), EPS))
    assert isinstance(left, PendingNorm), "ours added"
    assert_near(chosen(left), product.exact(left.tensor()))  # and PyTorch's took what ours left to it
    assert_near(chosen.gated(left, "silu"), gate(product.exact(left.tensor()), "silu"))
    assert not clock.left
    assert_near(sum_NH, product.exact(product.x_NK) + product.x_NK)


def test_the_next_start_on_this_device_computes_the_same_bits(own_cache: None):
    """A clock's noise would choose otherwise; another shape is measured for itself."""
    product, other = Product(17, 64, 64, torch.float16), Product(17, 64, 48, torch.float16)

    def choose(product: Product, clock: Clock) -> list[bool]:
        torch_s = TorchProjection(Linear(product.weight_OK))
        dtype = torch.float16
        return [MeasuredChoice(clock)("plain", product.own, torch_s, rows, dtype) for rows in (1, 17, 64)]

    assert choose(product, Clock(1, 2, 2, 1, 1, 2, 1, 2)) == [True, False, True]
    assert choose(product, Clock()) == [True, False, True], "nothing is timed"
    assert choose(other, Clock(2, 1, 2, 1, 2, 1, 2, 1)) == [False] * 3


def test_codes_are_measured_up_to_256_rows_and_by_their_form(own_cache: None):
    """A dequantized weight is another product, which may be faster for some rows."""
    product = Product(200, 64, 48, torch.float16)
    weight = QuantisedWeight.of(product.weight_OK[None, None])
    clock = Clock(*(1, 2) * 3, 2, 1, 1, 2, *(1, 2) * 5)
    project = quantised_projection(weight, None, WORKSPACE, MeasuredChoice(clock))
    assert isinstance(project, ChosenProjection)
    choose = partial(project._choice, "plain", project._own, project._other)
    ours = [rows for rows in (1, 64, 65, 128, 129, 256, 257) if choose(rows, torch.float16)]
    assert ours == [1, 64, 129, 256] and len(clock.left) == 10
    assert choose(1, torch.bfloat16) and not clock.left, "another dtype is measured for itself"
    packed = PackedCodes.of(quantize(tensor(64, 64, dtype=torch.float32), "int4"))
    scales_OG = packed.scales
    alike = (
        packed,
        replace(packed, code="e2m1"),
        replace(packed, scales=scales_OG.double()),
        replace(packed, scales=scales_OG.repeat_interleave(2, 1)),
        replace(packed, zeros=scales_OG),
    )
    forms = {OwnProjection(each.codes[None, None], None, WORKSPACE, packed=each).form for each in alike}
    assert len({*forms, project._own.form}) == len(alike) + 1


@pytest.mark.skipif(ON_GPU, reason="the ranks are threads on a CPU")
@pytest.mark.parametrize("num_ranks", [2, 4] if WHOLE else [2])
def test_all_ranks_choose_what_rank_0_has_measured(
    num_ranks: int, own_cache: None, one_launch_at_a_time: None
):
    """Routers too: a logit's last bit decides a near-tie. An error on rank 0 is one on all."""

    def run(rank: ThreadRank) -> tuple[list[list[bool]], str, int]:
        workspace, timed, is_broken = ProductWorkspace("cpu"), list[object](), False

        def clock(call: Callable[[], object]) -> float:
            """Rank 0 finds ours faster at 16 and 64 rows, the others at 32."""
            timed.append(call)
            if is_broken:
                raise RuntimeError("out of memory")
            is_second = (len(timed) - 1) // 2 % 4 == 1
            return float((len(timed) % 2 == 0) ^ (is_second ^ (rank.rank > 0)))

        def router(outputs: int) -> tuple[OwnProjection, TorchProjection]:
            weight_OK, bias_O = torch.ones(outputs, 32), torch.ones(outputs) if rank.rank == 0 else None
            return OwnProjection(weight_OK[None, None], bias_O, workspace), TorchProjection(Linear(weight_OK))

        choice = MeasuredChoice(clock, rank)
        choose = partial(choice, "plain")
        found = [
            [choose(*router(outputs), rows, torch.float32) for rows in (1, 17, 64)] for outputs in (8, 16)
        ]
        is_broken = True
        with pytest.raises(RuntimeError) as caught:
            choice("normed", *router(8), 1, torch.float32)
        return found, str(caught.value), len(timed)

    for rank, (found, error, num_timed) in enumerate(ThreadRanks(num_ranks).run(run)):
        assert found == [[True, False, True]] * 2
        assert num_timed == (0 if rank else 17), "rank 0 measures for all"
        assert "rank 0 could not measure" in error if rank else error == "out of memory"


def dequantized(weight: QuantisedWeight, dtype: torch.dtype) -> Tensor:
    return (weight.codes_PLRK.flatten(0, 2).float() * weight.scale_O[:, None]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", (5, 64, 65, MAX_PACKED_ROWS, MAX_PACKED_ROWS + 1))
@pytest.mark.one_in(2)
def test_a_quantized_product_equals_the_dequantized_weights(
    rows: int, dtype: torch.dtype, launches: Launches
):
    """Everything is fused in one tile of rows and in two; for more, a launch dequantizes for PyTorch."""
    plain = Product(rows, 200, 90, dtype, bias=True)
    plain.weight_OK[3] = 0
    weight = QuantisedWeight.of(plain.weight_OK[None, None])
    plain.weight_OK, exact = dequantized(weight, dtype), plain.weight_OK
    torch.testing.assert_close(plain.weight_OK, exact, rtol=2**-4, atol=1e-4)
    assert not torch.equal(plain.weight_OK, exact)
    own = quantised_projection(weight, plain.bias_O, WORKSPACE, choose_own)
    residual_NO, norm = tensor(rows, 90, dtype=dtype), RMSNorm(torch.rand(90).to(dtype) + 0.5, EPS)
    assert_near(own(plain.x_NK, residual_NO), plain.exact(plain.x_NK) + residual_NO)
    assert_near(own.gated(plain.x_NK, "silu"), gate(plain.exact(plain.x_NK), "silu"))
    sum_NO, left = own.added(plain.x_NK, residual_NO, norm)
    assert_near(as_tensor(left), norm(sum_NO))
    names = [kernel for kernel, _ in launches]
    assert names.count("_multiply") == 3 * (rows <= MAX_PACKED_ROWS) == 3 - names.count("_dequantize")


def test_quantized_weights_in_blocks_equal_those_of_their_rows():
    qkv_LOK = tensor(3, 90, 72, dtype=torch.float32)
    blocks_PLRK = qkv_LOK[:, 50:].unflatten(1, (2, 20)).transpose(0, 1)
    weight = QuantisedWeight.of(blocks_PLRK)
    rows = [QuantisedWeight.of(row_K[None, None, None]) for row_K in blocks_PLRK.flatten(0, 2)]
    rows_OK = torch.cat([dequantized(row, torch.float32) for row in rows])
    assert torch.equal(dequantized(weight, torch.float32), rows_OK)
    x_NK = tensor(7, 72, dtype=torch.float32)
    expected = (x_NK.double() @ rows_OK.double().T).float()
    assert_near(quantised_projection(weight, None, WORKSPACE, choose_own)(x_NK), expected)
