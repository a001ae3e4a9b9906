"""The shape that drafts of an engine may have: chains, or trees. A fact of loading, which travels whole.

Made by `actors/targets/loading/resolved_config.py`; read by the scheduler, which shares out rows and K/V
slots, by simulations and by evaluations of drafters. What a step's trees look like is its plan's `TreeShape`.

Legend: R requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

import numpy as np

from .scheduler_output import IntArray


class ShapeSettings(TypedDict):
    """The fields of `SpeculativeConfig`, and of an evaluation's JSON, that a `DraftShape` is written to."""

    tree_width: int
    tree_size: int | None


class DraftShape(NamedTuple):
    """The most children of a draft, and the most drafts of a request in a step.

    By default they form chains, of width 1 and without a size. A path has at most
    `ExecutorInfo.num_speculative_tokens` drafts, of a chain or of a tree.
    """

    width: int = 1
    size: int | None = None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> DraftShape:  # Any: JSON
        """Return the shape of these settings; others may be among them."""
        return cls(values["tree_width"], values["tree_size"])

    def settings(self) -> ShapeSettings:
        """Return what `read` reads."""
        return ShapeSettings(tree_width=self.width, tree_size=self.size)

    @property
    def branches(self) -> bool:
        """Whether drafts may form trees."""
        return self.size is not None

    def most_drafts(self, longest: int) -> int:
        """Return the most drafts of a request in a step, if a path has at most `longest`."""
        return longest if self.size is None else self.size

    def limit(self, remaining_R: IntArray, room_R: IntArray) -> IntArray:
        """Return the most drafts that requests can use, int32 [R]: few become tokens, but all need a slot.

        Args:
            remaining_R: tokens that may follow the next one.
            room_R: K/V slots that may follow the next one's.
        """
        return np.minimum(remaining_R * self.width, room_R)

    def describe(self, longest: int) -> str:
        """Return the shape in words for a reader, if a path has `longest` drafts."""
        if not self.branches:
            return f"chains of {longest} drafts"
        return f"trees of {self.size} drafts (depth {longest}, width {self.width})"


UNBRANCHED = DraftShape()
