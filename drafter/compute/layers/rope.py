"""Rotary position embeddings (RoPE, arXiv 2104.09864): configuration, tables, and the rotation of rows.

Pairs of a head's dimensions are always c, c + D/2, regardless of the checkpoint. If a checkpoint rotates only
the first R dimensions with pairs c, c + R/2, or has pairs 2c, 2c + 1, the rows of its query and key
projections and its head norms are permuted at load (`RopeConfig.arranged`): scores do not change, and
backends need not know.

    checkpoint   | a a a | b b b | . . . . . . |        a with b of R, the rest is not rotated
    loaded       | a a a . . . | b b b . . . |          unrotated pairs have cosine 1 and sine 0

Legend: N rows, J heads (of any kind), D head dim, T positions, C = D / 2 pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.hf_config import Json
from ..checkpoint.rope_config import read_rope


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
    """Tables in Hugging Face's rotary layout (the two halves of a head are pairs), in the model's dtype."""

    __slots__ = ("cos_TD", "sin_TD")

    def __init__(
        self, rope: RopeConfig, max_positions: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        angle_TC = torch.outer(
            torch.arange(max_positions, device=device, dtype=torch.float32), rope.frequencies().to(device)
        )
        scale_C = rope.scales().to(device)
        cos_TC, sin_TC = angle_TC.cos() * scale_C, angle_TC.sin() * scale_C
        self.cos_TD = torch.cat((cos_TC, cos_TC), dim=-1).to(dtype)
        self.sin_TD = torch.cat((-sin_TC, sin_TC), dim=-1).to(dtype)  # signed: rotate_half is a roll then

    def at(self, positions_N: Tensor) -> Rotation:
        """Return the rotation for these absolute positions; built once per step, shared by all layers."""
        return Rotation(
            self.cos_TD.index_select(0, positions_N).unsqueeze(1),
            self.sin_TD.index_select(0, positions_N).unsqueeze(1),
        )


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The settings of `rope_theta`, `rope_scaling` or `rope_parameters` of a config.json.

    Attributes:
        theta: base of the frequencies.
        kind: "default", "linear", "llama3", "yarn" or "proportional".
        scaling: the remaining keys, as in the checkpoint, with derived values filled in.
        rotary_dim: leading dimensions that are rotated, in pairs c, c + rotary_dim / 2 (2c, 2c + 1 if
            `interleaved`); 0: all.
    """

    head_dim: int
    theta: float
    kind: str
    scaling: Mapping[str, Any]  # Any: JSON values
    rotary_dim: int = 0
    interleaved: bool = False

    @classmethod
    def read(
        cls,
        config: Json,
        head_dim: int,
        file: str,
        *,
        layer_type: str | None = None,
        default_theta: float = 10000.0,
    ) -> RopeConfig:
        """Read from a parsed config.json, in either of transformers' spellings; `file` is for messages.

        `layer_type` is given if rotations differ by layer type. Settings that the file does not give per type
        then apply to full layers; sliding ones have `rope_local_base_freq` and no scaling. `default_theta` is
        used if the file has none for this type.
        """
        found = read_rope(config, head_dim, file, layer_type)
        return cls(head_dim, found.theta or default_theta, found.kind, found.scaling, found.rotary_dim)

    @property
    def attention_scale(self) -> float:
        """Factor on cosines and sines of rotated pairs; 1 except with YaRN (arXiv 2309.00071)."""
        if self.kind != "yarn":
            return 1.0
        explicit = self.scaling.get("attention_factor")
        if explicit is not None:
            return float(explicit)
        factor = float(self.scaling["factor"])
        mscale, mscale_all_dim = self.scaling.get("mscale"), self.scaling.get("mscale_all_dim")
        if mscale and mscale_all_dim:
            return _yarn_scale(factor, float(mscale)) / _yarn_scale(factor, float(mscale_all_dim))
        return _yarn_scale(factor)

    @property
    def max_positions(self) -> int:
        """Length of sequences for which YaRN extends these frequencies; 0 without YaRN."""
        if self.kind != "yarn":
            return 0
        return int(float(self.scaling["factor"]) * self.scaling["original_max_position_embeddings"])

    @property
    def score_scale(self) -> float:
        """Factor on attention scores: DeepSeek's, where `mscale_all_dim` is set; otherwise 1."""
        mscale = self.scaling.get("mscale_all_dim")
        if self.kind == "default" or not mscale:
            return 1.0
        return _yarn_scale(float(self.scaling["factor"]), float(mscale)) ** 2

    @property
    def _rotated(self) -> int:
        return self.rotary_dim or self.head_dim

    def permutation(self) -> Tensor | None:
        """Return each row's index in a checkpoint's head, int64 [D]; None for the same order."""
        if self._rotated == self.head_dim and not self.interleaved:
            return None
        rotated, passing = torch.arange(self._rotated), torch.arange(self._rotated, self.head_dim)
        low, high = (rotated[::2], rotated[1::2]) if self.interleaved else rotated.chunk(2)
        return torch.cat((low, passing[: len(passing) // 2], high, passing[len(passing) // 2 :]))

    def arranged(self, rows: Tensor) -> Tensor:
        """Permute a checkpoint's query or key weight, bias or norm of whole heads for these tables."""
        order_D = self.permutation()
        if order_D is None:
            return rows
        return rows.unflatten(0, (-1, self.head_dim))[:, order_D.to(rows.device)].flatten(0, 1)

    def frequencies(self) -> Tensor:
        """Return radians per position of each pair of dimensions, fp32 [C]; 0 for unrotated pairs."""
        period = self.theta ** (torch.arange(0, self._rotated, 2, dtype=torch.float32) / self._rotated)
        frequency = self._yarn(period) if self.kind == "yarn" else self._scaled(1.0 / period)
        return torch.cat((frequency, torch.zeros((self.head_dim - self._rotated) // 2)))

    def scales(self) -> Tensor:
        """Return each pair's factor on cosine and sine, fp32 [C]: `attention_scale`, 1 if unrotated."""
        scale_C = torch.ones(self.head_dim // 2)
        scale_C[: self._rotated // 2] = self.attention_scale
        return scale_C

    def _scaled(self, frequency: Tensor) -> Tensor:
        if self.kind == "linear":
            return frequency / float(self.scaling["factor"])
        if self.kind == "llama3":
            return self._llama3(frequency)
        if self.kind == "proportional":  # exponents of the whole head, but only the first pairs are rotated
            share = float(self.scaling["partial_rotary_factor"])
            frequency[int(share * self.head_dim // 2) :] = 0.0
            return frequency / float(self.scaling.get("factor") or 1.0)
        return frequency

    def _llama3(self, frequency: Tensor) -> Tensor:
        """Scale frequencies as Llama 3.1 does (transformers' `_compute_llama3_parameters`)."""
        factor = float(self.scaling["factor"])
        low, high = float(self.scaling["low_freq_factor"]), float(self.scaling["high_freq_factor"])
        turns = float(self.scaling["original_max_position_embeddings"]) * frequency / (2 * math.pi)
        smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - smooth) * frequency / factor + smooth * frequency

    def _yarn(self, period: Tensor) -> Tensor:
        """Interpolate frequencies "by parts" (YaRN, arXiv 2309.00071, section 3.2; as in transformers)."""
        length, rotated = float(self.scaling["original_max_position_embeddings"]), self._rotated

        def dimension(turns: float) -> float:
            return rotated * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low = dimension(float(self.scaling.get("beta_fast") or 32))
        high = dimension(float(self.scaling.get("beta_slow") or 1))
        if self.scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotated - 1)
        high = high if high != low else high + 0.001
        ramp = (torch.arange(len(period), dtype=torch.float32) - low) / (high - low)
        keep = 1 - ramp.clamp(0.0, 1.0)
        return 1.0 / (float(self.scaling["factor"]) * period) * (1 - keep) + 1.0 / period * keep


def _yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's attention scaling 0.1 ln(factor) + 1 (arXiv 2309.00071, section 3.4), with `mscale`."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
