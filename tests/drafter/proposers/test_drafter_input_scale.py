"""The factor of a drafter's input rows: from its file, the target, or a setting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from manta.drafter.compute.layers.linear import Linear
from manta.drafter.dflash.checkpoint import load_drafter
from manta.drafter.dflash.target_features import EmbeddingCopies, TargetFacts
from support.checkpoints import drafters as checkpoints
from support.checkpoints.drafters import HIDDEN, TARGET_LAYERS, VOCAB, speculators, z_lab

SCALE = 5376**0.5  # Gemma 4 31B's: no round number
FACTS = TargetFacts(HIDDEN, TARGET_LAYERS, VOCAB, 64, embed_scale=SCALE)
SAYS = {"input_embedding_scale": 5.5}


@pytest.mark.parametrize(
    ("config", "facts", "setting", "scale"),
    [
        (z_lab(), FACTS, None, SCALE),
        (z_lab(), replace(FACTS, embed_scale=1.0), None, 1.0),
        (z_lab(dflash=SAYS), FACTS, None, 5.5),
        (z_lab(dflash={"input_embedding_scale": 1.0}), FACTS, None, 1.0),
        (z_lab(), FACTS, 1.0, 1.0),
        (z_lab(dflash=SAYS), FACTS, 2.0, 2.0),
        (speculators(), FACTS, None, 1.0),
        (speculators(), FACTS, SCALE, SCALE),
        (speculators(draft_vocab_size=40), FACTS, None, 1.0),
    ],
)
def test_a_setting_overrides_the_file_which_overrides_the_target(
    tmp_path: Path, config: dict, facts: TargetFacts, setting: float | None, scale: float
) -> None:
    drafter = load(tmp_path, config, facts, torch.float32, setting)
    ids = torch.tensor([3, 90, 90])
    embedding = drafter_embedding(tmp_path, config)
    torch.testing.assert_close(drafter.embed_block(ids), embedding[ids] * scale)


def test_the_targets_factor_is_rounded_as_the_target_rounds_it(tmp_path: Path) -> None:
    drafter = load(tmp_path, z_lab(), FACTS, torch.bfloat16, None)
    ids = torch.tensor([3, 90])
    rows = shared_embedding().bfloat16()[ids]
    assert torch.equal(drafter.embed_block(ids), rows * torch.tensor(SCALE).bfloat16())
    assert not torch.equal(drafter.embed_block(ids), (rows.float() * SCALE).bfloat16())


def test_a_row_that_replaces_the_mask_embedding_is_scaled_too(tmp_path: Path) -> None:
    config, row = z_lab(dflash={"mask_token_id": VOCAB + 5}), torch.randn(HIDDEN)
    checkpoints.write_drafter(tmp_path, config, mask_embedding=row)
    drafter = load_drafter(tmp_path, FACTS, shared_embeddings(torch.float32), torch.float32, "cpu")
    torch.testing.assert_close(drafter.embed_block(torch.tensor([VOCAB + 5]))[0], row * SCALE)


def load(folder: Path, config: dict, facts: TargetFacts, dtype: torch.dtype, setting: float | None):
    checkpoints.write_drafter(folder, config)
    return load_drafter(folder, facts, shared_embeddings(dtype), dtype, "cpu", input_embedding_scale=setting)


def shared_embedding() -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(7))


def shared_embeddings(dtype: torch.dtype) -> EmbeddingCopies:
    embedding = shared_embedding().to(dtype)
    return EmbeddingCopies(embedding, Linear(embedding))


def drafter_embedding(folder: Path, config: dict) -> torch.Tensor:
    """Return the drafter's own embedding rows if it has any, else the target's."""
    own = checkpoints.drafter_tensors(config).get("embed_tokens.weight")
    return shared_embedding() if own is None else own
