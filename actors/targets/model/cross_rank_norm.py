"""RMSNorm over all queries, and over all keys, of a layer with heads split over ranks.

    scale of a row = 1 / sqrt(sum of its squares over all ranks' heads / (all heads * D) + eps)

Not the per-head norm (`AttentionShape.q_norm_D`). Costs one small all-reduce per layer.
Legend: N rows, O outputs of a rank's product (q, k, v), Q and K widths of its queries and of its keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....drafter.compute.backend import Backend
from .tensor_parallel import Communicator, Sharding


class RowNorm:
    """Norm of whole queries and keys; `q_norm_Q` and `k_norm_K` are this rank's part of the weights."""

    __slots__ = ("_communicator", "_eps", "_row_squares", "_shares_2", "_weight_O", "_widths")

    def __init__(
        self,
        q_norm_Q: Tensor,
        k_norm_K: Tensor,
        eps: float,
        sharding: Sharding,
        layer: int,
        communicator: Communicator,
        backend: Backend,
    ) -> None:
        self._row_squares = backend.row_squares
        self._weight_O = torch.cat((q_norm_Q, k_norm_K)).float()
        self._widths = (len(q_norm_Q), len(k_norm_K))
        self._eps, self._communicator = eps, communicator
        mixer, ranks = sharding.spec.attention(layer), sharding.world_size
        # K/V heads that several ranks share are summed several times.
        copies = (1, ranks * sharding.num_kv_heads(layer) // mixer.num_kv_heads)
        sizes = (mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim)
        shares = [1.0 / (size * copy) for size, copy in zip(sizes, copies, strict=True)]
        self._shares_2 = torch.tensor(shares, device=q_norm_Q.device)

    def __call__(self, qkv_NO: Tensor) -> Tensor:
        """Norm queries and keys in place; values are unchanged."""
        squares_N2 = self._communicator.all_reduce(self._row_squares(qkv_NO, self._widths))
        scales_N2 = squares_N2.mul_(self._shares_2).add_(self._eps).rsqrt_()
        parts = qkv_NO.split((*self._widths, qkv_NO.shape[1] - sum(self._widths)), dim=1)
        weights = self._weight_O.split(self._widths)
        for part, scale_N1, weight in zip(parts[:2], scales_N2.split(1, dim=1), weights, strict=True):
            part.copy_(part.float().mul_(scale_N1).mul_(weight))
        return qkv_NO
