"""The contract between target and drafter: what the drafter sees of the target, and what it borrows.

*Taps*: for every row of a target forward pass, the hidden states behind the tapped blocks, [N, m, H]. Tap i
is the output of 0-based block `target_layer_ids[i]` after both residual additions, before any norm (z-lab's
meaning); tap order is column order of the drafter's `fc`. Capturing one block early or late changes no
output of the engine and ruins acceptance, so ids are normalised once, in `config.py`.

*When*: taps of a row become drafter context at that row's absolute position once its token is committed.
Context of an anchor at position n is positions 0..n-1: the anchor itself has not passed the target yet.

*Borrowed*: the target's embedding and head, which DFlash shares. Under tensor parallelism both are
collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..compute.backend import Projection


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a drafter must fit.

    Attributes:
        hidden_size: of a tapped hidden state, and of embedding and head.
        num_layers: tapped ids are below it.
        vocab_size: rows of embedding and head.
        max_model_len: longest sequence served; sizes the drafter's rotary tables.
        embed_scale: factor of embedding rows, as its first block gets them.
    """

    hidden_size: int
    num_layers: int
    vocab_size: int
    max_model_len: int
    embed_scale: float = 1.0


class TargetLends(Protocol):
    """The target's layers that the drafter works with."""

    @property
    def is_split(self) -> bool:
        """Whether ranks have parts of the head."""
        ...

    def embed(self, token_ids_N: Tensor) -> Tensor:
        """Input embeddings [N, H], as the target's first block gets them but for any scale or norm."""
        ...

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """The head [N, V] on states that are normed already; no scaling, no cap."""
        ...

    def local_logits(self, hidden_NH: Tensor) -> tuple[Tensor, int]:
        """The same over this rank's part of the vocabulary, and the first token id of that part."""
        ...


class LentWeights:
    """Embedding [V, H] and head by themselves: for a drafter that lives apart, tools, tests."""

    is_split = False

    def __init__(self, embedding_VH: Tensor, head: Projection) -> None:
        self._embedding_VH = embedding_VH
        self._head = head

    def embed(self, token_ids_N: Tensor) -> Tensor:
        return self._embedding_VH.index_select(0, token_ids_N)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        return self._head(hidden_NH)

    def local_logits(self, hidden_NH: Tensor) -> tuple[Tensor, int]:
        return self._head(hidden_NH), 0


def usual_layer_ids(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """z-lab's default taps: evenly from layer 1 to the third last, by output of 0-based layer.

    A target of few layers gets fewer than `num_taps`, because no layer is tapped twice.
    """
    if num_taps == 1:
        return (num_layers // 2,)
    even = (round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in range(num_taps))
    return tuple(sorted({min(max(layer, 0), num_layers - 1) for layer in even}))
