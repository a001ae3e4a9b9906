"""How an attention call is cut into tiles and splits, and the tensors it shares: host arithmetic, no Triton.

All of it follows from shapes that a CUDA graph freezes; lengths and page ids stay on the device. Called by
`attention.py` and by whoever sizes its workspace.

Legend: B requests, N rows, Q query heads, K kv heads, D head dim, P pages of a request, S page size, E
partial results.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.integer]

_PROGRAMS_WANTED = 264  # two per multiprocessor of an H100 or H200: fewer leave memory bandwidth unused
_MAX_SPLITS = 64  # the reduction holds all splits of a head at once
MIN_SPLIT_TILES = 2  # a split of one tile writes and reads back twice the bytes of its own K/V
_MAX_BLOCK_ROWS, _INVARIANT_BLOCK_ROWS = 128, 64
# No call cut by shape needs more whose rows are at most B * max_rows: so many programs, so many rows each.
MAX_PARTIALS = _PROGRAMS_WANTED * _MAX_BLOCK_ROWS
_BLOCK_VALUES = {2: 16384, 4: 4096}  # rows * D that registers hold without spilling, by bytes of a value
_INVARIANT_SPLITS = 8


def invariant_partials(num_rows: int, num_heads: int) -> int:
    """Partial results that calls of so many rows need at most where they are batch-invariant."""
    return num_rows * num_heads * _INVARIANT_SPLITS


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where a step's rows are and what they may see. All tensors live on the device; graphs replay over them.

    Attributes:
        slots_B: int32, each request's row of `page_table`.
        cu_rows: int32 [B + 1], rows before each request; rows from cu_rows[B] on are padding.
        kv_lengths_B: int32, keys of each request, those of this call's rows included.
        page_table: int32 [slots, P], page ids from position 0 on; none behind a request's length is read.
        max_rows: no request has more rows (host integer, at least 1: it chooses the tiles).
    """

    slots_B: Tensor
    cu_rows: Tensor
    kv_lengths_B: Tensor
    page_table: Tensor
    max_rows: int


def rows_from_host(
    first_position_R: Ints,
    num_rows_R: Ints,
    pages_RP: Ints,
    page_size: int,
    device: torch.device | str,
    window: int | None = None,
) -> PagedRows:
    """The rows of a step whose places the host knows; as `attention.AttentionBatch.build`."""

    def put(values: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32)).to(device)

    return PagedRows(
        slots_B=put(np.arange(len(num_rows_R))),
        cu_rows=put(np.concatenate(([0], np.cumsum(num_rows_R)))),
        kv_lengths_B=put(first_position_R + num_rows_R),
        page_table=put(pages_RP),
        max_rows=int(num_rows_R.max()),
    )


class AttentionWorkspace:
    """Room for partial results of split contexts: allocated once, used by every layer in turn.

    Args:
        num_partials: the largest `TilePlan.num_partials` of the calls to come; 0 if none is split.
        batch_invariant: cut by absolute position and keep one tile height, so that a row's bits depend on
            neither its companions nor its place among them. Costs: contexts are cut into at most 8, long
            ones unevenly filled, and prefill needs a workspace too.
    """

    __slots__ = ("batch_invariant", "max_E", "out_ED", "sum_E")

    def __init__(
        self,
        num_partials: int,
        head_dim: int,
        device: torch.device | str,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self.batch_invariant = batch_invariant
        self.max_E = torch.empty(num_partials, dtype=torch.float32, device=device)
        self.sum_E = torch.empty_like(self.max_E)
        self.out_ED = torch.empty(num_partials, head_dim, dtype=torch.float32, device=device)


@dataclass(frozen=True, slots=True)
class TilePlan:
    """One call's cut.

    Attributes:
        block_rows, block_keys: a tile: query rows times the heads of a group, and keys.
        query_tiles: tiles that the longest request's rows need.
        num_splits: programs that share a context; a power of two.
        split_tiles: tiles of each split, counted from position 0; 0 shares what is visible evenly.
        num_warps: of a program.
    """

    block_rows: int
    block_keys: int
    query_tiles: int
    num_splits: int
    split_tiles: int
    num_warps: int

    def num_partials(self, num_rows: int, num_heads: int) -> int:
        """Partial results that a call with so many rows (padding included) needs in its workspace."""
        return 0 if self.num_splits == 1 else num_rows * num_heads * self.num_splits


def plan_tiles(
    num_requests: int,
    max_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    max_keys: int,
    *,
    batch_invariant: bool = False,
) -> TilePlan:
    """Cut a call by its shapes alone.

    Args:
        num_requests: B, requests of padding included.
        max_rows: as in `PagedRows`.
        max_keys: P * S.
    """
    group = num_heads // num_kv_heads
    block_keys = 64 if dtype.itemsize == 2 and head_dim <= 128 else 32
    most_rows = min(_MAX_BLOCK_ROWS, _BLOCK_VALUES[dtype.itemsize] // head_dim)
    wanted_rows = _INVARIANT_BLOCK_ROWS if batch_invariant else max_rows * group
    block_rows = max(16, _power_of_two_above(max(min(wanted_rows, most_rows), group)))
    query_tiles = -(-max_rows // (block_rows // group))
    splits = num_splits(num_requests, num_kv_heads, query_tiles, max_keys, block_keys)
    split_tiles = 0
    if batch_invariant:
        key_tiles = -(-max_keys // block_keys)
        splits = min(_INVARIANT_SPLITS, _power_of_two_below(key_tiles))
        split_tiles = -(-key_tiles // splits)
    num_warps = 8 if block_rows > 64 or block_rows * head_dim > 8192 else 4
    return TilePlan(block_rows, block_keys, query_tiles, splits, split_tiles, num_warps)


def num_splits(num_requests: int, num_kv_heads: int, query_tiles: int, max_keys: int, block_keys: int) -> int:
    """Programs that share a context: enough to fill the GPU, no more than a full table has work for."""
    programs = num_requests * num_kv_heads * query_tiles
    wanted = _PROGRAMS_WANTED // programs
    useful = max_keys // (block_keys * MIN_SPLIT_TILES)
    return _power_of_two_below(min(wanted, useful, _MAX_SPLITS))


def _power_of_two_below(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


def _power_of_two_above(number: int) -> int:
    return 1 << (number - 1).bit_length()
