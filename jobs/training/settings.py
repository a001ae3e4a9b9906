"""Recipes: how a drafter of each kind is trained. What its parts do is said where they are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ...drafter.dflash.config import SelectorSize
from .budget import Schedule

Head = Literal["dflash", "selector", "dflash2", "eagle3"]


@dataclass(frozen=True)
class Teaching:
    """What a slot is taught.

    Attributes:
        teacher_share: how much of its target is the target's whole distribution, the rest being the token it
            drew.
        distance_share: how much of its loss is the chance of being refused at temperature 1.
        unary_share: weight of its loss without the token before it, for a drafter with a selector: candidates
            are taken by that.
    """

    teacher_share: float = 0.5
    distance_share: float = 0.0
    unary_share: float = 0.5


@dataclass(frozen=True)
class DrafterSettings:
    """Of a drafter that drafts blocks.

    Attributes:
        num_layers: of a new drafter, 3 if None; one that is trained on gets silent ones behind its own.
        num_taps: of a new drafter.
        block_sizes: take turns, step by step; the first is the drafter's own.
        conv_group_size, selector: DFlash2's parts.
        batch_size: sequences of a step, on each worker.
        num_anchors: blocks of a sequence.
        matrix_lr, other_lr: Muon's, for hidden matrices, and AdamW's, for all else.
    """

    num_layers: int | None = None
    block_sizes: tuple[int, ...] = (16,)
    num_taps: int = 5
    conv_group_size: int | None = None
    selector: SelectorSize | None = None
    batch_size: int = 8
    num_anchors: int = 64
    matrix_lr: float = 4e-3
    other_lr: float = 2e-3
    weight_decay: float = 0.01
    teaching: Teaching = field(default_factory=Teaching)
    schedule: Schedule = field(default_factory=lambda: Schedule(warmup_steps=30, decay_from=0.1))

    @property
    def block_size(self) -> int:
        return self.block_sizes[0]

    def with_blocks(self, block_size: int) -> DrafterSettings:
        """The same for blocks of so many rows: turns keep their proportion."""
        sizes = (max(2, size * block_size // self.block_size) for size in self.block_sizes)
        return replace(self, block_sizes=tuple(dict.fromkeys(sizes)))


@dataclass(frozen=True)
class EagleSettings:
    """Of an EAGLE-3 head. `depth`: tokens of a chain in training."""

    depth: int = 5
    num_taps: int = 3
    batch_size: int = 8
    matrix_lr: float = 4e-3
    other_lr: float = 2e-3
    weight_decay: float = 0.01
    teaching: Teaching = field(default_factory=lambda: Teaching(distance_share=0.7))
    schedule: Schedule = field(default_factory=lambda: Schedule(warmup_steps=30, decay_from=0.3))


Settings = DrafterSettings | EagleSettings

_SELECTOR = SelectorSize(rank=128, top_k=16)
_SECOND = DrafterSettings(
    block_sizes=(16, 8),
    num_anchors=32,
    matrix_lr=2e-3,
    other_lr=5e-3,
    teaching=Teaching(distance_share=0.7),
    schedule=Schedule(warmup_steps=30, decay_from=0.3),
)
# "selector": DFlash2 without convolutions, which the compiled pass of a CPU does not have.
RECIPES: Mapping[Head, Settings] = {
    "dflash": _SECOND,
    "selector": replace(_SECOND, selector=_SELECTOR),
    "dflash2": replace(_SECOND, selector=_SELECTOR, conv_group_size=16),
    "eagle3": EagleSettings(),
}
