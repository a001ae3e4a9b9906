"""A drafter in training: one interface for the training loop, the measurement on held-out text, and export.

`make_drafter` makes DFlash drafters with or without DFlash2's parts, `models/recipe/eagle3.py` EAGLE-3 heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ....actors.capture.target_outputs import OutputLayout
from ....actors.checkpoints.checkpoint_paths import resolve_checkpoint
from ....actors.targets.families import read_model
from ....actors.targets.model.model_spec import ModelSpec
from ....actors.targets.model.weights import target_shapes
from ....drafter.compute.checkpoint.hf_config import read_json
from ....drafter.dflash.checkpoint import check_drafter
from ....drafter.dflash.target_features import usual_layer_ids
from ..loop.continuations import ContinuationReader, ContinuationRequest, Continuations, PaddedBatch
from ..loop.training_loop import Step
from .dflash_loss import block_loss, draw_anchors
from .export import export_drafter
from .frozen_target import FrozenTarget
from .initialization import continued, drafter_config, facts_of, new_drafter
from .offline_proposals import BlockProposals, OfflineProposals, accepted_at
from .recipes import DrafterSettings
from .stored_outputs import BatchOutputs, StoredOutputs

# (batch, the target's outputs for it, step, seed) -> loss and figures.
Loss = Callable[[PaddedBatch, BatchOutputs, Step, int], tuple[torch.Tensor, dict[str, float]]]

_HELD_OUT_SEQUENCES, _HELD_OUT_PLACES = 32, 16


def read_target(target: str | Path) -> tuple[ModelSpec, Path]:
    folder = resolve_checkpoint(str(target), field="target")
    return read_model(folder), folder


def is_small(spec: ModelSpec) -> bool:
    """Return whether a target has less than 1 B parameters; its answers are less certain."""
    return sum(map(math.prod, target_shapes(spec).values())) < 10**9


def output_layout(spec: ModelSpec, num_taps: int, initial: Path | None = None) -> OutputLayout:
    """Return the outputs of a target that are stored to train a drafter: `initial`, or a new one."""
    layer_ids = usual_layer_ids(spec.num_layers, num_taps)
    if initial is not None:
        layer_ids = check_drafter(initial, facts_of(spec)).target_layer_ids
    return OutputLayout.of(layer_ids, spec.hidden_size, spec.vocab_size)


@dataclass(frozen=True)
class Trainable:
    """A drafter in training with its target; `export` writes a checkpoint folder."""

    target: FrozenTarget
    layout: OutputLayout
    model: nn.Module
    loss: Loss
    proposals: OfflineProposals
    export: Callable[[Path], None]

    @torch.no_grad()
    def measure(self, held_out: Continuations, stored: StoredOutputs) -> dict[str, float]:
        """Return "loss", "accepted" and "tokens_per_step" on some held-out sequences at fixed positions.

        Drafts are greedy and accepted while they match the text; "accepted" is the share of first drafts that
        are, "tokens_per_step" the mean acceptance length.
        """
        count = min(len(held_out), _HELD_OUT_SEQUENCES)
        batch = ContinuationReader(held_out, count, pad_id=0).next_batch()
        outputs = stored.read(batch)
        loss, _ = self.loss(batch, outputs, Step(0, progress=1.0), 0)
        first_B, length_B = torch.from_numpy(batch.first), torch.from_numpy(batch.length)
        anchors_BA = draw_anchors(first_B, length_B, _HELD_OUT_PLACES, torch.Generator().manual_seed(0))
        tokens_BT, greedy = (
            torch.from_numpy(batch.tokens).to(self.target.device),
            ContinuationRequest((), 0.0, 0),
        )
        accepted: list[int] = []
        for row, length in enumerate(batch.length.tolist()):
            places_A = anchors_BA[row].to(self.target.device)
            features_TF, tokens_T = outputs.features_BTF[row, :length], tokens_BT[row, :length]
            accepted += accepted_at(self.proposals, features_TF, greedy, tokens_T, places_A)
        return {
            "loss": loss.item(),
            "accepted": sum(each > 0 for each in accepted) / len(accepted),
            "tokens_per_step": 1.0 + sum(accepted) / len(accepted),
        }


def make_drafter(
    target: str | Path,
    settings: DrafterSettings,
    initial: Path | None,
    mask_token_id: int | None,
    max_tokens: int,
    device: torch.device,
) -> Trainable:
    """Make a DFlash drafter for training: `initial`, or a new one with this mask token."""
    spec, _ = read_target(target)
    raw = None
    if initial is None:
        assert mask_token_id is not None, "a new drafter's mask token is chosen before its data is made"
        config = drafter_config(spec, settings, mask_token_id)
    else:
        config = continued(check_drafter(initial, facts_of(spec)), settings, spec.embed_scale)
        raw, settings = read_json(initial, param="initial"), settings.with_blocks(config.block_size)
    frozen = FrozenTarget(target, config.target_layer_ids, max_tokens, device)
    drafter = new_drafter(config, frozen.weights, initial).to(device)

    return Trainable(
        frozen,
        output_layout(spec, settings.num_taps, initial),
        drafter,
        lambda batch, outputs, step, seed: block_loss(frozen, drafter, batch, outputs, settings, step, seed),
        BlockProposals(frozen, drafter),
        lambda folder: export_drafter(drafter, spec, folder, raw),
    )
