"""Draft trees change no token: with every setting, in batches, with preemption, prefix hits and run-ahead.

The reference is plain decoding. Ranks are in test_lossless_topologies.py, grammars in test_grammars.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from manta import LLM, SamplingParams
from manta.actors.targets.families import read_model
from manta.actors.targets.loading.load_plan import plan_load, why_no_trees
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError
from manta.cluster.request.structured_outputs import StructuredOutputsParams
from manta.cluster.speculation.acceptance_model import AcceptanceModel
from manta.cluster.speculation.tree_policy import BranchModel
from manta.drafter.compute.cpu_numba.cpu_features import bf16_instructions
from support.checkpoints.tiny import make_tiny_drafter, make_tiny_target
from support.oracles.fp8_kv_scales import publish_with_kv_scales
from support.oracles.sampling_cases import KNOBS, WHOLE, params_of, prompts, tokens_of

FP32: dict[str, object] = {"dtype": "float32", "num_threads": 1, "attention_backend": "torch"}
BF16: dict[str, object] = {"dtype": "bfloat16", "num_threads": 1, "attention_backend": "compiled"}
ENGINES: dict[str, dict[str, object]] = {
    "as shipped": {},
    "chunks of 16 rows": {"max_num_batched_tokens": 16},
    "with copies": {"suffix_drafts": True},
    "with copies, chunks of 16 rows": {"suffix_drafts": True, "max_num_batched_tokens": 16},
    "forced preemption": {"enable_prefix_caching": False, "few_pages": True},
    "planned ahead, forced preemption": {"async_scheduling": True, "few_pages": True},
}
# (family, drafter's heads, engine): full and sliding layers, latent pages, pair scores, the compiled pass
SCALED_KV = "qwen3 with scales of FP8 K/V"
PAIRS: dict[str, tuple[str, tuple[str, ...], dict[str, object]]] = {
    "qwen3": ("qwen3", (), FP32),
    "qwen3 by a selector": ("qwen3", ("selector",), FP32),
    "qwen3 by DSpark": ("qwen3", ("dspark",), FP32),
    "gemma3": ("gemma3", (), FP32),
    "deepseek_v3": ("deepseek_v3", (), FP32),
    "qwen3 in bf16": ("qwen3", ("selector",), BF16),
    SCALED_KV: ("qwen3", (), {**FP32, "kv_cache_dtype": "fp8"}),
}
CELLS = [
    ("qwen3", "as shipped", 4, 31),
    ("qwen3", "planned ahead, forced preemption", 2, 15),
    ("qwen3", "with copies", 2, 15),
    ("qwen3 by a selector", "with copies", 4, 31),
    ("deepseek_v3", "with copies, chunks of 16 rows", 4, 31),
    ("qwen3 in bf16", "with copies", 4, 31),
    ("qwen3 by a selector", "chunks of 16 rows", 4, 15),
    ("qwen3 by DSpark", "planned ahead, forced preemption", 4, 31),
    ("gemma3", "planned ahead, forced preemption", 4, 15),
    ("deepseek_v3", "as shipped", 2, 15),
    (SCALED_KV, "chunks of 16 rows", 4, 15),
    ("qwen3 in bf16", "forced preemption", 4, 31),
    ("qwen3 in bf16", "as shipped", 2, 15),
]
if WHOLE:
    CELLS = [
        (pair, engine, width, size)
        for pair in PAIRS
        for engine in ENGINES
        for width, size in ((2, 15), (4, 31))
    ]

Models = tuple[Path, Path, dict[str, object]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Models]:
    made: dict[str, Models] = {}

    def make(name: str) -> Models:
        if name not in made:
            family, heads, how = PAIRS[name]
            if how is BF16 and bf16_instructions() is None:
                pytest.skip("this CPU has no products of bf16")
            folder, head_dim = tmp_path_factory.mktemp("pair"), 32 if how is BF16 else 16
            sizes = {"head_dim": head_dim} if how is BF16 else {}
            target = make_tiny_target(folder / "target", family, seed=5, **sizes)
            if name == SCALED_KV:
                target, _ = publish_with_kv_scales(target, folder / "published")
            spec = read_model(target)
            drafter = make_tiny_drafter(
                folder / "drafter",
                hidden_size=spec.hidden_size,
                head_dim=head_dim,
                sliding_window=20 if any(spec.windows) else None,
                **dict.fromkeys(heads, True),
            )
            made[name] = target, drafter, how
        return made[name]

    return make


def opened(models: Models, spec: dict[str, object] | None, **settings: object) -> LLM:
    target, drafter, how = models
    if settings.pop("few_pages", False):
        settings |= {"num_pages": 11} if how is BF16 else {"num_pages": 110, "page_size": 4}
    given = None if spec is None else {"model": str(drafter), "adaptive": False, **spec}
    if given is not None and settings.pop("suffix_drafts", False):
        given["suffix_drafts"] = True
    defaults = {"max_num_seqs": 8, "max_model_len": 256, "skip_tokenizer_init": True}
    return LLM(str(target), speculative_config=given, **{**defaults, **how, **settings})


REQUESTED = [(name, i) for number, name in enumerate(KNOBS) for i in range(number % 2, 8, 2)]


@pytest.fixture(scope="module")
def reference(models: Callable[[str], Models]) -> Callable[[str], list[list[int]]]:
    """Plain decoding, one request at a time."""
    known: dict[str, list[list[int]]] = {}

    def of(name: str) -> list[list[int]]:
        same = name.partition(" by ")[0]
        if same not in known:
            with opened(models(same), None, enable_prefix_caching=False, max_num_seqs=1) as llm:
                params = [params_of(knob, 8)[i] for knob, i in REQUESTED]
                known[same] = tokens_of(llm, [prompts(8)[i] for _, i in REQUESTED], params)
        return known[same]

    return of


@pytest.mark.parametrize(("pair", "engine", "width", "size"), CELLS)
def test_trees_change_no_token_in_batches_of_eight_with_every_setting(
    models: Callable[[str], Models],
    reference: Callable[[str], list[list[int]]],
    pair: str,
    engine: str,
    width: int,
    size: int,
) -> None:
    spec = {"tree_width": width, "tree_size": size}
    with opened(models(pair), spec, **ENGINES[engine]) as llm:
        assert llm.info.tree_size == size
        params = [params_of(knob, 8)[i] for knob, i in REQUESTED]
        got = tokens_of(llm, [prompts(8)[i] for _, i in REQUESTED], params)
        stats = llm.stats()
    wrong = [
        which for which, ours, right in zip(REQUESTED, got, reference(pair), strict=True) if ours != right
    ]
    assert not wrong, "these (knob, prompt) differ"
    assert stats.num_accepted_tokens > 0
    assert stats.num_trees <= stats.tree_depths and 0 < 2 * stats.num_trees <= stats.tree_widths
    copied = stats.num_copied_accepted_tokens, stats.num_copied_draft_tokens
    assert (min(copied) > 0) == (max(copied) > 0) == ("copies" in engine)
    if "preemption" not in engine:
        assert stats.preemptions == 0
    elif pair != "gemma3":  # sliding layers hold little
        assert stats.preemptions > 0


@pytest.mark.parametrize("copies", [False, True])
def test_adaptive_trees_and_limits_of_requests_change_no_token(
    models: Callable[[str], Models], reference: Callable[[str], list[list[int]]], copies: bool
) -> None:
    """Nodes are trimmed by their chance and cost, to chains and to none; a limit counts nodes."""
    expected = dict(zip(REQUESTED, reference("qwen3"), strict=True))
    spec: dict[str, object] = {"tree_width": 4, "tree_size": 31, "suffix_drafts": copies}
    with opened(models("qwen3"), {**spec, "adaptive": True}) as llm:
        for name in KNOBS:
            chosen = [i for knob, i in REQUESTED if knob == name]
            params = [params_of(name, 8)[i] for i in chosen]
            got = tokens_of(llm, [prompts(8)[i] for i in chosen], params)
            assert got == [expected[name, i] for i in chosen], name
    with opened(models("qwen3"), spec) as llm:
        for bound in (1, 5):
            (output,) = llm.generate(
                [{"prompt_token_ids": prompts(8)[0]}],
                [params_of("greedy", 8)[0]],
                max_draft_tokens=bound,
                trace=True,
            )
            assert output.outputs[0].token_ids == expected["greedy", 0]
            assert max(step.num_drafted for step in output.metrics.trace or ()) == bound


def test_prefix_hits_change_no_token_and_keep_the_drafters_context(
    models: Callable[[str], Models], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compacted rows are in the cached pages."""
    # Trees depend on what was learned from earlier ones.
    for model in (AcceptanceModel, BranchModel):
        monkeypatch.setattr(model, "observe", lambda *_: None)
    batch = [prompts(8)[7] + tail for tail in ([5, 6], [9], [])]
    params = params_of("plain", len(batch))
    spec = {"tree_width": 4, "tree_size": 31}
    with opened(models("qwen3"), None, enable_prefix_caching=False) as plain:
        expected = tokens_of(plain, batch, params)
        longer = [prompt + answer for prompt, answer in zip(batch, expected, strict=True)]
        expected_after = tokens_of(plain, longer, params)
    with opened(models("qwen3"), spec) as llm:
        cold = llm.generate([{"prompt_token_ids": p} for p in batch], params)
        assert [o.outputs[0].token_ids for o in cold] == expected
        after = llm.generate([{"prompt_token_ids": p} for p in longer], params)
        assert [o.outputs[0].token_ids for o in after] == expected_after
    assert all(o.metrics.num_cached_tokens > len(p) - 16 for o, p in zip(after, batch, strict=True))
    with opened(models("qwen3"), spec) as fresh:
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
    given = {"model": str(target), "speculative_config": {"model": str(drafter), "tree_width": 2}, **FP32}
    plan = plan_load(EngineConfig.from_dict(given))
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
