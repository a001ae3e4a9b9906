"""Qwen3.5 and Qwen3-Next: tokens after rejected drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from manta.drafter.compute.memory.recurrent_state_cache import StateRows
from manta.drafter.step.request_states import RequestStates
from support.checkpoints.tiny import TINY_VOCAB, make_tiny_target
from support.engines.steps import Steps
from support.oracles.decoder_requests import MAX_LEN, load, oracle, state_memory

KNOWN, DRAFTS = 11, 4


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_next"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("gated"), request.param, seed=11)


class OneRequest:
    """A sequence with right drafts up to a given number, and wrong ones after it."""

    def __init__(self, folder: Path, tokens: list[int]) -> None:
        self.tokens, self._model, self._steps = tokens, load(folder), Steps(1, MAX_LEN)
        pages = MAX_LEN // self._steps.page_size
        self._states = RequestStates(1, MAX_LEN, (pages,), self._steps.page_size, "cpu")
        self._cache = self._model.new_cache(pages, self._steps.page_size, state_memory(self._model.spec))
        self._admitted = [self._steps.admit(0, tokens)]
        self._computed = self._pending = 0

    @torch.inference_mode()
    def compute(self, known: int, right: int = 0, wrong: int = 0) -> torch.Tensor:
        rows, drafts, first = known + right + wrong, right + wrong, self._computed
        plan = self._steps.plan([0], [first], [rows], [drafts], admitted=self._admitted)
        self._admitted = []
        self._states.apply(plan)
        begin = first + known
        guessed = self.tokens[begin : begin + right] + [
            (t + 1) % TINY_VOCAB for t in self.tokens[-wrong:]
        ] * (wrong > 0)
        if drafts:
            self._states.write_drafts(plan, torch.tensor([guessed]))
        numbers = (np.array([n]) for n in (0, rows, drafts, self._pending))
        step = replace(self._states.lay_out_rows(plan), states=StateRows(*numbers))
        hidden, _ = self._model.forward(step.token_ids_N, step, self._cache)
        self._computed, self._pending = begin + right, right
        if drafts:  # the mirror forgets the wrong ones
            at = torch.tensor(self.tokens[begin : begin + drafts])
            self._states.token_ids[0, begin : begin + len(at)] = at
        return self._model.logits(hidden)[: known + right]


@pytest.mark.parametrize("stood", range(DRAFTS + 1))
def test_tokens_after_rejected_drafts_equal_transformers(checkpoint: Path, stood: int) -> None:
    tokens = np.random.default_rng(3).integers(0, TINY_VOCAB, 30).tolist()
    request = OneRequest(checkpoint, tokens)
    found = [request.compute(KNOWN), request.compute(1, stood, DRAFTS - stood)]
    found += [request.compute(1, 1, 2), request.compute(30 - KNOWN - stood - 3)]
    expected, _ = oracle(checkpoint, tokens)
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-4)
