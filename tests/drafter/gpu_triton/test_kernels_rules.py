"""The GPU's rules against `drafter/step/inputs/logits_processors.py`, for every row of a block."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from manta import SamplingParams
from manta.cluster.request.request import LogitsProcessorParams
from manta.drafter.compute.draft_trees import paths_of
from manta.drafter.step.gpu_triton.inputs.row_layout import SlotTables
from manta.drafter.step.gpu_triton.inputs.transfers import Arena
from manta.drafter.step.gpu_triton.sampling.logits_processors import apply_rules as apply_rules_in_kernels
from manta.drafter.step.gpu_triton.sampling.sampling_metadata import (
    RULE_LIMITS,
    RuleTables,
    rule_entries,
)
from manta.drafter.step.inputs.logits_processors import apply_rules
from manta.drafter.step.sampling.logits_processor_states import RuleStates
from support.engines.devices import DEVICE

VOCAB, LENGTH, PROMPT = 1500, 1300, 40  # more than one chunk of columns, and of tokens
DRAFTS = 3


def params(rng: np.random.Generator) -> list[SamplingParams]:
    some = rng.integers(0, VOCAB, 400).tolist()
    return [
        SamplingParams(presence_penalty=0.7),
        SamplingParams(frequency_penalty=-0.3, presence_penalty=1.5),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(logit_bias=tuple((t, rng.normal()) for t in range(0, VOCAB, 7))),
        SamplingParams(allowed_token_ids=tuple(some)),
        SamplingParams(bad_words_token_ids=((5,), (1400,), (3, 4), (3, 4, 2), (3, 4, 3, 4), (1, 1))),
        SamplingParams(
            presence_penalty=0.2,
            frequency_penalty=0.1,
            repetition_penalty=0.8,
            logit_bias=((3, 5.0), (1499, -100.0)),
            allowed_token_ids=tuple(range(1, VOCAB, 2)),
            bad_words_token_ids=((3,), (1, 3)),
        ),
        SamplingParams(thinking_token_budget=5, reasoning_end_token_ids=(1400, 2, 1400)),
        SamplingParams(
            thinking_token_budget=0, reasoning_start_token_ids=(3, 4), reasoning_end_token_ids=(1, 2, 1)
        ),
        SamplingParams(
            thinking_token_budget=3, reasoning_start_token_ids=(3,), reasoning_end_token_ids=(1, 1, 1, 4)
        ),
        SamplingParams(),
    ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rows", ["chains", "trees", "drafts"])
@pytest.mark.parametrize("begin", [LENGTH - 4, PROMPT + 2, PROMPT])
def test_rules_are_applied_as_in_the_definition(begin: int, rows: str) -> None:
    """Target rows see the drafts before them, in a tree those of their paths; drafter rows known tokens.

    They hide no NaN or infinity from the check that follows; the definition checks before.
    """
    rng = np.random.default_rng(begin)
    requested = params(rng)
    slots = rng.permutation(len(requested))
    tokens = torch.from_numpy(rng.integers(0, 6, (len(requested), LENGTH)))  # few, so that they repeat
    tokens[:, ::50] = torch.from_numpy(rng.integers(0, VOCAB, tokens[:, ::50].shape))
    shapes = RuleTables.shapes(len(requested))
    arena = Arena(shapes, DEVICE)
    arena.words.fill_(0x7F7F7F7F)  # what a slot's last request left there
    states = RuleStates(torch.device("cpu"))
    for slot, wanted in zip(slots.tolist(), requested, strict=True):
        rules = LogitsProcessorParams.of(wanted, PROMPT)
        states.admit(slot, rules)
        for words, values in rule_entries(arena, slot, rules):
            arena.words[torch.from_numpy(words).long()] = torch.from_numpy(values).to(DEVICE)
    parents = {"chains": [-1, 0, 1, 2], "trees": [-1, 0, 0, 2], "drafts": [-1] * 4}[rows]
    paths = paths_of(parents, DRAFTS + 1)
    num_before = begin + ((paths >= 0).sum(axis=1) - 1 if rows == "trees" else np.arange(DRAFTS + 1))
    slots_N, positions_N = np.repeat(slots, DRAFTS + 1), np.tile(num_before, len(slots))
    parents_N, paths_ND = np.tile(parents, len(slots)), np.tile(paths, (len(slots) + 1, 1))
    logits = torch.randn(len(slots_N) + 1, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    logits[::3, 700], logits[1::3, 1400] = torch.nan, torch.inf
    wanted = apply_rules(
        logits[:-1].clone(), states.rows(tokens, slots_N, np.full_like(positions_N, begin), parents_N)
    )
    wanted[(logits[:-1] != logits[:-1]) | (logits[:-1] == torch.inf)] = torch.nan
    tables = SlotTables(
        token_ids=tokens.to(torch.int32).to(DEVICE),
        page_tables=torch.zeros(1, len(requested), 1, dtype=torch.int32, device=DEVICE),
        num_computed=torch.full((len(requested),), begin - 1, dtype=torch.int32, device=DEVICE),
        page_size=16,
        skip_slots=torch.zeros(1, dtype=torch.int64, device=DEVICE),
    )
    got = logits.to(DEVICE)
    apply_rules_in_kernels(
        got,
        torch.tensor([*slots_N, -1], dtype=torch.int32, device=DEVICE),
        torch.tensor([*positions_N, 7], device=DEVICE),
        RuleTables.of(arena),
        tables,
        drafts=rows == "drafts",
        paths_ND=torch.from_numpy(paths_ND).to(DEVICE) if rows == "trees" else None,
    )
    assert torch.equal(got[-1].cpu().nan_to_num(), logits[-1].nan_to_num()), "padding was ruled"
    is_broken = logits[:-1] == torch.inf  # of a slot without rules
    torch.testing.assert_close(
        got[:-1].cpu().masked_fill(is_broken, torch.nan), wanted, rtol=1e-6, atol=1e-6, equal_nan=True
    )
    assert RULE_LIMITS.excess(requested[3]) is None, "the tables hold them"
