"""Triton version of `drafter/step/sampling/grammar_masks.py`, in a launch over rows and columns before
sampling, and one over rows after it.

Masks are made on the host, which must know a step's drafts for that
(`actors/targets/runners/grammar_masks.py`). They are read from memory of fixed shape, so a captured pass
applies whatever was written before its replay; rows without a mask cost a launch that reads their index.
Called by `sampler.py`, after all rules.

Legend: N rows, V columns of the logits, M rows with a mask, W words of a mask.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ....grammars.token_bitmasks import RowMasks

_CHUNK = 4096  # columns per program
_ROWS = 256  # per program


@dataclass(frozen=True, slots=True)
class DeviceMasks:
    """`RowMasks` of up to N rows on the device.

    Attributes:
        places_N: int32, each row's mask in `bits_NW`; -1 for none.
        bits_NW: int32; its first rows are the masks.
        end_id: the token that ends a text where nothing is allowed.
    """

    places_N: Tensor
    bits_NW: Tensor
    end_id: int

    @classmethod
    def build(cls, num_rows: int, num_words: int, end_id: int, device: torch.device | str) -> DeviceMasks:
        """Allocate, for rows without masks."""
        places_N = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
        return cls(places_N, torch.zeros(num_rows, num_words, dtype=torch.int32, device=device), end_id)

    @classmethod
    def of(cls, masks: RowMasks, num_rows: int, device: torch.device | str) -> DeviceMasks:
        built = cls.build(num_rows, masks.bits_MW.shape[1], masks.end_id, device)
        built.write(masks)
        return built

    def of_rows(self, num_rows: int) -> DeviceMasks:
        """Return a view of the first rows."""
        return DeviceMasks(self.places_N[:num_rows], self.bits_NW, self.end_id)

    def write(self, masks: RowMasks) -> None:
        """Copy a step's masks, which the host overwrites in the next step."""
        assert masks.end_id == self.end_id, "one model, one end token"
        places_N = np.full(len(self.places_N), -1, dtype=np.int32)
        places_N[masks.rows_M] = np.arange(len(masks.rows_M), dtype=np.int32)
        self.places_N.copy_(torch.from_numpy(places_N))
        self.bits_NW[: len(masks.bits_MW)].copy_(torch.from_numpy(masks.bits_MW))

    def clear(self) -> None:
        self.places_N.fill_(-1)


def mask_tokens(logits_NV: Tensor, masks: DeviceMasks) -> None:
    """Set logits to -inf in place where a mask's bit is 0. Columns are contiguous, the whole vocabulary."""
    num_rows, vocab_size = logits_NV.shape
    num_words = masks.bits_NW.shape[1]
    assert len(masks.places_N) == num_rows, "a place for each row"
    _mask[triton.cdiv(vocab_size, _CHUNK), num_rows](
        logits_NV, logits_NV.stride(0), masks.places_N, masks.bits_NW, num_words, vocab_size, CHUNK=_CHUNK
    )


def force_end_tokens(ids_N: Tensor, scores_N: Tensor, masks: DeviceMasks) -> None:
    """Set the sampled id to `end_id` in masked rows in which no token was possible."""
    _force_ends[triton.cdiv(len(ids_N), _ROWS),](
        ids_N, scores_N, masks.places_N, masks.end_id, len(ids_N), ROWS=_ROWS
    )


@triton.jit(do_not_specialize=["end_id", "num_rows"])
def _force_ends(ids, scores, places, end_id, num_rows, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < num_rows
    place = tl.load(places + rows, mask=there, other=-1)
    is_empty = tl.load(scores + rows, mask=there, other=0.0) == -float("inf")
    tl.store(ids + rows, tl.zeros([ROWS], tl.int64) + end_id, mask=(place >= 0) & is_empty)


@triton.jit
def _mask(logits, row_stride, places, bits, num_words, vocab_size, CHUNK: tl.constexpr):
    columns, row = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK), tl.program_id(1).to(tl.int64)
    mask = tl.load(places + row)
    if mask < 0:
        return
    is_column = columns < vocab_size
    words = tl.load(bits + mask.to(tl.int64) * num_words + columns // 32, mask=is_column, other=-1)
    is_banned = is_column & (((words >> (columns % 32)) & 1) == 0)
    tl.store(logits + row * row_stride + columns, -float("inf"), mask=is_banned)
