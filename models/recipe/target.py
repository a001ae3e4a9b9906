"""Training of the target: a small, deep and narrow Qwen3, with next-token loss over packed windows.

On a CPU, attention is computed as plain bf16 products: torch's fused attention takes more than twice as long
on AVX-512 without AMX. It is registered with transformers as ATTENTION; a GPU uses `sdpa`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

from ...jobs.training.heads.chunked_cross_entropy import row_losses
from ...jobs.training.heads.dflash_module import weighted_sum
from ...jobs.training.heads.export import write_checkpoint
from ...jobs.training.loop.muon_adamw import HybridOptimizer
from ...jobs.training.loop.precision import autocast
from ...jobs.training.loop.training_loop import Length, Report, Schedule, Step, StepLoss, TrainingLoop
from .tokenizer import MAX_CONTEXT_TOKENS, VOCAB_SIZE
from .tokens import TokenStore, WindowReader

ATTENTION = "manta_products"
ROPE_THETA = 10000.0


@dataclass(frozen=True)
class Stage:
    """The length of windows from training progress `start` (0 to 1) on."""

    start: float
    window_tokens: int


# Training begins with short windows, which are cheaper per token.
STAGES = (Stage(0.0, 256), Stage(0.45, 512), Stage(0.85, 1024))


@dataclass(frozen=True)
class TargetSettings:
    matrix_lr: float = 5e-3
    other_lr: float = 3e-3
    weight_decay: float = 0.1
    tokens_per_step: int = 4096
    stages: tuple[Stage, ...] = STAGES
    schedule: Schedule = field(default_factory=Schedule)

    def stage_at(self, progress: float) -> Stage:
        return [stage for stage in self.stages if progress >= stage.start][-1]


def target_config(end_ids: list[int], device: torch.device) -> Qwen3Config:
    """Return the configuration: 18 layers of width 192. Every split dimension is even, for tp=2."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        attn_implementation=ATTENTION if device.type == "cpu" else "sdpa",  # type: ignore[call-arg]
        eos_token_id=end_ids,
        bos_token_id=None,
    )


def train_target(
    config: Qwen3Config,
    store: TokenStore,
    folder: Path,
    budget_s: float,
    device: torch.device,
    report: Report,
    settings: TargetSettings | None = None,
) -> Qwen3ForCausalLM:
    """Train until the time is used up; resume from the snapshot in `folder` if there is one."""
    settings = settings or TargetSettings()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(device=device, dtype=torch.float32)  # type: ignore[call-arg]
    optimizer = HybridOptimizer(model, settings.matrix_lr, settings.other_lr, settings.weight_decay)
    reader = WindowReader(store)
    loop = TrainingLoop("target", model, optimizer, reader, folder, report)

    def compute_loss(step: Step) -> StepLoss:
        stage = settings.stage_at(step.progress)
        num_windows = settings.tokens_per_step // stage.window_tokens
        batch_BT = torch.from_numpy(reader.next_batch(num_windows, stage.window_tokens)).to(device)
        return StepLoss(next_token_loss(model, batch_BT), batch_BT.numel(), {})

    loop.run(compute_loss, Length(seconds=budget_s), settings.schedule)
    return model


def export_target(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write config.json and model.safetensors (bf16). The tied head is not stored twice."""
    config = model.config.to_dict() | {
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "use_cache": True,
    }
    config.pop("_name_or_path", None)
    write_checkpoint(folder, config, model, skipped="lm_head.weight")


@torch.no_grad()
def tame_unseen_embedding(model: Qwen3ForCausalLM, token_id: int) -> None:
    """Give a token that no text contains (the mask) an embedding of median norm.

    Training only ever pushes it away from every hidden state. Its norm becomes several times that of the
    others and would dominate a drafter's block. Its logit stays far below all others.
    """
    rows_VD = model.model.embed_tokens.weight
    rows_VD[token_id] *= rows_VD.norm(dim=1).median() / rows_VD[token_id].norm()


def next_token_loss(model: Qwen3ForCausalLM, batch_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats. Products are bf16 where that is fast, the loss is fp32."""
    with autocast(batch_BT.device):
        logits_BTV = model(input_ids=batch_BT, use_cache=False).logits
    return row_losses(logits_BTV[:, :-1].flatten(0, 1), batch_BT[:, 1:].flatten()).loss_R.mean()


@torch.no_grad()
def held_out_loss(
    model: Qwen3ForCausalLM, store: TokenStore, window_tokens: int, device: torch.device
) -> float:
    """Return the mean loss in nats per token of the held-out documents, packed as in training."""
    reader = WindowReader(store)
    num_batches = len(store.ids) // (4 * window_tokens)
    losses = [
        next_token_loss(model, torch.from_numpy(reader.next_batch(4, window_tokens)).to(device)).item()
        for _ in range(num_batches)
    ]
    return sum(losses) / len(losses)


# Any: transformers passes every attention function more than this one reads.
def products_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within causal windows: query [B, H, T, E], key and value [B, G, T, E]; returns [B, T, H, E]."""
    assert query.shape[2] == key.shape[2], "training windows have no cache"
    batch, heads, tokens, _width = query.shape
    kv_heads = key.shape[1]
    query = (query * scaling).reshape(batch, kv_heads, -1, tokens, query.shape[-1]).flatten(2, 3)
    scores = (query @ key.transpose(-1, -2)).unflatten(2, (-1, tokens))
    hidden = torch.full((tokens, tokens), float("-inf"), dtype=scores.dtype, device=scores.device).triu(1)
    weights = torch.softmax(scores + hidden, dim=-1, dtype=scores.dtype)
    out = weighted_sum(weights.flatten(2, 3), value).view(batch, heads, tokens, -1)
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, products_attention)
