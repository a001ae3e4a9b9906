"""The shapes of a target and its drafter, if any, and the demand on a layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .model_shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPair:
    """A target and perhaps a drafter, without norms and biases, which are under 0.1 % of the weights.

    Attributes:
        tied: whether the target's head is its embedding.
        tp_sizes: tensor parallel sizes that the target supports.
        survival: survival[i] is the probability that drafts 0..i are all accepted; empty without a drafter.
        chain: how drafts are made one pass each: by a drafter with its own head ("eagle3"), whole on every
            rank, or, divided among the ranks as the target is, by the target's layer, or a layer for each
            draft, with the target's head ("mtp"), or by an assistant with its own ("assistant"). None: all in
            one pass.
        read_layers: the target's layers, of those with K/V, that an assistant's layers read.
    """

    target: ModelShape
    drafter: ModelShape | None
    tied: bool
    tp_sizes: tuple[int, ...]
    survival: tuple[float, ...] = ()
    chain: Literal["eagle3", "mtp", "assistant"] | None = None
    read_layers: tuple[int, ...] = ()

    @property
    def num_drafts(self) -> int:
        return len(self.survival)

    def drafter_rank(self, ranks: int) -> ModelShape | None:
        """Return the drafter's part on one of the target's `ranks` ranks."""
        is_divided = self.chain in ("mtp", "assistant")
        return self.drafter.rank(ranks) if self.drafter is not None and is_divided else self.drafter

    def drafter_bytes(self, ranks: int = 1) -> int:
        """Return the bytes of the drafter's layers on a rank, and of its head if it has one of its own."""
        if (drafter := self.drafter_rank(ranks)) is None:
            return 0
        head_bytes = drafter.head_params * drafter.itemsize if self.chain in ("eagle3", "assistant") else 0
        return round(drafter.linear_params * drafter.weight_bytes + drafter.expert_bytes) + head_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of what a chain keeps for a page: states, one for each layer of the target's own."""
        if self.drafter is None or self.chain is None:
            return 0
        hidden = self.drafter.backbone or self.drafter.hidden
        count = self.drafter.num_layers if self.chain == "mtp" else 1
        return count * hidden * self.drafter.itemsize

    @property
    def fc_bytes(self) -> int:
        """Bytes of the projection from tapped target states, or of a token and a state with MTP."""
        return 0 if self.drafter is None else round(self.drafter.fc_bytes)

    def target_bytes(self, ranks: int) -> int:
        rank = self.target.rank(ranks)
        vocab_bytes = self.num_vocab_matrices * rank.head_params * rank.itemsize
        return round(rank.linear_params * rank.weight_bytes + rank.expert_bytes) + vocab_bytes

    @property
    def num_vocab_matrices(self) -> int:
        return 1 if self.tied else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutDemand:
    """The load that a layout must serve.

    Attributes:
        max_model_len: longest sequence in tokens; a layout must have memory for at least one.
        context: mean tokens per sequence, for the speed and the largest batch.
        slo_tpot_s: upper bound on the seconds per output token; None for no bound.
        batch: concurrent requests on the node; None for the best batch of each layout.
    """

    max_model_len: int
    context: int
    slo_tpot_s: float | None = None
    batch: int | None = None
