"""The dtype of products in training: bf16 where the device multiplies it fast, else fp32.

PyTorch's bf16 products take four to five times as long as fp32 on CPUs without instructions for them
(AVX-512 without BF16, AVX2).
"""

from __future__ import annotations

from functools import cache

import torch

from ....actors.targets.loading.backend_selection import instructions_of_passes


@cache
def product_dtype(device_type: str) -> torch.dtype:
    has_bf16 = device_type != "cpu" or instructions_of_passes() in ("amx", "avx512_bf16")
    return torch.bfloat16 if has_bf16 else torch.float32


def autocast(device: torch.device) -> torch.autocast:
    """Compute products of fp32 tensors in `product_dtype`."""
    return torch.autocast(device.type, torch.bfloat16, enabled=product_dtype(device.type) is torch.bfloat16)
