"""The choice of a token per row: argmax of z, or of z + T g with the noise of `noise.py`.

The definition, in PyTorch, on any device; `loops/choice.py` is the same in compiled loops, and
`device/sampling.py` does it with a step's filters in two launches. Called by `sampling.py`.

Legend: N rows, M rows with temperature > 0, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .noise import negative_gumbel


def argmax(logits_NV: Tensor) -> Tensor:
    """Token ids [N] (int64), ties to the lowest id."""
    return logits_NV.argmax(dim=-1)


def noisy_argmax(logits_MV: Tensor, temperature_M1: Tensor, key_2M1: Tensor) -> Tensor:
    """Token ids [M] (int64), ties to the lowest id.

    argmax of z + T g is that of z / T + g, and sound for T -> 0.

    Args:
        logits_MV: any float dtype; -inf where a token cannot be.
        temperature_M1: fp32, above 0.
        key_2M1: `noise_keys`, int64.
    """
    negative_g_MV = negative_gumbel(key_2M1, logits_MV.shape[-1])
    return torch.addcmul(logits_MV.float(), temperature_M1, negative_g_MV, value=-1).argmax(dim=-1)
