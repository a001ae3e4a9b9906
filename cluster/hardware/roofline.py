"""Roofline (Williams et al., 2009) of a step: bytes over bandwidth or operations over arithmetic rate.

A lower bound, not a forecast: norms, rotations, sampling, activations and host time are left out. Plain
arithmetic on shapes (`model_shape.py`) and rates; nothing is measured here. Called by
`jobs/bench/step_cost.py`; `planner/` adds what the bound leaves out, and sums over several devices.

Symbols: B requests, k rows of each (the anchor and k - 1 drafts), c context tokens, w bytes of an element of
weights and K/V, P weights used by every row, X weights of an expert, E experts, q of them chosen for a row, L
layers, Q query heads, D head dim, S_j probability that drafts 1..j are all accepted.

    t(op)    = max(bytes / bandwidth, flop / flops)            per group of products
    linears  : w P bytes, 2 P rows flop                        weights are read once per step
    experts  : w X L E (1 - (1 - q/E)^rows) bytes, 2 X L q rows flop    those chosen by some row
    attention: B (c + k) KV bytes, 4 L Q D B k (c + k) flop    K/V are read once
    states   : 2 B state bytes, of layers with a delta rule    read and written once, whatever c
    verify   = linears(B k) + experts(B k) + head(B k) + attention(B, k, c) + states(B, k)     plain: k = 1
    draft    = the drafter's linears(B k) + head(B (k - 1)) + attention(B, k, c)
    inject   = fc and context K/V of B k rows
    speed-up = tau(k) * plain / (draft + verify + inject),     tau(k) = 1 + S_1 + .. + S_{k-1}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from ..speculation.acceptance_length import expected_acceptance_length
from .layer_shape import DeviceWork
from .model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Device:
    """Sustained rates of a large copy and a large product on a device, which are below its data sheet's."""

    name: str
    bytes_per_s: float
    flops: float

    def seconds(self, work: DeviceWork) -> float:
        return max(work.num_bytes / self.bytes_per_s, work.flop / self.flops)

    @classmethod
    def parse(cls, name: str, text: str) -> Device:
        """Parse "GB/s,TFLOP/s", e.g. "4300,790"."""
        try:
            gigabytes, teraflops = (float(part) for part in text.split(","))
        except ValueError:
            gigabytes = teraflops = 0.0
        if min(gigabytes, teraflops) <= 0.0:
            raise ConfigError(
                f"device_rates={text!r} must be sustained GB/s and TFLOP/s, both above 0, like 4300,790.",
                param="device_rates",
            )
        return cls(name, gigabytes * 1e9, teraflops * 1e12)


# By CUDA's device name; bf16. H200: measured (a copy; a product of 8192^3). The others: 90 % of the data
# sheet's bandwidth, 75-80 % of its arithmetic.
GPUS: Mapping[str, Device] = {
    "NVIDIA H200": Device("H200", 4.3e12, 790e12),
    "NVIDIA H100 80GB HBM3": Device("H100", 3.015e12, 790e12),
    "NVIDIA B200": Device("B200", 7.2e12, 1687.5e12),
}


@dataclass(frozen=True, slots=True)
class Floor:
    """The minimum seconds of a step's parts."""

    draft_s: float
    verify_s: float
    inject_s: float

    @property
    def step_s(self) -> float:
        return self.draft_s + self.verify_s + self.inject_s


@dataclass(frozen=True, slots=True)
class Roofline:
    device: Device
    target: ModelShape
    drafter: ModelShape

    def verify_s(self, batch: int, rows: int, context: int) -> float:
        """Return the seconds of the target's pass; `rows` = 1 is a step of plain decoding."""
        return self._pass_s(self.target, batch, rows, rows, context)

    def draft_s(self, batch: int, rows: int, context: int) -> float:
        return 0.0 if rows <= 1 else self._pass_s(self.drafter, batch, rows, rows - 1, context)

    def inject_s(self, batch: int, rows: int) -> float:
        return self.device.seconds(self.drafter.context(batch * rows))

    def _pass_s(self, model: ModelShape, batch: int, rows: int, chosen: int, context: int) -> float:
        parts = (
            model.linears(batch * rows),
            model.experts(batch * rows),
            model.head(batch * chosen),
            model.attention(batch, rows, context),
            model.states(batch, rows),
        )
        return sum(self.device.seconds(work) for work in parts)

    def step(self, batch: int, rows: int, context: int) -> Floor:
        return Floor(
            self.draft_s(batch, rows, context),
            self.verify_s(batch, rows, context),
            self.inject_s(batch, rows),
        )

    def speedup(self, batch: int, rows: int, context: int, survival: Sequence[float]) -> float:
        """Return the speed-up over plain decoding, which needs no drafter."""
        plain_s = self.verify_s(batch, 1, context)
        if rows <= 1:
            return 1.0
        return expected_acceptance_length(survival, rows) * plain_s / self.step(batch, rows, context).step_s

    def best_rows(self, batch: int, context: int, survival: Sequence[float]) -> int:
        """Return the rows per request with the most tokens per second."""
        maximum = len(survival) + 1
        return max(range(1, maximum + 1), key=lambda rows: self.speedup(batch, rows, context, survival))
