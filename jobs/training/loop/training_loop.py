"""The training loop of all models: step, report, measure, snapshot, stop at the end of the run.

An interrupted run resumes from its last snapshot with the same weights, average, optimizer state and position
in the data. Steps after the snapshot are repeated identically (`training_curves.py`). Several workers train
data-parallel: each computes its part of the batch, and gradients are averaged, so weights are equal on all
workers. Worker 0 writes and reports.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import nn

from ....actors.targets.model.tensor_parallel import Communicator, SingleRank
from ....cluster.errors import ConfigError
from .muon_adamw import HybridOptimizer, Snapshot, WeightAverage
from .training_curves import Curves, Row

Report = Callable[[str], None]
SNAPSHOT, CURVES = "snapshot.pt", "curves.jsonl"


@dataclass(frozen=True)
class Schedule:
    """Learning-rate factor over progress in [0, 1]."""

    warmup_steps: int = 100
    decay_from: float = 0.6
    final_factor: float = 0.03

    def factor(self, step: int, progress: float) -> float:
        warm = min(1.0, (step + 1) / self.warmup_steps)
        if progress <= self.decay_from:
            return warm
        left = max(0.0, (1.0 - progress) / (1.0 - self.decay_from))
        return warm * (self.final_factor + (1.0 - self.final_factor) * left)


@dataclass(frozen=True)
class Length:
    """Length of a run in steps or in seconds; exactly one is set.

    Runs limited by steps end with bit-identical weights, interrupted or not. Runs limited by seconds end on
    time; repeated steps use their recorded learning rate.
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise ConfigError("Give the length of the run as steps or as time, not both.", param="steps")
        length = self.seconds if self.steps is None else self.steps
        if not length or length <= 0:
            raise ConfigError(f"The length of a run must be above 0, not {length}.", param="steps")


class TimeBudget:
    def __init__(self, budget_s: float, used_s: float = 0.0) -> None:
        self.budget_s = budget_s
        self._used_before_s = used_s
        self._started = time.monotonic()

    @property
    def used_s(self) -> float:
        return self._used_before_s + time.monotonic() - self._started

    @property
    def progress(self) -> float:
        return min(1.0, self.used_s / self.budget_s)

    @contextmanager
    def paused(self) -> Iterator[None]:
        begin_s = time.monotonic()
        yield
        self._started += time.monotonic() - begin_s


class Reader(Protocol):
    @property
    def position(self) -> tuple[int, int]: ...

    def seek(self, position: tuple[int, int]) -> None: ...


@dataclass(frozen=True)
class LoopSettings:
    snapshot_every_s: float = 120.0
    report_every_s: float = 10.0
    max_grad_norm: float = 1.0
    average_steps: int = 50


@dataclass(frozen=True)
class Step:
    index: int
    progress: float


@dataclass(frozen=True)
class StepLoss:
    """`loss` has gradients; `figures` are averaged for reports."""

    loss: torch.Tensor
    num_tokens: int
    figures: dict[str, float]


class TrainingLoop:
    """Trains a model and owns the run's state; a snapshot of another `subject` is refused.

    `useful_steps`: about how many steps make a useful model, for the first report; 0: not said.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: HybridOptimizer,
        reader: Reader,
        folder: Path,
        report: Report,
        settings: LoopSettings | None = None,
        *,
        subject: str = "",
        workers: Communicator | None = None,
        useful_steps: int = 0,
    ) -> None:
        self.name, self.model, self.optimizer, self.reader = name, model, optimizer, reader
        self.step, self.tokens, self.used_s = 0, 0, 0.0
        self._snapshot_path, self._subject = folder / SNAPSHOT, subject
        self._workers = workers or SingleRank()
        self._settings = settings or LoopSettings()
        self._is_first = self._workers.rank == 0
        self._report: Report = report if self._is_first else lambda line: None
        self._curves = Curves(folder / CURVES if self._is_first else None)
        self._figures: dict[str, list[float]] = {}
        self._useful_steps, self._has_foreseen, self._reported_at = useful_steps, False, 0.0
        self.average = WeightAverage(model, self._settings.average_steps)
        snapshot = load_snapshot(self._snapshot_path)
        if snapshot is not None:
            if snapshot["subject"] != subject:
                raise ConfigError(
                    f"{self._snapshot_path} is of another run (other data, recipe or number of workers). "
                    "Resume with the same ones, or give another folder.",
                    param="folder",
                )
            model.load_state_dict(snapshot["model"])
            optimizer.load_state_dict(snapshot["optimizer"])
            self.average.load_state_dict(snapshot["average"])
            reader.seek(tuple(snapshot["position"]))
            self.step, self.tokens, self.used_s = (snapshot[key] for key in ("step", "tokens", "used_s"))

    def run(
        self,
        compute_loss: Callable[[Step], StepLoss],
        length: Length,
        schedule: Schedule,
        measure: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        """Train to the end of the run; `measure` is called at the start, the end, and at snapshots."""
        budget = TimeBudget(length.seconds or float("inf"), max(self.used_s, self._curves.used_s))
        self._measure(measure, budget)
        saved_at = self._reported_at = time.monotonic()
        while (progress := self._progress(length)) < 1.0:
            result = compute_loss(Step(self.step, progress))
            result.loss.backward()
            self._average_gradients()
            nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.max_grad_norm)
            lr_factor = schedule.factor(self.step, progress)
            self.optimizer.step(lr_factor)
            self.average.move()
            self.step, self.tokens, self.used_s = (
                self.step + 1,
                self.tokens + result.num_tokens * self._workers.world_size,
                self._time_at(self.step, budget),
            )
            figures = self._mean_figures({"loss": result.loss.item(), **result.figures})
            self._note(figures, progress, lr_factor, length)
            if time.monotonic() - saved_at > self._settings.snapshot_every_s:
                self._measure(measure, budget)
                self.save()
                saved_at = time.monotonic()
        self._measure(measure, budget)
        self.save()

    def save(self) -> None:
        if not self._is_first:
            return
        save_snapshot(
            self._snapshot_path,
            {
                "subject": self._subject,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "average": self.average.state_dict(),
                "position": self.reader.position,
                "step": self.step,
                "tokens": self.tokens,
                "used_s": self.used_s,
            },
        )
        self._curves.draw()

    def _progress(self, length: Length) -> float:
        """Return the progress in [0, 1] from recorded state: equal on all workers and after a restart."""
        if length.steps is not None:
            return min(1.0, self.step / length.steps)
        assert length.seconds is not None, "a length has steps or seconds"
        return min(1.0, self.used_s / length.seconds)

    def _time_at(self, step: int, budget: TimeBudget) -> float:
        """Return the seconds used at the end of this step, by worker 0's clock, or as recorded before."""
        taken = self._curves.taken(step)
        used_s = torch.tensor(budget.used_s if taken is None else taken["used_s"], dtype=torch.float64)
        return self._workers.broadcast(used_s.to(self._device)).item()

    def _average_gradients(self) -> None:
        if self._workers.world_size == 1:
            return
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self._workers.all_reduce(parameter.grad).div_(self._workers.world_size)

    def _mean_figures(self, figures: dict[str, float]) -> dict[str, float]:
        if self._workers.world_size == 1:
            return figures
        values = torch.tensor(list(figures.values()), dtype=torch.float32, device=self._device)
        means = self._workers.all_reduce(values).div_(self._workers.world_size)
        return dict(zip(figures, means.tolist(), strict=True))

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _measure(self, measure: Callable[[], dict[str, float]] | None, budget: TimeBudget) -> None:
        """Measure the average of the weights, which is what is exported; this is no training time."""
        if measure is None or not self._is_first or self._curves.has_measured(self.step):
            return
        with budget.paused(), self.average.in_place():
            figures = measure()
        self._curves.add({"step": self.step, "held_out": figures})
        self._report(f"{self.name} step {self.step}, held out: {_format(figures)}")

    def _note(self, figures: dict[str, float], progress: float, lr_factor: float, length: Length) -> None:
        """Record a step's figures, and report their means now and then.

        After a restart, steps that were taken before are compared with their earlier figures.
        """
        index = self.step - 1
        taken = self._curves.taken(index)
        if taken is not None and taken["loss"] != figures["loss"]:
            self._report(
                f"{self.name} step {index} had another loss before the restart: threads, processor or "
                "versions have changed, so the weights will differ, too."
            )
        place = {"step": index, "progress": progress, "lr_factor": lr_factor}
        row: Row = {**place, "tokens": self.tokens, "used_s": self.used_s, **figures}
        if self._is_first:
            self._curves.add(row)
        for name, value in figures.items():
            self._figures.setdefault(name, []).append(value)
        if time.monotonic() - self._reported_at < self._settings.report_every_s:
            return
        self._reported_at = time.monotonic()
        total = self._expected_steps(length)
        if not self._has_foreseen:
            self._has_foreseen = True
            needed = f"; a useful drafter needs about {self._useful_steps:,}" if self._useful_steps else ""
            about = "" if length.steps else "about "
            steps = "step" if total == 1 else "steps"
            self._report(f"{self.name} has time for {about}{total:,} {steps}{needed}")
        means = {name: float(np.mean(values)) for name, values in self._figures.items()}
        rate = self.tokens / max(self.used_s, 1e-9)
        self._report(
            f"{self.name} step {self.step:,} of {total:,} ({progress:.1%}): {_format(means)}, "
            f"{self.tokens} tokens, {rate:.0f}/s"
        )
        self._figures.clear()

    def _expected_steps(self, length: Length) -> int:
        """Return the steps of the whole run, at the speed so far if its length is a time."""
        if length.steps is not None:
            return length.steps
        assert length.seconds is not None, "a length has steps or seconds"
        return max(self.step, round(self.step * length.seconds / max(self.used_s, 1e-9)))


def save_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write to a temporary file, sync and rename, so that a kill never leaves a partial snapshot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("wb") as file:
        torch.save(snapshot, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_snapshot(path: Path) -> Snapshot | None:
    if not path.exists():
        return None
    return torch.load(path, map_location="cpu", weights_only=True)


def _format(figures: dict[str, float]) -> str:
    return " ".join(f"{name} {value:.4f}" for name, value in figures.items())
