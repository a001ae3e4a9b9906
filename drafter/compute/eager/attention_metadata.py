"""Groups a step's requests for attention, with the indices and masks that layers need.

Made once per step from host integers. Short requests (decoding) of similar context share a group, padded to
the longest; each long one (prefill) has its own, in tiles of query rows. Keys before a window are skipped in
whole blocks, which changes no bit. `attention.py` computes the groups.

Legend: N rows, G requests of a group, W query rows, T context tokens (padded), P pages of a request, M rows
of a group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..backend import Device, Ints, PlacedRows
from ..draft_trees import branches
from ..layers.rope import RotaryEmbedding, Rotation

_SHORT_ROWS = 32  # requests with at most this many rows share a group
_TILE_ROWS = 512  # query rows of a long request computed at once
# The CPU kernel's rounding depends on the number of keys (measured, AVX-512, MKL). Keys are summed in blocks
# of 512. Within a block, a length that is no multiple of 16 (with AMX: of 32) rounds differently, and above
# 192 keys a sum is split depending on its length (AMD: at 192 from 384 on; Intel with AMX: 384 at once, 512
# not). So such lengths are padded.
_KEY_MULTIPLE, _KEY_BLOCK, _SHORT_KEYS = 32, 512, 192


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Padded query rows: source row of each; indices of the real ones among them; their rows. int64."""

    padded_M: Tensor
    real_places_N: Tensor
    real_N: Tensor


@dataclass(frozen=True, slots=True)
class BranchKeys:
    """Keys of a tree's branches after the context: places among a group's gathered keys, flat, and slots."""

    places_M: Tensor
    slots_M: Tensor


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """Which of its request's keys a row sees; see `paged_attention`."""

    causal: bool
    window: int | None
    first_key: int


@dataclass(slots=True)
class Group:
    """Requests computed by one attention call.

    Attributes:
        num_requests, num_rows, num_keys: G, W before `_width` and T.
        rows: the group's rows, as a slice if they are in order and equally many per request.
        pages_GP: page ids (int64, flat).
        first_page: the first page of the only request, if its pages are consecutive; else None.
        begins_G, lengths_G: absolute position of the first key; keys that exist.
        positions_GW: absolute position of each query row; a shorter request's last one is repeated.
        branches: keys that replace those gathered from pages, if the requests are branches of trees.
        masks: cache of additive masks.
        views: cache of every plane's K and V of consecutive pages, by the tensor's id; see `_views`.
    """

    num_requests: int
    num_rows: int
    num_keys: int
    rows: slice | PaddedRows
    pages_GP: Tensor
    first_page: int | None
    begins_G: Tensor
    positions_GW: Tensor
    lengths_G: Tensor
    branches: BranchKeys | None = None
    masks: dict[tuple[VisibleKeys, torch.dtype, int, int], Tensor] = field(default_factory=dict)
    views: dict[int, tuple[Tensor, list[tuple[Tensor, ...]]]] = field(default_factory=dict)

    def mask(self, seen: VisibleKeys, dtype: torch.dtype, copies: int, width: int) -> Tensor:
        """Return an additive mask [G, 1, copies * width, T], 0 where visible, else -inf.

        The third dimension is 1 if all rows see the same keys.
        """
        key = (seen, dtype, copies, width)
        if key not in self.masks:
            mask_G1WT = self._make_mask(seen, dtype)
            if mask_G1WT.shape[2] > 1:
                mask_G1WT = pad_rows(mask_G1WT, width).repeat(1, 1, copies, 1)
            self.masks[key] = mask_G1WT
        return self.masks[key]

    def _make_mask(self, seen: VisibleKeys, dtype: torch.dtype) -> Tensor:
        keys_T = torch.arange(self.num_keys, device=self.positions_GW.device)
        keys_G1T, query_GW1 = keys_T + self.begins_G.view(-1, 1, 1), self.positions_GW.unsqueeze(-1)
        hidden_GWT = keys_G1T >= self.lengths_G.view(-1, 1, 1)
        if seen.causal:
            hidden_GWT = hidden_GWT | (keys_G1T > query_GW1)
        if seen.first_key > 0:
            hidden_GWT = hidden_GWT | (keys_G1T < query_GW1.clamp(max=seen.first_key))
        if (window := seen.window) is not None:
            hidden_GWT = hidden_GWT | (keys_G1T <= query_GW1 - window) | (keys_G1T >= query_GW1 + window)
        zero = torch.zeros((), dtype=dtype, device=keys_T.device)
        return torch.where(hidden_GWT, zero - float("inf"), zero).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The groups of one step's rows for one page group, as consumed by `paged_attention`."""

    groups: list[Group]
    num_rows: int

    @staticmethod
    def build(
        first_R: Ints,
        rows_R: Ints,
        pages_RP: Ints,
        page_size: int,
        device: Device,
        window: int | None = None,
        paths_ND: Ints | None = None,
    ) -> AttentionBatch:
        lengths_R = first_R + rows_R
        starts_R = np.cumsum(rows_R) - rows_R
        step = _Step(first_R, rows_R, lengths_R, starts_R, pages_RP, page_size, device, window)
        if paths_ND is None:
            return AttentionBatch(step.chains(np.arange(len(rows_R))), int(rows_R.sum()))
        is_tree_R = paths_ND[starts_R, 0] >= 0
        groups = step.chains(np.flatnonzero(~is_tree_R))
        for r in np.flatnonzero(is_tree_R).tolist():
            start = int(starts_R[r])
            groups.append(step.tree(r, branches(paths_ND[start : start + int(rows_R[r])])))
        return AttentionBatch(groups, int(rows_R.sum()))


def _companions(num_rows_R: Ints, num_keys_R: Ints, page_size: int) -> list[list[int]]:
    """Group requests: short ones within a factor of two in the keys they see; long ones alone."""
    if len(num_rows_R) <= 1:
        return [[0]] * len(num_rows_R)
    groups: dict[int, list[int]] = {}
    for r, (rows, keys) in enumerate(zip(num_rows_R.tolist(), num_keys_R.tolist(), strict=True)):
        key = -1 - r if rows > _SHORT_ROWS else max(keys - 1, page_size, 64).bit_length()
        groups.setdefault(key, []).append(r)
    return list(groups.values())


def _padded(length: int, page_size: int) -> int:
    """Return the keys to gather: whole pages, and a length with sums that round like longer ones."""
    unit = math.lcm(page_size, _KEY_MULTIPLE)
    count = -(-length // unit) * unit
    blocks, rest = divmod(count, _KEY_BLOCK)
    if rest > _SHORT_KEYS:
        count = -(-(blocks + 1) * _KEY_BLOCK // unit) * unit
    return count


@dataclass(frozen=True, slots=True)
class _Step:
    """Makes groups from a step's host integers."""

    first_R: Ints
    rows_R: Ints
    lengths_R: Ints
    starts_R: Ints
    pages_RP: Ints
    page_size: int
    device: torch.device | str
    window: int | None

    def begins(self, first_R: Ints) -> Ints:
        """Return the first key to gather for rows from `first` on: the start of a block they see."""
        if self.window is None:
            return np.zeros_like(first_R)
        unit = math.lcm(_KEY_BLOCK, self.page_size)
        return np.maximum(first_R - self.window + 1, 0) // unit * unit

    def _tensor(self, values: Ints | list[int]) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self.device)

    def chains(self, requests: Ints) -> list[Group]:
        """Return the groups of requests with consecutive rows."""
        groups: list[Group] = []
        first, rows, lengths = self.first_R[requests], self.rows_R[requests], self.lengths_R[requests]
        for members in _companions(rows, lengths - self.begins(first), self.page_size):
            chosen = requests[members].tolist()
            groups += self.long_request(chosen[0]) if len(chosen) == 1 else [self.short_requests(chosen)]
        return groups

    def tree(self, r: int, branches_B: list[tuple[Ints, int]]) -> Group:
        """Return a tree's branches as requests with one context, each with its rows in path order.

        So a row's keys have the places that they have in a chain, and its sums the same bits. Rows that
        several branches share are computed in each, and kept from the first.
        """
        first, start, count = int(self.first_R[r]), int(self.starts_R[r]), len(branches_B)
        longest = max(len(path) for path, _ in branches_B)
        begin = int(self.begins(np.array([first]))[0])
        num_keys = _padded(first + longest - begin, self.page_size)
        pages_P = self._pages([r], np.array([begin]), num_keys)[0]
        places_GW, rows_GW = (
            np.arange(longest),
            np.stack([_padded_path(path, longest) for path, _ in branches_B]),
        )
        lengths_G = np.array([len(path) for path, _ in branches_B])
        known_G = np.array([known for _, known in branches_B])
        has_GW = places_GW < lengths_G[:, None]
        real_GW = has_GW & (places_GW >= known_G[:, None])
        # Keys of the context's last page and after it, at the places of their positions.
        places_KW = np.arange(count)[:, None] * num_keys + first - begin + places_GW
        positions_GW = first + rows_GW
        slots_GW = self.pages_RP[r][positions_GW // self.page_size] * self.page_size
        slots_GW = slots_GW + positions_GW % self.page_size
        return Group(
            num_requests=count,
            num_rows=longest,
            num_keys=num_keys,
            rows=PaddedRows(
                padded_M=self._tensor((start + rows_GW).ravel()),
                real_places_N=self._tensor(np.flatnonzero(real_GW)),
                real_N=self._tensor((start + rows_GW)[real_GW]),
            ),
            pages_GP=self._tensor(np.tile(pages_P, count)),
            first_page=None,
            begins_G=self._tensor(np.full(count, begin)),
            positions_GW=self._tensor(first + np.minimum(places_GW, lengths_G[:, None] - 1)),
            lengths_G=self._tensor(first + lengths_G),
            branches=BranchKeys(self._tensor(places_KW[has_GW]), self._tensor(slots_GW[has_GW])),
        )

    def _pages(self, requests: list[int], begins_G: Ints, num_keys: int) -> Ints:
        """Return page ids [G, T / S]; missing pages are page 0, which the masks hide."""
        columns_GP = begins_G[:, None] // self.page_size + np.arange(num_keys // self.page_size)
        used_G = -(-self.lengths_R[requests] // self.page_size)
        last = self.pages_RP.shape[1] - 1
        have_GP = self.pages_RP[np.array(requests)[:, None], np.minimum(columns_GP, last)]
        return np.where(columns_GP < used_G[:, None], have_GP, 0)

    def long_request(self, r: int) -> list[Group]:
        """Return one request's tiles of query rows."""
        tiles: list[Group] = []
        first, start, rows = int(self.first_R[r]), int(self.starts_R[r]), int(self.rows_R[r])
        for begin in range(0, rows, _TILE_ROWS):
            # A bidirectional tile sees the request's later keys, so every tile gathers all of them.
            size = min(_TILE_ROWS, rows - begin)
            tiles.append(self._tile(r, first + begin, start + begin, size))
        return tiles

    def _tile(self, r: int, position: int, row: int, size: int) -> Group:
        length, begins_1 = int(self.lengths_R[r]), self.begins(np.array([position]))
        span = length - int(begins_1[0])
        num_keys = _padded(span, self.page_size)
        pages_P = self._pages([r], begins_1, num_keys)[0]
        consecutive = bool((np.diff(pages_P[: -(-span // self.page_size)]) == 1).all())
        return Group(
            num_requests=1,
            num_rows=size,
            num_keys=num_keys,
            rows=slice(row, row + size),
            pages_GP=self._tensor(pages_P),
            first_page=int(pages_P[0]) if consecutive else None,
            begins_G=self._tensor(begins_1),
            positions_GW=self._tensor(position + np.arange(size)[None]),
            lengths_G=self._tensor([length]),
        )

    def short_requests(self, members: list[int]) -> Group:
        """Group several requests, padded to the longest; padding repeats a request's last row."""
        rows_G, starts_G = self.rows_R[members], self.starts_R[members]
        longest = int(rows_G.max())
        begins_G = self.begins(self.first_R[members])
        num_keys = max(_padded(int(n), self.page_size) for n in self.lengths_R[members] - begins_G)
        places_GW = np.minimum(np.arange(longest), rows_G[:, None] - 1)
        rows_GW = starts_G[:, None] + places_GW
        real_GW = np.arange(longest) < rows_G[:, None]
        begin, end = int(starts_G[0]), int(starts_G[0]) + longest * len(members)
        if (rows_G == longest).all() and (starts_G == np.arange(begin, end, longest)).all():
            rows: slice | PaddedRows = slice(begin, end)
        else:
            rows = PaddedRows(
                padded_M=self._tensor(rows_GW.ravel()),
                real_places_N=self._tensor(np.flatnonzero(real_GW)),
                real_N=self._tensor(rows_GW[real_GW]),
            )
        return Group(
            num_requests=len(members),
            num_rows=longest,
            num_keys=num_keys,
            rows=rows,
            pages_GP=self._tensor(self._pages(members, begins_G, num_keys).ravel()),
            first_page=None,
            begins_G=self._tensor(begins_G),
            positions_GW=self._tensor(self.first_R[members][:, None] + places_GW),
            lengths_G=self._tensor(self.lengths_R[members]),
        )


def _padded_path(path: Ints, length: int) -> Ints:
    return np.concatenate((path, np.repeat(path[-1:], length - len(path))))


def pad_rows(q: Tensor, num_rows: int) -> Tensor:
    """Pad the last but one dimension to `num_rows` by repeating its last row."""
    missing = num_rows - q.shape[-2]
    if missing == 0:
        return q
    # Copied, because a row stride of 0 selects a slow path of the kernel.
    return torch.cat((q, *[q[..., -1:, :]] * missing), dim=-2)


class EagerPass:
    """State shared by the layers of a pass: the rows, and their rotations, computed on first use."""

    __slots__ = ("_rotations", "rows")

    def __init__(self, rows: PlacedRows) -> None:
        self.rows = rows
        self._rotations: dict[int, Rotation] = {}

    def rotation(self, rope: RotaryEmbedding) -> Rotation:
        found = self._rotations.get(id(rope))
        if found is None:
            found = self._rotations[id(rope)] = rope.at(self.rows.positions_N)
        return found
