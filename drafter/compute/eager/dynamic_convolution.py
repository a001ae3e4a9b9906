"""The definition of DFlash2's grouped dynamic causal convolution (`dflash/model.py` of z-lab/dflash).

Called by Python-driven backends; `compute/gpu_triton/delta_net/dynamic_convolution.py` is the same in a
kernel.

Legend: N rows, H hidden, T taps, C groups of H / C adjacent channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layers.linear import in_fp32


def convolve(
    x_NH: Tensor,
    dynamic_NTC: Tensor,
    base_TH: Tensor,
    owners_N: Tensor,
    residual_NH: Tensor | None = None,
) -> Tensor:
    """Return y_n = sum over taps t of (base_t + dynamic_nt of each channel's group) * x_(n-t), [N, H].

    Rows of other requests and before the first count as 0: every block starts fresh. In fp32, rounded once.

    Args:
        owners_N: integers; adjacent rows have equal ones if they are of one request's block.
        residual_NH: added before the rounding.
    """
    num_rows, num_groups = len(x_NH), dynamic_NTC.shape[-1]
    x_NCG = in_fp32(x_NH).unflatten(-1, (num_groups, -1))
    y_NCG = torch.zeros_like(x_NCG)
    for t in range(min(len(base_TH), num_rows)):
        kernel_NCG = in_fp32(base_TH[t]).view(num_groups, -1) + in_fp32(dynamic_NTC[:, t]).unsqueeze(-1)
        is_own_M11 = (owners_N[t:] == owners_N[: num_rows - t]).view(-1, 1, 1)
        y_NCG[t:] += kernel_NCG[t:] * x_NCG[: num_rows - t] * is_own_M11
    y_NH = y_NCG.flatten(1)
    return (y_NH if residual_NH is None else y_NH + in_fp32(residual_NH)).to(x_NH.dtype)
