"""The gated delta rule, row by row, and the causal convolution before it: their meaning.

Of one request's rows, in their order, per value head (its key head serves several, in turn):

    S <- e^g S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q

`chunk` changes no state: it returns what its rows read, the state behind the last, and records, from which
`fold` makes the state behind any number of them, as one does once it is known which drafts stand. Every row
goes through the same operations on tensors of the same shape, so its bits depend neither on how rows are cut
into chunks nor on what is folded. Chunks as products of matrices are faster where those are, and round
otherwise.

`compute/cpu_numba/gated_delta_net.py` is the same in compiled loops; the layer around both is
`gated_delta_net.py`.

Legend: N rows of one request, K key heads, V value heads, D key dim, F value dim; C channels, T taps, W =
T - 1 rows before the first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..layers.linear import in_fp32

EPS = 1e-6  # beside the sum of queries' and keys' squares, as FLA has it


class Records(NamedTuple):
    """What rows do to a state, fp32: kept of a draft until it is known whether it stands.

    Attributes:
        k_NKD: keys, as `chunk` got them.
        u_NVF: what each row writes under its key.
        g_NV: by how much it lets the state decay before, as a logarithm.
    """

    k_NKD: Tensor
    u_NVF: Tensor
    g_NV: Tensor


def chunk(
    q_NKD: Tensor, k_NKD: Tensor, v_NVF: Tensor, g_NV: Tensor, beta_NV: Tensor, state_VDF: Tensor
) -> tuple[Tensor, Records, Tensor]:
    """All fp32, or fp64 but for `state`, which stays as it was.

    Args:
        q_NKD, k_NKD: of unit length (`unit`), q scaled besides.
        g_NV: <= 0.
        state_VDF: before the first row.

    Returns:
        what the rows read, [N, V, F]; their records; the state behind the last row.
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
    """The state behind the first `count` recorded rows, of the state before them; that stays as it was."""
    state_VDF, group = state_VDF.clone(), records.u_NVF.shape[1] // records.k_NKD.shape[1]
    k_NVD1 = records.k_NKD[:count].repeat_interleave(group, dim=1).unsqueeze(-1)
    for n in range(count):
        state_VDF *= records.g_NV[n].exp().view(-1, 1, 1)
        state_VDF += k_NVD1[n] * records.u_NVF[n].unsqueeze(1)
    return state_VDF


def conv_chunk(x_NC: Tensor, window_WC: Tensor, kernel_CT: Tensor) -> Tensor:
    """y_n = silu(sum over taps t of kernel_t x_(n - W + t)), [N, C], in fp32, rounded once.

    The rows' records are their inputs.

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
    """The inputs before the next row, once the first `count` rows of `x` stand."""
    return torch.cat((window_WC, x_NC[:count]))[count:]


def sigmoid(x: Tensor) -> Tensor:
    """By the exponential, whose bits do not depend on where in a tensor an element is; PyTorch's own do."""
    return 1.0 / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), likewise."""
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))


def unit(x_NKD: Tensor) -> Tensor:
    """Heads of unit length, fp32."""
    x_NKD = in_fp32(x_NKD)
    return x_NKD * torch.rsqrt(x_NKD.square().sum(-1, keepdim=True) + EPS)
