"""The choice of a token per row: argmax of z, or of z + T g with the noise of
`drafter/step/inputs/gumbel_noise.py`; and how sure it is.

The definition, in PyTorch, on any device; `step/cpu_numba/gumbel_argmax.py` is the same in compiled loops,
and `step/gpu_triton/sampling/sampler.py` does it with a step's filters in two launches. Called by
`sampler.py`.

Legend: N rows, M rows with temperature > 0, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..inputs.gumbel_noise import negative_gumbel


def argmax_margin(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids [N] (int64), ties to the lowest id; and margins [N] (fp32): the best logit minus the best of
    the others; inf where one token alone can be, 0 where none can.

    Args:
        logits_NV: any float dtype; -inf where a token cannot be.
    """
    return with_margin(logits_NV.float())


def are_numbers(logits_NV: Tensor) -> Tensor:
    """Whether a row holds neither NaN nor positive infinity, bool [N].

    Args:
        logits_NV: any float dtype, as the target computed them.
    """
    return logits_NV.amax(dim=-1) < float("inf")


def noisy_argmax_margin(logits_MV: Tensor, temperature_M1: Tensor, key_2M1: Tensor) -> tuple[Tensor, Tensor]:
    """The same of z + T g, ids [M] and margins [M].

    argmax of z + T g is that of z / T + g, and sound for T -> 0.

    Args:
        logits_MV: any float dtype; -inf where a token cannot be.
        temperature_M1: fp32, above 0.
        key_2M1: `noise_keys`, int64.
    """
    negative_g_MV = negative_gumbel(key_2M1, logits_MV.shape[-1])
    return with_margin(torch.addcmul(logits_MV.float(), temperature_M1, negative_g_MV, value=-1))


def with_margin(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Places of the best of fp32 scores along the last dimension, ties to the first, and their margins."""
    places = scores.argmax(dim=-1, keepdim=True)
    best, second = scores.gather(-1, places), scores.scatter(-1, places, float("-inf")).amax(dim=-1)
    best = best.squeeze(-1)
    return places.squeeze(-1), torch.where(best == second, 0.0, best - second)
