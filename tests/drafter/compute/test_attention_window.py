"""Attention with a window: keys before it are not gathered and change no bit of any row.

Legend: N rows, R requests, Q query heads, K kv heads, D head dim, P pages, S page size.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from manta.cluster.pages.kv_cache_groups import KVCacheSpec
from manta.drafter.compute.batch_invariance import rows_are_invariant
from manta.drafter.compute.cpu_numba.backend import NumbaBackend
from manta.drafter.compute.eager.attention import paged_attention
from manta.drafter.compute.eager.attention_metadata import AttentionBatch
from manta.drafter.compute.memory.kv_cache import PagedKVCache
from torch import Tensor

WINDOWS = (1, 500, 1024)
SHAPES = {torch.float32: [(4, 2, 64), (8, 2, 128), (4, 2, 256)], torch.bfloat16: [(4, 2, 64), (8, 2, 128)]}
KINDS = [(dtype, heads) for dtype, shapes in SHAPES.items() for heads in shapes]


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}".removeprefix("torch."))
def kind(request: pytest.FixtureRequest) -> tuple[torch.dtype, tuple[int, int, int]]:
    dtype, heads = request.param
    if not is_invariant(dtype):
        pytest.skip("this machine's products are not batch-invariant")
    return dtype, heads


@cache
def is_invariant(dtype: torch.dtype) -> bool:
    return rows_are_invariant(NumbaBackend(), dtype, "cpu")


class Case:
    """Requests of (keys, rows), whose rows are their last ones, at random pages."""

    def __init__(
        self,
        kind: tuple[torch.dtype, tuple[int, int, int]],
        requests: list[tuple[int, int]],
        *,
        page_size: int = 16,
        seed: int = 0,
    ) -> None:
        dtype, (self.num_heads, num_kv, self.head_dim) = kind
        torch.manual_seed(seed)
        self.page_size = page_size
        lengths, self.rows = (np.array(numbers) for numbers in zip(*requests, strict=True))
        self.first = lengths - self.rows
        num_pages = -(-int(lengths.max()) // page_size)
        order = np.random.default_rng(seed).permutation(num_pages * len(requests))
        self.pages = order.reshape(len(requests), num_pages)
        self.cache = PagedKVCache(
            1, len(order), page_size, KVCacheSpec(num_kv, self.head_dim, self.head_dim), dtype, "cpu"
        )
        self.cache.kv.copy_(torch.randn(self.cache.kv.shape))
        self.q = torch.randn(int(self.rows.sum()), self.num_heads, self.head_dim).to(dtype)

    def attend(self, window: int, *, causal: bool, cut: bool = True) -> Tensor:
        batch = AttentionBatch.build(
            self.first, self.rows, self.pages, self.page_size, "cpu", window if cut else None
        )
        return self._attend(self.q, batch, window, causal)

    def attend_alone(self, request: int, row: int, window: int) -> Tensor:
        first, pages = self.first[[request]] + row, self.pages[[request]]
        batch = AttentionBatch.build(first, np.array([1]), pages, self.page_size, "cpu", window)
        at = int(self.rows[:request].sum()) + row
        return self._attend(self.q[at : at + 1], batch, window, causal=True)

    def _attend(self, q_NQD: Tensor, batch: AttentionBatch, window: int, causal: bool) -> Tensor:
        scale = self.head_dim**-0.5
        return paged_attention(q_NQD, self.cache, 0, batch, scale, causal=causal, window=window)

    def check(self, window: int) -> None:
        """Assert that neither the window's cut nor, for causal rows, the batch changes a bit."""
        for causal in (True, False):
            whole = self.attend(window, causal=causal, cut=False)
            assert torch.equal(self.attend(window, causal=causal), whole), (window, causal)
        together, begin = self.attend(window, causal=True), 0
        for request, count in enumerate(self.rows.tolist()):
            for row in {0, count // 2, count - 1}:
                alone = self.attend_alone(request, row, window)
                assert torch.equal(alone[0], together[begin + row]), (window, request, row)
            begin += count


@pytest.mark.parametrize("window", WINDOWS)
def test_a_block_has_the_same_bits_with_the_keys_before_its_window_and_without(kind, window: int):
    for length in (40, 385, 900, 1600):
        for rows in (1, 5, 16):
            Case(kind, [(length, rows)], seed=length + rows).check(window)


@pytest.mark.parametrize("page_size", [16, 24])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.one_in(2)
def test_a_prompt_has_the_same_bits_with_the_keys_before_its_window_and_without(
    kind, window: int, page_size: int
):
    for length, rows in ((1100, 1100), (1600, 300)):
        Case(kind, [(length, rows)], page_size=page_size).check(window)


@pytest.mark.parametrize("window", WINDOWS)
def test_requests_of_any_lengths_have_the_same_bits_together_and_alone(kind, window: int):
    for requests in (
        [(1550, 16), (305, 16), (1514, 16), (230, 16)],
        [(876, 16), (1497, 16), (1090, 16), (40, 16)],
        [(804, 3), (1156, 5), (1386, 300), (565, 40), (723, 16)],
        [(919, 2), (442, 1), (1288, 5), (766, 8), (1600, 1)],
    ):
        Case(kind, requests).check(window)


@pytest.mark.parametrize("head_dim", [192, 512])
def test_wide_heads_have_the_same_bits_too(head_dim: int):
    for requests in ([(804, 3), (1156, 5), (723, 16), (442, 1)], [(1300, 34)]):
        Case((torch.float32, (2, 1, head_dim)), requests).check(600)


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
    case = Case((torch.float32, (2, 1, 16)), [(keys, rows)])
    batch = AttentionBatch.build(case.first, case.rows, case.pages, 16, "cpu", window)
    assert batch.groups[-1].begins_G.tolist() == [begin]
    assert keys <= begin + batch.groups[-1].num_keys <= keys + 512
    pages = case.pages[0, begin // 16 : -(-keys // 16)]
    assert batch.groups[-1].pages_GP[: len(pages)].tolist() == pages.tolist()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 20, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.one_in(2)
def test_pages_before_the_window_may_belong_to_another_request(dtype: torch.dtype, window: int, causal: bool):
    """Huge values may be gathered if their block has keys that a row sees."""
    case = Case((dtype, (4, 2, 64)), [(700, 16), (90, 5), (1300, 1), (800, 40)])
    before = case.attend(window, causal=causal)
    for first, pages in zip(case.first, case.pages, strict=True):
        unseen = max(first - window + 1, 0) // case.page_size
        case.cache.kv[0, torch.from_numpy(pages[:unseen])] = 1e30
    assert torch.equal(case.attend(window, causal=causal), before)
