"""Decoding methods of a simulated node: plain, EAGLE-3 and DFlash, adaptive or with fixed lengths.

Names are those of `manta bench sweep`: "dflash" is adaptive, "dflash-7" verifies seven drafts in every step;
the same for "eagle3". "dflash-tree" is adaptive with draft trees. With "-split" after it a DFlash drafter has
a GPU of its own in each engine. Methods are compared at equal tokens/s per user, each with its best layout
and load.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...cluster.errors import ConfigError
from ...cluster.hardware.model_pair import ModelPair
from ...cluster.hardware.model_shape import ModelShape
from ...cluster.simulation.acceptance_mix import AcceptanceMix
from ...cluster.speculation.acceptance_length import survival_of_length
from ...cluster.step.draft_shape import UNBRANCHED, DraftShape

Figures = dict[str, Any]  # Any: JSON
Kind = Literal["plain", "dflash", "eagle3"]
SPEEDS = tuple(range(100, 2001, 50))  # tokens/s per user at which methods are compared
EAGLE3_TAPS = 3
EAGLE3_VOCAB = 32_000  # of the drafter's own head, as in most published ones
EAGLE3_INTER = 6  # inner size / hidden size if all of the target's MLPs have experts
_TREES = DraftShape(width=4, size=63)
Point = tuple[float, float]  # (tokens/s of a user, tokens/s of a GPU)


@dataclass(frozen=True, slots=True)
class Method:
    """A decoding method.

    Attributes:
        drafts: None is adaptive, else the number in every step.
        placement: of the drafter; None without one.
    """

    name: str
    kind: Kind
    drafts: int | None = None
    draft_shape: DraftShape = UNBRANCHED
    placement: Literal["colocated", "split"] | None = "colocated"

    @classmethod
    def parse(cls, name: str) -> Method:
        if name == "plain":
            return cls(name, "plain", placement=None)
        found = re.fullmatch(r"(dflash|eagle3)(?:-(tree|[1-9]\d*))?(-split)?", name)
        if found is None or (found[1] == "eagle3" and (found[2] == "tree" or found[3])):
            raise ConfigError(
                f"method={name!r} must be plain, dflash, dflash-tree, eagle3, or dflash or eagle3 with a "
                "number of drafts of at least 1, such as dflash-7; -split may follow those of dflash.",
                param="method",
            )
        kind: Kind = found[1]  # type: ignore[assignment]  # the pattern allows no other
        shape = _TREES if found[2] == "tree" else UNBRANCHED
        drafts = None if found[2] in (None, "tree") else int(found[2])
        return cls(name, kind, drafts, shape, "split" if found[3] else "colocated")

    @property
    def adaptive(self) -> bool:
        return self.drafts is None

    def pair(self, pair: ModelPair, texts: AcceptanceMix) -> ModelPair:
        """Return the pair with this method's drafter shape, and its survival for a text of hardness 1."""
        if self.kind == "plain":
            return replace(pair, drafter=None, survival=())
        maximum = len(texts.survival)
        if self.drafts is not None and self.drafts > maximum:
            raise ConfigError(
                f"method={self.name!r}: its drafter makes at most {maximum} drafts.", param="method"
            )
        survival = texts.survival[: self.drafts]
        if self.kind == "dflash":
            return replace(pair, survival=survival)
        return replace(pair, drafter=eagle3_shape(pair.target), survival=survival, chain="eagle3")


def eagle3_shape(target: ModelShape) -> ModelShape:
    """Return an EAGLE-3 head for a target: one of its layers with a dense MLP, three taps, and its own head.

    The second input row of q, k and v (5 % of the weights) is left out. For a target with latents, every head
    has its own keys and values of the target's value size, as in TorchSpec's head for Kimi-K2.5. With
    experts, the MLP is as wide as the target's dense ones.
    """
    layer = target.layers[-1]
    latent = layer.latent
    dense = [each.inter for each in target.layers if each.experts is None]
    return ModelShape.dense(
        layers=1,
        hidden=target.hidden,
        inter=dense[-1] if dense else EAGLE3_INTER * target.hidden,
        heads=layer.heads,
        kv_heads=layer.kv_heads if latent is None else layer.heads,
        head_dim=layer.head_dim if latent is None else latent.v_dim,
        vocab=min(EAGLE3_VOCAB, target.vocab),
        taps=EAGLE3_TAPS,
        itemsize=target.itemsize,
    )


def parse_acceptance(text: str, num_drafts: int) -> tuple[tuple[float, ...], dict[str, float]]:
    """Read "4.9" or "code=4.9,chat=2.9" as a mean acceptance curve, and lengths by category.

    Lengths are for blocks of `num_drafts` drafts with equal conditional acceptance probabilities.
    """
    parts = [part.rpartition("=") for part in text.split(",")]
    try:
        lengths = {name.strip(): float(value) for name, _, value in parts}
    except ValueError:
        lengths = {}
    if not lengths or len(lengths) < len(parts) or ("" in lengths and len(lengths) > 1):
        raise ConfigError(
            f"acceptance={text!r} must be a mean acceptance length, such as 4.9, or one per category, "
            "such as code=4.9,chat=2.9.",
            param="acceptance",
        )
    curve = survival_of_length(sum(lengths.values()) / len(lengths), num_drafts)
    return curve, {} if "" in lengths else lengths


def of_method(points: Sequence[Figures], method: str) -> list[tuple[float, float]]:
    mine = [point for point in points if point["method"] == method]
    return frontier((point["user_tokens_per_s"], point["tokens_per_s_per_gpu"]) for point in mine)


def matched_speed(points: Sequence[Figures]) -> list[Figures]:
    """Return each method's throughput at given tokens/s per user, and at plain decoding's highest."""
    fronts = {name: of_method(points, name) for name in dict.fromkeys(point["method"] for point in points)}
    edges = [front[-1][0] for name, front in fronts.items() if name == "plain" and front]
    found: list[Figures] = []
    for speed in sorted({*map(float, SPEEDS), *edges}):
        rates = {name: throughput_at(front, speed) for name, front in fronts.items()}
        if any(rates.values()):
            found.append({"user_tokens_per_s": speed, "tokens_per_s_per_gpu": rates})
    return found


def frontier(points: Iterable[Point]) -> list[Point]:
    """Return the points that no other dominates, ascending in user speed, so that throughput falls."""
    best: list[Point] = []
    for user, gpu in sorted(points, reverse=True):
        if not best or gpu > best[-1][1]:
            best.append((user, gpu))
    return best[::-1]


def throughput_at(front: Sequence[Point], user_tokens_per_s: float) -> float | None:
    """Return the tokens/s of a GPU while every user gets at least so many; None if unreachable."""
    if not front or user_tokens_per_s > front[-1][0]:
        return None
    before: Point | None = None
    for user, gpu in front:
        if user >= user_tokens_per_s:
            if before is None:
                return gpu
            share = (user_tokens_per_s - before[0]) / (user - before[0])
            return before[1] + share * (gpu - before[1])
        before = user, gpu
    return None
