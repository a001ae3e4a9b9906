"""Draft trees beyond the grid of test_lossless.py: adaptive ones, prefix hits, the shipped pair, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from manta import LLM, SamplingParams
from manta.actors.targets.loading.resolved_config import resolve_config, why_no_trees
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError
from manta.cluster.request.structured_outputs import StructuredOutputsParams
from manta.cluster.speculation.acceptance_model import AcceptanceModel
from manta.cluster.speculation.tree_policy import BranchModel
from support.checkpoints.tiny import make_tiny_drafter, make_tiny_target
from support.oracles.lossless_grid import Pair, Reference, Tree
from support.oracles.sampling_cases import KNOBS, params_of, prompts, tokens_of

TREE = Tree(4, 31)


@pytest.mark.parametrize("pair", ["qwen3", "qwen3 mixed with suffixes"], indirect=True)
def test_adaptive_trees_and_limits_of_requests_change_no_token(pair: Pair, reference: Reference) -> None:
    """Nodes are trimmed by their chance and cost, to chains and to none; a limit counts nodes."""
    with pair.open(TREE, adaptive=True) as llm:
        for number, name in enumerate(KNOBS):
            chosen = range(number % 2, 8, 2)
            params = [params_of(name, 8)[i] for i in chosen]
            got = tokens_of(llm, [prompts(8)[i] for i in chosen], params)
            assert got == reference.of((name, i) for i in chosen), name
    with pair.open(TREE) as llm:
        for bound in (1, 5):
            (output,) = llm.generate(
                [{"prompt_token_ids": prompts(8)[0]}],
                [params_of("greedy", 8)[0]],
                max_draft_tokens=bound,
                trace=True,
            )
            assert [output.outputs[0].token_ids] == reference.first("greedy", 1)
            assert max(step.num_drafted for step in output.metrics.trace or ()) == bound


def test_prefix_hits_change_no_token_and_keep_the_drafters_context(
    make_pair: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compacted rows are in the cached pages."""
    # Trees depend on what was learned from earlier ones.
    for model in (AcceptanceModel, BranchModel):
        monkeypatch.setattr(model, "observe", lambda *_: None)
    pair = make_pair("qwen3")
    batch = [prompts(8)[7] + tail for tail in ([5, 6], [9], [])]
    params = params_of("plain", len(batch))
    with pair.open(None, enable_prefix_caching=False) as plain:
        expected = tokens_of(plain, batch, params)
        longer = [prompt + answer for prompt, answer in zip(batch, expected, strict=True)]
        expected_after = tokens_of(plain, longer, params)
    with pair.open(TREE) as llm:
        cold = llm.generate([{"prompt_token_ids": p} for p in batch], params)
        assert [o.outputs[0].token_ids for o in cold] == expected
        after = llm.generate([{"prompt_token_ids": p} for p in longer], params)
        assert [o.outputs[0].token_ids for o in after] == expected_after
    assert all(o.metrics.num_cached_tokens > len(p) - 16 for o, p in zip(after, batch, strict=True))
    with pair.open(TREE) as fresh:
        alone = fresh.generate([{"prompt_token_ids": p} for p in longer], params)
    # The drafter sees the same context after a hit, so it must propose, and win, exactly as before.
    found, computed = ([o.metrics.acceptance_histogram for o in each] for each in (after, alone))
    assert found == computed


@pytest.mark.one_in(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_shipped_pairs_trees_accept_what_its_chains_reject(
    shipped_pair: tuple[Path, Path], temperature: float
) -> None:
    """With a grammar in every third request."""
    grammar = StructuredOutputsParams(json={"type": "object", "properties": {"age": {"type": "integer"}}})
    texts = ["def area(width, height):\n", "The house stood", "A record: "] * 2
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=40, ignore_eos=True) for i in range(6)
    ]
    params = [replace(p, structured_outputs=grammar) if i % 3 == 2 else p for i, p in enumerate(params)]
    answers, per_step, branched = [], [], []
    for spec in (None, {"num_speculative_tokens": 15}, {"tree_width": 4, "tree_size": 31}):
        drafts = None if spec is None else {"model": str(shipped_pair[1]), "adaptive": False, **spec}
        how = {"dtype": "float32", "num_threads": 1, "max_model_len": 256}
        with LLM(str(shipped_pair[0]), speculative_config=drafts, **how) as llm:
            outputs = llm.generate(texts, params, trace=True)
        answers.append([output.outputs[0].token_ids for output in outputs])
        accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
        per_step.append(accepted / max(1, sum(output.metrics.num_steps for output in outputs)))
        traced = [step for output in outputs for step in output.metrics.trace or ()]
        branched.append(sum(any(step.branches) for step in traced))
        assert all(len(step.branches) in (0, step.num_accepted) for step in traced)
    assert answers[1] == answers[0] and answers[2] == answers[0]
    assert branched[2] > branched[0] == branched[1] == 0
    assert per_step[2] > 1.1 * per_step[1], "fp32 on fixed prompts and seeds: the same but for near-ties"


def test_targets_with_recurrent_states_keep_chains(tmp_path: Path) -> None:
    target, drafter = (
        make_tiny_target(tmp_path / "target", "qwen3_5"),
        make_tiny_drafter(tmp_path / "drafter"),
    )
    given = {
        "model": str(target),
        "speculative_config": {"model": str(drafter), "tree_width": 2},
        "dtype": "float32",
    }
    plan = resolve_config(EngineConfig.from_dict(given))
    assert why_no_trees(plan) == "recurrent states follow one path of tokens"


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"tree_width": 0}, "tree_width"),
        ({"tree_size": 31}, "tree_size"),
        ({"tree_width": 2, "tree_size": 256}, "tree_size"),
        ({"tree_width": 2, "method": "eagle3"}, "tree_width"),
    ],
)
def test_settings_without_a_meaning_for_trees_are_refused(spec: dict[str, object], named: str) -> None:
    config = {"model": "target", "speculative_config": {"model": "drafter", **spec}}
    with pytest.raises(ConfigError) as raised:
        EngineConfig.from_dict(config)
    assert raised.value.param == f"speculative_config.{named}"
