"""Fused elementwise kernels against the classes used on a CPU (device: see `devices.py`).

In fp16 they must round where those classes round: nearly all elements are equal bit by bit, and none is far.
Triton's interpreter cuts bf16 instead of rounding it, so that bf16 is held to a few ulp only.

Legend: N rows, H hidden, I inner size, Q query heads, K kv heads, J = Q + 2K, D head dim, L layers.
"""

from __future__ import annotations

import pytest
import torch
from manta.cluster.pages.kv_cache_groups import KVCacheSpec
from manta.drafter.compute.backend import PlacedRows
from manta.drafter.compute.block_weights import AttentionShape
from manta.drafter.compute.eager.attention_metadata import EagerPass
from manta.drafter.compute.eager.backend import EagerAttention, EagerContextWriter
from manta.drafter.compute.gpu_triton.attention.norm_rope_kv_write import norm_rotate_write, write_context
from manta.drafter.compute.gpu_triton.common.element_ops import add_rms_norm, gate, rms_norm
from manta.drafter.compute.layers.linear import Activation, RMSNorm
from manta.drafter.compute.layers.linear import gate as gate_of_the_layer
from manta.drafter.compute.layers.rope import RopeConfig, RotaryEmbedding
from manta.drafter.compute.memory.kv_cache import UNSCALED, KVScales, PagedKVCache
from support.engines.devices import DEVICE, HALVES, ON_GPU
from torch import Tensor
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("on_the_device")
EPS = 1e-6
MAX_POSITIONS = 300
NUM_PAGES, PAGE_SIZE = 5, 16
FP32 = torch.float32
FP32_TOLERANCE = 4e-6 if ON_GPU else 1e-6  # a GPU's exponentials are coarser
DTYPES = (FP32, *HALVES)


def assert_same(actual: Tensor, expected: Tensor):
    """Assert equality to 1e-6 in fp32, and in half precision to a few ulp of the largest values."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    if actual.numel() == 0:
        return
    tolerance = {FP32: FP32_TOLERANCE, torch.float16: 2e-3, torch.bfloat16: 3e-2}[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    if actual.dtype is torch.float16:
        assert (actual == expected).float().mean() > 0.99


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def weights(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.rand(shape) + 0.5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 192), (33, 64), (3, 2880), (2, 4096), (0, 192)])
@pytest.mark.one_in(2)
def test_the_norm_of_rows_equals_the_layers(rows: int, width: int, dtype: torch.dtype):
    """Rows are slices; with weights in fp32 they are rounded once, at the end."""
    x_NH = randn(rows, 2 * width, dtype=dtype)[:, width:]
    for weight_H in (weights(width, dtype=dtype), weights(width, dtype=FP32)):
        assert_same(rms_norm(x_NH, weight_H, EPS), RMSNorm(weight_H, EPS)(x_NH))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "of_norm", "scalar"),
    [
        (1, 4096, None, None),
        (17, 192, FP32, None),
        (9, 640, FP32, 0.7),
        (2, 2880, None, 0.7),
        (0, 192, None, None),
    ],
)
@pytest.mark.one_in(2)
def test_a_residual_is_added_scaled_and_normed_without_changing_it(
    rows: int, width: int, of_norm: torch.dtype | None, scalar: float | None, dtype: torch.dtype
):
    """Rows are slices. A scaled residual is rounded before and after it is scaled."""
    wide_NH, weight_H = randn(rows, 3 * width, dtype=dtype), weights(width, dtype=of_norm or dtype)
    y_NH, x_NH, before_NH = wide_NH[:, :width], wide_NH[:, 2 * width :], wide_NH.clone()
    sum_NH, normed_NH = add_rms_norm(y_NH, x_NH, weight_H, EPS, scalar)
    assert torch.equal(wide_NH, before_NH)
    expected_NH = x_NH + y_NH if scalar is None else (x_NH + y_NH) * scalar
    assert_same(sum_NH, expected_NH)
    assert dtype is not torch.float16 or scalar or torch.equal(sum_NH, expected_NH)
    assert_same(normed_NH, RMSNorm(weight_H, EPS)(sum_NH))


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_a_norm_of_zeros_is_zero_and_eps_counts(eps: float):
    x_NH, weight_H = torch.zeros(3, 48), weights(48, dtype=FP32)
    x_NH[1] = 1e-2
    assert_same(rms_norm(x_NH, weight_H, eps), RMSNorm(weight_H, eps)(x_NH))


def reference_gate(gate_up_NI2: Tensor, activation: Activation) -> Tensor:
    """Return the layer's result; GELU is exact: 1 + tanh in fp32 loses all digits of negative gates."""
    if activation == "silu":
        return gate_of_the_layer(gate_up_NI2.clone(), activation)
    gate_NI, up_NI = gate_up_NI2.chunk(2, dim=-1)
    return F.gelu(gate_NI.double(), approximate="tanh").to(up_NI.dtype) * up_NI


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "inner"), [(1, 3072), (33, 96), (2, 1000), (0, 96)])
@pytest.mark.one_in(2)
def test_the_gated_product_equals_the_layers(
    rows: int, inner: int, activation: Activation, dtype: torch.dtype
):
    gate_up_NI2 = 4 * randn(rows, 2 * inner, dtype=dtype)
    before_NI2 = gate_up_NI2.clone()
    assert_same(gate(gate_up_NI2, activation), reference_gate(before_NI2, activation))
    assert torch.equal(gate_up_NI2, before_NI2)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # as on a GPU, infinity is right there
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_gated_product_survives_large_gates_and_sliced_rows(activation: Activation):
    wide_NI2 = randn(4, 300, dtype=FP32)
    gate_up_NI2 = wide_NI2[:, 100:]
    gate_up_NI2[0, :4] = torch.tensor([-200.0, -90.0, 90.0, 1e30])
    gate_up_NI2[1, :6] = torch.tensor([float("inf"), -1e30, -0.0, -5.0, -10.0, 10.0])
    assert_same(gate(gate_up_NI2, activation), reference_gate(gate_up_NI2, activation))


def rotary(head_dim: int, dtype: torch.dtype) -> RotaryEmbedding:
    rope = RopeConfig.read({"rope_theta": 1e4}, head_dim, "config.json")
    return RotaryEmbedding(rope, MAX_POSITIONS, dtype, DEVICE)


def tables(head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines [T, D] of all positions."""
    rotation = rotary(head_dim, dtype).at(torch.arange(MAX_POSITIONS))
    return rotation.cos_N1D.squeeze(1), rotation.sin_N1D.squeeze(1)


def two_caches(layers: int, num_kv: int, head_dim: int, dtype: torch.dtype) -> list[PagedKVCache]:
    geometry = KVCacheSpec(num_kv, head_dim, head_dim)
    caches = [PagedKVCache(layers, NUM_PAGES, PAGE_SIZE, geometry, dtype, DEVICE) for _ in range(2)]
    caches[0].kv.copy_(torch.randn(caches[0].kv.shape))
    caches[1].kv.copy_(caches[0].kv)
    return caches


def assert_written(
    cache: PagedKVCache, expected: PagedKVCache, slots_N: Tensor, *, copies_values: bool = True
) -> None:
    """Assert that keys and values in `slots` are the same, and that all other slots are unchanged."""
    ours, theirs = (c.planes(0, c.num_layers).flatten(1, 2) for c in (cache, expected))
    wanted_N = slots_N[slots_N != cache.skip_slot]
    assert_same(ours[:, wanted_N], theirs[:, wanted_N])
    assert not copies_values or torch.equal(ours[:, wanted_N, 1], theirs[:, wanted_N, 1])
    others = torch.ones(ours.shape[1], dtype=torch.bool).index_fill(0, slots_N, False)
    assert torch.equal(ours[:, others], theirs[:, others])


def some_rows(num_rows: int) -> tuple[Tensor, Tensor]:
    """Return positions and distinct slots."""
    return torch.randint(MAX_POSITIONS, (num_rows,)), torch.randperm(NUM_PAGES * PAGE_SIZE)[:num_rows]


class Queries(EagerAttention):
    """Norms, rotates and writes as a transformer block does, and returns the queries."""

    attend = staticmethod(lambda q_NQD, *_, **__: q_NQD)


def reference_write(
    qkv_NJD: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    positions_N: Tensor,
    slots_N: Tensor,
    cache: PagedKVCache,
    layer: int = 0,
    *,
    v_norm: bool = False,
) -> Tensor:
    """Compute by PyTorch's operators, in place; return q."""
    num_kv, dim = cache.geometries[0].num_kv_heads, qkv_NJD.shape[2]
    sizes, rope = (qkv_NJD.shape[1] - 2 * num_kv, num_kv, dim, dim), rotary(dim, qkv_NJD.dtype)
    shape = AttentionShape(*sizes, *(norms or (None, None)), EPS, rope, 1.0, v_norm=v_norm)
    rows = PlacedRows(positions_N, (slots_N,), (None,))
    return Queries(shape)(qkv_NJD.flatten(1), EagerPass(rows), cache, layer)


def write(
    qkv_NJD: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    positions_N: Tensor,
    slots_N: Tensor,
    cache: PagedKVCache,
    layer: int = 0,
    **how: bool,
) -> None:
    """Compute by the kernel, in place, as `reference_write`."""
    rope, pages = tables(qkv_NJD.shape[2], qkv_NJD.dtype), cache.heads(layer)
    qkv_NO, norms_2D = qkv_NJD.flatten(1), norms or (None, None)
    norm_rotate_write(qkv_NO, *norms_2D, EPS, *rope, positions_N, slots_N, *pages, **how)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", ["qwen3", "gemma", "gemma4", None], ids=lambda name: name or "llama")
@pytest.mark.parametrize(
    ("rows", "num_q", "num_kv", "head_dim"),
    [
        (3, 32, 8, 128),
        (33, 4, 2, 64),
        (2, 5, 3, 256),
        (5, 6, 1, 64),
        (1, 4, 2, 16),
        (2, 3, 2, 24),
        (1, 2, 1, 512),
    ],
)
@pytest.mark.one_in(3)
def test_heads_are_normed_rotated_and_written_as_in_the_layers(
    rows: int, num_q: int, num_kv: int, head_dim: int, normed: str | None, dtype: torch.dtype
):
    """Rows are of a wider buffer, positions and slots are int32, and the last two rows are padding."""
    wide_NJD = 3 * randn(rows + 2, num_q + 2 * num_kv + 2, head_dim, dtype=dtype)
    qkv_NJD, behind = wide_NJD[:, :-2], wide_NJD[:, -2:].clone()
    of_norms, v_norm = dtype if normed == "qwen3" else FP32, normed == "gemma4"
    norms = (weights(head_dim, dtype=of_norms), weights(head_dim, dtype=of_norms)) if normed else None
    positions_N, slots_N = some_rows(rows + 2)
    cache, expected_cache = two_caches(2, num_kv, head_dim, dtype)
    positions_N[rows:], slots_N[rows:] = 0, cache.skip_slot
    given = norms, positions_N, slots_N, expected_cache, 1
    expected_q = reference_write(qkv_NJD.clone(), *given, v_norm=v_norm)
    write(qkv_NJD, norms, positions_N.int(), slots_N.int(), cache, 1, v_norm=v_norm)
    assert_same(qkv_NJD[:, :num_q], expected_q)
    assert torch.equal(wide_NJD[:, -2:], behind)
    assert_written(cache, expected_cache, slots_N, copies_values=not v_norm)


@pytest.mark.filterwarnings("ignore:invalid value")  # as on a GPU, NaN is right there
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_no_numbers_are_written_as_zeros(dtype: torch.dtype):
    """Queries keep them, so that a row's own result shows them."""
    qkv_NJD, norm_D = randn(4, 8, 64, dtype=dtype), weights(64, dtype=dtype)
    for row, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        qkv_NJD[row, :, 5] = value
    positions_N, slots_N = some_rows(4)
    for norms in (None, (norm_D, norm_D)):
        cache, expected_cache = two_caches(1, 2, 64, dtype)
        ours_NJD, theirs_NJD = qkv_NJD.clone(), qkv_NJD.clone()
        expected_q = reference_write(theirs_NJD, norms, positions_N, slots_N, expected_cache)
        write(ours_NJD, norms, positions_N, slots_N, cache)
        assert_written(cache, expected_cache, slots_N)
        assert torch.equal(ours_NJD[:, :4].isfinite(), expected_q.isfinite())
        assert not ours_NJD[:3, :4].isfinite().all(-1).any()


def test_heads_normed_in_fp32_are_rounded_once():
    """At position 0 (no rotation) results are nearest to the exact norm; two roundings would miss it."""
    qkv_NJD, norm_D = randn(50, 6, 64, dtype=torch.float16), 1 + 0.0003 * torch.randn(64)
    exact_NJD = qkv_NJD[:, :2].double()
    exact_NJD = exact_NJD / (exact_NJD.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * norm_D.double()
    cache, _ = two_caches(1, 2, 64, torch.float16)
    write(qkv_NJD, (norm_D, norm_D), torch.zeros(50, dtype=torch.int64), torch.arange(50), cache)
    assert (qkv_NJD[:, :2] == exact_NJD.half()).float().mean() > 0.9999


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_divided_by_the_scales_of_e4m3(dtype: torch.dtype):
    qkv_NJD, (positions_N, slots_N) = 3 * randn(9, 8, 24, dtype=dtype), some_rows(9)
    geometry, scales = KVCacheSpec(2, 24, 24), KVScales(0.011, 0.0073)
    caches = [
        PagedKVCache(1, NUM_PAGES, PAGE_SIZE, geometry, torch.float8_e4m3fn, DEVICE, scales=[each])
        for each in (scales, scales, UNSCALED)
    ]
    for cache in caches[1:]:
        cache.write(0, slots_N, qkv_NJD[:, 4:].flatten(1))
    none = (None, None, EPS, None, None)
    norm_rotate_write(
        qkv_NJD.flatten(1), *none, positions_N, slots_N, *caches[0].heads(0), scales=caches[0].scales(0)
    )
    got, expected, unscaled = (cache.kv.view(torch.uint8) for cache in caches)
    assert torch.equal(got, expected) and not torch.equal(got, unscaled)


def test_without_rows_nothing_is_written():
    cache, expected_cache = two_caches(2, 2, 64, FP32)
    none = torch.empty(0, dtype=torch.int64)
    cos_TD, sin_TD = tables(64, FP32)
    norm_rotate_write(torch.empty(0, 512), None, None, EPS, cos_TD, sin_TD, none, none, *cache.heads(0))
    pages = cache.planes(0, 2)
    write_context(torch.empty(0, 8, 64), torch.ones(2, 64), EPS, cos_TD, sin_TD, none, none, pages)
    assert torch.equal(cache.kv, expected_cache.kv)


def reference_context(
    kv_NJD: Tensor, k_norm_LD: Tensor, positions_N: Tensor, slots_N: Tensor, cache: PagedKVCache
):
    write = EagerContextWriter(k_norm_LD, EPS, cache.geometries[0].num_kv_heads)
    rows = PlacedRows(positions_N, (slots_N,), (None,))
    write(kv_NJD.flatten(1), rotary(kv_NJD.shape[2], kv_NJD.dtype), rows, cache, 0)


@pytest.mark.parametrize("of_norms", [None, FP32], ids=["norms alike", "norms in fp32"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "layers", "num_kv", "head_dim"),
    [(3, 5, 8, 128), (33, 2, 2, 64), (2, 3, 3, 256), (4, 1, 1, 64), (1, 2, 2, 16), (2, 2, 2, 24)],
)
@pytest.mark.one_in(3)
def test_context_is_written_to_all_layers_as_in_the_drafter(
    rows: int, layers: int, num_kv: int, head_dim: int, dtype: torch.dtype, of_norms: torch.dtype | None
):
    """Rows are of a wider buffer, positions and slots are int32, and the last two rows are padding."""
    kv_NJD = randn(rows + 2, 2 * layers * num_kv + 3, head_dim, dtype=dtype)[:, :-3]
    k_norm_LD = weights(layers, head_dim, dtype=of_norms or dtype)
    positions_N, slots_N = some_rows(rows + 2)
    cache, expected_cache = two_caches(layers, num_kv, head_dim, dtype)
    positions_N[rows:], slots_N[rows:] = 0, cache.skip_slot
    reference_context(kv_NJD.clone(), k_norm_LD, positions_N, slots_N, expected_cache)
    where = positions_N.int(), slots_N.int(), cache.planes(0, layers)
    write_context(kv_NJD, k_norm_LD, EPS, *tables(head_dim, dtype), *where)
    assert_written(cache, expected_cache, slots_N)


def test_context_in_e4m3_is_divided_by_each_layers_scales():
    """Equal codes as `PagedKVCache` makes them; those of the last layer's values are clamped."""
    kv_NJD, k_norm_LD = randn(5, 8, 64, dtype=FP32), weights(2, 64, dtype=FP32)
    positions_N, slots_N = some_rows(5)
    scales = [KVScales(0.03, 0.5), KVScales(0.25, 0.002)]
    cache, expected_cache = (
        PagedKVCache(2, 8, 16, KVCacheSpec(2, 64, 64), torch.float8_e4m3fn, DEVICE, scales=scales)
        for _ in range(2)
    )
    reference_context(kv_NJD.clone(), k_norm_LD, positions_N, slots_N, expected_cache)
    where = positions_N, slots_N, cache.planes(0, 2), cache.scales_of(0, 2)
    write_context(kv_NJD, k_norm_LD, EPS, *tables(64, FP32), *where)
    found, expected = (each.slots(0, 2)[:, slots_N].float() for each in (cache, expected_cache))
    assert torch.equal(found[..., 128:], expected[..., 128:]) and (found[1].abs() == 448).any()
    assert (found != expected).float().mean() < 0.02, "keys are normed in another order"
    assert (found - expected).abs().max() <= expected.abs().max() / 8
