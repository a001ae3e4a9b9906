"""Paged attention, against dense attention of one request at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.cluster.pages.kv_cache_groups import KVCacheSpec, LayerPlace
from manta.drafter.compute.batch_invariance import rows_are_invariant
from manta.drafter.compute.eager.attention import paged_attention
from manta.drafter.compute.eager.attention_metadata import AttentionBatch
from manta.drafter.compute.eager.backend import EagerBackend
from manta.drafter.compute.memory.kv_cache import PagedKVCache

HEAD_DIM = 16
GEOMETRY = KVCacheSpec(2, 8, 8)


class Case:
    """Requests at random pages of a cache full of other values."""

    def __init__(self, first, rows, *, kv_heads=2, shared=2, page_size=16, scattered=True, seed=0):
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self.first, self.rows = np.array(first), np.array(rows)
        self.lengths = self.first + self.rows
        self.shared, self.page_size = shared, page_size
        used = -(-self.lengths // page_size)
        total = int(used.sum()) + 5
        self.cache = PagedKVCache(
            2, total, page_size, KVCacheSpec(kv_heads, HEAD_DIM, HEAD_DIM), torch.float32, "cpu"
        )
        self.cache.kv.normal_()
        order = rng.permutation(total) if scattered else np.arange(total)
        self.pages = np.full((len(rows), used.max()), 10**9)  # entries after it must not be read
        for r, count in enumerate(used):
            self.pages[r, :count], order = order[:count], order[count:]
        self.q = torch.randn(int(self.rows.sum()), kv_heads * shared, HEAD_DIM)
        self.sinks = torch.randn(kv_heads * shared)

    def attend(self, q=None, **kind) -> torch.Tensor:
        batch = AttentionBatch.build(self.first, self.rows, self.pages, self.page_size, "cpu")
        return paged_attention(self.q if q is None else q, self.cache, 1, batch, 0.25, **kind)

    def dense(
        self, causal: bool = True, window: int | None = None, sinks_Q: torch.Tensor | None = None
    ) -> torch.Tensor:
        out, start = [], 0
        for r, length in enumerate(self.lengths):
            used = -(-length // self.page_size)
            kv = self.cache.planes(1, 1)[0][self.pages[r, :used]].flatten(0, 1)[:length]
            k, v = (kv[:, i].repeat_interleave(self.shared, dim=1) for i in range(2))
            q = self.q[start : start + self.rows[r]]
            scores = torch.einsum("qhd,khd->hqk", q, k) * 0.25
            p, t = torch.arange(self.first[r], length)[:, None], torch.arange(length)[None]
            seen = torch.ones_like(scores[0], dtype=torch.bool)
            if causal:
                seen &= t <= p
            if window is not None:
                seen &= (t > p - window) & (t < p + window)
            scores = scores.masked_fill(~seen, -torch.inf)
            none = torch.full((len(scores),), -torch.inf)
            sinks = (none if sinks_Q is None else sinks_Q)[:, None, None].expand(-1, scores.shape[1], 1)
            probs = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
            out.append(torch.einsum("hqk,khd->qhd", probs, v).flatten(1))
            start += self.rows[r]
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
    first, rows = zip(*requests, strict=True)
    case = Case(first, rows, kv_heads=kv_heads, shared=shared, page_size=page_size, scattered=scattered)
    sinks_Q = case.sinks if sinks else None
    out = case.attend(causal=causal, window=window, sinks_Q=sinks_Q)
    assert torch.allclose(out, case.dense(causal, window, sinks_Q), atol=2e-5)


def test_long_prompts_are_computed_in_tiles():
    case = Case([0, 700, 30], [1100, 300, 1])
    for causal, window, sinks_Q in (
        (True, None, None),
        (False, None, None),
        (True, 100, None),
        (True, 100, case.sinks),
    ):
        out = case.attend(causal=causal, window=window, sinks_Q=sinks_Q)
        assert torch.allclose(out, case.dense(causal, window, sinks_Q), atol=2e-5)


def test_keys_beyond_a_requests_length_are_never_seen():
    case = Case([20, 3, 41], [4, 1, 16])
    before = [case.attend(causal=causal) for causal in (True, False)]
    own = torch.zeros(case.cache.kv.shape[1:3], dtype=torch.bool)
    for r, length in enumerate(case.lengths):
        for t in range(length):
            own[case.pages[r, t // 16], t % 16] = True
    case.cache.kv[:, ~own] = 1e6
    after = [case.attend(causal=causal) for causal in (True, False)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("sinks", [False, True])
def test_a_rows_bits_do_not_depend_on_its_batch(sinks):
    if not rows_are_invariant(EagerBackend(), torch.float32, "cpu"):
        pytest.skip("this machine's products are not batch-invariant")
    case = Case([300, 290, 40, 600], [16, 3, 1, 16], seed=3)
    sinks_Q = case.sinks if sinks else None
    together, start = case.attend(sinks_Q=sinks_Q), 0
    for r, rows in enumerate(case.rows):
        for i in range(rows):
            at = start + i
            alone = AttentionBatch.build(
                case.first[[r]] + i, np.array([1]), case.pages[[r]], case.page_size, "cpu"
            )
            row = paged_attention(case.q[at : at + 1], case.cache, 1, alone, 0.25, sinks_Q=sinks_Q)
            assert torch.equal(row[0], together[at])
        start += rows


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
