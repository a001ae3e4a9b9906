"""Rotary positions: what a config.json asks for, its tables, and the rotation of a step's rows.

Legend: N rows, J heads (of any kind), D head dim, T positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...cluster.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and signed sines of the rows of one step, broadcast over heads: [N, 1, D]."""

    cos_N1D: Tensor
    sin_N1D: Tensor

    def rotate(self, x_NJD: Tensor, out_NJD: Tensor | None = None) -> Tensor:
        """Rotate all heads of `x`; with `out` (which may be `x`) the result is written there."""
        swapped_NJD = torch.roll(x_NJD, x_NJD.shape[-1] // 2, -1)
        out_NJD = torch.mul(x_NJD, self.cos_N1D, out=out_NJD)
        return out_NJD.addcmul_(swapped_NJD, self.sin_N1D)


class RotaryEmbedding:
    """Tables of Hugging Face's rotary layout (the two halves of a head are pairs), in the model's dtype."""

    __slots__ = ("cos_TD", "sin_TD")

    def __init__(
        self, rope: RopeConfig, max_positions: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        frequency = rope.frequencies().to(device)
        angle = torch.outer(torch.arange(max_positions, device=device, dtype=torch.float32), frequency)
        cos, sin = angle.cos() * rope.attention_scale, angle.sin() * rope.attention_scale
        self.cos_TD = torch.cat((cos, cos), dim=-1).to(dtype)
        self.sin_TD = torch.cat((-sin, sin), dim=-1).to(dtype)  # signed: rotate_half is a roll then

    def at(self, positions_N: Tensor) -> Rotation:
        """The rotation of these absolute positions; built once per step, shared by all layers."""
        return Rotation(
            self.cos_TD.index_select(0, positions_N).unsqueeze(1),
            self.sin_TD.index_select(0, positions_N).unsqueeze(1),
        )


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """What `rope_theta`, `rope_scaling` or `rope_parameters` of a config.json say.

    Attributes:
        head_dim: dimensions of a head, all of them rotated.
        theta: base of the frequencies.
        kind: "default", "linear", "llama3" or "yarn".
        scaling: the remaining keys, as written in the checkpoint.
    """

    head_dim: int
    theta: float
    kind: str
    scaling: Mapping[str, Any]  # Any: JSON values

    @classmethod
    def read(
        cls, config: Mapping[str, Any], head_dim: int, file: str, *, default_theta: float = 10000.0
    ) -> RopeConfig:
        """Read from a parsed config.json; both of transformers' spellings are known.

        Args:
            file: where the values came from, for the message.
        """
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        if kind not in ("default", "linear", "llama3", "yarn"):
            raise CheckpointError(
                f"{file}: rope type {kind!r} is not supported; supported are default, linear, llama3, yarn.",
                param="rope_parameters.rope_type",
            )
        partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        if partial != 1.0:
            raise CheckpointError(
                f"{file}: partial_rotary_factor={partial!r} is not supported; it must be 1.0.",
                param="partial_rotary_factor",
            )
        theta = rope.get("rope_theta", config.get("rope_theta", default_theta))
        rope.setdefault("max_position_embeddings", config.get("max_position_embeddings"))
        needed = {"linear": ("factor",), "yarn": ("factor",)}.get(kind, ())
        if kind == "llama3":
            needed = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        for key in needed:
            if key not in rope:
                raise CheckpointError(f"{file}: rope type {kind!r} needs the key {key!r}.", param=key)
        return cls(head_dim, float(theta), kind, rope)

    @property
    def attention_scale(self) -> float:
        """Factor on cosines and sines; 1 but for yarn."""
        if self.kind != "yarn":
            return 1.0
        explicit = self.scaling.get("attention_factor")
        return float(explicit) if explicit else 0.1 * math.log(float(self.scaling["factor"])) + 1.0

    def frequencies(self) -> Tensor:
        """Radians per position of each pair of dimensions, fp32 [D / 2]."""
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        frequency = 1.0 / (self.theta**exponent)
        if self.kind == "linear":
            return frequency / float(self.scaling["factor"])
        if self.kind == "llama3":
            return self._llama3(frequency)
        return self._yarn(frequency) if self.kind == "yarn" else frequency

    def _llama3(self, frequency: Tensor) -> Tensor:
        factor = float(self.scaling["factor"])
        low, high = float(self.scaling["low_freq_factor"]), float(self.scaling["high_freq_factor"])
        turns = float(self.scaling["original_max_position_embeddings"]) * frequency / (2 * math.pi)
        smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - smooth) * frequency / factor + smooth * frequency

    def _yarn(self, frequency: Tensor) -> Tensor:
        factor = float(self.scaling["factor"])
        known = (
            self.scaling.get("original_max_position_embeddings") or self.scaling["max_position_embeddings"]
        )
        length, half = float(known), self.head_dim // 2

        def dimension(turns: float) -> float:
            return self.head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low = max(math.floor(dimension(float(self.scaling.get("beta_fast") or 32))), 0)
        high = min(math.ceil(dimension(float(self.scaling.get("beta_slow") or 1))), self.head_dim - 1)
        ramp = (torch.arange(half, dtype=torch.float32) - low) / max(high - low, 0.001)
        keep = 1 - ramp.clamp(0.0, 1.0)
        return frequency / factor * (1 - keep) + frequency * keep
