"""Weights of multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434), and its two forms.

A token leaves one vector for all heads: its *latent* c, which per-head projections turn into keys and values,
and a rotated key r that all heads share.

    u ─▶ q_down, norm, q_up ─▶ of each head  q = [q_n, rotated q_r]
    u ─▶ kv_down ─▶ c = norm(..), r rotated           cached: [c, r], one vector per token
    k_h = [K_h c, r],  v_h = V_h c                     K_h, V_h: rows of kv_up

*Expanded*, attention is that of q and k_h. *Absorbed*, it is attention of [q_n K_h, q_r] over one K/V head
with the cached vectors as keys, their first C as values, followed by V_h: a token is read once
for all heads, which is what bounds decoding. Many rows of one request are less work expanded, with other last
bits: only a GPU does it, for prompts, without batch invariance (docs/decisions/latent-attention.md,
expanded-latents.md). `AttentionShape` has the sizes of the absorbed form.

Legend: J heads, E unrotated head dim, F of values, U = E + F, C values of a latent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .linear import RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class MLALayer:
    """Norms and projections of a layer's MLA, on one rank.

    `q_norm` and `q_up` are for low-rank queries, else None. `kv_norm` is of the latent; `kv_up_JUC` has of
    each head K_h, then V_h; `v_dim` is F.
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
        """Unrotated dimensions of a head's queries and keys."""
        return self.kv_up_JUC.shape[1] - self.v_dim

    @property
    def rank(self) -> int:
        return self.kv_up_JUC.shape[2]

    @property
    def min_expanded(self) -> int | None:
        """Rows of a request in a pass from which expansion is less work, for any context; None: never.

        Per row and key of its context: 2 C + R multiplications per head absorbed, U + R expanded, and U C per
        key once a pass.
        """
        unit = self.kv_up_JUC.shape[1]
        saved = 2 * self.rank - unit
        return unit * self.rank // saved + 1 if saved > 0 else None

    def k_up(self) -> Tensor:
        return self.kv_up_JUC[:, : self.nope_dim]

    def v_up(self) -> Tensor:
        return self.kv_up_JUC[:, self.nope_dim :]
