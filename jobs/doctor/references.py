"""What kernels compute, in fp64 and in the plainest words, on the device that they run on.

Operands are taken as they are given and nothing is rounded between. Used by the checks beside this module.

Legend: N rows, M rows of an expert, H hidden, I inner size, O outputs, J heads (of any kind), Q query heads,
K kv heads, D head dim, T keys of a request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...drafter.compute.experts import ExpertActivation
from ...drafter.compute.layers import Activation
from ...drafter.compute.rope import RotaryEmbedding


def linear(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """[N, O]."""
    return x_NI.double() @ weight_OI.double().T


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Over the last dimension."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight_H.double()


def gate(gate_up_NI: Tensor, activation: Activation) -> Tensor:
    """activation(first half) * second half."""
    gate_NI, up_NI = gate_up_NI.double().chunk(2, dim=-1)
    if activation == "silu":
        return gate_NI / (1 + (-gate_NI).exp()) * up_NI
    inside_NI = (2 / torch.pi) ** 0.5 * (gate_NI + 0.044715 * gate_NI**3)
    return gate_NI * (1 + inside_NI.tanh()) / 2 * up_NI


def expert_gate(gate_up_MI: Tensor, activation: ExpertActivation, limit: float | None) -> Tensor:
    """An expert's: clamped (gate at most the limit, up on both sides) for gpt-oss."""
    if activation != "swiglu_clamped":
        return gate(gate_up_MI, activation)
    gate_MI, up_MI = gate_up_MI.double().chunk(2, dim=-1)
    gate_MI, up_MI = gate_MI.clamp(max=limit), up_MI.clamp(-limit, limit)  # type: ignore[operator]
    return (up_MI + 1) * gate_MI / (1 + (-1.702 * gate_MI).exp())


def rotate(x_NJD: Tensor, rope: RotaryEmbedding, positions_N: Tensor) -> Tensor:
    """By the tables' own (rounded) cosines and sines."""
    low, high = x_NJD.double().chunk(2, dim=-1)
    half = low.shape[-1]
    cos_N1C = rope.cos_TD[positions_N, None, :half].double()
    sin_N1C = rope.sin_TD[positions_N, None, half:].double()
    return torch.cat((low * cos_N1C - high * sin_N1C, high * cos_N1C + low * sin_N1C), dim=-1)


def attend(
    q_NQD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    scale: float,
    *,
    causal: bool,
    window: int | None,
    sinks_Q: Tensor | None = None,
) -> Tensor:
    """[N, Q, D]: a request's rows, the last N of its T positions, over its keys.

    Args:
        sinks_Q: logits that take part in the softmax and have no value.
    """
    num_rows, num_heads, _ = q_NQD.shape
    num_keys, num_kv, _ = k_TKD.shape
    k_TQD, v_TQD = (x.double().repeat_interleave(num_heads // num_kv, 1) for x in (k_TKD, v_TKD))
    keys_T = torch.arange(num_keys, device=q_NQD.device)
    rows_N1 = keys_T[num_keys - num_rows :, None]
    seen_NT = torch.ones(num_rows, num_keys, dtype=torch.bool, device=q_NQD.device)
    if causal:
        seen_NT = seen_NT & (keys_T <= rows_N1)
    if window is not None:
        seen_NT = seen_NT & (keys_T > rows_N1 - window) & (keys_T < rows_N1 + window)
    scores_QNT = torch.einsum("nqd,tqd->qnt", q_NQD.double(), k_TQD) * scale
    scores_QNT = scores_QNT.masked_fill(~seen_NT, -torch.inf)
    if sinks_Q is not None:
        sinks_QN1 = sinks_Q.double()[:, None, None].expand(-1, num_rows, 1)
        scores_QNT = torch.cat((scores_QNT, sinks_QN1), dim=-1)
    return torch.einsum("qnt,tqd->nqd", scores_QNT.softmax(-1)[..., :num_keys], v_TQD)
