"""Applies grammars' token bitmasks to logits: the definition, in PyTorch, on any device.

`step/cpu_numba/grammar_masks.py` is the same in a compiled loop, `step/gpu_triton/sampling/grammar_masks.py`
in a kernel. `drafter/grammars/matchers.py` makes the masks. Called by `sampler.py`, after all rules.

Legend: N rows, V vocabulary, M rows with a mask.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...grammars.token_bitmasks import RowMasks


def mask_tokens(logits_NV: Tensor, masks: RowMasks) -> Tensor:
    """Return the logits, edited: -inf where a mask's bit is 0; 0 for `end_id` if no token is left."""
    rows_M = torch.from_numpy(masks.rows_M).to(logits_NV.device)
    bits_M8 = masks.bits_MW.view(np.uint8)
    allowed_MV = np.unpackbits(bits_M8, axis=1, count=logits_NV.shape[1], bitorder="little")
    is_allowed_MV = torch.from_numpy(allowed_MV).to(logits_NV.device).bool()
    logits_MV = logits_NV[rows_M].masked_fill_(~is_allowed_MV, float("-inf"))
    logits_MV[logits_MV.amax(dim=-1) == float("-inf"), masks.end_id] = 0.0
    logits_NV[rows_M] = logits_MV
    return logits_NV
