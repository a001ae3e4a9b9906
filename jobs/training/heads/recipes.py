"""Recipes: training settings for each kind of drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ....drafter.dflash.config import SelectorSize
from ..loop.training_loop import Schedule

Head = Literal["dflash", "selector", "dflash2"]


@dataclass(frozen=True)
class Teaching:
    """Weights of the parts of the loss.

    Attributes:
        teacher_share: of the target's distribution in the cross-entropy; the token has the rest.
        distance_share: of the rejection probability in the loss.
        distance_from: progress at which that starts to grow, to its whole weight at twice this progress: it
            has no gradient where the drafter gives a token no probability.
        unary_share: of the loss of the plain logits, which determine a selector's candidates.
    """

    teacher_share: float = 0.5
    distance_share: float = 0.0
    distance_from: float = 1 / 3
    unary_share: float = 0.5

    def at(self, progress: float) -> Teaching:
        """Return the weights at this progress of a run."""
        if progress >= 2 * self.distance_from:
            return self
        grown = max(0.0, progress / self.distance_from - 1.0)
        return replace(self, distance_share=self.distance_share * grown)


@dataclass(frozen=True)
class TrainSettings:
    """Settings of any drafter; learning rates are Muon's (hidden matrices) and AdamW's (the rest)."""

    batch_size: int = 8
    matrix_lr: float = 4e-3
    other_lr: float = 2e-3
    weight_decay: float = 0.01
    teaching: Teaching = field(default_factory=Teaching)
    schedule: Schedule = field(default_factory=lambda: Schedule(warmup_steps=30, decay_from=0.1))


@dataclass(frozen=True)
class DrafterSettings(TrainSettings):
    """Settings of a DFlash drafter.

    Attributes:
        num_layers: of a new drafter, 3 if None; an initial drafter gets more layers up to this number.
        block_sizes: used in turn, by step; the first is the drafter's own.
        conv_group_size, selector: DFlash2's parts; None leaves them out.
        num_anchors: blocks per sequence.
    """

    num_layers: int | None = None
    block_sizes: tuple[int, ...] = (16,)
    num_taps: int = 5
    conv_group_size: int | None = None
    selector: SelectorSize | None = None
    num_anchors: int = 64

    @property
    def block_size(self) -> int:
        return self.block_sizes[0]

    def with_blocks(self, block_size: int) -> DrafterSettings:
        """Return the settings for another block size; the other block sizes are scaled."""
        sizes = (max(2, size * block_size // self.block_size) for size in self.block_sizes)
        return replace(self, block_sizes=tuple(dict.fromkeys(sizes)))


_SELECTOR = SelectorSize(rank=128, top_k=16)
# Codebooks have a row per token: 49,152 of rank 128 are as large as three layers of width 576.
_SMALL_SELECTOR = replace(_SELECTOR, rank=24)
_PLAIN = DrafterSettings(
    block_sizes=(16, 8),
    num_anchors=32,
    matrix_lr=10e-3,
    other_lr=25e-3,
    teaching=Teaching(distance_share=0.5),
    schedule=Schedule(warmup_steps=30, decay_from=0.3),
)
# "selector": DFlash2 without convolutions, which the compiled CPU backend does not support.
_PARTS: Mapping[Head, DrafterSettings] = {
    "dflash": _PLAIN,
    "selector": replace(_PLAIN, selector=_SELECTOR),
    "dflash2": replace(_PLAIN, selector=_SELECTOR, conv_group_size=16),
}


def new_recipe(head: Head, *, is_small: bool) -> DrafterSettings:
    """Return the recipe for a new drafter: blocks of 16, of 8 for a small target, which says less surely."""
    return _fitted(head).with_blocks(8) if is_small else _PARTS[head]


def further_recipe(head: Head, *, is_small: bool) -> DrafterSettings:
    """Return the recipe for a trained drafter: lower rates, and the rejection probability from the start."""
    teaching = Teaching(distance_share=0.7, distance_from=0.0)
    parts = _fitted(head) if is_small else _PARTS[head]
    return replace(parts, matrix_lr=2e-3, other_lr=5e-3, teaching=teaching)


def _fitted(head: Head) -> DrafterSettings:
    """Return the parts of a drafter for a small target."""
    parts = _PARTS[head]
    return parts if parts.selector is None else replace(parts, selector=_SMALL_SELECTOR)
