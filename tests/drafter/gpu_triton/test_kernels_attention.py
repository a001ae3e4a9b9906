"""The paged attention kernel against PyTorch's operators in fp64 (device: see `devices.py`).

The interpreter's bf16 products are broken: there bf16 is only compiled (`test_kernels_compile.py`).
Everything that a call may not read (beyond a length, padding rows, an earlier call's workspace) is NaN.

Legend: N rows, B requests, Q query heads, K kv heads, D head dim, P pages, S page size, T keys of a request.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from manta.actors.targets.loading.backend_selection import choose_backend
from manta.actors.targets.loading.resolved_config import kv_dtype
from manta.cluster.config import EngineConfig
from manta.cluster.pages.kv_cache_groups import KVCacheSpec
from manta.drafter.compute.backend import DeviceCapabilities, Feature, ModelStackSpec
from manta.drafter.compute.eager.attention import paged_attention
from manta.drafter.compute.eager.attention_metadata import AttentionBatch
from manta.drafter.compute.gpu_triton import backend, flash_attention
from manta.drafter.compute.gpu_triton.attention import attention_tiles as tiles
from manta.drafter.compute.gpu_triton.attention.attention_tiles import (
    AttentionKind,
    AttentionWorkspace,
    PagedRows,
    TreeRows,
    WorkList,
    choose_tiles,
    list_work,
)
from manta.drafter.compute.gpu_triton.attention.norm_rope_kv_write import norm_rotate_write
from manta.drafter.compute.gpu_triton.attention.paged_attention import verify_attention
from manta.drafter.compute.gpu_triton.flash_attention import FlashAttention, why_not
from manta.drafter.compute.memory.kv_cache import UNSCALED, KVScales, PagedKVCache
from support.engines.devices import DEVICE, HALVES, ON_GPU
from torch import Tensor

pytestmark = pytest.mark.usefixtures("on_the_device")
# A GPU's products of fp32 are three of tf32.
TOLERANCE = {torch.float32: 2e-5 if ON_GPU else 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
NAN = float("nan")
MANY = 64  # programs: contexts are split into the shortest pieces
H200_PROGRAMS = 264
LARGEST = 65504.0  # in fp16


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    v_dim: int | None = None
    kv_dtype: torch.dtype | None = None
    scales: KVScales = UNSCALED

    @property
    def geometry(self) -> KVCacheSpec:
        return KVCacheSpec(self.kv_heads, self.dim, self.v_dim or self.dim)


class Case:
    """Requests with `lengths` keys, the last `rows` of them in this call, at scattered pages and slots."""

    def __init__(self, shape: Shape, lengths, rows, *, max_keys=512, padding=0, seed=0):
        torch.manual_seed(seed)
        self.shape, self.lengths, self.num_rows = shape, lengths, rows
        used = [-(-length // shape.page_size) for length in lengths]
        nowhere = sum(used)  # a page of NaN, to which the table points beyond a request's length
        self.size, dtype = (nowhere + 1, shape.page_size, shape.geometry), shape.kv_dtype or shape.dtype
        self.cache = PagedKVCache(2, *self.size, dtype, DEVICE, scales=[UNSCALED, shape.scales])
        self.cache.kv.fill_(NAN)
        order = torch.randperm(nowhere).int().split(used)
        pages_BP = torch.full((len(rows) + 2, max_keys // shape.page_size), nowhere, dtype=torch.int32)
        self.pages_BP = pages_BP
        slots_B = torch.randperm(len(rows) + 2)[: len(rows)].int()
        for slot, pages, length in zip(slots_B, order, lengths, strict=True):
            pages_BP[slot, : len(pages)] = pages
            kv = torch.randn(length, shape.geometry.width).to(shape.dtype)
            self.cache.write(1, self.slots_of(slot, torch.arange(length)), kv)
        cu_rows = torch.tensor([0, *rows]).cumsum(0).int()
        self.rows = PagedRows(slots_B, cu_rows, torch.tensor(lengths).int(), pages_BP, max(1, *rows))
        self.q = torch.randn(sum(rows) + padding, shape.heads, shape.dim).to(shape.dtype)
        self.q[sum(rows) :] = NAN
        self.sinks = torch.randn(shape.heads)
        self.scale = shape.dim**-0.5

    def slots_of(self, slot: Tensor, positions: Tensor) -> Tensor:
        """Return where K and V are, by the page table's row."""
        size = self.shape.page_size
        return self.pages_BP[slot][positions // size].long() * size + positions % size

    def kind(self, causal: bool = True, window: int | None = None, first_key: int = 0) -> AttentionKind:
        s = self.shape
        sizes = s.heads, s.kv_heads, s.dim, s.v_dim or s.dim
        return AttentionKind(*sizes, s.dtype, s.page_size, causal, window, first_key)

    def workspace(self, num_programs: int = MANY, batch_invariant: bool = False) -> AttentionWorkspace:
        workspace = AttentionWorkspace(
            self.shape.v_dim or self.shape.dim,
            DEVICE,
            num_programs=num_programs,
            batch_invariant=batch_invariant,
        )
        workspace.max_E.fill_(NAN)
        workspace.sum_E.fill_(NAN)
        workspace.out_EF.fill_(NAN)
        return workspace

    def work(self, workspace: AttentionWorkspace, **kind) -> WorkList:
        return list_work(self.kind(**kind), self.rows, workspace)

    def pieces(self, workspace: AttentionWorkspace | None = None, **kind) -> list[int]:
        """Return the number of pieces per request, times its tiles."""
        work = self.work(workspace or self.workspace(), **kind)
        return work.values[2 : 3 + len(self.num_rows)].diff().tolist()

    def attend(self, *, sinks: bool = False, workspace: AttentionWorkspace | None = None, **kind) -> Tensor:
        workspace = workspace or self.workspace()
        out = verify_attention(
            self.q,
            *self.cache.heads(1),
            self.rows,
            self.work(workspace, **kind),
            self.scale * self.shape.scales.k,
            v_scale=self.shape.scales.v,
            sinks_Q=self.sinks if sinks else None,
        )
        assert not workspace.arrived.any(), "counters are zeros between launches"
        return out

    def dense(self, *, sinks: bool = False, **kind) -> Tensor:
        """Return [N, Q * F] by PyTorch's operators in fp64; zeros for padding."""
        exact, real = PagedKVCache(2, *self.size, torch.float64, DEVICE), np.array(self.num_rows) > 0
        exact.kv.copy_(self.cache.kv.double().nan_to_num())
        for pages, scale in zip(exact.heads(1), self.shape.scales, strict=True):
            pages.mul_(scale)
        rows_B, slots_B = np.array(self.num_rows)[real], self.rows.slots_B.cpu().numpy()[real]
        places = np.array(self.lengths)[real] - rows_B, rows_B, self.pages_BP.cpu().numpy()[slots_B]
        batch = AttentionBatch.build(*places, self.shape.page_size, DEVICE)
        q, sinks_Q = self.q[: rows_B.sum()].double(), self.sinks.double() if sinks else None
        out_NO = paged_attention(q, exact, 1, batch, self.scale, sinks_Q=sinks_Q, **kind)
        return torch.nn.functional.pad(out_NO, (0, 0, 0, len(self.q) - len(q)))

    def check(self, workspace: AttentionWorkspace | None = None, **kind) -> None:
        error = (self.attend(workspace=workspace, **kind).double() - self.dense(**kind)).abs().max().item()
        assert error < TOLERANCE[self.shape.dtype], error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.one_in(2)
def test_keys_before_a_window_may_be_any_numbers(batch_invariant: bool, causal: bool, dtype: torch.dtype):
    """Their pages are released, and may hold another request's values."""
    case, window = Case(Shape(dtype=dtype), [100, 40], [3, 1]), 20
    workspace = case.workspace(batch_invariant=batch_invariant)
    expected = case.attend(causal=causal, window=window, workspace=workspace)
    for slot, length, rows in zip(case.rows.slots_B, case.lengths, case.num_rows, strict=True):
        case.cache.slots(1)[0, case.slots_of(slot, torch.arange(length - rows - window + 1))] = LARGEST
    assert expected.isfinite().all()
    assert torch.equal(case.attend(causal=causal, window=window, workspace=workspace), expected)


def test_keys_before_first_key_may_be_any_numbers() -> None:
    """Nothing was ever written there: a page holds what another request left."""
    case = Case(Shape(), [100, 3], [3, 1])
    expected = case.attend(first_key=2)
    for slot in case.rows.slots_B:
        case.cache.slots(1)[0, case.slots_of(slot, torch.arange(2))] = LARGEST
    assert expected.isfinite().all()
    assert torch.equal(case.attend(first_key=2), expected)


@pytest.mark.parametrize("wrong", [torch.inf, NAN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("batch_invariant", "window"), [(False, None), (True, None), (False, 20)])
@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.one_in(3)
def test_drafts_that_overflow_change_no_row_that_does_not_see_them(
    is_tree: bool, batch_invariant: bool, window: int | None, dtype: torch.dtype, wrong: float
):
    """Rows 1 and 3 of a tree are a branch beside rows 2 and 4; in a chain rows 3 and 4 come last."""
    case = Case(Shape(dtype=dtype), [100, 40], [5, 3], padding=1)
    if is_tree:
        paths_ND = torch.full((9, 3), -1, dtype=torch.int32)
        paths_ND[:5] = torch.tensor([[0, -1, -1], [0, 1, -1], [0, 2, -1], [0, 1, 3], [0, 2, 4]])
        positions_N = torch.tensor([95, 96, 96, 97, 97, 37, 38, 39, 0])
        case.rows = replace(case.rows, tree=TreeRows(paths_ND, positions_N))
    spans = [(95, 100), (37, 40)]
    slots = [case.slots_of(b, torch.arange(*span)) for b, span in zip(case.rows.slots_B, spans, strict=True)]
    slots_N = torch.cat((*slots, torch.tensor([case.cache.skip_slot])))
    heads = case.shape.heads
    qkv_NJD = torch.randn(9, heads + 2 * case.shape.kv_heads, case.shape.dim).to(dtype)
    case.q = qkv_NJD[:, :heads]
    results = []
    for overflow in ([], [1, 3, 8] if is_tree else [3, 4, 8]):
        qkv_NJD[overflow, heads:] = wrong
        qkv_NO, pages = qkv_NJD.flatten(1), case.cache.heads(1)
        norm_rotate_write(qkv_NO, None, None, 1e-6, None, None, torch.arange(9), slots_N, *pages)
        workspace = case.workspace(batch_invariant=batch_invariant)
        results.append(case.attend(window=window, workspace=workspace))
    others = [0, 2, 4, 5, 6, 7] if is_tree else [0, 1, 2, 5, 6, 7]
    assert torch.equal(results[0][others], results[1][others])
    assert results[1].isfinite().all()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 20, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("max_keys", [64, 512])
@pytest.mark.sanitized
@pytest.mark.one_in(2)
def test_ragged_rows_equal_dense_attention_with_one_piece_or_several(max_keys, causal, window, sinks):
    lengths = [16, 61, 1] if max_keys == 64 else [300, 0, 77]
    case = Case(Shape(), lengths, [16, 7, 1] if max_keys == 64 else [16, 0, 1], max_keys=max_keys)
    if window is None:
        assert case.pieces() == ([1, 1, 1] if max_keys == 64 else [5, 0, 2])
    case.check(causal=causal, window=window, sinks=sinks)


@pytest.mark.parametrize(
    ("shape", "lengths", "rows"),
    [
        *((Shape(16, 2, 64, 64, half), [150, 16], [8, 16]) for half in HALVES),  # gpt-oss: groups of 8
        *((Shape(8, 2, 128, 32, half), [129, 33], [16, 3]) for half in HALVES),  # Qwen3: groups of 4
        (Shape(8, 2, 128, 64, torch.float32), [140], [16]),
        *((Shape(5, 1, 128, 256, half), [300], [9]) for half in HALVES),  # a group that is no power of two
        (Shape(2, 2, 64, 128, torch.float32), [130, 1], [1, 1]),  # a K/V head for every query head
        *((Shape(2, 1, 256, 16, half), [70], [5]) for half in HALVES),
        (Shape(2, 1, 256, 64, torch.float32), [300], [5]),  # runs of pieces, some columns at a time
        *((Shape(8, 1, 512, 64, half), [140], [5]) for half in HALVES),  # Gemma 4's full layers
        (Shape(2, 1, 512, 16, torch.float32), [70], [5]),
        *((Shape(4, 2, 192, 32, half, 128), [150, 16], [5, 1]) for half in HALVES),  # MiMo-V2
        (Shape(3, 1, 24, 16, torch.float32, 10), [300, 7], [9, 3]),  # sizes that no tile has
    ],
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.one_in(2)
def test_heads_dims_pages_and_dtypes_of_real_models_equal_dense_attention(shape, lengths, rows, causal):
    case = Case(shape, lengths, rows)
    case.check(causal=causal, sinks=causal)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("scales", [UNSCALED, KVScales(0.3, 1.7)])
@pytest.mark.parametrize(("batch_invariant", "window"), [(False, None), (True, None), (False, 20)])
@pytest.mark.one_in(3)
def test_keys_and_values_in_e4m3_equal_dense_attention_over_them(
    batch_invariant: bool, window: int | None, scales: KVScales, dtype: torch.dtype
) -> None:
    shape = Shape(dtype=dtype, kv_dtype=torch.float8_e4m3fn, scales=scales)
    case = Case(shape, [100, 40, 300], [3, 1, 4], padding=2)
    assert case.cache.kv.dtype is torch.float8_e4m3fn
    workspace = case.workspace(batch_invariant=batch_invariant)
    case.check(sinks=True, window=window, workspace=workspace)


@pytest.mark.parametrize("first_key", [1, 40])
def test_keys_before_first_key_are_seen_only_by_their_own_row(first_key: int) -> None:
    case = Case(Shape(), [300, 5, 1], [16, 5, 1])
    case.check(first_key=first_key)
    assert not torch.allclose(case.dense(first_key=first_key), case.dense(), atol=1e-3)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("max_keys", [112, 256])
@pytest.mark.one_in(2)
def test_a_prompt_longer_than_a_tile_equals_dense_attention(max_keys, causal, window):
    case = Case(Shape(3, 1), [110, 20], [90, 2], max_keys=max_keys)
    assert case.pieces()[0] in (3, 6)  # three tiles
    case.check(causal=causal, window=window, sinks=True)


@pytest.mark.parametrize("max_keys", [64, 512])
def test_padding_rows_read_nothing_and_become_zeros(max_keys):
    case = Case(Shape(), [30, 40, 0, 0], [2, 3, 0, 0], max_keys=max_keys, padding=6)
    expected = case.dense()
    case.rows.slots_B[2:] = -(10**6)  # no such row of the table
    out = case.attend()
    assert torch.equal(out[5:], torch.zeros(6, 64))
    assert (out.double() - expected).abs().max() < TOLERANCE[torch.float32]


def test_a_call_of_padding_alone_is_zeros():
    case = Case(Shape(), [0, 0], [0, 0], max_keys=64, padding=3)
    assert torch.equal(case.attend(), torch.zeros(3, 64))


def test_a_page_whose_elements_lie_beyond_32_bits_is_found():
    case = Case(Shape(dtype=torch.float16), [16], [2], max_keys=64)
    far = torch.empty(2**31 + 2**12, dtype=torch.float16)  # untouched memory costs none
    k_PSKD, v_PSKD = (torch.as_strided(far[at:], (3, 16, 2, 16), (2**30, 64, 16, 1)) for at in (0, 32))
    for away, near in zip((k_PSKD, v_PSKD), case.cache.heads(1), strict=True):
        away[2] = near[case.rows.page_table[case.rows.slots_B[0], 0]]
    rows = replace(case.rows, page_table=torch.full_like(case.rows.page_table, 2))
    work = list_work(case.kind(), rows, case.workspace())
    out = verify_attention(case.q, k_PSKD, v_PSKD, rows, work, case.scale)
    assert torch.equal(out, case.attend())


def test_one_workspace_serves_calls_of_any_shape_in_turn():
    long, short = Case(Shape(), [300, 200], [16, 3]), Case(Shape(), [40, 20], [16, 3])
    workspace = long.workspace()
    for case in (long, short, long):
        case.check(workspace)


class Alone:
    """Requests' blocks of a case, in batch-invariant calls with other batches and numbers of programs."""

    def __init__(self, shape: Shape, **kind) -> None:
        # A window of 130 begins in another tile of 64 for the first context's last row.
        self.case = Case(shape, [200, 61, 524], [16, 1, 24], max_keys=1024)
        self.kind = kind
        self.piece_keys = 0  # in the last call

    def __call__(self, requests: list[tuple[int, int, int]], num_programs: int = MANY) -> Tensor:
        """Return rows begin..end of requests, each as if it were the last of its request; [N, Q * D]."""
        case = self.case
        before = case.rows.cu_rows.tolist()
        picked = [case.q[before[r] + begin : before[r] + end] for r, begin, end in requests]
        counts = [end - begin for _, begin, end in requests]
        lengths = [case.lengths[r] - case.num_rows[r] + end for r, _, end in requests]
        rows = PagedRows(
            case.rows.slots_B[[r for r, _, _ in requests]],
            torch.tensor([0, *counts]).cumsum(0).int(),
            torch.tensor(lengths).int(),
            case.rows.page_table,
            max(counts),
        )
        workspace = case.workspace(num_programs, batch_invariant=True)
        work = list_work(case.kind(**self.kind), rows, workspace)
        self.piece_keys = int(work.values[0])
        sinks_Q = case.sinks if "window" in self.kind else None
        pages = case.cache.heads(1)
        return verify_attention(torch.cat(picked), *pages, rows, work, case.scale, sinks_Q=sinks_Q)


@pytest.fixture
def short_splits(monkeypatch):
    """Use splits of 64 keys and runs of two, so that short contexts have all levels."""
    monkeypatch.setattr(tiles, "_SPLIT_KEYS", 64)
    monkeypatch.setattr(tiles, "_RUN_SPLITS", 2)


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, {}), *((half, {"window": 130}) for half in HALVES)]
)
def test_in_invariant_mode_a_rows_bits_do_not_depend_on_its_batch(short_splits, dtype, kind):
    attend = Alone(Shape(4, 1, 32, dtype=dtype), **kind)
    together = attend([(0, 0, 16), (1, 0, 1), (2, 0, 24)])  # the last in two tiles
    assert torch.equal(attend([(2, 0, 24), (0, 0, 16)]), together[[*range(17, 41), *range(16)]])
    for row in (0, 7, 15):  # plain steps
        assert torch.equal(attend([(0, row, row + 1)]), together[row : row + 1])
    assert torch.equal(attend([(2, 0, 11)]), together[17:28])  # a prompt in two chunks
    behind_nobody = attend([(0, 3, 3), (2, 11, 24), (1, 0, 1)], 1)  # the first has no rows
    assert torch.equal(behind_nobody, together[[*range(28, 41), 16]])


def test_in_invariant_mode_bits_do_not_depend_on_how_a_context_is_split(short_splits):
    attend = Alone(Shape(4, 1, 16))
    requests = [(0, 0, 16), (2, 0, 24)]
    by_split = attend(requests)
    assert attend.piece_keys == 64
    by_run = attend(requests, 12)
    assert attend.piece_keys == 128
    assert torch.equal(by_run, by_split)
    alone = attend(requests, 1)
    assert attend.piece_keys > 1024
    assert torch.equal(alone, by_split)


@pytest.mark.sanitized
def test_in_invariant_mode_splits_equal_dense_attention(short_splits):
    case = Case(Shape(), [300, 0, 77], [16, 0, 1])
    workspace = case.workspace(batch_invariant=True)
    assert case.pieces(workspace) == [5, 0, 2]
    for kind in ({}, {"causal": False, "window": 20}):
        case.check(workspace, **kind)


def test_the_invariant_tiles_follow_from_the_model_alone():
    kind = AttentionKind(32, 8, 128, 128, torch.bfloat16, 64)
    plans = {choose_tiles(kind, rows, batch_invariant=True) for rows in (1, 16, 2048)}
    assert [(plan.block_rows, plan.block_keys, plan.num_warps) for plan in plans] == [(64, 32, 8)]


def test_any_number_of_programs_gives_the_same_bits():
    case = Case(Shape(), [300, 0, 200], [16, 0, 3])
    bits = []
    for num_programs in (MANY, 3):  # of three each does several items, and others arrive last
        work = replace(case.work(case.workspace()), num_programs=num_programs)
        bits.append(verify_attention(case.q, *case.cache.heads(1), case.rows, work, case.scale))
    assert torch.equal(*bits)


class Cut:
    """The split of a pass of Qwen3-8B's shape on an H200: pieces per request, and their length."""

    def __init__(self, lengths, rows=16, *, kv_heads=8, window=None, batch_invariant=False, **kind):
        count = len(lengths)
        self.kind = AttentionKind(4 * kv_heads, kv_heads, 128, 128, torch.bfloat16, 64, window=window, **kind)
        self.workspace = AttentionWorkspace(
            1, DEVICE, num_programs=H200_PROGRAMS, batch_invariant=batch_invariant
        )
        table = torch.zeros(count, 131072 // 64, dtype=torch.int32)
        cu_rows = torch.arange(count + 1, dtype=torch.int32) * rows
        slots = torch.zeros(count, dtype=torch.int32)
        paged = PagedRows(slots, cu_rows, torch.tensor(lengths, dtype=torch.int32), table, rows)
        self.work = list_work(self.kind, paged, self.workspace)
        values = self.work.values
        self.keys, self.run = values[:2].tolist()
        self.pieces = values[2 : 3 + count].diff().tolist()
        self.items = kv_heads * sum(self.pieces)
        assert values[2] == 0
        tiles = -(-rows // self.work.tiles.tile_tokens)
        shared = torch.tensor([n * (n > tiles) for n in self.pieces]).cumsum(0).tolist()
        assert values[3 + count :].tolist() == [0, *shared[:-1]]
        slots_needed = kv_heads * shared[-1]
        assert slots_needed <= self.workspace.num_slots(self.work.tiles.block_rows), "the workspace holds it"
        assert slots_needed <= len(self.workspace.arrived)


def test_a_long_context_among_short_ones_is_split_in_proportion_to_its_keys():
    cut = Cut([32768] + [1024] * 31)
    assert cut.keys == 1024 and cut.pieces == [32] + [1] * 31
    assert cut.items == 504 <= 2 * H200_PROGRAMS  # two rounds, as good as full


def test_contexts_are_split_just_enough_to_fill_the_device():
    assert Cut([1024]).keys == 128 and Cut([1024]).items == 64
    assert [Cut([8192] * b).items for b in (1, 2, 4, 8, 16, 32)] == [256] * 6
    assert Cut([8192] * 32).pieces == [1] * 32
    assert Cut([2048], rows=2048).pieces == [64]  # a prompt's 64 tiles of 32 rows fill it
    assert Cut([8192], rows=1).items == 256
    assert Cut([131072], kv_heads=1).items == 256 and Cut([131072], kv_heads=1).run == 32


def test_any_batch_fits_the_workspace_also_in_invariant_mode():
    for batch_invariant in (False, True):
        for lengths, rows in (([300], 1), ([131072] * 3, 16), ([70000, 16, 9000] * 50, 16), ([131072], 2048)):
            Cut(lengths, rows, batch_invariant=batch_invariant)
            Cut(lengths, rows, batch_invariant=batch_invariant, window=1000)


def test_in_invariant_mode_items_are_splits_runs_or_full_contexts():
    def keys(*lengths):
        return Cut(lengths, batch_invariant=True).keys

    assert keys(1024) == keys(32768) == keys(*[8192] * 4) == 256
    assert keys(131072) == keys(*[32768] * 8) == 4096
    assert keys(*[16384] * 64) > 131072


def test_keys_before_a_window_make_no_work():
    assert Cut([32768] * 4, window=128).items == 4 * 8  # the 143 keys that 16 rows see are one piece
    assert Cut([32768] * 4, window=4096).items <= H200_PROGRAMS


def test_there_are_no_more_programs_than_possible_work():
    case = Case(Shape(), [64, 30], [16, 7], max_keys=64)
    work = case.work(case.workspace())
    assert work.num_programs == 2 * 2  # requests, kv heads: a table of 64 keys is one piece


def test_tiles_are_as_high_as_the_rows_of_a_group_need_and_registers_hold():
    def height(rows, heads, kv_heads, dim, dtype=torch.bfloat16):
        plan = choose_tiles(AttentionKind(heads, kv_heads, dim, dim, dtype, 64), rows)
        return plan.block_rows, -(-rows // plan.tile_tokens)

    assert height(16, 32, 8, 128) == (64, 1)
    assert height(16, 64, 8, 64) == (128, 1)
    assert height(1, 32, 8, 128) == (16, 1)
    assert height(512, 32, 8, 128) == (128, 16)
    assert height(16, 16, 4, 256) == (64, 1)
    assert height(32, 16, 4, 256) == (64, 2)
    assert height(10, 40, 8, 128) == (64, 1)  # 12 tokens of 5 heads in 64 rows
    assert height(13, 40, 8, 128) == (128, 1)
    assert height(16, 32, 8, 128, torch.float32) == (32, 2)


# Stand-ins for functions of packages. They check the arguments that are given here as the packages'
# documentation and C++ code do, and attend with PyTorch's operators.


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, causal, window_size,
    block_table,
):  # fmt: skip
    """FlashAttention 2's."""
    for lengths in (cu_seqlens_q, cu_seqlens_k):
        assert (
            lengths.dtype is torch.int32 and lengths.is_contiguous() and len(lengths) == len(block_table) + 1
        )
    assert block_table.dtype is torch.int32 and block_table.stride(-1) == 1
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    limits, how = (max_seqlen_q, max_seqlen_k), (softmax_scale, causal, window_size, block_table)
    return attend_over_pages(q, k, v, cu_seqlens_q, cu_seqlens_k, *limits, *how)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal,
    window_size,
):  # fmt: skip
    """FlashAttention 3's, with pages of any size and ragged queries."""
    assert q.dim() == 3 and q.shape[-1] <= 256 and q.dtype in (torch.float16, torch.bfloat16)
    assert k_cache.stride(-1) == v_cache.stride(-1) == q.stride(-1) == 1
    for lengths, count in ((cache_seqlens, len(page_table)), (cu_seqlens_q, len(page_table) + 1)):
        assert lengths.dtype is torch.int32 and lengths.is_contiguous() and len(lengths) == count
    assert page_table.dtype is torch.int32 and page_table.stride(-1) == 1
    keys = torch.nn.functional.pad(cache_seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    limits = max(max_seqlen_q, 2), int(cache_seqlens.max())
    how = softmax_scale, causal, window_size, page_table
    return attend_over_pages(q, k_cache, v_cache, cu_seqlens_q, keys, *limits, *how)


def flash_attn_4_varlen_func(
    q, k, v, *, cu_seqlens_q, seqused_k, max_seqlen_q, page_table, softmax_scale, causal,
    window_size, learnable_sink=None,
):  # fmt: skip
    """FlashAttention 4's (August 2026), on data-center Blackwell."""
    batch_size, (num_heads, head_dim) = len(cu_seqlens_q) - 1, q.shape[-2:]
    assert page_table.dtype is torch.int32 and page_table.stride(-1) == 1
    assert len(page_table) == batch_size and seqused_k.shape == (batch_size,)
    assert k.shape == (*v.shape[:3], head_dim) and num_heads % k.shape[2] == 0
    assert 8 <= head_dim <= 128 and 8 <= v.shape[3] <= 128 and head_dim % 8 == v.shape[3] % 8 == 0
    for cache in (q, k, v):  # of others the package makes contiguous copies
        assert cache.stride(-1) == 1 and cache.data_ptr() % 16 == 0
        assert all(stride * cache.element_size() % 16 == 0 for stride in cache.stride()[:-1])
    for lengths in (cu_seqlens_q, seqused_k):
        assert lengths.dtype is torch.int32 and lengths.stride(0) == 1
    if learnable_sink is not None:
        assert learnable_sink.shape == (num_heads,)
        assert learnable_sink.dtype in (torch.float16, torch.bfloat16, torch.float32)
    left, right = window_size
    assert left is None or right is None or left + right >= 0, "would be no window"
    keys = torch.nn.functional.pad(seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
    window = tuple(-1 if beside is None else beside for beside in window_size)
    limits, how = (max(max_seqlen_q, 2), int(seqused_k.max())), (softmax_scale, causal, window, page_table)
    return attend_over_pages(q, k, v, cu_seqlens_q, keys, *limits, *how, learnable_sink), None


def attend_over_pages(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size,
    block_table, sinks=None,
):  # fmt: skip
    """What all packages compute."""
    assert q.dtype is k.dtype is torch.float16
    assert max_seqlen_q > 1, "at 1 the package takes row b for request b's"
    assert max_seqlen_q >= cu_seqlens_q.diff().max() and max_seqlen_k >= cu_seqlens_k.diff().max()
    out = torch.full_like(q, NAN)  # not initialized
    left, right = (2**30 if beside < 0 else beside for beside in window_size)
    for b, (rows, keys) in enumerate(zip(cu_seqlens_q.diff(), cu_seqlens_k.diff(), strict=True)):
        mine = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        k_THD, v_THD = (
            cache[block_table[b].long()].flatten(0, 1)[:keys].repeat_interleave(q.shape[1] // k.shape[2], 1)
            for cache in (k, v)
        )
        i, j = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)
        seen = (j >= i - left) & (j <= i + (0 if causal else right))
        scores = torch.einsum("qhd,khd->hqk", q[mine].double(), k_THD.double()) * softmax_scale
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:  # a key without a value
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, rows, 1)), -1)
        probs = scores.softmax(-1)[..., :keys]
        out[mine] = torch.einsum("hqk,khd->qhd", probs, v_THD.double()).half()
    return out


@dataclass(frozen=True)
class Package:
    module: str
    function: Callable[..., object]
    capability: int  # of the device that it is for
    page_size: int = 64


PACKAGES = (
    Package("flash_attn", flash_attn_varlen_func, 8, page_size=256),
    Package("flash_attn_interface", flash_attn_with_kvcache, 9),
    Package("flash_attn.cute", flash_attn_4_varlen_func, 10),
)


def install(patch: pytest.MonkeyPatch, *packages: Package, capability: int) -> None:
    """Install these packages alone, on a device with a compute capability."""
    for each in PACKAGES:
        module = ModuleType(each.module)
        setattr(module, each.function.__name__.replace("_4_", "_"), each.function)
        patch.setitem(sys.modules, each.module, module if each in packages else None)
    if PACKAGES[2] in packages and PACKAGES[0] not in packages:  # a folder without the older package
        patch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    patch.setattr(flash_attention, "_capability", lambda device: capability)


@pytest.fixture(params=PACKAGES, ids=lambda package: package.module)
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Package:
    """Only this package is installed, on a GPU that it is for."""
    install(monkeypatch, request.param, capability=request.param.capability)
    return request.param


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 2 is installed, on a GPU before Hopper."""
    install(monkeypatch, PACKAGES[0], capability=8)


def as_prompts(case: Case) -> Case:
    """The same requests, with lengths that the host knows."""
    rows_B = np.array(case.num_rows)
    spans_B2 = np.stack((np.array(case.lengths) - rows_B, rows_B), axis=1)
    case.rows = replace(case.rows, host_spans_B2=spans_B2)
    return case


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [[16, 1, 3, 0], [1, 1, 1, 0]])
def test_prompts_are_attended_by_the_package(
    package: Package, rows: list[int], causal: bool, window: int | None
):
    shape = Shape(page_size=package.page_size, dtype=torch.float16)
    case = as_prompts(Case(shape, [300, 5, 77, 0], rows, max_keys=1024))
    case.rows.slots_B[3] = 0
    attend = FlashAttention(DEVICE)
    k_PSKD, v_PSKD = case.cache.heads(1)
    prepared = attend.prepare(case.kind(causal, window), case.rows)
    assert not isinstance(prepared, WorkList)
    sinks_Q = case.sinks if package.capability == 10 else None
    out = attend(case.q, k_PSKD, v_PSKD, case.rows, prepared, case.scale, sinks_Q=sinks_Q)
    expected = case.dense(causal=causal, window=window, sinks=sinks_Q is not None)
    assert (out.double() - expected).abs().max() < 3e-3


def test_rows_of_draft_trees_are_attended_by_our_kernel(flash_attn) -> None:
    """Also if the host knows their lengths: the package has no masks of ancestors."""
    case = as_prompts(Case(Shape(page_size=256, dtype=torch.float16), [300, 5], [4, 1], max_keys=1024))
    attend, kind = FlashAttention(DEVICE), case.kind()
    attend.reserve(kind.v_head_dim)
    assert not isinstance(attend.prepare(kind, case.rows), WorkList)
    paths_ND = torch.zeros(len(case.q), 2, dtype=torch.int32, device=DEVICE)
    tree = TreeRows(paths_ND, paths_ND[:, 0])
    assert isinstance(attend.prepare(kind, replace(case.rows, tree=tree)), WorkList)


@pytest.mark.parametrize(
    ("prompts", "shape", "first_key"),
    [
        (False, Shape(page_size=256, dtype=torch.float16), 0),
        (True, Shape(page_size=256, dtype=torch.float16, v_dim=8), 0),
        (True, Shape(page_size=256, dtype=torch.float16, dim=512), 0),
        (True, Shape(page_size=256, dtype=torch.float16), 1),
    ],
    ids=["a block", "values of another size", "wide heads", "a first key"],
)
def test_other_rows_and_kinds_are_attended_by_our_kernel(
    flash_attn, prompts: bool, shape: Shape, first_key: int
):
    case = Case(shape, [300, 5, 77], [16, 1, 3], max_keys=1024, padding=0 if prompts else 2)
    case = as_prompts(case) if prompts else case
    attend, kind = FlashAttention(DEVICE), case.kind(first_key=first_key)
    attend.reserve(kind.v_head_dim)
    prepared = attend.prepare(kind, case.rows)
    assert isinstance(prepared, WorkList)
    out = attend(case.q, *case.cache.heads(1), case.rows, prepared, case.scale)
    assert (out.double() - case.dense(first_key=first_key)).abs().max() < 3e-3


@pytest.mark.parametrize("capability", [8, 9, 10, 12])
def test_the_newest_package_of_a_device_is_used(capability: int, monkeypatch: pytest.MonkeyPatch):
    """Alone, FlashAttention 4 is in a folder with the name of 2."""
    spec, machine = asked(64, torch.bfloat16, 128)
    with_sinks = replace(spec, features=frozenset({"attention sinks"}))
    install(monkeypatch, *PACKAGES, capability=capability)
    reason = why_not(spec, machine)
    assert reason is None if capability in (9, 10) else "page_size=256" in str(reason)
    assert (why_not(with_sinks, replace(machine, page_size=256)) is None) == (capability == 10)
    install(monkeypatch, PACKAGES[2], capability=capability)
    reason = why_not(spec, machine)
    assert reason is None if capability == 10 else "FlashAttention 4 alone" in str(reason)


@pytest.mark.parametrize(
    ("page_size", "features", "changes", "by_version"),
    [
        (64, set(), {}, [False, True, True]),
        (256, set(), {}, [True, True, True]),
        (256, set(), {"batch_invariant": True}, [False, False, False]),
        (256, set(), {"kv_cache_dtype": "fp8"}, [False, False, False]),
        (256, {"attention sinks"}, {}, [False, False, True]),
        (256, set(), {"attention_backend": "triton"}, [False, False, False]),
    ],
)
def test_auto_takes_the_package_for_prompts_where_it_supports_the_model(
    package: Package,
    page_size: int,
    features: set[Feature],
    changes: dict[str, object],
    by_version: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where `auto` could take it and does not, the log says why."""
    caplog.set_level("INFO")
    monkeypatch.setattr(backend, "why_not_launch", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = EngineConfig.from_dict({"model": "none", "device": "cuda", **changes})
    spec, machine = asked(page_size, torch.bfloat16, 128)
    machine = replace(machine, kv_dtype=kv_dtype(config))
    wanted = "flash_attn" if by_version[PACKAGES.index(package)] else "triton"
    assert choose_backend(config, [replace(spec, features=frozenset(features))], machine) == wanted
    is_open = not {"batch_invariant", "attention_backend"} & changes.keys()
    assert ("attend prompts as well: flash_attn" in caplog.text) == (is_open and wanted == "triton")
    assert page_size == 256 or wanted == "flash_attn" or "page_size=256" in caplog.text


@pytest.mark.parametrize(
    ("page_size", "dtype", "head_dim", "features", "kv", "named"),
    [
        (256, torch.bfloat16, 256, set(), None, None),
        (512, torch.float16, 64, set(), None, None),
        (64, torch.bfloat16, 128, set(), None, "page_size=256"),
        (256, torch.float32, 128, set(), None, "dtype=bfloat16"),
        (256, torch.bfloat16, 512, set(), None, None),
        (256, torch.bfloat16, 1024, set(), None, "head_dim above 512, the drafter's is 1024"),
        (256, torch.bfloat16, 96, set(), None, None),
        (256, torch.bfloat16, 128, set(), torch.float8_e4m3fn, "kv_cache_dtype=auto"),
        (
            256,
            torch.bfloat16,
            64,
            {"attention sinks"},
            None,
            "has no attention sinks, which the drafter needs",
        ),
    ],
)
def test_limits_of_the_flash_attn_package_are_reported_with_a_remedy(
    flash_attn,
    page_size: int,
    dtype: torch.dtype,
    head_dim: int,
    features: set[Feature],
    kv: torch.dtype | None,
    named: str | None,
):
    spec, machine = asked(page_size, dtype, head_dim)
    reason = why_not(replace(spec, features=frozenset(features)), replace(machine, kv_dtype=kv))
    assert reason is None if named is None else reason is not None and named in reason


def asked(page_size: int, dtype: torch.dtype, head_dim: int) -> tuple[ModelStackSpec, DeviceCapabilities]:
    spec = ModelStackSpec(name="drafter", sizes=frozenset({4096}), head_dims=frozenset({64, head_dim}))
    return spec, DeviceCapabilities(torch.device("cuda"), dtype, page_size, num_ranks=2)


def test_a_missing_flash_attn_package_is_named(flash_attn, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    reason = why_not(*asked(256, torch.bfloat16, 128))
    assert reason is not None and "pip install flash-attn" in reason


def test_a_package_that_fails_to_import_is_absent_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Packages with a compiler of their own raise whatever it does, when they are imported."""
    install(monkeypatch, capability=9)
    (tmp_path / "flash_attn_interface.py").write_text("raise AttributeError('no such operator')")
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    monkeypatch.syspath_prepend(tmp_path)
    reason = why_not(*asked(64, torch.bfloat16, 128))
    assert reason is not None and "pip install flash-attn" in reason
    assert "flash_attn_interface is installed, but its import failed" in caplog.text
