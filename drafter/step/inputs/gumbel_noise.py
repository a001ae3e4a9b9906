"""Keyed Gumbel noise: a pure function of (seed, absolute position, token id).

The Gumbel-max trick: argmax(log p + g) with independent standard Gumbel g is a sample of p (E. J. Gumbel,
1954; Maddison et al., arXiv 1411.0030). Shared by drafter and target, it couples their samples (Daliri et
al., arXiv 2408.07978).

The definition, in NumPy and PyTorch; `step/gpu_triton/sampling/sampling_metadata.py` and
`step/cpu_numba/gumbel_noise.py` compute the same. Integers are equal everywhere, logarithms to about one unit
in the last place.

Legend: N rows, M rows with temperature > 0, V vocabulary.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LOW32 = 0xFFFFFFFF
# A two-round 32-bit mixer with low bias (github.com/skeeto/hash-prospector). Both factors are below 2^31, so
# a product with a 32-bit value fits int64: the integers are the same on every device.
FACTOR_1, FACTOR_2 = 0x21F0AAAD, 0x735A2D97
CHAINS = (0x243F6A88, 0x13198A2E)  # digits of pi: two independent keys per row
_CHAINS_21 = np.array(CHAINS)[:, None]
GREATEST_NEGATIVE = 2.8116  # upper bound of -g: log(24 log 2), where u is rounded to 1 - 2^-24


def noise_keys(seed: NDArray[np.int64], position: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return two 32-bit keys for each (64-bit seed, absolute position), int64 [2, N]."""
    low, high = seed & _LOW32, (seed >> 32) & _LOW32
    return _mix(_mix(_mix(low ^ _CHAINS_21) ^ high) ^ position)


def _mix(x: Any) -> Any:  # Any: NumPy arrays and tensors, whose operators are the same
    """Return a bijective hash of 32-bit values (held in int64)."""
    x = x ^ (x >> 16)
    x = (x * FACTOR_1) & _LOW32
    x = x ^ (x >> 15)
    x = (x * FACTOR_2) & _LOW32
    return x ^ (x >> 15)


@lru_cache(maxsize=8)
def _mixed_tokens(vocab_size: int, device: torch.device) -> Tensor:
    """Return mix(token id) for every token: the row-independent part of the hash."""
    return _mix(torch.arange(vocab_size, dtype=torch.int64, device=device))


def noise_bits(key_2M1: Tensor, vocab_size: int) -> Tensor:
    """Return 32 random bits per (row, token), int64 [M, V], the same integers on every device."""
    return _bits(key_2M1, _mixed_tokens(vocab_size, key_2M1.device))


def _bits(key_2M1: Tensor, mixed_V: Tensor) -> Tensor:
    bits_MV = mixed_V ^ key_2M1[0]
    bits_MV.mul_(FACTOR_1).bitwise_and_(_LOW32)
    bits_MV.bitwise_xor_(bits_MV >> 15).bitwise_xor_(key_2M1[1])
    bits_MV.mul_(FACTOR_2).bitwise_and_(_LOW32)
    return bits_MV.bitwise_xor_(bits_MV >> 15)


def negative_gumbel(key_2M1: Tensor, vocab_size: int) -> Tensor:
    """Return -g = log(E), E = -log(1 - u), u = (bits + 1/2) / 2^32, [M, V].

    This form is precise at small u, where the winning noise lies.
    """
    return _negative_gumbel(noise_bits(key_2M1, vocab_size))


def negative_gumbel_of(key_2M1: Tensor, token_ids_MK: Tensor) -> Tensor:
    """Return -g for some tokens of each row, [M, K]."""
    return _negative_gumbel(_bits(key_2M1, _mix(token_ids_MK)))


def _negative_gumbel(bits_MV: Tensor) -> Tensor:
    minus_u_MV = bits_MV.to(torch.float32).mul_(-(2.0**-32)).sub_(2.0**-33)
    minus_u_MV.clamp_(min=-1.0 + 2.0**-24)  # a u rounded to 1 would give infinity
    return minus_u_MV.log1p_().neg_().log_()
