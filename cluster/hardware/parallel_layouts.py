"""Enumerates the layouts of a target and its drafter over a node's GPUs, without regard to memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Placement = Literal["colocated", "split", "shared"]
TP_SIZES = (1, 2, 4, 8, 16)  # Ranks of one target are on one node.


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """A number of identical engines over the GPUs of a node, each with a target on `tp` ranks.

    A drafter is whole on every rank ("colocated"), on one more GPU per engine ("split"), or on one for all
    ("shared").
    """

    tp: int
    placement: Placement | None
    replicas: int

    @property
    def num_gpus(self) -> int:
        drafters = {"split": self.replicas, "shared": 1}.get(self.placement or "", 0)
        return self.tp * self.replicas + drafters

    @property
    def has_drafter_gpu(self) -> bool:
        return self.placement in ("split", "shared")

    @property
    def drafted_engines(self) -> int:
        return self.replicas if self.placement == "shared" else 1

    def __str__(self) -> str:
        return f"{self.replicas} x TP{self.tp} {self.placement or 'plain'}"


def layouts(
    num_gpus: int, tp_sizes: Sequence[int], *, drafter: bool, is_separable: bool = True
) -> Iterator[ParallelLayout]:
    """Yield the layouts for `num_gpus` GPUs, each with as many engines as fit.

    `is_separable`: whether the drafter can have a GPU of its own.
    """
    for tp in tp_sizes:
        if drafter:
            yield from _if_any(ParallelLayout(tp, "colocated", num_gpus // tp))
        if drafter and is_separable:
            yield from _if_any(ParallelLayout(tp, "split", num_gpus // (tp + 1)))
            if (num_gpus - 1) // tp > 1:
                yield ParallelLayout(tp, "shared", (num_gpus - 1) // tp)
        yield from _if_any(ParallelLayout(tp, None, num_gpus // tp))


def _if_any(layout: ParallelLayout) -> Iterator[ParallelLayout]:
    if layout.replicas:
        yield layout
