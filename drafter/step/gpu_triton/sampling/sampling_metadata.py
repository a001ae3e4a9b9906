"""Sampling parameters of request slots on the device, and the kernels' accessors.

Used by `sampler.py` and `top_k_top_p.py`.

Legend: F stop tokens of a request.
"""

# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ..inputs.row_layout import SlotTables
from .logits_processor_tables import RuleTables


@dataclass(frozen=True, slots=True)
class DeviceSamplingMetadata:
    """Sampling parameters of each request slot: tensors [slots] on the device.

    Attributes:
        temperature, top_p, min_p: fp32. Temperature 0: greedy.
        top_k: int32; 0 or less keeps all, 1 is greedy.
        seed: int64, the noise key.
        min_length: int32; no stop token at positions below it.
        stop_ids: int32 [slots, F]; the list ends at the first -1.
        rules, tables: logits rules, and the tokens that they read; None without rules.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    min_length: Tensor
    stop_ids: Tensor
    rules: RuleTables | None = None
    tables: SlotTables | None = None


@triton.jit
def read_temperature(slot, temperatures, top_ks):
    """Return a slot's temperature; 0 if it is greedy."""
    return tl.where(tl.load(top_ks + slot) == 1, 0.0, tl.load(temperatures + slot))


@triton.jit
def read_filters(slot, temperature, top_ks, top_ps, min_ps):
    """Return (top-k, top-p, min-p) of a slot; neutral (0, 1, 0) if it is greedy."""
    is_noisy = temperature > 0
    top_k = tl.where(is_noisy, tl.load(top_ks + slot), 0)
    top_p = tl.where(is_noisy, tl.load(top_ps + slot), 1.0)
    return top_k, top_p, tl.where(is_noisy, tl.load(min_ps + slot), 0.0)


@triton.jit
def has_filters(filters):
    """Return whether (top-k, top-p, min-p) exclude anything."""
    top_k, top_p, min_p = filters
    return (top_k > 0) | (top_p < 1) | (min_p > 0)


@triton.jit
def read_logits(logits_row, columns, vocab_start, NUM_STOP_IDS: tl.constexpr):
    """Load logits as `read_raw_logits`, with NaN replaced by -inf, which never wins."""
    z = read_raw_logits(logits_row, columns, vocab_start, NUM_STOP_IDS)
    return tl.where(z == z, z, -float("inf"))


@triton.jit
def read_raw_logits(logits_row, columns, vocab_start, NUM_STOP_IDS: tl.constexpr):
    """Load logits in fp32; -inf outside the row, and for stop tokens below the minimum length.

    Args:
        logits_row: (pointer to a row, V, pointer to its stop tokens, whether it is below the minimum
            length, temperature); passed on as one.
    """
    logits, vocab_size, stop_ids, is_early, _ = logits_row
    z = tl.load(logits + columns, mask=columns < vocab_size, other=-float("inf")).to(tl.float32)
    if is_early:
        i, stop_id = 0, tl.load(stop_ids)
        while stop_id >= 0:  # loop over the actual ids: unrolled over capacity, 128 compares
            z = tl.where(columns + vocab_start == stop_id, -float("inf"), z)
            i += 1
            stop_id = tl.load(stop_ids + i, mask=i < NUM_STOP_IDS, other=-1)
    return z
