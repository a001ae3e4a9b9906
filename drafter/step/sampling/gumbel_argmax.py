"""Chooses a token per row and its margin: argmax of z, or of z + T g (Gumbel-max, `inputs/gumbel_noise.py`).

The definition, in PyTorch, on any device; `step/cpu_numba/gumbel_argmax.py` is the same in compiled loops,
and `step/gpu_triton/sampling/sampler.py` does it together with filters. Called by `sampler.py`.

Legend: N rows, M rows with temperature > 0, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..inputs.gumbel_noise import negative_gumbel


def argmax_margin(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Return token ids [N] (int64), ties to the lowest id, and margins [N] (fp32).

    A margin is the best logit minus the second best: inf if only one token is possible, 0 if none is.

    Args:
        logits_NV: any float dtype; -inf for impossible tokens.
    """
    return with_margin(logits_NV.float())


def are_numbers(logits_NV: Tensor) -> Tensor:
    """Return whether a row holds neither NaN nor +inf, bool [N].

    Args:
        logits_NV: any float dtype, as the target computed them.
    """
    return logits_NV.amax(dim=-1) < float("inf")


def noisy_argmax_margin(logits_MV: Tensor, temperature_M1: Tensor, key_2M1: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids [M] and margins [M] of z + T g.

    argmax(z + T g) = argmax(z / T + g), and is stable for T -> 0.

    Args:
        logits_MV: any float dtype; -inf for impossible tokens.
        temperature_M1: fp32, above 0.
        key_2M1: `noise_keys`, int64.
    """
    negative_g_MV = negative_gumbel(key_2M1, logits_MV.shape[-1])
    return with_margin(torch.addcmul(logits_MV.float(), temperature_M1, negative_g_MV, value=-1))


def with_margin(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the argmax of fp32 scores along the last dimension, ties to the first, and the margins."""
    places = scores.argmax(dim=-1, keepdim=True)
    best, second = scores.gather(-1, places), scores.scatter(-1, places, float("-inf")).amax(dim=-1)
    best = best.squeeze(-1)
    return places.squeeze(-1), torch.where(best == second, 0.0, best - second)
