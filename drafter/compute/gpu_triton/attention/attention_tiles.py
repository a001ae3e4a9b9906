"""How an attention call is cut into tiles, and the tensors it shares: host arithmetic, no Triton.

All of it follows from shapes that a CUDA graph freezes; what follows from lengths, how contexts are cut into
pieces, is decided on the device (`work_list.py`). Called by `work_list.py` and `paged_attention.py`, and by
whoever makes a step's rows.

Legend: B requests, N rows, Q query heads, K kv heads, D head dim, F that of values, P pages of a request, S
page size, E rows of partial results.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.integer]

_PROGRAMS_PER_PROCESSOR = 2  # as many as registers and shared memory hold of blocks of 64 rows
_PROGRAMS_INTERPRETED = 4
_PARTIAL_ROWS = 512  # of partial results, for each program
_MIN_WIDTH = 16  # of a tile: the least that the matrix unit takes
_MIN_BLOCK_ROWS, _MAX_BLOCK_ROWS, _INVARIANT_BLOCK_ROWS = 16, 128, 64
_BLOCK_VALUES = {2: 16384, 4: 4096}  # rows * D that registers hold without spilling, by bytes of a value
MIN_PIECE_TILES = 2  # a piece of one tile writes and reads back twice the bytes of its own K/V
_SPLIT_KEYS, _RUN_SPLITS = 256, 16  # in batch-invariant mode
_ALL_ROWS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where a step's rows are and what they may see. All tensors live on the device; graphs replay over them.

    Attributes:
        slots_B: int32, each request's row of `page_table`.
        cu_rows: int32 [B + 1], rows before each request; rows from cu_rows[B] on are padding.
        kv_lengths_B: int32, keys of each request, those of this call's rows included.
        page_table: int32 [slots, P], page ids from position 0 on; none behind a request's length is read.
        max_rows: no request has more rows (host integer, at least 1: it chooses the tiles).
        host_spans_B2: first position and rows of each request, on the host, where it knows them: of prompts,
            among which is no padding. None of whoever decodes.
    """

    slots_B: Tensor
    cu_rows: Tensor
    kv_lengths_B: Tensor
    page_table: Tensor
    max_rows: int
    host_spans_B2: Ints | None = None


def rows_from_host(
    first_position_R: Ints,
    num_rows_R: Ints,
    pages_RP: Ints,
    page_size: int,
    device: torch.device | str,
    window: int | None = None,
) -> PagedRows:
    """Return a step's rows, which the host knows; see `backend.Backend.attention_batch`."""

    def put(values: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32)).to(device)

    return PagedRows(
        slots_B=put(np.arange(len(num_rows_R))),
        cu_rows=put(np.concatenate(([0], np.cumsum(num_rows_R)))),
        kv_lengths_B=put(first_position_R + num_rows_R),
        page_table=put(pages_RP),
        max_rows=int(num_rows_R.max()),
        host_spans_B2=np.stack((first_position_R, num_rows_R), axis=1),
    )


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What layers have in common that cut a pass alike.

    Attributes:
        head_dim, v_head_dim: of queries and keys; of values.
        dtype: of q, K and V.
        page_size: tokens of a page.
        causal, window, first_key: as in `attention.verify_attention`.
        most_rows: requests of more are left out: another kernel attends for them, and writes their results.
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
    """Room for partial results of shared contexts: allocated once, used by every layer in turn.

    Args:
        v_head_dim: of values.
        num_programs: that a launch has at most; by default as many as the device runs at once.
        batch_invariant: make every sum of the same parts in the same order and keep one tile height, so that
            a row's bits depend on neither its companions nor its place among them. Costs: tiles of 64 rows
            also for prompts and single rows, and a pause after every 256 keys.

    Attributes:
        max_E, sum_E, out_EF: fp32, the m, l and o of `paged_attention.py`; a tile of block_rows takes as many
            rows.
        arrived: int32, how many parts of a sum are there; zeros between launches.
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
        """Partial results of tiles of such a height that it holds."""
        return len(self.max_E) // block_rows


def _programs_at_once(device: torch.device) -> int:
    if device.type == "cpu":
        return _PROGRAMS_INTERPRETED
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True, slots=True)
class TilePlan:
    """One call's tiles.

    Attributes:
        block_rows, block_keys: a tile: query rows times the heads of a group, and keys.
        tile_tokens: rows of a request in a tile.
        num_warps: of a program.
        split_keys, run_splits: what sums are made of in batch-invariant mode: splits of so many keys, runs of
            so many splits; 0 where they may be made of anything.
    """

    block_rows: int
    block_keys: int
    tile_tokens: int
    num_warps: int
    split_keys: int
    run_splits: int

    def num_programs(self, num_requests: int, max_rows: int, num_kv_heads: int, max_keys: int) -> int:
        """Programs that can have work, were every context as long as the page table allows."""
        query_tiles = -(-max_rows // self.tile_tokens)
        pieces = -(-max_keys // (self.block_keys * MIN_PIECE_TILES))
        return num_requests * query_tiles * num_kv_heads * pieces


def plan_tiles(kind: AttentionKind, max_rows: int, *, batch_invariant: bool = False) -> TilePlan:
    """Tiles for a call by its shapes alone: of a kind at most four plans, in invariant mode one.

    Args:
        max_rows: as in `PagedRows`.
    """
    group, width = kind.num_heads // kind.num_kv_heads, tile_width(kind.head_dim)
    block_keys = _block_keys(width, kind.dtype.itemsize)
    values = _BLOCK_VALUES[kind.dtype.itemsize]
    if batch_invariant:  # three sums under way at once: half the rows where heads are wide, and more warps
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
    """Keys of a tile: so many that copies of several tiles of K and V fit into shared memory."""
    if itemsize == 2 and width <= 128:
        return 64
    return 32 if width * itemsize <= 1024 else 16


def tile_width(head_dim: int) -> int:
    """Columns of a tile that holds such heads: what is behind them is masked."""
    return max(_power_of_two_above(head_dim), _MIN_WIDTH)


def _power_of_two_above(number: int) -> int:
    return 1 << (number - 1).bit_length()
