"""An EAGLE-3 head (arXiv:2503.01840) in training: module, loss, drafts and checkpoint.

One Llama layer over [token embedding, feature of the previous position]; embedding and head are the target's.
It drafts a chain: after the target's newest feature, its own output replaces the feature. Chains are unrolled
in training, as published ("training-time test"), so that it learns to correct its errors. The inference code
is `drafter/eagle3/model.py`. `python -m manta.models.recipe.eagle3` is the command.

Row r starts a chain after position r: at depth s it reads token r + 1 + s and predicts the next one. Shapes:
B sequences, T tokens, R = T - 1 rows of each, N depths, D width, F tapped features, H query heads, G
key/value heads, E head width, C candidates, M answer positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn

from ...actors.targets.model.model_spec import ModelSpec
from ...actors.targets.model.weights import TargetWeights
from ...drafter.dflash.config import DraftLayer
from ...drafter.dflash.target_features import usual_layer_ids
from ...drafter.eagle3.config import Eagle3Config
from ...drafter.step.sampling.sampler import sample_rows
from ...jobs.drafters.common.options import TrainOptions
from ...jobs.drafters.train.train_run import prepare_data
from ...jobs.training.heads.chunked_cross_entropy import Teacher, row_losses
from ...jobs.training.heads.dflash_loss import dpace_weights, length_figures, weighted_mean
from ...jobs.training.heads.dflash_module import GatedMlp, RmsNorm, Rotary
from ...jobs.training.heads.export import backbone, write_checkpoint
from ...jobs.training.heads.frozen_target import FrozenTarget
from ...jobs.training.heads.initialization import SEED, layer_parts, layer_sizes, load_matching
from ...jobs.training.heads.offline_proposals import sampling
from ...jobs.training.heads.recipes import Teaching, TrainSettings
from ...jobs.training.heads.stored_outputs import BatchOutputs
from ...jobs.training.heads.trainables import Trainable, output_layout, read_target
from ...jobs.training.loop.continuations import ContinuationRequest, Continuations, PaddedBatch
from ...jobs.training.loop.precision import autocast
from ...jobs.training.loop.training_loop import Length, Schedule, Step
from ...jobs.training.train_drafter import ANSWERS, DATA, HELD_OUT, OUTPUTS, train


@dataclass(frozen=True)
class EagleSettings(TrainSettings):
    """Settings of an EAGLE-3 head; `depth` is the number of tokens of a chain in training."""

    depth: int = 5
    num_taps: int = 3
    teaching: Teaching = field(default_factory=lambda: Teaching(distance_share=0.7))
    schedule: Schedule = field(default_factory=lambda: Schedule(warmup_steps=30, decay_from=0.3))


class EagleHead(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.num_taps * width, width, bias=False)
        self.midlayer = _Layer(config)
        self.norm = RmsNorm(width, eps)

    def chains(self, features_BRF: torch.Tensor) -> Chains:
        """Start a chain at every row, from the tapped features of its position."""
        return Chains(self, self.fc(features_BRF))


class Chains:
    """The chains of all rows. At each depth a row attends to earlier rows at depth 0 and to its own chain."""

    def __init__(self, head: EagleHead, hidden_BRD: torch.Tensor) -> None:
        self._head, self._hidden_BRD = head, hidden_BRD
        self._keys: list[torch.Tensor] = []  # per depth, [B, G, R, E]
        self._values: list[torch.Tensor] = []

    def step(self, embedded_BRD: torch.Tensor) -> torch.Tensor:
        """Advance all chains by one token; return hidden states [B, R, D] for the target's head."""
        layer, depth = self._head.midlayer, len(self._keys)
        u_BR2D = torch.cat([layer.input_layernorm(embedded_BRD), layer.hidden_norm(self._hidden_BRD)], dim=-1)
        rows_R = torch.arange(u_BR2D.shape[1], device=u_BR2D.device)
        q_BHRE, key, value = layer.self_attn.project(u_BR2D, rows_R + 1 + depth)
        self._keys.append(key)
        self._values.append(value)
        x_BRD = self._hidden_BRD + layer.self_attn.attend(q_BHRE, self._keys, self._values)
        self._hidden_BRD = x_BRD + layer.mlp(layer.post_attention_layernorm(x_BRD))
        return self._head.norm(self._hidden_BRD)


class _Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RmsNorm(width, eps)
        self.hidden_norm = RmsNorm(width, eps)
        self.self_attn = _ChainAttention(config)
        self.post_attention_layernorm = RmsNorm(width, eps)
        self.mlp = GatedMlp(width, config.intermediate_size)


class _ChainAttention(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self._config = config
        width, head_dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(2 * width, config.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(2 * width, config.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(2 * width, config.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head_dim, width, bias=False)
        self.rotary = Rotary(config.rope)

    def project(
        self, u_BR2D: torch.Tensor, positions_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries [B, H, R, E], keys and values [B, G, R, E], with rotary embedding."""
        q, k, v = (
            project(u_BR2D).unflatten(-1, (-1, self._config.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.rotary(q, positions_R), self.rotary(k, positions_R)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def attend(
        self, q_BHRE: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        """Attend to depth 0 of the rows up to the own row, and to later depths of the own row; [B, R, D]."""
        group = self._config.num_heads // self._config.num_kv_heads
        q_BGNRE = (q_BHRE * self._config.head_dim**-0.5).unflatten(1, (-1, group))
        num_rows = q_BHRE.shape[2]
        hidden = torch.full((num_rows, num_rows), float("-inf"), device=q_BHRE.device).triu(1)
        first = q_BGNRE @ keys[0].unsqueeze(2).transpose(-1, -2)
        later = [(q_BGNRE * key.unsqueeze(2)).sum(dim=-1, keepdim=True) for key in keys[1:]]
        scores = torch.cat([first + hidden.to(first.dtype), *later], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=scores.dtype)
        out = weights[..., :num_rows] @ values[0].unsqueeze(2)
        for depth, value in enumerate(values[1:]):
            out = out + weights[..., num_rows + depth, None] * value.unsqueeze(2)
        return self.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2))


def chain_loss(
    target: FrozenTarget,
    head: EagleHead,
    batch: PaddedBatch,
    outputs: BatchOutputs,
    settings: EagleSettings,
    step: Step,
    seed: int,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the loss of all chains of a batch, weighted by D-PACE, and figures for reports."""
    device = target.device
    tokens_BT = torch.from_numpy(batch.tokens).to(device)
    first_B, length_B = (torch.from_numpy(x).to(device) for x in (batch.first, batch.length))
    num_sequences, num_tokens = tokens_BT.shape
    rows_R = torch.arange(num_tokens - 1, device=device)
    begins_BR = rows_R + 1 >= first_B[:, None]
    with autocast(device):
        chains = head.chains(outputs.features_BTF[:, :-1])
    candidates = outputs.candidates(head.config.vocab_size, seed)
    teacher_MC, teaching = outputs.teacher_logits(candidates), settings.teaching.at(step.progress)
    shares = teaching.teacher_share, teaching.distance_share
    label_loss_BRN, overlap_BRN = torch.zeros(
        2, num_sequences, num_tokens - 1, settings.depth, device=device
    ).unbind()
    counted_BRN = torch.zeros_like(overlap_BRN, dtype=torch.bool)
    losses: list[torch.Tensor] = []
    for depth in range(settings.depth):
        read_BR = (rows_R + 1 + depth).clamp(max=num_tokens - 1).expand(num_sequences, -1)
        with autocast(device):
            hidden_BRD = chains.step(target.embed(tokens_BT.gather(1, read_BR)))
        counted_BR = begins_BR & (rows_R + 2 + depth < length_B[:, None])
        counted_BRN[..., depth] = counted_BR
        logits_XC = target.head(hidden_BRD[counted_BR], candidates.token_ids_C) + candidates.bias_C
        labels_X = candidates.find(tokens_BT.gather(1, (read_BR + 1).clamp(max=num_tokens - 1))[counted_BR])
        of_rows = row_losses(
            logits_XC, labels_X, Teacher(teacher_MC, outputs.rows(read_BR + 1)[counted_BR], *shares)
        )
        loss_BR = hidden_BRD.new_zeros(counted_BR.shape, dtype=torch.float32)
        losses.append(loss_BR.masked_scatter(counted_BR, of_rows.loss_R))
        label_loss_BRN[..., depth][counted_BR] = of_rows.label_loss_R
        overlap_BRN[..., depth][counted_BR] = of_rows.overlap_R
    loss = weighted_mean(torch.stack(losses, dim=-1), dpace_weights(label_loss_BRN), counted_BRN)
    return loss, length_figures(overlap_BRN[begins_BR])


def eagle_config(spec: ModelSpec, settings: EagleSettings) -> Eagle3Config:
    return Eagle3Config(
        file="a new head",
        layout="sglang",
        **layer_sizes(spec),
        layers=(DraftLayer(causal=True, window=None),),
        target_layer_ids=usual_layer_ids(spec.num_layers, settings.num_taps),
        draft_vocab_size=spec.vocab_size,
        target_hidden_size=spec.hidden_size,
    )


@torch.no_grad()
def new_eagle_head(config: Eagle3Config, target: TargetWeights) -> EagleHead:
    """Make a head from the target's last layer where shapes agree; it reads the deepest tap."""
    torch.manual_seed(SEED)
    head = EagleHead(config)
    parts = layer_parts(target, target.spec.num_layers - 1)
    width, layer = config.hidden_size, head.midlayer
    for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
        torch.nn.init.normal_(projection.weight, std=0.02)
    if (v_proj := parts.get("self_attn.v_proj.weight")) is not None:
        layer.self_attn.v_proj.weight[:, width:].copy_(v_proj)
    layer.hidden_norm.weight.copy_(parts["input_layernorm.weight"])
    own = ("self_attn.o_proj.", "mlp.", "post_attention_layernorm.")
    load_matching(layer, {name: tensor for name, tensor in parts.items() if name.startswith(own)})
    head.norm.weight.copy_(target.final_norm())
    head.fc.weight[:, -width:].copy_(torch.eye(width))
    return head


class ChainProposals:
    def __init__(self, target: FrozenTarget, head: EagleHead, num_drafts: int) -> None:
        self._target, self._head, self._num_drafts = target, head, num_drafts

    @torch.no_grad()
    def __call__(
        self,
        features_TF: torch.Tensor,
        question: ContinuationRequest,
        tokens_T: torch.Tensor,
        anchors_A: torch.Tensor,
    ) -> torch.Tensor:
        device, rows_A = tokens_T.device, anchors_A - 1
        read_R = tokens_T[1:].clone()
        drafts: list[torch.Tensor] = []
        with autocast(device):
            chains = self._head.chains(features_TF[None, :-1])
        for depth in range(self._num_drafts):
            with autocast(device):
                hidden_RD = chains.step(self._target.embed(read_R[None]))[0]
            logits_AV = self._target.head(hidden_RD[rows_A]).float()
            drafts.append(sample_rows(logits_AV, sampling(question, anchors_A + 1 + depth)))
            read_R[rows_A] = drafts[-1]
        return torch.stack(drafts, dim=1)


def export_eagle_head(model: EagleHead, target: ModelSpec, folder: Path) -> None:
    """Write the original format, which SGLang and vLLM read, without the target's embedding and head."""
    config = model.config
    written = backbone(config, target) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.target_layer_ids),
            "use_aux_hidden_state": True,
        },
    }
    write_checkpoint(folder, written, model)


def make_head(
    target: str | Path,
    settings: EagleSettings,
    initial: Path | None,
    mask_token_id: int | None,
    max_tokens: int,
    device: torch.device,
) -> Trainable:
    """Make a new head for `train`; it starts from no checkpoint and has no mask token."""
    assert initial is None and mask_token_id is None
    spec, _ = read_target(target)
    config = eagle_config(spec, settings)
    frozen = FrozenTarget(target, config.target_layer_ids, max_tokens, device)
    head = new_eagle_head(config, frozen.weights).to(device)
    return Trainable(
        frozen,
        output_layout(spec, settings.num_taps),
        head,
        lambda batch, outputs, step, seed: chain_loss(frozen, head, batch, outputs, settings, step, seed),
        ChainProposals(frozen, head, settings.depth),
        lambda folder: export_eagle_head(head, spec, folder),
    )


def main(
    target: Annotated[str, typer.Option("-m", "--target", help="Folder or hub id of the target.")],
    output_dir: Annotated[Path, typer.Option("-o", "--output", help="Folder of the run, with drafter/.")],
    data: Annotated[
        list[str] | None, typer.Option("--data", help="As of manta drafter train; may be repeated.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="A run of manta drafter train: learn from its sequences and stored outputs."),
    ] = None,
    hours: Annotated[float, typer.Option("--hours", help="Time for training.")] = 1.0,
) -> None:
    """Train an EAGLE-3 head for a frozen target."""
    if bool(data) == (run is not None):
        raise typer.BadParameter("Give --data or --run.")
    settings = EagleSettings()
    if data:
        options = TrainOptions(target=target, folder=output_dir, data=tuple(data))
        prepare_data(
            options, output_layout(read_target(target)[0], settings.num_taps), settings.batch_size, print
        )
    source = run or output_dir
    trained = train(
        target,
        Continuations.load(source / DATA),
        Continuations.load(source / HELD_OUT),
        output_dir,
        Length(seconds=hours * 3600),
        settings=settings,
        make=make_head,
        recorded=[source / ANSWERS, source / OUTPUTS],
    )
    print(f"{trained.held_out_after['tokens_per_step']:.2f} tokens per step, held out; {trained.drafter}")


if __name__ == "__main__":
    typer.run(main)
