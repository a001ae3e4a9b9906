"""Stacks whose layers differ, on every backend: page groups, windows, rotations, scales, norms, gates.

A layer of a stack computes what it computes alone, over a cache of its own. A block with all features equals
PyTorch's operators on every backend.

Legend: L layers, R requests, P pages, S page size, K kv heads, D head dim, H hidden, G page groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from manta.cluster.pages.kv_cache_groups import KVCacheSpec, LayerPlace
from manta.drafter.compute.backend import Backend, PlacedRows
from manta.drafter.compute.block_weights import AttentionShape, BlockWeights, DenseMLP
from manta.drafter.compute.cpu_fused.backend import FusedCpuBackend
from manta.drafter.compute.cpu_numba.backend import NumbaBackend
from manta.drafter.compute.cpu_numba.cpu_features import bf16_instructions
from manta.drafter.compute.eager.backend import EagerBackend
from manta.drafter.compute.gpu_triton.backend import TritonBackend
from manta.drafter.compute.layers.linear import RMSNorm
from manta.drafter.compute.memory.kv_cache import PagedKVCache
from support.engines.devices import DEVICE
from support.oracles.random_stacks import CPU, EPS, Numbers, placed_rows
from torch import Tensor

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 4, 2, 32, 64, 96
PAGE_SIZE, NUM_PAGES = 16, 260
REQUESTS = ((640, 16), (33, 5), (0, 40))  # tokens known, rows
LONG = 2  # which is computed alone
PLACES = (LayerPlace(1, 0), LayerPlace(0, 0), LayerPlace(1, 1))
WINDOWS = (20, None, 20)  # of the layers: those of a group have one
GROUP_WINDOWS = (None, 20)
UNTURNED, GATED = 1, 2  # of layers that may have all: one does not rotate, one has a gate


@dataclass(frozen=True)
class Kind:
    """A backend and its requested features; `rich` means every feature of a block."""

    make: Callable[[], Backend]
    dtype: torch.dtype
    rich: bool = True
    device: torch.device = CPU


KINDS = {
    "eager": Kind(EagerBackend, torch.float32),
    "eager bf16": Kind(EagerBackend, torch.bfloat16),
    "loops": Kind(NumbaBackend, torch.float32),
    "loops bf16": Kind(NumbaBackend, torch.bfloat16),
    "compiled": Kind(lambda: FusedCpuBackend(2), torch.bfloat16, rich=False),
    "triton": Kind(lambda: TritonBackend(DEVICE), torch.float32, device=DEVICE),
    "triton bf16": Kind(lambda: TritonBackend(DEVICE), torch.bfloat16, device=DEVICE),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param == "compiled" and bf16_instructions() is None:
        pytest.skip("this CPU has no products of bf16")
    return KINDS[request.param]


class Model:
    """Three random layers, and the contexts of requests for any of them."""

    def __init__(self, kind: Kind) -> None:
        self.numbers = Numbers(kind.dtype, kind.device)
        self.tensor, self._random = self.numbers.tensor, self.numbers.generator
        self.kind, self.dtype, self.device, self.backend = kind, kind.dtype, kind.device, kind.make()
        thetas = (1e4, 1e6) if kind.rich else (1e4, 1e4)
        ropes = [self.numbers.rope(HEAD_DIM, theta) for theta in thetas]
        self.ropes = [ropes[place.group if kind.rich else 0] for place in PLACES]
        self.blocks = [self._block(i) for i in range(len(PLACES))]
        self.final_norm = self._norm(HIDDEN)
        rng = np.random.default_rng(0)
        pages = -(-max(sum(request) for request in REQUESTS) // PAGE_SIZE)
        ids = rng.permutation(NUM_PAGES)
        shape, size = (len(REQUESTS), pages), len(REQUESTS) * pages
        # Of each group, and of layers alone: other pages everywhere.
        self.group_tables = [ids[:size].reshape(shape), ids[size:][:size].reshape(shape)]
        self.own_table = rng.permutation(NUM_PAGES)[:size].reshape(shape)
        for table, first in zip(
            (*self.group_tables, self.own_table), (NUM_PAGES, NUM_PAGES + 9, NUM_PAGES), strict=True
        ):
            table[LONG, :3] = np.arange(first, first + 3)  # the last request's follow each other
        self.contents = [self.tensor(*shape, PAGE_SIZE, 2, KV_HEADS, HEAD_DIM) for _ in PLACES]
        self.x = self.tensor(sum(rows for _, rows in REQUESTS), HIDDEN)

    def _norm(self, size: int) -> RMSNorm:
        """Return a norm; blocks with every feature have fp32 weights, which bf16 cannot represent."""
        weight = 1 + 0.1 * torch.randn(size, generator=self._random)
        weight = weight if self.kind.rich else weight.bfloat16().to(self.dtype)
        return RMSNorm(weight.to(self.device), EPS)

    def _block(self, layer: int) -> tuple[AttentionShape, BlockWeights]:
        rich, linear = self.kind.rich, self._linear
        shape = AttentionShape(
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            v_head_dim=HEAD_DIM,
            q_norm_D=self._norm(HEAD_DIM).weight_H,
            k_norm_D=self._norm(HEAD_DIM).weight_H,
            eps=EPS,
            rope=None if rich and layer == UNTURNED else self.ropes[layer],
            scale=0.3,
            window=WINDOWS[layer],
            v_norm=rich and layer == GATED,
            sinks_Q=torch.randn(HEADS, generator=self._random).to(self.device) if rich else None,
        )
        weights = BlockWeights(
            attention_norm=self._norm(HIDDEN),
            qkv=linear((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            qkv_norm=(lambda qkv_NO: qkv_NO.mul_(0.7)) if rich and layer != GATED else None,
            attention_gate=linear(HEADS * HEAD_DIM, HIDDEN) if rich and layer == GATED else None,
            o=linear(HIDDEN, HEADS * HEAD_DIM),
            attention_out_norm=self._norm(HIDDEN) if rich else None,
            mlp_norm=self._norm(HIDDEN),
            mlp=DenseMLP(
                gate_up=linear(2 * INNER, HIDDEN),
                activation="gelu_tanh" if rich else "silu",
                down=linear(HIDDEN, INNER),
            ),
            mlp_out_norm=self._norm(HIDDEN) if rich else None,
            scalar=0.7 if rich and layer == GATED else None,
        )
        return shape, weights

    def _linear(self, outputs: int, inputs: int):
        return self.backend.linear(self.tensor(outputs, inputs, scale=inputs**-0.5))

    def cache(self, layers: list[int], places: list[LayerPlace], tables: list[np.ndarray]) -> PagedKVCache:
        """Return a cache with these layers' contexts, in any element order within a page."""
        size = (NUM_PAGES + 12, PAGE_SIZE, KVCacheSpec(KV_HEADS, HEAD_DIM, HEAD_DIM))
        cache = PagedKVCache(places, *size, self.dtype, self.device)
        cache.kv.copy_(torch.randn(cache.kv.shape, generator=torch.Generator().manual_seed(5)))
        for layer, place in zip(layers, places, strict=True):
            mine = torch.from_numpy(tables[place.group])
            cache.kv[place.plane, mine] = self.contents[layer].flatten(-3)
        return cache

    def grouped_cache(self) -> PagedKVCache:
        return self.cache([0, 1, 2], list(PLACES), self.group_tables)

    def cache_of(self, layer: int) -> PagedKVCache:
        return self.cache([layer], [LayerPlace(0, 0)], [self.own_table])

    def rows(self, tables: list[np.ndarray], windows: tuple[int | None, ...]) -> PlacedRows:
        """Return all requests' rows, by page group."""
        first, counts = zip(*REQUESTS, strict=True)
        return placed_rows(self.backend, first, counts, tables, PAGE_SIZE, self.device, windows=windows)

    def grouped_rows(self) -> PlacedRows:
        return self.rows(self.group_tables, GROUP_WINDOWS)

    def rows_of(self, layer: int) -> PlacedRows:
        return self.rows([self.own_table], (WINDOWS[layer],))

    def run(self) -> tuple[Tensor, Tensor, PagedKVCache]:
        """Return normed rows, the residual after each layer [N, L, H], and the cache."""
        cache = self.grouped_cache()
        stack = self.backend.stack(self.blocks, self.final_norm, (0, 1, 2))
        normed, taps = stack(self.x.clone(), self.grouped_rows(), cache)
        assert taps is not None
        return normed, taps, cache

    def assert_same_pages(self, grouped: PagedKVCache, own: list[PagedKVCache]) -> None:
        """Assert that each layer's pages equal its own cache's, and that nothing else was written."""
        expected = self.grouped_cache()
        for place, cache in zip(PLACES, own, strict=True):
            mine = torch.from_numpy(self.group_tables[place.group])
            expected.kv[place.plane, mine] = cache.kv[0, torch.from_numpy(self.own_table)]
        assert torch.equal(grouped.kv, expected.kv)


def test_a_layer_of_a_group_computes_what_it_computes_alone(kind: Kind):
    """It has its own page table, slots, window and plane; results are equal bit by bit."""
    model = Model(kind)
    normed, taps, cache = model.run()
    x, own = model.x, [model.cache_of(layer) for layer in range(len(PLACES))]
    for layer, block in enumerate(model.blocks):
        stack = model.backend.stack([block], model.final_norm, (0,))
        normed_alone, tap = stack(x.clone(), model.rows_of(layer), own[layer])
        assert tap is not None
        x = tap[:, 0].contiguous()
        assert torch.equal(x, taps[:, layer]), layer
    assert torch.equal(normed_alone, normed)
    model.assert_same_pages(cache, own)


@pytest.mark.parametrize("name", [name for name in KINDS if KINDS[name].rich and name != "eager"])
def test_every_block_feature_equals_pytorchs_operators(name: str):
    """Results are nearly equal in fp32; in bf16 up to its rounding at every step."""
    model = Model(KINDS[name])
    found, expected = model.run(), Model(KINDS["eager"]).run()
    for got, right in zip(found[:2], expected[:2], strict=True):
        error, size = (got.cpu().float() - right).abs(), right.abs()
        if model.dtype is torch.float32:
            assert error.max() < 2e-5 * size.max()
        else:
            assert error.max() < 0.04 * size.max() and error.mean() < 0.02 * size.mean()


@pytest.mark.parametrize("layers", [[0, 2], [2], [1]], ids=["of group 1", "its second", "of group 0"])
def test_context_of_a_group_is_written_as_for_single_layers(kind: Kind, layers: list[int]):
    model = Model(kind)
    norms_LD = torch.stack([model.blocks[layer][0].k_norm_D for layer in layers])
    width = len(layers) * KV_HEADS * HEAD_DIM
    kv_NO, rope = model.tensor(len(model.x), 2 * width), model.ropes[layers[0]]
    grouped = model.grouped_cache()
    write = model.backend.context_writer(norms_LD, EPS, KV_HEADS)
    write(kv_NO.clone(), rope, model.grouped_rows(), grouped, layers[0])
    own = [model.cache_of(layer) for layer in range(len(PLACES))]
    for nth, layer in enumerate(layers):
        its = slice(nth * KV_HEADS * HEAD_DIM, (nth + 1) * KV_HEADS * HEAD_DIM)
        alone_NO = torch.cat((kv_NO[:, :width][:, its], kv_NO[:, width:][:, its]), dim=1)
        write = model.backend.context_writer(norms_LD[nth : nth + 1], EPS, KV_HEADS)
        write(alone_NO, rope, model.rows_of(layer), own[layer], 0)
        assert not torch.equal(own[layer].kv, model.cache_of(layer).kv), "something was written"
    model.assert_same_pages(grouped, own)


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:overflow encountered")  # in scores that no row sees
def test_pages_before_the_window_may_belong_to_another_request(kind: Kind):
    """Huge values in the windowed group's unseen pages change no bit of the results."""
    model = Model(kind)
    normed, taps, _ = model.run()
    for r, (first, _) in enumerate(REQUESTS):
        unseen = max(first - WINDOWS[0] + 1, 0) // PAGE_SIZE
        for layer in (0, 2):
            model.contents[layer][r, :unseen] = 1e30
    again, again_taps, _ = model.run()
    assert torch.equal(again, normed) and torch.equal(again_taps, taps)
    model.contents[1][0, :1] = 1e30  # the other group's are seen
    assert not torch.equal(model.run()[0], normed)


@pytest.mark.parametrize("out_normed", [False, True], ids=["added as it is", "normed before"])
@pytest.mark.parametrize("name", [name for name in KINDS if KINDS[name].rich])
def test_adding_to_a_residual_does_not_change_the_old_one(name: str, out_normed: bool):
    kind, model = KINDS[name], Model(KINDS[name])
    weight_HI = model.tensor(HIDDEN, INNER, scale=0.1)
    x, residual = model.tensor(5, INNER), model.tensor(5, HIDDEN)
    before, added = residual.clone(), x.double() @ weight_HI.double().T
    norm, out_norm = model._norm(HIDDEN), model._norm(HIDDEN) if out_normed else None
    if out_norm is not None:
        added = _exact_norm(out_norm, added)
    found, normed = model.backend.residual_norm(model.backend.linear(weight_HI), x, residual, norm, out_norm)
    assert torch.equal(residual, before) and found.data_ptr() != residual.data_ptr()
    tolerance = 1e-5 if kind.dtype is torch.float32 else 4e-2
    assert (found.double() - added - residual.double()).abs().max() < tolerance
    assert (normed.double() - _exact_norm(norm, found.double())).abs().max() < tolerance


def _exact_norm(norm: RMSNorm, x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight_H.double()
