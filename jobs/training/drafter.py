"""Training of the drafter on the target's own continuations; the target is frozen.

Features are made anew in every step by running the target over the sequences.

Shapes: B sequences, T tokens, A anchors, S block size, N = S - 1 slots, V vocabulary.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from ...cluster.acceptance import expected_acceptance_length
from .blocks import Blocks, cut_blocks, dpace_weights, draw_anchors, weighted_mean
from .budget import Schedule
from .continuations import ContinuationReader, Continuations, PaddedBatch
from .cross_entropy import RowLosses, Teacher, row_losses
from .export import rope_theta
from .loop import Report, Step, StepLoss, TrainingLoop
from .model import DrafterShape, TrainableDrafter
from .optimizers import HybridOptimizer


@dataclass(frozen=True)
class DrafterSettings:
    """`teacher_share`: how much of a slot's target is the target's whole distribution, the
    rest being the token it drew."""

    num_layers: int = 3
    block_size: int = 16
    num_taps: int = 5
    batch_size: int = 8
    num_anchors: int = 64
    matrix_lr: float = 4e-3
    other_lr: float = 2e-3
    weight_decay: float = 0.01
    teacher_share: float = 0.5
    schedule: Schedule = field(default_factory=lambda: Schedule(warmup_steps=30, decay_from=0.1))


def drafter_shape(target: Qwen3ForCausalLM, settings: DrafterSettings) -> DrafterShape:
    config = target.config
    return DrafterShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=settings.num_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim,
        rope_theta=rope_theta(config),
        rms_norm_eps=config.rms_norm_eps,
        block_size=settings.block_size,
        target_layer_ids=target_layer_ids(config.num_hidden_layers, settings.num_taps),
    )


def target_layer_ids(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """z-lab's default: evenly from layer 1 to the third last, by output of 0-based layer."""
    if num_taps == 1:
        return (num_layers // 2,)
    return tuple(round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in range(num_taps))


def train_drafter(
    target: Qwen3ForCausalLM,
    drafter: TrainableDrafter,
    data: Continuations,
    mask_id: int,
    pad_id: int,
    snapshot_path: Path,
    budget_s: float,
    device: torch.device,
    report: Report,
    settings: DrafterSettings | None = None,
) -> None:
    """Change `drafter` in place until the budget is used up, going on from the snapshot if there is one."""
    settings = settings or DrafterSettings()
    drafter.to(device)
    optimizer = HybridOptimizer(drafter, settings.matrix_lr, settings.other_lr, settings.weight_decay)
    reader = ContinuationReader(data, settings.batch_size, pad_id)
    loop = TrainingLoop("drafter", drafter, optimizer, reader, snapshot_path, report)
    frozen = FrozenTarget(target, drafter.shape.target_layer_ids)

    def compute_loss(step: Step) -> StepLoss:
        batch = reader.next_batch()
        tokens_BT = torch.from_numpy(batch.tokens).to(device)
        block_size = drafter.shape.block_size
        blocks = draw_blocks(batch, tokens_BT, settings.num_anchors, block_size, mask_id, seed=step.index)
        losses = block_losses(frozen, drafter, tokens_BT, blocks, settings.teacher_share)
        weights = dpace_weights(losses.label_loss_R.view_as(blocks.labels))
        loss = weighted_mean(losses.loss_R.view_as(blocks.labels), weights, blocks.is_counted)
        return StepLoss(loss, batch.tokens.size, report_figures(blocks, losses))

    loop.run(compute_loss, budget_s, settings.schedule)


@torch.no_grad()
def new_drafter(target: Qwen3ForCausalLM, settings: DrafterSettings | None = None) -> TrainableDrafter:
    """Begin with layers of the target, evenly spaced up to its last, which read its deepest tap.

    They know already how to look back and how to write what the head reads: many steps are saved.
    """
    torch.manual_seed(1)
    drafter = TrainableDrafter(drafter_shape(target, settings or DrafterSettings()))
    count, num_target_layers = drafter.shape.num_layers, target.config.num_hidden_layers
    for index, layer in enumerate(drafter.layers):
        source = target.model.layers[num_target_layers * (index + 1) // count - 1]
        layer.load_state_dict(source.state_dict())
    width = drafter.shape.hidden_size
    drafter.fc.weight[:, -width:].copy_(torch.eye(width))
    drafter.norm.load_state_dict(target.model.norm.state_dict())
    return drafter


class FrozenTarget:
    """The target as the drafter's training sees it: features, embeddings, logits; no gradients to it."""

    def __init__(self, target: Qwen3ForCausalLM, layer_ids: tuple[int, ...]) -> None:
        self._target = target.bfloat16().eval().requires_grad_(False)
        self._layer_ids = layer_ids

    @torch.no_grad()
    def read(self, tokens_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tapped features [B, T, taps * D] and logits [B, T, V], bf16."""
        states = self._target.model(tokens_BT, use_cache=False, output_hidden_states=True)
        features = torch.cat([states.hidden_states[i + 1] for i in self._layer_ids], dim=-1)
        return features, self.logits(states.last_hidden_state)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._target.model.embed_tokens(tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Contiguous hidden states, please: for a slice torch copies the head once per row of its batch."""
        assert hidden.is_contiguous(), "a slice of hidden states"
        return self._target.lm_head(hidden)


def draw_blocks(
    batch: PaddedBatch, tokens_BT: torch.Tensor, num_anchors: int, block_size: int, mask_id: int, seed: int
) -> Blocks:
    """Random blocks in the generated part of every sequence."""
    first_B, length_B = torch.from_numpy(batch.first), torch.from_numpy(batch.length)
    anchors_BA = draw_anchors(first_B, length_B, num_anchors, torch.Generator().manual_seed(seed))
    device = tokens_BT.device
    return cut_blocks(tokens_BT, length_B.to(device), anchors_BA.to(device), block_size, mask_id)


def block_losses(
    target: FrozenTarget,
    drafter: TrainableDrafter,
    tokens_BT: torch.Tensor,
    blocks: Blocks,
    teacher_share: float,
) -> RowLosses:
    """The losses of all slots, flattened to rows."""
    features, target_logits_BTV = target.read(tokens_BT)
    with torch.autocast(tokens_BT.device.type, torch.bfloat16):
        hidden_BASD = drafter(features, target.embed(blocks.inputs), blocks.anchors)
        logits_RV = target.logits(hidden_BASD[..., 1:, :].flatten(0, 2).to(torch.bfloat16))
    teacher = Teacher(target_logits_BTV.flatten(0, 1), teacher_rows(blocks, tokens_BT), teacher_share)
    return row_losses(logits_RV, blocks.labels.flatten(), teacher)


def teacher_rows(blocks: Blocks, tokens_BT: torch.Tensor) -> torch.Tensor:
    """[B * A * N] into [B * T]: the label at a + k is judged by the target's row a + k - 1."""
    batch, num_tokens = tokens_BT.shape
    slots_N = torch.arange(blocks.labels.shape[-1], device=tokens_BT.device)
    positions_BAN = (blocks.anchors[..., None] + slots_N).clamp(max=num_tokens - 1)
    offsets_B = torch.arange(batch, device=tokens_BT.device) * num_tokens
    return (positions_BAN + offsets_B[:, None, None]).flatten()


def report_figures(blocks: Blocks, losses: RowLosses) -> dict[str, float]:
    """Slot 1's chance of acceptance at temperature 1, and the length to expect if slots were accepted so."""
    overlap_BAN = losses.overlap_R.view_as(blocks.labels) * blocks.is_counted
    survival = overlap_BAN.cumprod(dim=-1).mean(dim=(0, 1)).tolist()
    length = expected_acceptance_length(survival, len(survival) + 1)
    return {"slot1": overlap_BAN[..., 0].mean().item(), "mean_acceptance_length": length}
