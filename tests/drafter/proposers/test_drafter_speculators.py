"""Blocks equal those of the `speculators` package, if it is installed (it is no dependency)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpoints import drafters as checkpoints
from support.checkpoints.drafters import SLIDING, speculators
from support.oracles.drafter_requests import Requests, load_pair, random_taps

core = pytest.importorskip("speculators.models.dflash.core", reason="speculators is not installed")

# Their window begins at anchor - W for all rows of a block, ours (and every engine's) at each row's own
# position; wider than the context the two are one.
WIDE = {**SLIDING, "sliding_window": 64, "use_sliding_window": True}  # or Qwen3Config drops the window
CONFIGS = {
    "full": speculators(),
    "own vocabulary": speculators(draft_vocab_size=40),
    "sliding": speculators(layer=WIDE),
    "sliding non-causal": speculators(layer=WIDE, sliding_window_non_causal=True),
}


@pytest.mark.parametrize("variant", sorted(CONFIGS))
@torch.no_grad()
def test_blocks_equal_the_speculators_package(variant: str, tmp_path: Path):
    config, length = CONFIGS[variant], 21
    pair = load_pair(tmp_path, config)
    taps = random_taps([length])
    requests = Requests(pair.ours, [length], taps)
    theirs = _their_model(config, pair.oracle)
    total = length + 20
    hidden = torch.cat((taps[0].flatten(1), torch.randn(total - length, taps[0][0].numel())))[None]
    ids = torch.zeros(1, total, dtype=torch.long)
    ids[0, length] = requests.anchors[0]
    only_anchor = torch.zeros(1, total)
    only_anchor[0, length] = 1
    _, logits, *_ = theirs._backbone_forward(
        hidden,
        ids,
        only_anchor,
        torch.zeros(1, total, checkpoints.HIDDEN),
        torch.zeros(1, total, dtype=torch.long),
        torch.arange(total)[None],
        max_anchors=1,
    )
    ours = requests.block_logits([15])[0]
    assert torch.allclose(ours[ours.isfinite()].view(15, -1), logits[0, 1:], atol=3e-5)


def _their_model(config: dict, oracle):
    raw = {k: v for k, v in config.items() if k not in ("speculators_config", "architectures")}
    parsed = core.DFlashSpeculatorConfig(**raw)
    parsed.transformer_layer_config._attn_implementation = "eager"
    model = core.DFlashDraftModel(parsed).eval()
    weights = {"embed_tokens.weight": oracle.embedding, "lm_head.weight": oracle.head, **oracle.tensors}
    missing = model.load_state_dict(weights, strict=False)
    assert set(missing.missing_keys) <= {"verifier_norm.weight", "verifier_lm_head.weight"}
    return model
