"""Trains one drafter for one frozen target, from token sequences to a checkpoint folder.

The caller provides the data: `manta drafter train` (`jobs/drafters/train/train_run.py`) reads datasets,
`manta drafter adapt` captured traffic. All state is in the run's folder; calling it again with the same
folder resumes. Several workers are a Ray Train job over GPUs or cores: each calls `train`, takes its part of
every batch and reads the data from the run's folder. If one dies, Ray restarts the group, which resumes from
the last snapshot.
"""

from __future__ import annotations

import ctypes
import math
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...actors.targets.model.tensor_parallel import Communicator, SingleRank
from ...actors.workers.comm.process_group import joined
from ...cluster.errors import ConfigError
from .heads.recipes import DrafterSettings, TrainSettings
from .heads.stored_outputs import store_outputs
from .heads.trainables import Trainable, make_drafter
from .loop.answering import seconds_used
from .loop.continuations import ContinuationReader, Continuations
from .loop.muon_adamw import HybridOptimizer
from .loop.training_curves import read_rows
from .loop.training_loop import CURVES, Length, LoopSettings, Report, Step, StepLoss, TrainingLoop

DATA, HELD_OUT = "data.npz", "held-out.npz"
ANSWERS, OUTPUTS = "answers", "outputs"
_OUTPUTS_SHARE = 0.3
# For two tokens per step of a new drafter for a small target, extrapolated: 1.59 at 337 and 1.78 at 631
# (docs/measurements.md).
USEFUL_STEPS = 1_300
_MAX_FAILURES = 3
# mallopt's parameters: the value in training, and glibc's own. M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD.
_MALLOC = {-4: (0, 65536), -1: (2**31 - 1, 128 * 1024), -2: (256 * 2**20, 128 * 1024)}
# Target, settings (Any: those of its kind), initial drafter, mask token, longest sequence, device.
MakeTrainable = Callable[[str | Path, Any, Path | None, int | None, int, torch.device], Trainable]


@dataclass(frozen=True)
class Trained:
    """Result of a run: checkpoint folder, curves (JSON lines), totals over processes, held-out figures."""

    drafter: Path
    curves: Path
    num_steps: int
    num_tokens: int
    used_s: float
    held_out_before: dict[str, float]
    held_out_after: dict[str, float]

    @classmethod
    def read(cls, folder: Path) -> Trained:
        rows = read_rows(folder / CURVES)
        measured = [row["held_out"] for row in rows if "held_out" in row]
        last = next(row for row in reversed(rows) if "held_out" not in row)
        return cls(
            drafter=folder / "drafter",
            curves=folder / CURVES,
            num_steps=last["step"] + 1,
            num_tokens=last["tokens"],
            used_s=last["used_s"],
            held_out_before=measured[0],
            held_out_after=measured[-1],
        )


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Make glibc keep freed large blocks: mapping them again per tensor takes a third of a step's time.

    Afterwards it gives them back, and behaves as by default.
    """
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    mallopt, trim = getattr(library, "mallopt", None), getattr(library, "malloc_trim", None)
    if mallopt is None or trim is None:
        yield
        return
    for parameter, (value, _) in _MALLOC.items():
        mallopt(parameter, value)
    try:
        yield
    finally:
        for parameter, (_, usual) in _MALLOC.items():
            mallopt(parameter, usual)
        trim(0)


@freed_memory_kept()
def train(
    target: str | Path,
    data: Continuations,
    held_out: Continuations,
    folder: Path,
    length: Length,
    *,
    settings: TrainSettings,
    initial: Path | None = None,
    mask_token_id: int | None = None,
    make: MakeTrainable = make_drafter,
    report: Report = lambda line: print(line, flush=True),
    loop_settings: LoopSettings | None = None,
    workers: Communicator | None = None,
    recorded: Sequence[Path] = (),
) -> Trained:
    """Train until `length` is reached; called again with the same folder, resume.

    The target's outputs for all sequences are stored before; for a length in seconds, in at most
    _OUTPUTS_SHARE of it, and training uses the sequences that were reached.

    Args:
        data: token sequences; only the answers have a loss. Repeat a kind of text to weight it.
        held_out: sequences that are measured before, during and after training, and never trained on.
        folder: gets `outputs/`, `snapshot.pt`, `curves.jsonl`, `curves.svg` and `drafter/`.
        initial: folder of a DFlash drafter to start from; by default layers of the target.
        settings: the recipe (`recipes.py`).
        mask_token_id: of a new DFlash drafter (`mask_token`).
        make: makes the drafter; `models/recipe/eagle3.py` has another one.
        workers: train together (`run_on_workers`); each of them calls this function.
        recorded: folders in which the engine has stored outputs of the target (`target_outputs.py`).
    """
    workers = workers or SingleRank()
    check_data(data, held_out, settings.batch_size * workers.world_size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    longest = max(data.longest, held_out.longest)
    trainable = make(target, settings, initial, mask_token_id, longest, device)
    outputs_s = math.inf if length.seconds is None else _OUTPUTS_SHARE * length.seconds
    stored = store_outputs(
        trainable.target,
        trainable.layout,
        held_out,
        data,
        recorded,
        folder / OUTPUTS,
        outputs_s,
        report,
        workers,
    )
    if length.seconds is not None:
        length = Length(seconds=max(1e-3, length.seconds - seconds_used(folder / OUTPUTS)))
    subject = f"{settings} {workers.world_size} {data.digest}"
    if len(reached := stored.indices(data)) < len(data):
        report(f"training uses {len(reached)} of {len(data)} sequences; the others had no time")
        data = data.take(reached)
    optimizer = HybridOptimizer(trainable.model, settings.matrix_lr, settings.other_lr, settings.weight_decay)
    reader = ContinuationReader(data, settings.batch_size * workers.world_size, pad_id=0)
    loop = TrainingLoop(
        "training",
        trainable.model,
        optimizer,
        reader,
        folder,
        report,
        loop_settings,
        subject=subject,
        workers=workers,
        useful_steps=0 if initial is not None else USEFUL_STEPS,
    )

    def compute_loss(step: Step) -> StepLoss:
        batch = reader.next_batch().part(workers.rank, workers.world_size)
        seed = step.index * workers.world_size + workers.rank
        loss, figures = trainable.loss(batch, stored.read(batch), step, seed)
        return StepLoss(loss, batch.tokens.size, figures)

    loop.run(compute_loss, length, settings.schedule, lambda: trainable.measure(held_out, stored))
    trainable.model.load_state_dict(loop.average.state)
    if workers.rank == 0:
        trainable.export(folder / "drafter")
    workers.all_reduce(torch.zeros(1, device=device))  # barrier: worker 0 has written everything
    return Trained.read(folder)


def check_data(data: Continuations, held_out: Continuations, batch_size: int) -> None:
    """Raise ConfigError if there is too little to train on, or nothing to measure on."""
    if len(data) < batch_size:
        raise ConfigError(
            f"data: {len(data)} training sequences are fewer than the {batch_size} of a step. Give more.",
            param="data",
        )
    if not len(held_out):
        raise ConfigError("held_out: there is no sequence to measure on. Give more data.", param="held_out")


def machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} cores of {platform.processor() or platform.machine()}"


@dataclass(frozen=True)
class TrainingRun:
    target: str
    folder: Path
    length: Length
    settings: DrafterSettings
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
        recorded=[run.folder / ANSWERS],
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
