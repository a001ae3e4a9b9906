"""Triton version of `drafter/step/sampling/grammar_masks.py`, in one launch over rows and columns.

Masks are made on the host, which must know a step's drafts for that; so this runs only in steps with a
grammar (`actors/targets/runners/grammar_masks.py`). Called by `sampler.py`, after all rules.

Legend: N rows, V columns of the logits, M rows with a mask, W words of a mask.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....grammars.token_bitmasks import RowMasks

_CHUNK = 4096  # columns per program


@dataclass(frozen=True, slots=True)
class DeviceMasks:
    """`RowMasks` on the device: rows_M int64, bits_MW int32."""

    rows_M: Tensor
    bits_MW: Tensor
    end_id: int

    @classmethod
    def of(cls, masks: RowMasks, device: torch.device) -> DeviceMasks:
        # Copies, because the host's masks are overwritten in the next step.
        rows_M, bits_MW = (torch.tensor(x, device=device) for x in (masks.rows_M, masks.bits_MW))
        return cls(rows_M, bits_MW, masks.end_id)


def mask_tokens(logits_NV: Tensor, masks: DeviceMasks) -> None:
    """Set logits to -inf in place where a mask's bit is 0. Columns are contiguous, the whole vocabulary."""
    vocab_size, (num_rows, num_words) = logits_NV.shape[1], masks.bits_MW.shape
    _mask[triton.cdiv(vocab_size, _CHUNK), num_rows](
        logits_NV, logits_NV.stride(0), masks.rows_M, masks.bits_MW, num_words, vocab_size, CHUNK=_CHUNK
    )


def force_end_tokens(ids_N: Tensor, scores_N: Tensor, masks: DeviceMasks) -> None:
    """Set the sampled id to `end_id` in masked rows in which no token was possible."""
    ids_M, is_empty_M = ids_N[masks.rows_M], scores_N[masks.rows_M] == float("-inf")
    ids_N[masks.rows_M] = torch.where(is_empty_M, masks.end_id, ids_M)


@triton.jit
def _mask(logits, row_stride, rows, bits, num_words, vocab_size, CHUNK: tl.constexpr):
    columns, mask = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK), tl.program_id(1)
    is_column = columns < vocab_size
    words = tl.load(bits + mask.to(tl.int64) * num_words + columns // 32, mask=is_column, other=-1)
    is_banned = is_column & (((words >> (columns % 32)) & 1) == 0)
    row = tl.load(rows + mask)
    tl.store(logits + row * row_stride + columns, -float("inf"), mask=is_banned)
