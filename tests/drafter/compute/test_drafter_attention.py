"""Paged attention: equal to dense attention, and keys before a window are not gathered and change no bit.

Legend: N rows, R requests, Q query heads, K kv heads, D head dim, P pages, S page size.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.cluster.pages.kv_cache_groups import KVCacheSpec, LayerPlace
from manta.drafter.compute.batch_invariance import rows_are_invariant
from manta.drafter.compute.cpu_numba.backend import NumbaBackend
from manta.drafter.compute.eager.attention import paged_attention
from manta.drafter.compute.eager.attention_metadata import AttentionBatch
from manta.drafter.compute.memory.kv_cache import PagedKVCache
from torch import Tensor

Heads = tuple[int, int, int]  # Q, K, D
SMALL: Heads = (4, 2, 16)
WINDOWS = (1, 500, 1024)
KINDS = [
    *((torch.float32, heads) for heads in ((4, 2, 64), (8, 2, 128), (4, 2, 256))),
    *((torch.bfloat16, heads) for heads in ((4, 2, 64), (8, 2, 128))),
]
GEOMETRY = KVCacheSpec(2, 8, 8)


@cache
def is_invariant(dtype: torch.dtype) -> bool:
    return rows_are_invariant(NumbaBackend(), dtype, "cpu")


def needs_invariant_products(dtype: torch.dtype) -> None:
    if not is_invariant(dtype):
        pytest.skip("this machine's products are not batch-invariant")


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}".removeprefix("torch."))
def kind(request: pytest.FixtureRequest) -> tuple[torch.dtype, Heads]:
    """A dtype and a layer's heads."""
    needs_invariant_products(request.param[0])
    return request.param


class Case:
    """Requests of (keys, rows), whose rows are their last ones, at random pages full of other values."""

    def __init__(
        self,
        requests: list[tuple[int, int]],
        heads: Heads = SMALL,
        dtype: torch.dtype = torch.float32,
        *,
        page_size: int = 16,
        scattered: bool = True,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        num_heads, num_kv, dim = heads
        self.page_size, self.shared, self.scale = page_size, num_heads // num_kv, dim**-0.5
        self.lengths, self.rows = (np.array(numbers) for numbers in zip(*requests, strict=True))
        self.first = self.lengths - self.rows
        used = -(-self.lengths // page_size)
        total = int(used.sum()) + 5
        self.cache = PagedKVCache(2, total, page_size, KVCacheSpec(num_kv, dim, dim), dtype, "cpu")
        self.cache.kv.copy_(torch.randn(self.cache.kv.shape))
        order = np.random.default_rng(seed).permutation(total) if scattered else np.arange(total)
        self.pages = np.full((len(requests), used.max()), 10**9)  # entries after a request's must not be read
        for r, count in enumerate(used):
            self.pages[r, :count], order = order[:count], order[count:]
        self.q = torch.randn(int(self.rows.sum()), num_heads, dim).to(dtype)
        self.sinks = torch.randn(num_heads)

    def attend(self, window: int | None = None, *, cut: bool = True, **kind) -> Tensor:
        """Return attention of all rows; without `cut` keys before the window are gathered, too."""
        size, cut_at = self.page_size, window if cut else None
        batch = AttentionBatch.build(self.first, self.rows, self.pages, size, "cpu", cut_at)
        return paged_attention(self.q, self.cache, 1, batch, self.scale, window=window, **kind)

    def attend_alone(self, request: int, row: int, window: int | None = None, **kind) -> Tensor:
        first, pages = self.first[[request]] + row, self.pages[[request]]
        batch = AttentionBatch.build(first, np.array([1]), pages, self.page_size, "cpu", window)
        at = int(self.rows[:request].sum()) + row
        q_1QD = self.q[at : at + 1]
        return paged_attention(q_1QD, self.cache, 1, batch, self.scale, window=window, **kind)[0]

    def check_rows_alone(self, window: int | None = None, **kind) -> None:
        """Assert that the first, middle and last row of each request have their bits alone, too."""
        together = self.attend(window, **kind).split(self.rows.tolist())
        for request, count in enumerate(self.rows.tolist()):
            for row in {0, count // 2, count - 1}:
                alone = self.attend_alone(request, row, window, **kind)
                assert torch.equal(alone, together[request][row]), (window, request, row)

    def check_window(self, window: int) -> None:
        """Assert that neither the window's cut nor, for causal rows, the batch changes a bit."""
        for causal in (True, False):
            whole = self.attend(window, causal=causal, cut=False)
            assert torch.equal(self.attend(window, causal=causal), whole), (window, causal)
        self.check_rows_alone(window)

    def dense(
        self, window: int | None = None, *, causal: bool = True, sinks_Q: Tensor | None = None
    ) -> Tensor:
        out = []
        for r, (length, q) in enumerate(zip(self.lengths, self.q.split(self.rows.tolist()), strict=True)):
            kv = self.cache.planes(1, 1)[0][self.pages[r, : -(-length // self.page_size)]].flatten(0, 1)[
                :length
            ]
            k, v = (kv[:, i].repeat_interleave(self.shared, dim=1) for i in range(2))
            scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
            p, t = torch.arange(self.first[r], length)[:, None], torch.arange(length)[None]
            hidden = (t > p) & causal
            if window is not None:
                hidden |= (t - p).abs() >= window
            scores = scores.masked_fill(hidden, -torch.inf)
            none = torch.full((len(scores),), -torch.inf)
            sinks = (none if sinks_Q is None else sinks_Q)[:, None, None].expand(-1, scores.shape[1], 1)
            probs = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
            out.append(torch.einsum("hqk,khd->qhd", probs, v).flatten(1))
        return torch.cat(out)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 90), st.sampled_from([1, 1, 2, 5, 16, 40])), min_size=1, max_size=6
    ),
    kv_heads=st.integers(1, 2),
    shared=st.integers(1, 3),
    page_size=st.sampled_from([1, 4, 16]),
    scattered=st.booleans(),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 7, 64]),
    sinks=st.booleans(),
)
def test_paged_attention_equals_dense_attention(
    requests, kv_heads, shared, page_size, scattered, causal, window, sinks
):
    lengths = [(first + rows, rows) for first, rows in requests]
    case = Case(lengths, (kv_heads * shared, kv_heads, 16), page_size=page_size, scattered=scattered)
    kind = {"causal": causal, "sinks_Q": case.sinks if sinks else None}
    assert torch.allclose(case.attend(window, cut=False, **kind), case.dense(window, **kind), atol=2e-5)


@pytest.mark.parametrize(
    ("causal", "window", "sinks"),
    [(True, None, False), (False, None, False), (True, 100, False), (True, 100, True)],
)
def test_long_prompts_are_computed_in_tiles(causal: bool, window: int | None, sinks: bool):
    case = Case([(1100, 1100), (1000, 300), (31, 1)])
    kind = {"causal": causal, "sinks_Q": case.sinks if sinks else None}
    assert torch.allclose(case.attend(window, cut=False, **kind), case.dense(window, **kind), atol=2e-5)


def test_keys_beyond_a_requests_length_are_never_seen():
    case = Case([(24, 4), (4, 1), (57, 16)])
    before = [case.attend(causal=causal) for causal in (True, False)]
    own = torch.zeros(case.cache.kv.shape[1:3], dtype=torch.bool)
    for r, length in enumerate(case.lengths):
        for t in range(length):
            own[case.pages[r, t // 16], t % 16] = True
    case.cache.kv[:, ~own] = 1e6
    after = [case.attend(causal=causal) for causal in (True, False)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("sinks", [False, True])
def test_a_rows_bits_do_not_depend_on_its_batch(sinks: bool):
    needs_invariant_products(torch.float32)
    case = Case([(316, 16), (293, 3), (41, 1), (616, 16)], seed=3)
    case.check_rows_alone(sinks_Q=case.sinks if sinks else None)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    ("requests", "page_size"),
    [
        *(([(length, rows)], 16) for length, rows in ((40, 16), (385, 1), (900, 5), (1600, 16))),
        ([(1100, 1100)], 16),
        ([(1600, 300)], 24),
        ([(1550, 16), (305, 16), (1514, 16), (230, 16)], 16),
        ([(876, 16), (1497, 16), (1090, 16), (40, 16)], 16),
        ([(804, 3), (1156, 5), (1386, 300), (565, 40), (723, 16)], 16),
        ([(919, 2), (442, 1), (1288, 5), (766, 8), (1600, 1)], 16),
    ],
    ids=lambda value: str(value).replace(" ", "") if isinstance(value, list) else None,
)
def test_rows_have_the_same_bits_with_the_keys_before_their_window_and_without(
    kind: tuple[torch.dtype, Heads], requests: list[tuple[int, int]], page_size: int, window: int
):
    dtype, heads = kind
    Case(requests, heads, dtype, page_size=page_size).check_window(window)


@pytest.mark.parametrize("head_dim", [192, 512])
@pytest.mark.parametrize("requests", [[(804, 3), (1156, 5), (723, 16), (442, 1)], [(1300, 34)]])
def test_wide_heads_have_the_same_bits_too(requests: list[tuple[int, int]], head_dim: int):
    needs_invariant_products(torch.float32)
    Case(requests, (2, 1, head_dim)).check_window(600)


@pytest.mark.parametrize(
    ("keys", "rows", "window", "begin"),
    [
        (500, 1, 9, 0),
        (1600, 1, 9, 1536),
        (1600, 16, 9, 1536),
        (1600, 1, 513, 1024),
        (1600, 1, 1024, 512),
        (1552, 16, 1, 1536),
        (1552, 16, 2, 1024),
        (1600, 1600, 9, 1024),
        (1600, 1600, 514, 512),
    ],
)
def test_gathered_keys_begin_with_a_block_that_a_row_sees(keys: int, rows: int, window: int, begin: int):
    """Blocks have 512 keys; the last tile of rows of a prompt of 1600 begins at 1536."""
    case = Case([(keys, rows)], (2, 1, 16))
    batch = AttentionBatch.build(case.first, case.rows, case.pages, 16, "cpu", window)
    assert batch.groups[-1].begins_G.tolist() == [begin]
    assert keys <= begin + batch.groups[-1].num_keys <= keys + 512
    pages = case.pages[0, begin // 16 : -(-keys // 16)]
    assert batch.groups[-1].pages_GP[: len(pages)].tolist() == pages.tolist()


def test_rows_are_written_to_their_slots_and_masked_ones_nowhere():
    cache = PagedKVCache(2, 3, 4, GEOMETRY, torch.float32, "cpu")
    rows = torch.randn(3, 32)
    cache.write(1, torch.tensor([9, cache.skip_slot, 2]), rows)
    assert torch.equal(cache.pages(1)[2, 1], rows[0]) and torch.equal(cache.pages(1)[0, 2], rows[2])
    assert cache.kv[:, :3].count_nonzero() == rows[[0, 2]].count_nonzero()
    every = torch.randn(2, 1, 2, 2, 8)
    cache.write_all(0, torch.tensor([5]), every)
    assert torch.equal(cache.kv[:, 1, 1], every[:, 0].flatten(1))


def test_layers_of_a_group_use_planes_that_other_groups_share():
    places = (LayerPlace(1, 0), LayerPlace(0, 0), LayerPlace(1, 1))
    cache = PagedKVCache(places, 3, 4, GEOMETRY, torch.float32, "cpu")
    assert cache.kv.shape == (2, 4, 4, 32) and cache.num_layers == 3
    assert [cache.group(layer) for layer in range(3)] == [1, 0, 1]
    assert cache.plane_bytes * 2 == cache.kv.nbytes
    row, rows = torch.randn(1, 32), torch.randn(2, 1, 2, 2, 8)
    cache.write(1, torch.tensor([9]), row)
    cache.write_all(0, torch.tensor([5]), rows)
    assert torch.equal(cache.kv[0, 2, 1], row[0]) and torch.equal(cache.kv[:, 1, 1], rows[:, 0].flatten(1))
    assert cache.kv.count_nonzero() == row.numel() + rows.numel()
    assert cache.pages(0).data_ptr() == cache.pages(1).data_ptr() != cache.pages(2).data_ptr()
    assert cache.slots(2).data_ptr() == cache.pages(2).data_ptr() == cache.planes(2, 1).data_ptr()
    assert cache.slots(0, 2).shape == (2, 16, 32) and torch.equal(cache.planes(0, 2).flatten(3), cache.kv)


def test_page_size_in_bytes_counts_keys_and_values_of_all_layers():
    cache = PagedKVCache(3, 7, 4, GEOMETRY, torch.bfloat16, "cpu")
    assert PagedKVCache.bytes_per_page(3, 4, GEOMETRY.width, torch.bfloat16) * 8 == cache.kv.nbytes
