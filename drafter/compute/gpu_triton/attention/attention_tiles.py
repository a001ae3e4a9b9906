"""Tile sizes of attention calls, their shared tensors, and their work lists.

Tile sizes follow from shapes that a CUDA graph fixes. How contexts are split among programs depends on
lengths; the work list with it is built on the device.

A *pair* is a tile of a request's rows and a piece of its keys; pairs times kv heads are the items that
`paged_attention.py`'s programs share. Pieces have one length per call and begin at multiples of it, so that a
context of 32k among 31 short ones becomes many items of similar size. The length is chosen here from the
step's lengths, to minimize the estimated time, in units of keys that a program reads:

    rounds of all programs * (keys of an item + its fixed cost + write and read of its partial result)

Unsplit contexts win if requests fill the device, pieces of 128 keys for a single request with a thousand
keys. Batch-invariant mode has three lengths: a split, a run of splits, everything; sums always consist of
splits and runs (`key_tiles.py`), so bits do not depend on the choice.

One program, launched once per pass for all layers of a kind; the host reads nothing back.

    work    piece length | pieces of a run | pairs before each request, and all | shared pairs before each

Legend: B requests (in the kernel of one iteration), N rows, Q query heads, K kv heads, D head dim, F that of
values, P pages of a request, S page size, E rows of partial results, J candidate lengths.
"""

from __future__ import annotations

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ...backend import Device, Ints
from ...draft_trees import positions_of
from ..common.element_ops import dependent_launch, wait_for_predecessor

_PROGRAMS_PER_PROCESSOR = 2  # registers and shared memory hold two blocks of 64 rows
_PROGRAMS_INTERPRETED = 4
_PARTIAL_ROWS = 512  # of partial results, per program
_MIN_WIDTH = 16  # of a tile: the minimum of tensor cores
_MIN_BLOCK_ROWS, _MAX_BLOCK_ROWS, _INVARIANT_BLOCK_ROWS = 16, 128, 64
_BLOCK_VALUES = {2: 16384, 4: 4096}  # rows * D that fit in registers without spilling, by bytes of a value
MIN_PIECE_TILES = 2  # for a piece of one tile, writing and reading partials is twice its K/V
_SPLIT_KEYS, _RUN_SPLITS = 256, 16  # in batch-invariant mode
_ALL_ROWS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Paths [N, D], int32, of rows of draft trees (`draft_trees.py`), and positions of all rows."""

    paths_ND: Tensor
    positions_N: Tensor


@dataclass(frozen=True, slots=True)
class PagedRows:
    """A step's rows for attention. All tensors are on the device; graphs replay over them.

    Attributes:
        slots_B: int32, each request's row of `page_table`.
        cu_rows: int32 [B + 1], rows before each request; rows from cu_rows[B] on are padding.
        kv_lengths_B: int32, keys of each request, this call's rows included.
        page_table: int32 [slots, P], page ids from position 0 on; none past a request's length is read.
        max_rows: maximum rows of a request (host integer, at least 1: it determines the tiles).
        host_spans_B2: first position and rows of each request, on the host, if known: for prompts, which
            have no padding. None for decoding, so that rows with a tree have none.
        tree: None if all requests are chains.
    """

    slots_B: Tensor
    cu_rows: Tensor
    kv_lengths_B: Tensor
    page_table: Tensor
    max_rows: int
    host_spans_B2: Ints | None = None
    tree: TreeRows | None = None

    @property
    def has_masks(self) -> bool:
        """Whether a row sees some of its request's rows, by a mask, which takes registers."""
        return self.tree is not None


def rows_from_host(
    first_R: Ints,
    rows_R: Ints,
    pages_RP: Ints,
    page_size: int,
    device: Device,
    window: int | None = None,
    paths_ND: Ints | None = None,
) -> PagedRows:
    """Return a step's rows, which the host knows; see `backend.Backend.attention_batch`."""

    def put(values: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32)).to(device)

    tree = None
    if paths_ND is not None:
        tree = TreeRows(put(paths_ND), put(positions_of(paths_ND, first_R, rows_R)))
    return PagedRows(
        slots_B=put(np.arange(len(rows_R))),
        cu_rows=put(np.concatenate(([0], np.cumsum(rows_R)))),
        kv_lengths_B=put(first_R + rows_R),
        page_table=put(pages_RP),
        max_rows=int(rows_R.max()),
        host_spans_B2=np.stack((first_R, rows_R), axis=1) if tree is None else None,
        tree=tree,
    )


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """Properties shared by the layers that use one work list; see `eager.attention.paged_attention`.

    Requests with more than `most_rows` rows are skipped; another kernel computes them. `tile_rows` are the
    most of a tile if not the default (`mla.py`).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    page_size: int
    causal: bool = True
    window: int | None = None
    first_key: int = 0
    most_rows: int = _ALL_ROWS
    tile_rows: int | None = None


class AttentionWorkspace:
    """Memory for partial results of split contexts: allocated once, used by every layer in turn.

    Args:
        v_head_dim: of values.
        num_programs: most programs of a launch; by default as many as the device runs at once.
        batch_invariant: make every sum of the same parts in the same order and use one tile height, so that
            a row's bits depend on neither other rows nor its place among them. Costs: tiles of 64 rows
            also for prompts and single rows, and a rescaling after every 256 keys.

    Attributes:
        max_E, sum_E, out_EF: fp32, the m, l and o of `paged_attention.py`; a tile takes `block_rows` rows.
        arrived: int32, how many parts of a sum are stored; zeros between launches.
    """

    __slots__ = ("arrived", "batch_invariant", "max_E", "num_programs", "out_EF", "sum_E")

    def __init__(
        self,
        v_head_dim: int,
        device: torch.device | str,
        *,
        num_programs: int | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.batch_invariant = batch_invariant
        self.num_programs = num_programs or _programs_at_once(torch.device(device))
        num_rows = self.num_programs * _PARTIAL_ROWS
        self.max_E = torch.empty(num_rows, dtype=torch.float32, device=device)
        self.sum_E = torch.empty_like(self.max_E)
        self.out_EF = torch.empty(num_rows, tile_width(v_head_dim), dtype=torch.float32, device=device)
        self.arrived = torch.zeros(num_rows // _MIN_BLOCK_ROWS, 2, dtype=torch.int32, device=device)

    def num_slots(self, block_rows: int) -> int:
        return len(self.max_E) // block_rows


def _programs_at_once(device: torch.device) -> int:
    if device.type == "cpu":
        return _PROGRAMS_INTERPRETED
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Tile sizes of one call: query rows times the heads of a group, keys, and rows of a request.

    In batch-invariant mode sums consist of splits of `split_keys` keys, and runs of `run_splits` splits; 0
    otherwise.
    """

    block_rows: int
    block_keys: int
    tile_tokens: int
    num_warps: int
    split_keys: int
    run_splits: int

    def num_programs(self, num_requests: int, max_rows: int, num_kv_heads: int, max_keys: int) -> int:
        """Return how many programs can have work if every context is as long as the page table allows."""
        query_tiles = -(-max_rows // self.tile_tokens)
        pieces = -(-max_keys // (self.block_keys * MIN_PIECE_TILES))
        return num_requests * query_tiles * num_kv_heads * pieces


def choose_tiles(
    kind: AttentionKind, max_rows: int, *, batch_invariant: bool = False, has_masks: bool = False
) -> TileSizes:
    """Choose tiles from shapes alone: at most four per kind, in invariant mode one."""
    group, width = kind.num_heads // kind.num_kv_heads, tile_width(kind.head_dim)
    block_keys = _block_keys(width, kind.dtype.itemsize, needs_registers=batch_invariant or has_masks)
    values = _BLOCK_VALUES[kind.dtype.itemsize]
    if batch_invariant:  # three accumulators at once: half the rows if heads are wide, and more warps
        wanted_rows, most_rows = _INVARIANT_BLOCK_ROWS, values // 2 // width
    else:
        wanted_rows = max_rows * group
        most_rows = kind.tile_rows or min(_MAX_BLOCK_ROWS, values // width)
    block_rows = max(_MIN_BLOCK_ROWS, triton.next_power_of_2(max(min(wanted_rows, most_rows), group)))
    wide = block_rows > 64 or block_rows * width > 8192 or kind.dtype.itemsize == 4
    return TileSizes(
        block_rows=block_rows,
        block_keys=block_keys,
        tile_tokens=block_rows // group,
        num_warps=8 if wide or batch_invariant else 4,
        split_keys=_SPLIT_KEYS if batch_invariant else 0,
        run_splits=_RUN_SPLITS if batch_invariant else 0,
    )


def _block_keys(width: int, itemsize: int, *, needs_registers: bool) -> int:
    """Return the keys of a tile, so that several stages of K and V tiles fit in shared memory.

    Beside the three accumulators of batch-invariant mode, or masks of trees, scores of 64 keys would spill
    from 128 columns on.
    """
    if itemsize == 2 and width <= (64 if needs_registers else 128):
        return 64
    return 32 if width * itemsize <= 1024 else 16


def tile_width(head_dim: int) -> int:
    """Return the columns of a tile that holds such heads; the rest is masked."""
    return max(1 << (head_dim - 1).bit_length(), _MIN_WIDTH)


HEADER = tl.constexpr(2)  # numbers before the lists
_REQUESTS = tl.constexpr(64)  # per iteration
_LENGTHS = tl.constexpr(32)
_ITEM_KEYS = tl.constexpr(64)  # an item's cost besides its keys: its rows, the first memory latency
_ALL_KEYS = tl.constexpr(2**30)
_MIN_TILES = tl.constexpr(MIN_PIECE_TILES)


@dataclass(frozen=True, slots=True)
class WorkList:
    """A pass's work for layers of one kind: int32 `values` on the device, as above; programs to launch."""

    kind: AttentionKind
    tiles: TileSizes
    workspace: AttentionWorkspace
    values: Tensor
    num_programs: int


def list_work(kind: AttentionKind, rows: PagedRows, workspace: AttentionWorkspace) -> WorkList:
    """Build the work list in one launch; the host need not know the contents of `rows`."""
    num_requests = len(rows.slots_B)
    max_rows = min(rows.max_rows, kind.most_rows)
    how = {"batch_invariant": workspace.batch_invariant, "has_masks": rows.has_masks}
    tiles = choose_tiles(kind, max_rows, **how)
    max_keys = rows.page_table.shape[1] * kind.page_size
    maximum = tiles.num_programs(num_requests, max_rows, kind.num_kv_heads, max_keys)
    values = torch.empty(HEADER.value + 2 * num_requests + 1, dtype=torch.int32, device=rows.cu_rows.device)
    _list_work[(1,)](
        rows.cu_rows, rows.kv_lengths_B, values, num_requests, workspace.num_programs,
        workspace.num_slots(tiles.block_rows), kind.most_rows,
        KV_HEADS=kind.num_kv_heads, BLOCK_ROWS=tiles.block_rows, BLOCK_KEYS=tiles.block_keys,
        TILE_TOKENS=tiles.tile_tokens, WINDOW=kind.window or 0, SPLIT_KEYS=tiles.split_keys,
        RUN_SPLITS=tiles.run_splits, **dependent_launch(values.device),
    )  # fmt: skip
    return WorkList(kind, tiles, workspace, values, min(maximum, workspace.num_programs))


@triton.jit(
    do_not_specialize=[
        "cu_rows_ptr",
        "kv_lengths_ptr",
        "num_requests",
        "num_programs",
        "num_slots",
        "most_rows",
    ]
)
def _list_work(
    cu_rows_ptr, kv_lengths_ptr, work_ptr, num_requests, num_programs, num_slots, most_rows,
    KV_HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, TILE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT_KEYS: tl.constexpr, RUN_SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    length_J = _lengths(BLOCK_KEYS, SPLIT_KEYS, RUN_SPLITS)
    pairs_J = tl.zeros([_LENGTHS], tl.int32)
    shared_J = tl.zeros([_LENGTHS], tl.int32)
    longest = 0
    for begin in range(0, num_requests, _REQUESTS):
        request_B = begin + tl.arange(0, _REQUESTS)
        tiles_B, first_B, last_B = _requests(
            cu_rows_ptr, kv_lengths_ptr, request_B, num_requests, most_rows, TILE_TOKENS, WINDOW
        )
        pieces_BJ = count_pieces(first_B[:, None], last_B[:, None], length_J[None, :])
        pairs_BJ = tiles_B[:, None] * pieces_BJ
        pairs_J += tl.sum(pairs_BJ, 0)
        shared_J += tl.sum(tl.where(pieces_BJ > 1, pairs_BJ, 0), 0)
        longest = tl.maximum(longest, tl.max(tl.where(tiles_B > 0, last_B - first_B + 1, 0), 0))
    rounds_J = tl.cdiv(pairs_J * KV_HEADS, num_programs).to(tl.float32)
    partial_J = tl.where(shared_J > 0, 2 * BLOCK_ROWS, 0)  # fp32 partials versus K and V in half precision
    cost_J = rounds_J * (tl.minimum(length_J, longest) + _ITEM_KEYS + partial_J)
    cost_J = tl.where(shared_J * KV_HEADS <= num_slots, cost_J, float("inf"))
    length = tl.min(tl.where(cost_J == tl.min(cost_J, 0), length_J, _ALL_KEYS), 0)
    tl.store(work_ptr, length)
    tl.store(work_ptr + 1, _run_pieces(length, longest, SPLIT_KEYS, RUN_SPLITS))
    before_ptr = work_ptr + HEADER
    before, shared_before = 0, 0
    for begin in range(0, num_requests, _REQUESTS):
        request_B = begin + tl.arange(0, _REQUESTS)
        tiles_B, first_B, last_B = _requests(
            cu_rows_ptr, kv_lengths_ptr, request_B, num_requests, most_rows, TILE_TOKENS, WINDOW
        )
        pieces_B = count_pieces(first_B, last_B, length)
        pairs_B = tiles_B * pieces_B
        shared_B = tl.where(pieces_B > 1, pairs_B, 0)
        there_B = request_B < num_requests
        tl.store(before_ptr + request_B, before + tl.cumsum(pairs_B, 0) - pairs_B, mask=there_B)
        shared_ptr = before_ptr + num_requests + 1
        tl.store(shared_ptr + request_B, shared_before + tl.cumsum(shared_B, 0) - shared_B, mask=there_B)
        before += tl.sum(pairs_B, 0)
        shared_before += tl.sum(shared_B, 0)
    tl.store(before_ptr + num_requests, before)


@triton.jit
def _lengths(BLOCK_KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr, RUN_SPLITS: tl.constexpr):
    """Return the candidate lengths, ascending; the last holds any context."""
    step_J = tl.arange(0, _LENGTHS)
    if SPLIT_KEYS > 0:
        length_J = tl.where(step_J == 0, SPLIT_KEYS, SPLIT_KEYS * RUN_SPLITS)
        length_J = tl.where(step_J > 1, _ALL_KEYS, length_J)
    else:  # 2, 3, 4, 6, 8, 12, .. tiles
        length_J = BLOCK_KEYS * (_MIN_TILES + (step_J % 2) * (_MIN_TILES // 2)) << (step_J // 2)
    return length_J


@triton.jit
def _requests(
    cu_rows_ptr, kv_lengths_ptr, request_B, num_requests, most_rows,
    TILE_TOKENS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return tiles of rows (0 for requests with too many), and the first and last visible key."""
    there_B = request_B < num_requests
    rows_B = tl.load(cu_rows_ptr + request_B + 1, mask=there_B, other=0)
    rows_B -= tl.load(cu_rows_ptr + request_B, mask=there_B, other=0)
    keys_B = tl.load(kv_lengths_ptr + request_B, mask=there_B, other=0)
    first_B = first_seen(keys_B - rows_B, WINDOW)
    tiles_B = tl.where(rows_B <= most_rows, tl.cdiv(rows_B, TILE_TOKENS), 0)
    return tiles_B, first_B, keys_B - 1


@triton.jit
def first_seen(position, WINDOW: tl.constexpr):
    seen = position * 0
    if WINDOW > 0:
        seen = tl.maximum(position - WINDOW + 1, 0)
    return seen


@triton.jit
def count_pieces(first, last, length):
    """Return the number of pieces that contain keys first..last."""
    return last // length - first // length + 1


@triton.jit
def _run_pieces(length, longest, SPLIT_KEYS: tl.constexpr, RUN_SPLITS: tl.constexpr):
    """Return the pieces per run: about the square root of all, so that runs are as many as pieces in each."""
    pieces = longest // length + 1
    run = 1
    if SPLIT_KEYS > 0:
        run = tl.where(length == SPLIT_KEYS, RUN_SPLITS, 1)
    else:
        while run * run < pieces:
            run *= 2
    return run


@triton.jit
def find_request(before_ptr, pair, num_requests):
    """Return a pair's request: the number of requests that end before it."""
    request = 0
    for begin in range(0, num_requests, _REQUESTS):
        request_B = begin + tl.arange(0, _REQUESTS)
        end_B = tl.load(before_ptr + 1 + request_B, mask=request_B < num_requests, other=2**31 - 1)
        request += tl.sum((end_B <= pair).to(tl.int32), 0)
    return request
