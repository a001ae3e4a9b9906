"""Latent attention (DeepSeek's MLA): what a layer has beyond `backend.AttentionShape`, as a backend gets it.

A token leaves one vector for all heads: its *latent* c, of which heads make keys and values by products of
their own, and a key r that is rotated and the same in all heads.

    u ─▶ q_down, norm, q_up ─▶ of each head  q = [q_n, rotated q_r]
    u ─▶ kv_down ─▶ c = norm(..), r rotated           cached: [c, r], one vector a token
    k_h = [K_h c, r],  v_h = V_h c                     K_h, V_h: rows of kv_up

*Expanded*, attention is that of q and k_h. *Absorbed*, q_n (K_h c) is (q_n K_h) c, and the sum over p V_h c
is V_h of the sum over p c: so it is attention of [q_n K_h, q_r] over one K/V head whose keys are the cached
vectors and whose values are their first C, and V_h multiplies behind it. That reads a token once for all
heads, which is what decoding waits for. Many rows of one request are less work expanded
(`MLALayer.fewest_expanded`), in other last bits: so a GPU computes prompts where bits are not promised, and
nobody else does (docs/decisions/latent-attention.md, expanded-latents.md).

`AttentionShape` has the sizes of that form. Made by the target's decoder.

Legend: J heads, E head dim of what is not rotated, F of values, U = E + F, C values of a latent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .linear import RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class MLALayer:
    """Norms and products of a layer's latent attention, on one rank.

    Attributes:
        q_norm, q_up: of queries behind their bottleneck; None where the block's first product makes queries.
        kv_norm: of the latent.
        kv_up_JUC: of each head K_h, then V_h.
        v_dim: F.
    """

    q_norm: RMSNorm | None
    q_up: Callable[[Tensor], Tensor] | None
    kv_norm: RMSNorm
    kv_up_JUC: Tensor
    v_dim: int

    @property
    def num_heads(self) -> int:
        return self.kv_up_JUC.shape[0]

    @property
    def nope_dim(self) -> int:
        """Of a head's queries and keys, what is not rotated."""
        return self.kv_up_JUC.shape[1] - self.v_dim

    @property
    def rank(self) -> int:
        return self.kv_up_JUC.shape[2]

    @property
    def fewest_expanded(self) -> int | None:
        """Rows of a request in a pass from which expanded is less work, however long its context; None: from
        no number on.

        A row and a key of its context take 2 C + R multiplications a head absorbed, and U + R expanded,
        which takes U C of a key before, once a pass.
        """
        unit = self.kv_up_JUC.shape[1]
        saved = 2 * self.rank - unit
        return unit * self.rank // saved + 1 if saved > 0 else None

    def k_up(self) -> Tensor:
        """K [J, E, C] of all heads, where it lies."""
        return self.kv_up_JUC[:, : self.nope_dim]

    def v_up(self) -> Tensor:
        """V [J, F, C] likewise."""
        return self.kv_up_JUC[:, self.nope_dim :]
