"""The definition of the gated delta rule, row by row, and of the causal convolution before it.

Gated DeltaNet (arXiv 2412.06464); conventions are those of FLA (flash-linear-attention). For one request's
rows in order, per value head (a key head serves several):

    S <- e^g S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q

`chunk` changes no state: it returns its rows' outputs, the state after the last, and records, from which
`fold` computes the state after any number of them, once it is known which drafts are accepted. Every row runs
the same operations on tensors of the same shape, so its bits depend neither on how rows are divided into
chunks nor on folding. The layer around the rule is `gated_delta_net.py`.

Legend: N rows of one request, K key heads, V value heads, D key dim, F value dim; C channels, T taps, W = T -
1 rows before the first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..layers.linear import in_fp32

EPS = 1e-6  # added to the sum of squares of queries and keys, as in FLA


class Records(NamedTuple):
    """Rows' updates of a state, fp32: keys, what each row writes under its key, and log decays."""

    k_NKD: Tensor
    u_NVF: Tensor
    g_NV: Tensor


def chunk(
    q_NKD: Tensor, k_NKD: Tensor, v_NVF: Tensor, g_NV: Tensor, beta_NV: Tensor, state_VDF: Tensor
) -> tuple[Tensor, Records, Tensor]:
    """Return the outputs [N, V, F] of one request's rows, their records, and the state after the last row.

    All arguments are fp32, or fp64 but for `state_VDF`, which is not changed. q and k are of unit length
    (`unit`), q also scaled; g <= 0.
    """
    state_VDF, group = state_VDF.to(v_NVF.dtype, copy=True), v_NVF.shape[1] // k_NKD.shape[1]
    out_NVF, u_NVF = torch.empty_like(v_NVF), torch.empty_like(v_NVF)
    q_NVD1, k_NVD1 = (x.repeat_interleave(group, dim=1).unsqueeze(-1) for x in (q_NKD, k_NKD))
    for n in range(len(v_NVF)):
        state_VDF *= g_NV[n].exp().view(-1, 1, 1)
        seen_VF = (state_VDF * k_NVD1[n]).sum(1)
        torch.mul(beta_NV[n].unsqueeze(1), v_NVF[n] - seen_VF, out=u_NVF[n])
        state_VDF += k_NVD1[n] * u_NVF[n].unsqueeze(1)
        out_NVF[n] = (state_VDF * q_NVD1[n]).sum(1)
    return out_NVF, Records(k_NKD, u_NVF, g_NV), state_VDF


def fold(state_VDF: Tensor, records: Records, count: int) -> Tensor:
    """Return the state after the first `count` recorded rows; `state` is not changed."""
    state_VDF, group = state_VDF.clone(), records.u_NVF.shape[1] // records.k_NKD.shape[1]
    k_NVD1 = records.k_NKD[:count].repeat_interleave(group, dim=1).unsqueeze(-1)
    for n in range(count):
        state_VDF *= records.g_NV[n].exp().view(-1, 1, 1)
        state_VDF += k_NVD1[n] * records.u_NVF[n].unsqueeze(1)
    return state_VDF


def conv_chunk(x_NC: Tensor, window_WC: Tensor, kernel_CT: Tensor) -> Tensor:
    """Return y_n = silu(sum over taps t of kernel_t x_(n - W + t)), [N, C], in fp32, rounded once.

    Args:
        window_WC: the inputs before the first row, oldest first; 0 before a sequence begins.
        kernel_CT: fp32; the last tap is a row's own.
    """
    seen_MC, num_rows = in_fp32(torch.cat((window_WC, x_NC))), len(x_NC)
    y_NC = seen_MC[:num_rows] * kernel_CT[:, 0]
    for t in range(1, kernel_CT.shape[1]):
        y_NC += seen_MC[t : t + num_rows] * kernel_CT[:, t]
    return (y_NC * sigmoid(y_NC)).to(x_NC.dtype)


def conv_fold(window_WC: Tensor, x_NC: Tensor, count: int) -> Tensor:
    """Return the window before the next row, after the first `count` rows of `x` are accepted."""
    return torch.cat((window_WC, x_NC[:count]))[count:]


def sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid by exp: its bits do not depend on an element's index, unlike PyTorch's sigmoid."""
    return 1.0 / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + e^x); its bits do not depend on an element's index."""
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))


def unit(x_NKD: Tensor) -> Tensor:
    """Return heads normalized to unit length, fp32."""
    x_NKD = in_fp32(x_NKD)
    return x_NKD * torch.rsqrt(x_NKD.square().sum(-1, keepdim=True) + EPS)
