"""Runs training on several workers: a Ray Train job over GPUs or CPU cores.

Each worker calls `train` and takes its part of every batch. The data is in the run's folder, which all
workers must be able to read. If a worker dies, Ray restarts the group, which resumes from the last snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...actors.workers.comm.process_group import joined
from .data.continuations import Continuations
from .heads.recipes import Settings
from .loop.lr_schedule import Length
from .loop.training_loop import LoopSettings
from .train_drafter import Trained, train

DATA, HELD_OUT = "data.npz", "held-out.npz"
_MAX_FAILURES = 3


@dataclass(frozen=True)
class TrainingRun:
    target: str
    folder: Path
    length: Length
    settings: Settings
    initial: Path | None = None
    mask_token_id: int | None = None
    loop_settings: LoopSettings | None = None


def run_here(run: TrainingRun, **further: Any) -> Trained:  # Any: arguments of `train`
    return train(
        run.target,
        Continuations.load(run.folder / DATA),
        Continuations.load(run.folder / HELD_OUT),
        run.folder,
        run.length,
        initial=run.initial,
        settings=run.settings,
        mask_token_id=run.mask_token_id,
        loop_settings=run.loop_settings,
        **further,
    )


def run_on_workers(run: TrainingRun, num_workers: int, *, use_gpu: bool, cpus_per_worker: int) -> Trained:
    """Train on workers of the Ray cluster that this process is connected to."""
    import ray.train
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        _run_worker,
        train_loop_config={"run": run},
        scaling_config=ray.train.ScalingConfig(
            num_workers=num_workers, use_gpu=use_gpu, resources_per_worker={"CPU": cpus_per_worker}
        ),
        run_config=ray.train.RunConfig(
            name="train",
            storage_path=str((run.folder / "ray").resolve()),
            failure_config=ray.train.FailureConfig(max_failures=_MAX_FAILURES),
        ),
    )
    result = trainer.fit()
    if result.error is not None:
        raise result.error
    return Trained.read(run.folder)


def _run_worker(config: dict[str, TrainingRun]) -> None:
    run_here(config["run"], workers=joined())
