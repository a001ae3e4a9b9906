"""Tile sizes of attention calls, and their shared tensors: host arithmetic, no Triton.

Everything here follows from shapes that a CUDA graph fixes; how contexts are split into pieces depends on
lengths, and is decided on the device (`work_list.py`).

Legend: B requests, N rows, Q query heads, K kv heads, D head dim, F that of values, P pages of a request, S
page size, E rows of partial results.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...backend import Device, Ints

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
class PagedRows:
    """A step's rows for attention. All tensors are on the device; graphs replay over them.

    Attributes:
        slots_B: int32, each request's row of `page_table`.
        cu_rows: int32 [B + 1], rows before each request; rows from cu_rows[B] on are padding.
        kv_lengths_B: int32, keys of each request, this call's rows included.
        page_table: int32 [slots, P], page ids from position 0 on; none past a request's length is read.
        max_rows: maximum rows of a request (host integer, at least 1: it determines the tiles).
        host_spans_B2: first position and rows of each request, on the host, if known: for prompts, which
            have no padding. None for decoding.
    """

    slots_B: Tensor
    cu_rows: Tensor
    kv_lengths_B: Tensor
    page_table: Tensor
    max_rows: int
    host_spans_B2: Ints | None = None


def rows_from_host(
    first_R: Ints, rows_R: Ints, pages_RP: Ints, page_size: int, device: Device, window: int | None = None
) -> PagedRows:
    """Return a step's rows, which the host knows; see `backend.Backend.attention_batch`."""

    def put(values: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32)).to(device)

    return PagedRows(
        slots_B=put(np.arange(len(rows_R))),
        cu_rows=put(np.concatenate(([0], np.cumsum(rows_R)))),
        kv_lengths_B=put(first_R + rows_R),
        page_table=put(pages_RP),
        max_rows=int(rows_R.max()),
        host_spans_B2=np.stack((first_R, rows_R), axis=1),
    )


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """Properties shared by the layers that use one work list; see `eager.attention.paged_attention`.

    Requests with more than `most_rows` rows are skipped; another kernel computes them.
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
class TilePlan:
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


def plan_tiles(kind: AttentionKind, max_rows: int, *, batch_invariant: bool = False) -> TilePlan:
    """Choose tiles from shapes alone: at most four plans per kind, in invariant mode one."""
    group, width = kind.num_heads // kind.num_kv_heads, tile_width(kind.head_dim)
    block_keys = _block_keys(width, kind.dtype.itemsize)
    values = _BLOCK_VALUES[kind.dtype.itemsize]
    if batch_invariant:  # three accumulators at once: half the rows if heads are wide, and more warps
        wanted_rows, most_rows = _INVARIANT_BLOCK_ROWS, values // 2 // tile_width(kind.v_head_dim)
    else:
        wanted_rows, most_rows = max_rows * group, min(_MAX_BLOCK_ROWS, values // width)
    block_rows = max(_MIN_BLOCK_ROWS, _power_of_two_above(max(min(wanted_rows, most_rows), group)))
    wide = block_rows > 64 or block_rows * width > 8192 or kind.dtype.itemsize == 4
    return TilePlan(
        block_rows=block_rows,
        block_keys=block_keys,
        tile_tokens=block_rows // group,
        num_warps=8 if wide or batch_invariant else 4,
        split_keys=_SPLIT_KEYS if batch_invariant else 0,
        run_splits=_RUN_SPLITS if batch_invariant else 0,
    )


def _block_keys(width: int, itemsize: int) -> int:
    """Return the keys of a tile, so that several stages of K and V tiles fit in shared memory."""
    if itemsize == 2 and width <= 128:
        return 64
    return 32 if width * itemsize <= 1024 else 16


def tile_width(head_dim: int) -> int:
    """Return the columns of a tile that holds such heads; the rest is masked."""
    return max(_power_of_two_above(head_dim), _MIN_WIDTH)


def _power_of_two_above(number: int) -> int:
    return 1 << (number - 1).bit_length()
