"""Products in training: bf16 where a CPU multiplies it fast, fp32 elsewhere, with the same training."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from manta.drafter.compute.cpu_numba.cpu_features import Instructions
from manta.jobs.training.heads.dflash_loss import block_loss
from manta.jobs.training.heads.dflash_module import TrainableDrafter
from manta.jobs.training.heads.frozen_target import FrozenTarget
from manta.jobs.training.heads.recipes import DrafterSettings
from manta.jobs.training.loop import precision
from manta.jobs.training.loop.continuations import ContinuationReader
from manta.jobs.training.loop.muon_adamw import Float32Muon, HybridOptimizer
from manta.jobs.training.loop.training_loop import Step
from support.checkpoints.training_targets import (
    CPU,
    continuations,
    small_config,
    stored_outputs,
    write_target,
)

Fake = Callable[[Instructions], None]


@pytest.fixture
def on_a_cpu_with(monkeypatch: pytest.MonkeyPatch):
    def pretend(instructions: Instructions) -> None:
        monkeypatch.setattr(precision, "instructions_of_passes", lambda: instructions.value)
        precision.product_dtype.cache_clear()

    yield pretend
    precision.product_dtype.cache_clear()


@pytest.mark.parametrize("instructions", Instructions)
def test_products_are_bf16_only_where_the_cpu_multiplies_it(on_a_cpu_with: Fake, instructions: Instructions):
    on_a_cpu_with(instructions)
    has_bf16 = instructions in (Instructions.AMX, Instructions.AVX512_BF16)
    assert precision.product_dtype("cpu") is (torch.bfloat16 if has_bf16 else torch.float32)
    assert precision.product_dtype("cuda") is torch.bfloat16


def test_both_precisions_give_the_same_loss_and_gradient(on_a_cpu_with: Fake, tmp_path: Path):
    folder = write_target(tmp_path / "target")
    settings = DrafterSettings(num_layers=2, block_sizes=(4,), num_taps=2, num_anchors=8)
    batch = ContinuationReader(continuations(), 4, pad_id=0).next_batch()

    def trained_in(instructions: Instructions) -> tuple[torch.dtype, float, torch.Tensor]:
        on_a_cpu_with(instructions)
        target = FrozenTarget(folder, (1, 2), max_tokens=64, device=CPU)
        outputs = stored_outputs(target, (1, 2), continuations(), tmp_path / instructions.value).read(batch)
        torch.manual_seed(0)
        drafter = TrainableDrafter(small_config())
        loss, _ = block_loss(target, drafter, batch, outputs, settings, Step(0, 0.0), seed=0)
        loss.backward()
        (optimizer, *_) = HybridOptimizer(drafter, 1e-2, 1e-2, 0.0)._optimizers
        assert isinstance(optimizer, Float32Muon) == (outputs.features_BTF.dtype is torch.float32)
        return (
            outputs.features_BTF.dtype,
            loss.item(),
            torch.cat(
                [parameter.grad.flatten() for parameter in drafter.parameters() if parameter.grad is not None]
            ),
        )

    bf16, fp32 = trained_in(Instructions.AMX), trained_in(Instructions.AVX2)
    assert (bf16[0], fp32[0]) == (torch.bfloat16, torch.float32)
    assert bf16[1] == pytest.approx(fp32[1], rel=0.01)
    assert torch.cosine_similarity(bf16[2], fp32[2], dim=0) > 0.99


@pytest.mark.parametrize("shape", [(24, 64), (64, 24)])
def test_muon_in_fp32_steps_as_torchs_does(shape: tuple[int, int]):
    """torch iterates in bf16, which has three digits."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    matrices = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    options = {"lr": 0.1, "weight_decay": 0.5, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = [
        kind([matrix], **options)
        for kind, matrix in zip((torch.optim.Muon, Float32Muon), matrices, strict=True)
    ]
    for _ in range(4):
        gradient = torch.randn(shape, generator=generator)
        for matrix, optimizer in zip(matrices, optimizers, strict=True):
            matrix.grad = gradient.clone()
            optimizer.step()
    torchs, ours = (matrix.detach() - start for matrix in matrices)
    assert (torchs - ours).norm() < 0.02 * torchs.norm()
    assert optimizers[0].state_dict()["state"][0].keys() == optimizers[1].state_dict()["state"][0].keys()
