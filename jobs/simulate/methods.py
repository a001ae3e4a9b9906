"""Methods that a node is played with: plain decoding, EAGLE-3 and DFlash, adaptive or of fixed lengths.

Names are those of `manta bench sweep`: "dflash" chooses how much it drafts and verifies, "dflash-7" verifies
seven drafts in every step; the same of "eagle3". They are compared where users are served equally fast, each
by the best of its layouts and loads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...cluster.errors import ConfigError
from ...cluster.model_shape import ModelShape
from ...cluster.planner.pair import Pair
from ...cluster.planner.pareto import frontier, throughput_at
from ...cluster.planner.texts import Texts
from ...cluster.roofline import survival_of_length

Figures = dict[str, Any]  # Any: JSON
Kind = Literal["plain", "dflash", "eagle3"]
SPEEDS = tuple(range(100, 2001, 50))  # tokens/s of a user
EAGLE3_TAPS = 3
EAGLE3_VOCAB = 32_000  # of the drafter's own head, as most published ones have it
EAGLE3_INTER = 6  # inner size over hidden size, where all of the target's MLPs are made of experts


@dataclass(frozen=True, slots=True)
class Method:
    """One of them.

    Attributes:
        drafts: in every step; None chooses.
    """

    name: str
    kind: Kind
    drafts: int | None = None

    @classmethod
    def parse(cls, name: str) -> Method:
        """ConfigError if there is none of that name."""
        found = re.fullmatch(r"(plain|dflash|eagle3)(?:-(\d+))?", name)
        if found is None or (found[1] == "plain" and found[2]) or found[2] == "0":
            raise ConfigError(
                f"method={name!r} must be plain, dflash, eagle3, or one of the last two with a number of "
                "drafts of at least 1, as dflash-7.",
                param="method",
            )
        kind: Kind = found[1]  # type: ignore[assignment]  # the pattern has no other
        return cls(name, kind, int(found[2]) if found[2] else None)

    @property
    def adaptive(self) -> bool:
        return self.drafts is None

    @property
    def placement(self) -> Literal["colocated"] | None:
        return None if self.kind == "plain" else "colocated"

    def pair(self, pair: Pair, texts: Texts) -> Pair:
        """What the engine is told of this method's drafter: shapes, and survival of a text of hardness 1."""
        if self.kind == "plain":
            return replace(pair, drafter=None, survival=())
        most = len(texts.survival)
        if self.drafts is not None and self.drafts > most:
            raise ConfigError(
                f"method={self.name!r}: its drafter makes at most {most} drafts.", param="method"
            )
        survival = texts.survival[: self.drafts]
        if self.kind == "dflash":
            return replace(pair, survival=survival)
        return replace(pair, drafter=eagle3_shape(pair.target), survival=survival, sequential=True)


def eagle3_shape(target: ModelShape) -> ModelShape:
    """A head for that target: one of its layers with a dense MLP, three taps, and a head of its own.

    Its queries, keys and values read two rows, embedding and features: a twentieth of its weights, left out.
    Beside latents every head has keys and values of its own, of the target's size of values, as TorchSpec's
    for Kimi-K2.5 has; beside experts the MLP is as wide as the target's dense ones.
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
    """A mean curve, and mean acceptance lengths by category, of "4.9" or "code=4.9,chat=2.9".

    Lengths are of blocks of `num_drafts` drafts; each draft is as likely as the one before it, given that.
    """
    parts = [part.rpartition("=") for part in text.split(",")]
    try:
        lengths = {name.strip(): float(value) for name, _, value in parts}
    except ValueError:
        lengths = {}
    if not lengths or len(lengths) < len(parts) or ("" in lengths and len(lengths) > 1):
        raise ConfigError(
            f"acceptance={text!r} must be a mean acceptance length, as 4.9, or one for each category, as "
            "code=4.9,chat=2.9.",
            param="acceptance",
        )
    curve = survival_of_length(sum(lengths.values()) / len(lengths), num_drafts)
    return curve, {} if "" in lengths else lengths


def of_method(points: Sequence[Figures], method: str) -> list[tuple[float, float]]:
    """Its frontier over all layouts and loads."""
    mine = [point for point in points if point["method"] == method]
    return frontier((point["user_tokens_per_s"], point["tokens_per_s_per_gpu"]) for point in mine)


def matched_speed(points: Sequence[Figures]) -> list[Figures]:
    """Throughput of each method while every user gets at least so many tokens/s; None where it cannot be.

    The last speed at which there is plain decoding is the end of its curve.
    """
    fronts = {name: of_method(points, name) for name in dict.fromkeys(point["method"] for point in points)}
    edges = [front[-1][0] for name, front in fronts.items() if name == "plain" and front]
    found: list[Figures] = []
    for speed in sorted({*map(float, SPEEDS), *edges}):
        rates = {name: throughput_at(front, speed) for name, front in fronts.items()}
        if any(rates.values()):
            found.append({"user_tokens_per_s": speed, "tokens_per_s_per_gpu": rates})
    return found
