"""A small training run as a process: to be killed, or one of two workers.

training_run.py answer TARGET FOLDER COUNT
training_run.py run TARGET FOLDER STEPS
training_run.py worker FOLDER RANK PORT     worker 0 opens a port, and prints it
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from manta.actors.capture.target_outputs import OutputLayout
from manta.actors.workers.comm import process_group
from manta.drafter.dflash.config import SelectorSize
from manta.jobs.training.heads.dflash_module import TrainableDrafter
from manta.jobs.training.heads.recipes import DrafterSettings
from manta.jobs.training.loop.answering import TEMPERATURES, write_continuations
from manta.jobs.training.loop.continuations import ContinuationRequest, Continuations
from manta.jobs.training.loop.muon_adamw import HybridOptimizer
from manta.jobs.training.loop.training_loop import (
    Length,
    LoopSettings,
    Schedule,
    Step,
    StepLoss,
    TrainingLoop,
)
from manta.jobs.training.train_drafter import Trained, train

from support.checkpoints.training_targets import small_config

SETTINGS = DrafterSettings(
    num_layers=1,
    block_sizes=(4, 3),
    num_taps=2,
    num_anchors=4,
    batch_size=4,
    conv_group_size=16,
    selector=SelectorSize(rank=8, top_k=16),
)
DATA = "data.npz"
LAYOUT = OutputLayout.of((1, 2), width=32, vocab_size=64)


def run(target: Path, folder: Path, length: Length) -> Trained:
    """Train on the data next to the target, with a snapshot after each step."""
    data = Continuations.load(target / DATA)
    return train(
        target,
        data,
        data.take(range(4)),
        folder,
        length,
        settings=SETTINGS,
        mask_token_id=63,
        loop_settings=LoopSettings(snapshot_every_s=0.0, report_every_s=0.0),
    )


def questions(count: int, vocab_size: int = 60) -> list[ContinuationRequest]:
    """Return different prompts, of several lengths, with all temperatures."""
    return [
        ContinuationRequest(
            (number // vocab_size, number % vocab_size, *range(number % 9)), TEMPERATURES[number % 4], number
        )
        for number in range(count)
    ]


def answer(target: Path, folder: Path, count: int, budget_s: float = float("inf")) -> Continuations:
    asked = questions(count)
    return write_continuations(target, asked, folder, budget_s, print, max_new_tokens=40, layout=LAYOUT)


class _NoReader:
    position = (0, 0)

    def seek(self, position: tuple[int, int]) -> None: ...


def weights_after_some_steps(
    folder: Path, parts: tuple[int, ...], workers: process_group.ProcessGroupCommunicator | None = None
) -> dict[str, torch.Tensor]:
    """Gradients of a drafter whose loss is the mean over parts of a synthetic batch."""
    torch.manual_seed(0)
    drafter = TrainableDrafter(small_config())
    optimizer = HybridOptimizer(drafter, 1e-2, 1e-2, 0.0)
    loop = TrainingLoop("parts", drafter, optimizer, _NoReader(), folder, print, workers=workers)

    def compute_loss(step: Step) -> StepLoss:
        losses = []
        for part in parts:
            generator = torch.Generator().manual_seed(10 * step.index + part)
            features, blocks = (torch.randn(2, 9, 64, generator=generator) for _ in range(2))
            rows = drafter(features, blocks[:, :4, :32].unflatten(1, (1, 4)), torch.tensor([[5], [7]]))
            losses.append((rows - features[:, :1, None, :32]).square().mean())
        return StepLoss(torch.stack(losses).mean(), 18, {})

    loop.run(compute_loss, Length(steps=3), Schedule(warmup_steps=1))
    return drafter.state_dict()


def work(folder: Path, port: int) -> None:
    """The second of two workers."""
    process_group.connect(rank=1, world_size=2, device=torch.device("cpu"), store=port)
    workers = process_group.joined()
    torch.save(weights_after_some_steps(folder / "run", (1,), workers), folder / "theirs.pt")
    workers.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, *places, number = sys.argv[1:]
    if what == "answer":
        answer(Path(places[0]), Path(places[1]), int(number))
    elif what == "run":
        run(Path(places[0]), Path(places[1]), Length(steps=int(number)))
    else:
        work(Path(places[0]), int(number))
