"""Chooses which requests of a pass have their latents expanded, and gathers these latents from pages.

Expands requests with many rows, and only if the host knows the lengths: prompts, never a decoding graph.
Launch sizes come from the host; the lists are computed on the device, so nothing is uploaded. The
concatenated keys are processed in pieces:

    rows of each      3   200    40   300       expanded from 171 rows on
    keys of each     90   900  6000  4200
    keys_before    0    0   900   900  5100     piece 0: keys 0 .. 4095, piece 1: 4096 .. 5099

Legend: B requests, J heads, E unrotated head dim, F of values, W values of a latent and its rotated key, U =
E + F, T keys of a piece, P pages, S page size; in the kernel K keys.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from ...layers.mla import MLALayer
from ..common.e4m3 import widen
from ..common.element_ops import dependent_launch, wait_for_predecessor
from .attention_tiles import PagedRows

PIECE_KEYS = 4096  # large enough that rereading a tile's sums is cheap compared to its attention
# Rows, keys, warps and stages of a tile that registers hold; in fp32 with the correction terms of tf32x3.
_TILE, _TILE_FP32 = (128, 64, 8, 3), (16, 32, 4, 2)
_PROCESSORS_INTERPRETED = 64
_GATHERED = 8  # tokens per program
_REQUESTS = tl.constexpr(64)  # scanned per iteration


class ExpansionWorkspace:
    """Memory for one piece of latents, shared by layers of equal shape; requests from `fewest` rows on."""

    __slots__ = ("fewest", "heads_TJU", "latents_TW", "num_processors")

    def __init__(self, parts: MLALayer, width: int, minimum: int) -> None:
        self.fewest, empty = minimum, parts.kv_up_JUC.new_empty
        self.latents_TW = empty(PIECE_KEYS, width)
        self.heads_TJU = empty(PIECE_KEYS, *parts.kv_up_JUC.shape[:2])
        self.num_processors = _count_processors(self.latents_TW.device)

    @property
    def tile(self) -> tuple[int, int, int, int]:
        return _TILE_FP32 if self.heads_TJU.dtype is torch.float32 else _TILE


def _count_processors(device: torch.device) -> int:
    if device.type == "cpu":
        return _PROCESSORS_INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True, slots=True)
class Expansion:
    """The expanded requests of a pass, for all MLA layers in a page group, and totals.

    int32 [B + 1] tensors count what comes before each request. `takes_all`: no other request has rows.
    """

    rows: PagedRows
    workspace: ExpansionWorkspace
    keys_before: Tensor
    rows_before: Tensor
    tiles_before: Tensor
    num_keys: int
    num_rows: int
    num_tiles: int
    takes_all: bool

    @property
    def num_splits(self) -> int:
        num_heads = self.workspace.heads_TJU.shape[1]
        return max(1, self.workspace.num_processors // (self.num_tiles * num_heads))


def find_expansion(rows: PagedRows, workspace: ExpansionWorkspace) -> Expansion | None:
    """Return a pass's expansion; None if no request has enough rows, or the host does not know the rows."""
    if rows.host_spans_B2 is None:
        return None
    first_B, rows_B = rows.host_spans_B2.T
    minimum, (height, *_) = workspace.fewest, workspace.tile
    expands_B = rows_B >= minimum
    if not expands_B.any():
        return None
    counts_B = rows.cu_rows.diff()
    wanted_B = counts_B >= minimum
    tiles_B = (counts_B + (height - 1)).div(height, rounding_mode="floor")
    return Expansion(
        rows=rows,
        workspace=workspace,
        keys_before=_before_each(rows.kv_lengths_B * wanted_B),
        rows_before=_before_each(counts_B * wanted_B),
        tiles_before=_before_each(tiles_B * wanted_B),
        num_keys=int((first_B + rows_B)[expands_B].sum()),
        num_rows=int(rows_B[expands_B].sum()),
        num_tiles=int((-(-rows_B[expands_B] // height)).sum()),
        takes_all=bool((expands_B | (rows_B == 0)).all()),
    )


def _before_each(count_B: Tensor) -> Tensor:
    return F.pad(count_B.cumsum(0, dtype=torch.int32), (1, 0))


def gather(pages_PSW: Tensor, expansion: Expansion, begin: int, latents_TW: Tensor) -> None:
    (count, width), rows = latents_TW.shape, expansion.rows
    _gather_latents[triton.cdiv(count, _GATHERED),](
        pages_PSW, latents_TW, expansion.keys_before, rows.slots_B, rows.page_table, begin, count,
        len(rows.slots_B), rows.page_table.stride(0), pages_PSW.stride(0), pages_PSW.stride(1),
        VALUES=width, WIDTH=triton.next_power_of_2(width), PAGE=pages_PSW.shape[1], TOKENS=_GATHERED,
        **dependent_launch(latents_TW.device),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["begin", "count", "num_requests", "table_stride"],
    do_not_specialize_on_alignment=["slots_ptr", "page_table_ptr"],
)
def _gather_latents(
    pages_ptr, out_ptr, keys_before_ptr, slots_ptr, page_table_ptr, begin, count, num_requests, table_stride,
    page_stride, token_stride,
    VALUES: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(PDL)
    place_K = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there_K = place_K < count
    owner_K = tl.zeros([TOKENS], tl.int32)  # number of requests whose keys all come before
    for first in range(0, num_requests, _REQUESTS):
        request_B = first + tl.arange(0, _REQUESTS)
        end_B = tl.load(keys_before_ptr + 1 + request_B, mask=request_B < num_requests, other=2**31 - 1)
        owner_K += tl.sum((end_B[None, :] <= (begin + place_K)[:, None]).to(tl.int32), 1)
    key_K = begin + place_K - tl.load(keys_before_ptr + owner_K, mask=there_K, other=0)
    slot_K = tl.load(slots_ptr + owner_K, mask=there_K, other=0).to(tl.int64)
    page_K = tl.load(page_table_ptr + slot_K * table_stride + key_K // PAGE, mask=there_K, other=0)
    from_K = page_K.to(tl.int64) * page_stride + (key_K % PAGE) * token_stride
    value_W = tl.arange(0, WIDTH)
    there_KW = there_K[:, None] & (value_W < VALUES)[None, :]
    latents_KW = tl.load(pages_ptr + from_K[:, None] + value_W[None, :], mask=there_KW, other=0.0)
    latents_KW = widen(latents_KW, out_ptr.dtype.element_ty)
    tl.store(out_ptr + place_K[:, None] * VALUES + value_W[None, :], latents_KW, mask=there_KW)
