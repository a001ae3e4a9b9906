"""The interface between target and drafter: tapped hidden states, and borrowed embedding and head.

*Taps*: hidden states [N, m, H] after the tapped blocks, for every row of a target pass. Tap i is the output
of 0-based block `target_layer_ids[i]` after both residual additions, before any norm (z-lab's convention);
tap order is the column order of the drafter's `fc`. An off-by-one capture changes no output but ruins
acceptance, so ids are normalized once, in `config.py`.

*Timing*: a row's taps become drafter context at that row's absolute position once its token is committed. The
context of an anchor at position n is positions 0..n-1: the anchor itself has not passed the target yet.

*Borrowed*: DFlash shares the target's embedding and head. Under tensor parallelism both are collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..compute.block_weights import Projection


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Properties of the target that a drafter must match.

    `num_layers` bounds tapped ids; `max_model_len` sizes the rotary tables; `embed_scale` multiplies the
    target's embedding rows.
    """

    hidden_size: int
    num_layers: int
    vocab_size: int
    max_model_len: int
    embed_scale: float = 1.0


class TargetEmbeddings(Protocol):
    @property
    def is_split(self) -> bool: ...

    def embed(self, token_ids_N: Tensor, /) -> Tensor:
        """Return input embeddings [N, H] as the target's first block gets them, without scale or norm."""
        ...

    def logits(self, hidden_NH: Tensor, /) -> Tensor:
        """Return the head's logits [N, V] for normed states, without scaling or cap."""
        ...

    def local_logits(self, hidden_NH: Tensor, /) -> tuple[Tensor, int]:
        """Return the logits of this rank's part of the vocabulary, and the part's first token id."""
        ...


class EmbeddingCopies:
    """Copies of embedding [V, H] and head, for drafters in other processes, tools and tests."""

    is_split = False

    def __init__(self, embedding_VH: Tensor, head: Projection) -> None:
        self._embedding_VH = embedding_VH
        self._head = head

    def embed(self, token_ids_N: Tensor, /) -> Tensor:
        return self._embedding_VH.index_select(0, token_ids_N)

    def logits(self, hidden_NH: Tensor, /) -> Tensor:
        return self._head(hidden_NH)

    def local_logits(self, hidden_NH: Tensor, /) -> tuple[Tensor, int]:
        return self._head(hidden_NH), 0


def usual_layer_ids(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Return z-lab's default taps: evenly spaced from layer 1 to the third last, as 0-based output ids.

    Formula: round(1 + i (L - 4) / (m - 1)) for i = 0..m-1 (z-lab/dflash). No layer is tapped twice, so a
    target with few layers gets fewer than `num_taps`.
    """
    if num_taps == 1:
        return (num_layers // 2,)
    even = (round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in range(num_taps))
    return tuple(sorted({min(max(layer, 0), num_layers - 1) for layer in even}))
