"""Small random targets and drafter shapes for tests of training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from manta.actors.capture.target_outputs import OutputLayout
from manta.actors.targets.model.tensor_parallel import SingleRank
from manta.drafter.compute.layers.rope import RopeConfig
from manta.drafter.dflash.config import DrafterConfig, DraftLayer
from manta.jobs.training.heads.frozen_target import FrozenTarget
from manta.jobs.training.heads.stored_outputs import StoredOutputs, store_outputs
from manta.jobs.training.loop.continuations import Continuations
from transformers import Qwen3ForCausalLM

from support.checkpoints.tiny import tiny_training_config

CPU = torch.device("cpu")


def random_target() -> Qwen3ForCausalLM:
    """A target in fp32, with weights that bf16 can represent."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(tiny_training_config()).bfloat16().float()


def write_target(folder: Path) -> Path:
    """The same as a checkpoint folder, in bf16."""
    target = random_target().bfloat16()
    target.config.dtype = torch.bfloat16
    target.save_pretrained(folder)
    return folder


def continuations(count: int = 12, vocab_size: int = 60) -> Continuations:
    """Random sequences of several lengths."""
    random = np.random.default_rng(0)
    return Continuations.of_pairs(
        (
            random.integers(0, vocab_size, 6 + i).tolist(),
            random.integers(0, vocab_size, 9 + i % 5).tolist(),
        )
        for i in range(count)
    )


def stored_outputs(
    target: FrozenTarget, layer_ids: tuple[int, ...], data: Continuations, folder: Path
) -> StoredOutputs:
    """All outputs of a target for these sequences, computed and stored in `folder`."""
    layout = OutputLayout.of(layer_ids, target.spec.hidden_size, target.spec.vocab_size)
    run = (data.take([]), data, (), folder, math.inf, lambda _: None, SingleRank())
    return store_outputs(target, layout, *run)


def small_config(**changes: Any) -> DrafterConfig:  # Any: fields by name
    """The shape of a drafter of two layers for a target of width 32."""
    fields: dict[str, Any] = {
        "file": "a test",
        "layout": "z-lab",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig(8, 1e4, "default", {}),
        "target_layer_ids": (1, 2),
        "layers": (DraftLayer(causal=False, window=None),) * 2,
        "block_size": 4,
        "mask_token_id": 63,
        "vocab_size": 64,
        "draft_vocab_size": 64,
        "target_hidden_size": None,
        "num_target_layers": 6,
        "mask_embedding": False,
        "input_embedding_scale": 1.0,
    }
    return DrafterConfig(**fields | changes)
