"""Qwen3.5 and Qwen3-Next: tokens after rejected drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpoints.tiny import make_tiny_target
from support.oracles.decoder_requests import Requests, load, oracle

KNOWN, DRAFTS = 11, 4


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_next"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("gated"), request.param, seed=11)


@pytest.mark.parametrize("stood", range(DRAFTS + 1))
def test_tokens_after_rejected_drafts_equal_transformers(checkpoint: Path, stood: int) -> None:
    requests = Requests(load(checkpoint), [30])
    requests.compute({0: KNOWN}, known=KNOWN)
    requests.compute({0: 1 + stood}, wrong=DRAFTS - stood)
    requests.compute({0: 2}, wrong=2)
    requests.compute({0: 30 - KNOWN - stood - 3}, known=30 - KNOWN - stood - 3)
    expected, _ = oracle(checkpoint, requests.tokens[0])
    torch.testing.assert_close(torch.cat(requests.logits[0]), expected, atol=1e-4, rtol=1e-4)
