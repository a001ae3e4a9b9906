"""The loop both models are trained with: step, report, snapshot, stop when the time is used up.

A killed run goes on from its last snapshot with the same weights, moments and place in the data.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import nn

from .budget import Schedule, TimeBudget
from .optimizers import HybridOptimizer
from .snapshots import load_snapshot, save_snapshot

Report = Callable[[str], None]


class Reader(Protocol):
    """A source of batches that can be moved to a place it named before."""

    @property
    def position(self) -> tuple[int, int]: ...

    def seek(self, position: tuple[int, int]) -> None: ...


@dataclass(frozen=True)
class LoopSettings:
    snapshot_every_s: float = 120.0
    report_every: int = 25
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class Step:
    """What a step's loss may depend on."""

    index: int
    progress: float


@dataclass(frozen=True)
class StepLoss:
    """`loss` carries gradients; `figures` are averaged into the report."""

    loss: torch.Tensor
    num_tokens: int
    figures: dict[str, float]


class TrainingLoop:
    """Owns where a run stands: steps, tokens, time used. The model and optimizer are its caller's."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: HybridOptimizer,
        reader: Reader,
        snapshot_path: Path,
        report: Report,
        settings: LoopSettings | None = None,
    ) -> None:
        self.name, self.model, self.optimizer, self.reader = name, model, optimizer, reader
        self.step, self.tokens, self.used_s = 0, 0, 0.0
        self._snapshot_path, self._report = snapshot_path, report
        self._settings = settings or LoopSettings()
        self._figures: dict[str, list[float]] = {}
        snapshot = load_snapshot(snapshot_path)
        if snapshot is not None:
            model.load_state_dict(snapshot["model"])
            optimizer.load_state_dict(snapshot["optimizer"])
            reader.seek(tuple(snapshot["position"]))
            self.step, self.tokens, self.used_s = (snapshot[key] for key in ("step", "tokens", "used_s"))

    def run(self, compute_loss: Callable[[Step], StepLoss], budget_s: float, schedule: Schedule) -> None:
        """Train until `budget_s` seconds have been used, earlier runs included."""
        budget = TimeBudget(budget_s, self.used_s)
        saved_at = time.monotonic()
        while budget.progress < 1.0:
            progress = budget.progress
            result = compute_loss(Step(self.step, progress))
            result.loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.max_grad_norm)
            self.optimizer.step(schedule.factor(self.step, progress))
            self.step, self.tokens, self.used_s = (
                self.step + 1,
                self.tokens + result.num_tokens,
                budget.used_s,
            )
            self._note({"loss": result.loss.item(), **result.figures}, progress)
            if time.monotonic() - saved_at > self._settings.snapshot_every_s:
                self.save()
                saved_at = time.monotonic()
        self.save()

    def save(self) -> None:
        save_snapshot(
            self._snapshot_path,
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "position": self.reader.position,
                "step": self.step,
                "tokens": self.tokens,
                "used_s": self.used_s,
            },
        )

    def _note(self, figures: dict[str, float], progress: float) -> None:
        for name, value in figures.items():
            self._figures.setdefault(name, []).append(value)
        if self.step % self._settings.report_every:
            return
        means = " ".join(f"{name} {np.mean(values):.4f}" for name, values in self._figures.items())
        rate = self.tokens / max(self.used_s, 1e-9)
        self._report(
            f"{self.name} step {self.step} ({progress:.1%}): {means}, {self.tokens} tokens, {rate:.0f}/s"
        )
        self._figures.clear()
