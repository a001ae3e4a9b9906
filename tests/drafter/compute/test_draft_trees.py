"""Rows of draft trees: bit by bit what a row's path computes as a chain, which other tests compare.

A path becomes a chain by moving its K/V rows to consecutive slots, which tests that as well.

Legend: N rows, R requests, Q query heads, K kv heads, D head dim, F head dim of values, P pages, S page size,
T keys.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from manta.cluster.pages.kv_cache_groups import KVCacheSpec
from manta.drafter.compute.backend import Backend
from manta.drafter.compute.batch_invariance import rows_are_invariant
from manta.drafter.compute.cpu_fused.backend import FusedCpuBackend
from manta.drafter.compute.cpu_numba.backend import NumbaBackend
from manta.drafter.compute.cpu_numba.cpu_features import bf16_instructions
from manta.drafter.compute.draft_trees import branches, paths_of
from manta.drafter.compute.eager.attention import paged_attention
from manta.drafter.compute.eager.attention_metadata import AttentionBatch
from manta.drafter.compute.eager.backend import EagerBackend
from manta.drafter.compute.gpu_triton.attention.attention_tiles import (
    AttentionKind,
    AttentionWorkspace,
    list_work,
    rows_from_host,
)
from manta.drafter.compute.gpu_triton.attention.paged_attention import verify_attention
from manta.drafter.compute.gpu_triton.backend import TritonBackend
from manta.drafter.compute.memory.kv_cache import PagedKVCache
from support.engines.devices import DEVICE
from support.oracles.random_stacks import RandomStack, StackShape, slots_of
from torch import Tensor

pytestmark = pytest.mark.usefixtures("on_the_device")
PAGE_SIZE = 16
PLAIN = KVCacheSpec(2, 32, 32)


@dataclass(frozen=True)
class Requests:
    """Requests of (context length, parents of its rows, or the number of rows of a chain)."""

    lists: tuple[tuple[int, list[int] | int], ...]

    @property
    def firsts(self) -> np.ndarray:
        return np.array([first for first, _ in self.lists])

    @property
    def counts(self) -> np.ndarray:
        return np.array([rows if isinstance(rows, int) else len(rows) for _, rows in self.lists])

    @property
    def paths(self) -> np.ndarray:
        trees = [rows for _, rows in self.lists if not isinstance(rows, int)]
        depth = max(int((paths_of(rows, len(rows)) >= 0).sum(1).max()) for rows in trees)
        chain = [np.full((rows if isinstance(rows, int) else 0, depth), -1) for _, rows in self.lists]
        own = [paths_of([] if isinstance(rows, int) else rows, depth) for _, rows in self.lists]
        return np.concatenate([part for pair in zip(chain, own, strict=True) for part in pair])

    def branches(self) -> list[tuple[int, int, np.ndarray]]:
        """Return each branch's request, that request's first row, and the branch's offsets."""
        starts_R = np.cumsum(self.counts) - self.counts
        paths_ND = self.paths
        return [
            (r, int(start), path)
            for r, start in enumerate(starts_R)
            if paths_ND[start, 0] >= 0
            for path, _ in branches(paths_ND[start : start + self.counts[r]])
        ]


def tree(num_rows: int, seed: int, reach: int = 6) -> list[int]:
    """Return a random tree's parents, among the last `reach` rows."""
    numbers = random.Random(seed)
    return [-1, *(numbers.randrange(max(0, row - reach), row) for row in range(1, num_rows))]


MANY = Requests(
    (
        (0, tree(9, 0)),
        (40, 5),
        (37, [-1, 0, 1, 2, 3, 4]),  # a chain, given as a tree
        (0, 21),
        (15, tree(30, 1)),
        (300, tree(17, 2, 3)),
        (250, 1),
        (100, [-1, *[0] * 8]),  # leaves of one root
    )
)


def random_pages(requests: Requests) -> np.ndarray:
    """Return page ids [R, P]: each page belongs to one request."""
    lengths = requests.firsts + requests.counts
    shape = (len(lengths), -(-int(lengths.max()) // PAGE_SIZE))
    return np.random.default_rng(0).permutation(shape[0] * shape[1]).reshape(shape)


@dataclass(frozen=True)
class Layer:
    heads: int = 4
    geometry: KVCacheSpec = PLAIN
    window: int | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None


LAYERS = {
    "plain": Layer(),
    "window": Layer(window=20),
    "sinks": Layer(sinks=True),
    "shorter values": Layer(geometry=KVCacheSpec(2, 32, 16)),
    "latents": Layer(geometry=KVCacheSpec(1, 48, 32, v_in_k=True)),
    "e4m3": Layer(kv_dtype=torch.float8_e4m3fn),
}


class Case:
    """A layer's K and V at random pages, and queries of all rows."""

    def __init__(self, layer: Layer, requests: Requests) -> None:
        torch.manual_seed(0)
        self.layer, self.requests = layer, requests
        kind, dtype = layer.geometry, layer.kv_dtype or layer.dtype
        self.pages_RP = random_pages(requests)
        self.cache = PagedKVCache(1, self.pages_RP.size, PAGE_SIZE, kind, dtype, DEVICE)
        values = torch.randn(self.cache.kv.shape)
        self.cache.kv.copy_(values.to(dtype))
        self.q = torch.randn(int(requests.counts.sum()), layer.heads, kind.head_dim).to(layer.dtype)
        self.sinks = torch.randn(layer.heads) if layer.sinks else None
        self.scale = 0.2

    def slots(self, r: int, positions: np.ndarray) -> Tensor:
        return slots_of(self.pages_RP[r], positions, PAGE_SIZE).to(DEVICE)

    def places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, torch.device, int | None]:
        first_R, rows_R = self.requests.firsts, self.requests.counts
        return first_R, rows_R, self.pages_RP, PAGE_SIZE, DEVICE, self.layer.window

    def chain_of(self, r: int, start: int, path: np.ndarray) -> Case:
        """Return a case of one request with a path of this one's as a chain, in other pages' contents."""
        first = int(self.requests.firsts[r])
        case = Case(self.layer, Requests(((first, len(path)),)))
        case.pages_RP, case.cache, case.sinks = self.pages_RP[[r]], self.copied_cache(), self.sinks
        own = np.arange(len(path))
        case.cache.compact_rows(self.slots(r, first + path), self.slots(r, first + own))
        case.q = self.q[torch.from_numpy(start + path).long().to(DEVICE)]
        return case

    def copied_cache(self) -> PagedKVCache:
        cache = PagedKVCache(1, self.pages_RP.size, PAGE_SIZE, self.layer.geometry, self.cache.dtype, DEVICE)
        cache.kv.copy_(self.cache.kv)
        return cache


Attend = Callable[[Case, "np.ndarray | None"], Tensor]


def eager(case: Case, paths_ND: np.ndarray | None) -> Tensor:
    batch = AttentionBatch.build(*case.places(), paths_ND)
    settings = {"window": case.layer.window, "sinks_Q": case.sinks}
    return paged_attention(case.q, case.cache, 0, batch, case.scale, **settings)


def triton(case: Case, paths_ND: np.ndarray | None, *, batch_invariant: bool) -> Tensor:
    layer, kind = case.layer, case.layer.geometry
    tail = kind.head_dim - kind.v_head_dim if kind.v_in_k else 0
    sizes = (layer.heads, kind.num_kv_heads, kind.head_dim - tail, kind.v_head_dim)
    of_layer = AttentionKind(*sizes, layer.dtype, PAGE_SIZE, window=layer.window)
    workspace = AttentionWorkspace(kind.v_head_dim, DEVICE, num_programs=64, batch_invariant=batch_invariant)
    rows = rows_from_host(*case.places(), paths_ND)
    k_PSKD, v_PSKF = (case.cache.pages(0).unsqueeze(2),) * 2 if tail else case.cache.heads(0)
    q, q_tail = (case.q[..., :-tail], case.q[..., -tail:]) if tail else (case.q, None)
    work = list_work(of_layer, rows, workspace)
    return verify_attention(q, k_PSKD, v_PSKF, rows, work, case.scale, sinks_Q=case.sinks, q_tail_NQC=q_tail)


ATTENDS: dict[str, Attend] = {
    "eager": eager,
    "triton, batch-invariant": lambda case, paths_ND: triton(case, paths_ND, batch_invariant=True),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_kernels_attend_to_trees_as_the_definition(batch_invariant: bool, layer: str):
    case = Case(LAYERS[layer], MANY)
    found = triton(case, MANY.paths, batch_invariant=batch_invariant)
    torch.testing.assert_close(found, eager(case, MANY.paths), rtol=1e-4, atol=2e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("attend", ATTENDS)
def test_a_path_has_the_bits_of_a_chain_with_its_keys_alone(attend: str, layer: str):
    """Nearly, by PyTorch's operators on a machine whose products are not batch-invariant."""
    case = Case(LAYERS[layer], MANY)
    found = ATTENDS[attend](case, MANY.paths)
    near = (
        {"rtol": 1e-4, "atol": 2e-5}
        if attend == "eager" and not products_are_invariant()
        else {"rtol": 0, "atol": 0}
    )
    for r, start, path in MANY.branches()[:: 1 if attend == "eager" else 3]:
        alone = ATTENDS[attend](case.chain_of(r, start, path), None)
        rows = torch.from_numpy(start + path).long().to(DEVICE)
        torch.testing.assert_close(found[rows], alone, **near)


KINDS: dict[str, tuple[Callable[[], Backend], torch.dtype]] = {
    "loops": (NumbaBackend, torch.float32),
    "fused": (lambda: FusedCpuBackend(3), torch.bfloat16),
}


@cache
def products_are_invariant() -> bool:
    """Return whether PyTorch's kernels give a row the same bits in any batch; the other backends' do."""
    return rows_are_invariant(NumbaBackend(), torch.float32, "cpu", (32,))


SHAPE = StackShape(heads=(4, 2, 32), hidden=64, inner=96, windows=(None, 20), scale=0.3)


class Stack(RandomStack):
    """Two random layers, one with a window, and requests' contexts."""

    def __init__(self, backend: Backend, dtype: torch.dtype, requests: Requests = MANY) -> None:
        super().__init__(backend, dtype, SHAPE, random_pages(MANY))
        self.requests = requests
        self.cache = self.new_cache()
        self.cache.kv.copy_(self.numbers.tensor(*self.cache.kv.shape))
        self.x = self.numbers.tensor(int(requests.counts.sum()), SHAPE.hidden)

    def run_all(self, cache: PagedKVCache) -> Tensor:
        first, counts = self.requests.firsts.tolist(), self.requests.counts.tolist()
        return self.run(self.x, cache, range(len(first)), first, counts, self.requests.paths)[0]

    def copy(self, source: PagedKVCache | None = None) -> PagedKVCache:
        cache = self.new_cache()
        cache.kv.copy_((source or self.cache).kv)
        return cache

    def check_bits_of_chains(self) -> None:
        """Assert that paths compute what chains do, and the row after an accepted path, too."""
        whole = self.copy()
        found = self.run_all(whole)
        after = self.numbers.tensor(1, SHAPE.hidden)
        for r, start, path in self.requests.branches():
            rows, first = torch.from_numpy(start + path).long(), int(self.requests.firsts[r])
            chain = self.copy()
            alone, _ = self.run(self.x[rows], chain, [r], [first], [len(path)])
            assert torch.equal(found[rows], alone), (r, path)
            if first + len(path) < self.pages_RP.shape[1] * PAGE_SIZE:
                accepted = self.copy(whole)
                targets = self.slots(r, first + np.arange(len(path)))
                self.backend.compact_rows(accepted, self.slots(r, first + path), targets)
                next_row, of_chain = (
                    self.run(after, cache, [r], [first + len(path)], [1])[0] for cache in (accepted, chain)
                )
                assert torch.equal(next_row, of_chain), (r, path)


@pytest.mark.parametrize("name", KINDS)
def test_a_stack_gives_paths_the_bits_of_chains_and_keeps_the_accepted_ones(name: str):
    if name == "fused" and bf16_instructions() is None:
        pytest.skip("no draft trees on this CPU")
    if name == "loops" and not products_are_invariant():
        pytest.skip("this machine's products are not batch-invariant")
    make, dtype = KINDS[name]
    Stack(make(), dtype).check_bits_of_chains()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", [KVCacheSpec(2, 24, 24), KVCacheSpec(1, 40, 32, v_in_k=True)])
@pytest.mark.parametrize("backend", [EagerBackend, lambda: TritonBackend(DEVICE)], ids=["eager", "triton"])
@pytest.mark.one_in(2)
def test_moves_of_a_request_may_overlap(
    backend: Callable[[], Backend], kind: KVCacheSpec, dtype: torch.dtype
):
    cache = PagedKVCache(3, 8, PAGE_SIZE, kind, dtype, DEVICE)
    cache.kv.copy_(torch.randn(cache.kv.shape).to(dtype))
    before = cache.kv.view(torch.uint8).clone().flatten(1, 2)
    order = torch.randperm(8 * PAGE_SIZE)
    skip = torch.tensor([cache.skip_slot]).expand(2)
    sources, targets = [], []
    for r in range(3):
        mine = order[20 * r :][:9]
        sources.append(torch.cat((mine[torch.tensor([0, 2, 1, 5, 8, 3])], skip)))
        targets.append(torch.cat((mine[:6], skip)))
    source, target = torch.stack(sources), torch.stack(targets)
    backend().compact_rows(cache, source, target)
    expected = before.clone()
    expected[:, target.flatten()] = before[:, source.flatten()]
    assert torch.equal(cache.kv.view(torch.uint8).flatten(1, 2), expected)
