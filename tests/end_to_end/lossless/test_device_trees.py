"""Draft trees in steps that a device drives: they change no token, and are the host's (see `devices.py`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from manta.actors.targets.families import read_model
from manta.actors.targets.loading.resolved_config import resolve_config, why_no_trees
from manta.actors.targets.model.tensor_parallel import SingleRank
from manta.actors.targets.runners.drafts.device_trees import TreeMemory
from manta.cluster.request.request import LogitsProcessorParams
from manta.cluster.speculation.draft_tree import TreeSizes
from manta.cluster.step.dummy_steps import dummy_step
from manta.cluster.step.scheduler_output import SlotSampling, TreeShape, Trim
from manta.drafter.step.gpu_triton.draft_trees import DeviceTrees
from manta.drafter.step.gpu_triton.inputs.row_layout import NUM_LISTS
from manta.drafter.step.gpu_triton.verification import TrimLists
from support.checkpoints.tiny import make_tiny_drafter, make_tiny_target
from support.engines.device_engines import Twins, generate
from support.engines.random_policy import RandomPolicy
from support.engines.steps import GREEDY, settings
from support.oracles.sampling_cases import KNOBS, WHOLE

PROMPTS = [[5, 6, 7], [9] * 15, [11], [12, 13]]
DEPTH = 3


def trim_of(num_rows: int, count: int) -> Trim:
    curves = np.array([[0.5, 0.0, -0.5], [1.0, 1.0, 1.0]], np.float32)
    weights_R = np.array([1.0, 1.5, 1.0, 0.5], np.float32)[:count]
    return Trim(*curves, np.zeros(count, np.float32), weights_R, np.zeros(0, np.float32), num_rows)


HEADS = [(("dspark",), 2, 7)] + [(("dspark",), 3, 12), ((), 4, 12), (("selector",), 2, 12)] * WHOLE


@pytest.mark.if_changed
@pytest.mark.parametrize(("heads", "width", "size"), HEADS, ids=str)
def test_steps_with_trees_never_wait_and_equal_the_hosts(
    tiny_qwen3: Path, tmp_path: Path, heads: tuple[str, ...], width: int, size: int
) -> None:
    """With noise, a filter, a penalty, log probabilities, a limit, a chain, a prompt, and without a trim."""
    drafter = make_tiny_drafter(tmp_path, seed=2, **dict.fromkeys(heads, True))
    warm = replace(GREEDY, temperature=1.5, seed=9)
    ruled = replace(warm, rules=LogitsProcessorParams(prompt_length=1, presence=0.5, repetition=1.3))
    sampling: list[SlotSampling] = [replace(GREEDY, logprobs=1), replace(warm, top_k=4), ruled, GREEDY]
    twins = Twins.open(tiny_qwen3, drafter, PROMPTS, tree_width=width, tree_size=size)
    enter = [twins.steps.admit(*of) for of in zip(range(4), PROMPTS, sampling, strict=True)]
    twins.run([0, 0, 0], [3, 15, 1], [0, 0, 0], admitted=enter[:3])
    shape = TreeShape(DEPTH, width, (0.8, *[1.2] * (width - 1)))
    num_trees = num_branches = 0
    for turn in range(4):
        more = {"admitted": enter[3:], "samples": [True] * 3 + [False]} if turn == 1 else {}
        rows = ([size + 1, size + 1, 4], [size, size, 3]) if turn != 2 else ([4, 1, 6], [3, 0, 5])
        count = 4 if turn == 1 else 3
        last = ([1], [0]) if turn == 1 else ([], [])
        computed = twins.computed()[:3] + ([0] if turn == 1 else [])
        trim = None if turn == 3 else trim_of(12 if turn else sum(rows[0]), count)
        result = twins.run(computed, rows[0] + last[0], rows[1] + last[1], trim=trim, tree=shape, **more)
        if result.trees is not None:
            num_trees += int((result.trees.widths_R > 1).sum())
            num_branches += int((result.trees.ranks_RW > 0).sum())
    assert num_trees > 3 and num_branches > 0
    chain = twins.run(twins.computed()[:3], [4, 3, 1], [3, 2, 0], trim=trim_of(6, 3))
    assert chain.trees is None and chain.num_drafts is not None and chain.num_drafts.sum() == 3


# (family, drafter's heads, width, size, engine): full, sliding and latent layers
ENGINES = [
    ("qwen3", (), 4, 8, {"async_scheduling": True, "num_pages": 3}),
    pytest.param("gemma4", ("selector",), 2, 6, {"async_scheduling": True}, marks=pytest.mark.if_changed),
    *[("deepseek_v3", (), 2, 6, {"max_num_batched_tokens": 16})] * WHOLE,
]
KNOBS_HERE = [
    replace(KNOBS["greedy"], logprobs=1),
    replace(KNOBS["all"], temperature=0.7),
    replace(KNOBS["plain"], presence_penalty=0.4, repetition_penalty=1.2),
]


@pytest.mark.parametrize(("family", "heads", "width", "size", "engine"), ENGINES, ids=lambda each: str(each))
def test_trees_change_no_token(
    tmp_path: Path, family: str, heads: tuple[str, ...], width: int, size: int, engine: dict[str, object]
) -> None:
    """At three temperatures, with filters, penalties and log probabilities; pages are freed."""
    target = make_tiny_target(tmp_path / "target", family, seed=5)
    spec = read_model(target)
    window = 7 if any(spec.windows) else None
    sizes = {"hidden_size": spec.hidden_size, "sliding_window": window}
    drafter = make_tiny_drafter(tmp_path / "drafter", **sizes, **dict.fromkeys(heads, True))
    params = [replace(knob, seed=7 + i, max_tokens=5 + i) for i, knob in enumerate(KNOBS_HERE)]
    expected, _ = generate(target, None, "torch", params)
    drafts = {"model": str(drafter), "num_speculative_tokens": 3, "adaptive": False}
    drafts |= {"tree_width": width, "tree_size": size}
    got, stats = generate(target, None, "triton", params, speculative_config=drafts, **engine)
    assert got == expected
    assert stats.num_trees > 0 and 2 * stats.num_trees <= stats.tree_widths
    assert ("num_pages" in engine) == (stats.preemptions > 0)


def test_a_random_policy_with_trees_changes_no_token(
    tiny_qwen3: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees, chains and no drafts alternate. Kernels are interpreted so slowly that the product's policy
    might never draft."""
    params = [replace(knob, seed=3 + i, max_tokens=8) for i, knob in enumerate(KNOBS_HERE)]
    expected, _ = generate(tiny_qwen3, None, "torch", params)
    drafts = {"model": str(tiny_drafter), "num_speculative_tokens": 3, "tree_width": 3, "tree_size": 7}
    monkeypatch.setattr("manta.cluster.scheduler.step_controller.DraftLengthPolicy", RandomPolicy)
    num_trees = num_drafts = 0
    for seed in range(8):  # until trees and chains have been drafted
        monkeypatch.setattr(RandomPolicy, "random", np.random.default_rng(seed))
        got, stats = generate(tiny_qwen3, None, "triton", params, speculative_config=drafts)
        assert got == expected
        num_trees, num_drafts = num_trees + stats.num_trees, num_drafts + stats.num_drafts
        if 0 < num_trees < num_drafts:
            return
    pytest.fail(f"{num_trees} trees among {num_drafts} drafted blocks")


def test_what_has_no_kernels_for_trees_keeps_chains(tiny_qwen3: Path, tiny_drafter: Path) -> None:
    spec = {"model": str(tiny_drafter), "num_speculative_tokens": 3, "tree_width": 2, "tree_size": 6}
    how = {"attention_backend": "triton", "page_size": 16}
    plan = resolve_config(settings(tiny_qwen3, speculative_config=spec, **how))
    assert plan.tree == TreeSizes(3, 2, 6) and plan.max_drafts == 6
    copies = replace(
        plan.config, speculative_config=replace(plan.config.speculative_config, suffix_drafts=True)
    )
    for attention in ("triton", "flash_attn"):
        assert replace(plan, attention_backend=attention).tree == plan.tree
        other = replace(plan, attention_backend=attention, config=copies)
        assert other.tree is None and why_no_trees(other) and other.max_drafts == 3


@pytest.mark.parametrize("tree", [None, TreeShape(3, 2, (1.0, 1.0))], ids=["chain", "tree"])
def test_drafts_that_a_grammar_restricts_are_grown_again(tree: TreeShape | None) -> None:
    """Those of the second request: never the best candidate."""
    sizes, lists = TreeSizes(3, 2, 6), torch.zeros(NUM_LISTS, 4, dtype=torch.int32)
    trim = TrimLists.views_of(torch.zeros(TrimLists.num_values(4, 3, 2), dtype=torch.int32), 4, 3, 2)
    ids = torch.arange(7)[:, None] * 10 + torch.arange(4)  # two anchors, three rows, and two
    scores = torch.tensor([3.0, 2.0, 1.0, 0.0]).expand(7, 1, 4).contiguous()
    memory = TreeMemory(sizes, DeviceTrees.build(2, sizes, "cpu"), lists, lists, trim, 1, (ids, scores))
    nodes = 5 if tree else 2
    plan = replace(dummy_step([5, 5], [4, nodes + 1], [3, nodes]), tree=tree)
    restrictions = {1: lambda _, found: [child for child in found if child.token % 10]}
    if tree is not None:
        memory = replace(memory, candidates=(torch.cat((ids, ids[-1:])), torch.cat((scores, scores[-1:]))))
    tokens, parents = memory.regrow(plan, np.arange(2), restrictions, SingleRank())
    assert not tokens[0].any(), "of the first request nothing is written"
    grown = memory.trees
    count, survivals = int(grown.num_nodes_R[1]), grown.survivals_RM[1].tolist()
    assert count == nodes and sorted(survivals[:count], reverse=True) == survivals[:count]
    assert survivals[count - 1] > 0 and not any(survivals[count:])
    assert tokens[1, :2].tolist() == [51, 61] if tree is None else (tokens[1, :count] % 10 > 0).all()
    assert (parents[1, :count] == np.arange(count)).all() == (tree is None)
