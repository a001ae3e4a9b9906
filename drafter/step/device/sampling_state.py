"""How request slots sample, on the device, and how kernels read it. Used by `sampling.py` and `filters.py`.

Legend: F stop tokens of a request.
"""

# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingState:
    """How each request slot samples; tensors [slots] on the device, read when the kernels run.

    Attributes:
        temperature, top_p, min_p: fp32. Temperature 0: greedy.
        top_k: int32; 0 or less keeps all, 1 is greedy.
        seed: int64, the noise key.
        min_length: int32; at positions below it no stop token may be chosen.
        stop_ids: int32 [slots, F], padded with -1.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    min_length: Tensor
    stop_ids: Tensor


@triton.jit
def read_filters(slot, temperatures, top_ks, top_ps, min_ps):
    """(top-k, top-p, min-p) of a slot; neutral (0, 1, 0) where it is greedy."""
    top_k, top_p, min_p = tl.load(top_ks + slot), tl.load(top_ps + slot), tl.load(min_ps + slot)
    is_noisy = (tl.load(temperatures + slot) > 0) & (top_k != 1)
    return tl.where(is_noisy, top_k, 0), tl.where(is_noisy, top_p, 1.0), tl.where(is_noisy, min_p, 0.0)


@triton.jit
def read_logits(row_logits, columns, vocab_size, vocab_start, stop_ids, is_early, NUM_STOP_IDS: tl.constexpr):
    """Logits in fp32; -inf outside the row, and where it is too early for a stop token."""
    z = tl.load(row_logits + columns, mask=columns < vocab_size, other=-float("inf")).to(tl.float32)
    if is_early:
        for i in range(NUM_STOP_IDS):
            z = tl.where(columns + vocab_start == tl.load(stop_ids + i), -float("inf"), z)
    return z
