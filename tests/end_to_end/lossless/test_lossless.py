"""Losslessness: outputs never depend on speculation. Token by token, over the grid of features.

In fp32, and in bf16 by the CPU's compiled pass, whose rows do not depend on the batch. The reference is plain
decoding of one request at a time; for greedy output in fp32 also transformers' own `generate`. The table of
cells is `support/oracles/lossless_grid.py`; topologies of several processes are in
test_lossless_topologies.py, grammars in test_grammars.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from manta import SamplingParams
from support.checkpoints.families import FAMILIES
from support.checkpoints.tiny import transformers_model
from support.engines.random_policy import RandomPolicy
from support.oracles.lossless_grid import ENGINES, LENGTHS, PAIRS, Drafts, Pair, Reference, Tree, cells
from support.oracles.sampling_cases import KNOBS, WHOLE, params_of, prompts, tokens_of

FULL = ("qwen3", "qwen3 in bf16")  # pairs that the short form, too, runs in every engine
INT8 = "qwen3_moe in bf16 with int8 weights"  # as int4
SMALL_BATCHES = [(pair, drafts) for pair in (PAIRS if WHOLE else FULL) for drafts in PAIRS[pair].lengths]
PLAIN_FAMILIES = [name for name in FAMILIES if WHOLE or PAIRS[name].short]


@pytest.mark.parametrize("pair", PLAIN_FAMILIES, indirect=True)
def test_greedy_equals_transformers_generate(pair: Pair, reference: Reference) -> None:
    model = transformers_model(pair.target)
    chosen = range(0, 8, 1 if WHOLE else 4)
    for i, ours in zip(chosen, reference.of(("greedy", i) for i in chosen), strict=True):
        prompt, params = prompts(8)[i], params_of("greedy", 8)[i]
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=params.max_tokens
        )
        assert out[0, len(prompt) :].tolist() == ours


def test_in_the_short_grid_any_engine_and_number_of_drafts_meet_and_no_pair_is_left_out() -> None:
    short = cells(whole=False)
    assert {(engine, drafts) for _, engine, drafts in short} >= set(product(ENGINES, (None, *LENGTHS)))
    for pair in FULL:
        met = {(engine, drafts) for name, engine, drafts in short if name == pair and drafts is not None}
        assert {engine for engine, _ in met} == set(ENGINES) and {drafts for _, drafts in met} >= set(LENGTHS)
    left_out = PAIRS.keys() - {name for name, _, _ in short}
    assert all(PAIRS[name].published or FAMILIES[PAIRS[name].family].composed for name in left_out - {INT8})


@pytest.mark.parametrize(("pair", "drafts"), SMALL_BATCHES, indirect=["pair"])
def test_speculation_changes_no_token_in_small_batches(pair: Pair, reference: Reference, drafts: int) -> None:
    size = 1 if drafts == 3 else 3
    with pair.open(drafts) as llm:
        for name in KNOBS:
            got = tokens_of(llm, prompts(8)[:size], params_of(name, 8)[:size])
            assert got == reference.first(name, size), name
        assert llm.stats().num_accepted_tokens > 0


@pytest.mark.parametrize(("pair", "engine", "drafts"), cells(), indirect=["pair"], ids=str)
def test_no_token_changes_in_batches_of_eight_with_every_setting(
    pair: Pair, reference: Reference, engine: str, drafts: Drafts
) -> None:
    """All knobs, eight requests at a time: neighbors differ in length, age and knobs.

    In the whole grid every prompt meets half of the knobs, the next prompt the other half; as shipped, all.
    In the short form it meets a quarter, with the next engine another one; a third where pages are few. Pairs
    with few cells there have eleven or twelve requests, with every knob and every prompt.
    """
    is_short_of_pages = "preemption" in engine
    every = (1 if engine == "as shipped" else 2) if WHOLE else 3 if is_short_of_pages else 4
    if not WHOLE and len(pair.spec.short) < len(ENGINES) and not (is_short_of_pages and pair.spec.in_bf16):
        every = 6  # in bf16 pages are larger: few requests would not run out of them
    shift = 0 if WHOLE else 2 * (list(ENGINES).index(engine) % 2)
    requested = [
        (name, i) for number, name in enumerate(KNOBS) for i in range(8) if (i + number + shift) % every == 0
    ]
    with pair.open(drafts, few_pages=is_short_of_pages, **ENGINES[engine]) as llm:
        params = [params_of(name, 8)[i] for name, i in requested]
        got = tokens_of(llm, [prompts(8)[i] for _, i in requested], params)
        stats = llm.stats()
    expected = reference.of(requested)
    wrong = [which for which, ours, right in zip(requested, got, expected, strict=True) if ours != right]
    assert not wrong, "these (knob, prompt) differ"
    assert (stats.num_accepted_tokens > 0) == (drafts is not None), "drafts never accepted prove little"
    if isinstance(drafts, Tree):
        assert llm.info.draft_shape.size == drafts.size
        assert 0 < 2 * stats.num_trees <= stats.tree_widths and stats.num_trees <= stats.tree_depths
    if pair.spec.spec.get("suffix_drafts"):
        assert stats.num_copied_draft_tokens > 0
    if not is_short_of_pages:
        assert stats.preemptions == 0
    elif not pair.slides:  # sliding layers hold little: sequences rarely grow
        assert stats.preemptions > 0


@pytest.mark.parametrize("pair", PAIRS if WHOLE else FULL, indirect=True)
@pytest.mark.parametrize("engine", ENGINES if WHOLE else ["planned ahead, forced preemption"])
def test_no_token_changes_with_random_drafts_and_trimming(
    pair: Pair, reference: Reference, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight at once, every setting, log probabilities among them."""
    monkeypatch.setattr("manta.cluster.scheduler.step_controller.DraftLengthPolicy", RandomPolicy)
    requested = [(name, i) for number, name in enumerate(KNOBS) for i in range(number % 2, 8, 2)]
    with pair.open(15, adaptive=True, few_pages="preemption" in engine, **ENGINES[engine]) as llm:
        got = tokens_of(
            llm, [prompts(8)[i] for _, i in requested], [params_of(name, 8)[i] for name, i in requested]
        )
        assert 0 < llm.stats().num_accepted_tokens < llm.stats().num_draft_tokens
    assert got == reference.of(requested)


@pytest.mark.parametrize("pair", FULL, indirect=True)
def test_limits_on_drafts_top_k_of_one_and_seeds_give_the_tokens_that_they_say(
    pair: Pair, reference: Reference
) -> None:
    """In one engine: top-k of 1 is greedy at any temperature, and a seed determines the output."""
    batch = [{"prompt_token_ids": prompt} for prompt in prompts(3)]
    with pair.open(15) as llm:
        for bound in (1, 4):
            for name in ("greedy", "plain"):
                got = llm.generate(batch, params_of(name, 3), max_draft_tokens=bound, trace=True)
                assert [output.outputs[0].token_ids for output in got] == reference.first(name, 3), name
                steps = [step for output in got for step in output.metrics.trace or ()]
                assert max(step.num_drafted for step in steps) == bound
        assert llm.stats().num_accepted_tokens > 0
        params = [replace(p, temperature=1.0, top_k=1) for p in params_of("greedy", 8)]
        assert tokens_of(llm, prompts(8), params) == reference.first("greedy", 8)
        seeded = [SamplingParams(seed=s, max_tokens=32, ignore_eos=True) for s in (1, 1, 2)]
        same, again, other = tokens_of(llm, [prompts(8)[3]] * 3, seeded)
        assert same == again != other


@pytest.mark.parametrize("pair", [*FULL, "gemma3", "qwen3_5"], indirect=True)
def test_prefix_hits_change_no_token_and_keep_the_drafters_context(pair: Pair) -> None:
    shared = prompts(8)[7]
    batch = [shared + tail for tail in ([5, 6], [9], [], [5, 6, 7, 8, 9])]
    params = params_of("plain", len(batch))
    with pair.open(None, enable_prefix_caching=False) as plain:
        expected = tokens_of(plain, batch, params)
    with pair.open(15) as llm:
        cold = llm.generate([{"prompt_token_ids": p} for p in batch], params)
        warm = llm.generate([{"prompt_token_ids": p} for p in batch], params)
    assert [o.outputs[0].token_ids for o in cold] == expected
    assert [o.outputs[0].token_ids for o in warm] == expected
    assert all(o.metrics.num_cached_tokens > 0 for o in warm)
    # The drafter sees the same context after a hit, so it must propose, and win, exactly as before.
    assert [o.metrics.acceptance_histogram for o in warm] == [o.metrics.acceptance_histogram for o in cold]
