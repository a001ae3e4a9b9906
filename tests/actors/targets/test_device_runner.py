"""The GPU path end to end: kernels, runner, the scheduler running ahead (device: see `devices.py`).

Triton's interpreter runs all but CUDA's own part (streams, graphs). Tokens equal those of PyTorch's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from manta.actors.targets.families import read_model
from manta.actors.targets.runners.cuda_graphs import PassKind, StepKinds
from manta.actors.targets.runners.drafts.tp_sampling import best_of_ranks
from manta.cluster.errors import ConfigError
from manta.cluster.step.scheduler_output import Trim
from support.checkpoints.drafters import EAGLE3, deepspec_gemma4, drafter_tensors, write_drafter
from support.checkpoints.families import FAMILIES
from support.checkpoints.mtp_targets import make_assistant, make_mtp_target
from support.checkpoints.tiny import TINY_VOCAB, make_tiny_drafter, make_tiny_target
from support.engines.device_engines import (
    CASES,
    KNOB_NAMES,
    PARAMS,
    SMALL_STATES,
    Twins,
    generate,
    opened,
    outputs,
)
from support.engines.devices import ON_GPU
from support.engines.steps import GREEDY, settings
from support.engines.thread_ranks import OtherRank
from support.engines.waits import counting_waits
from support.oracles.sampling_cases import KNOBS, WHOLE, tokens_of

# In the interpreter only a family with states. Gemma 4's layers are in `test_device_trees.py`, layers of one
# kind in the tests of steps, sinks, experts and latents in `test_fp8_kv.py` and `test_latent.py`.
DIFFERENT = ("qwen3_5",)
TRUSTED_COPIES = [4.0, 1.0, 0.0, 0.0]  # instead of `_SUFFIX_PRIOR`, so that copies win early
FAMILIES_HERE = [n for n, f in FAMILIES.items() if not f.composed and (ON_GPU or WHOLE or n in DIFFERENT)]


@pytest.mark.parametrize("family", FAMILIES_HERE)
def test_kernels_change_no_token(tmp_path: Path, family: str) -> None:
    """Pages are freed: with sliding layers the drafter's first one slides, too."""
    changes = {key: size for key, size in SMALL_STATES.items() if key in FAMILIES[family].changes}
    target = make_tiny_target(tmp_path / "target", family, seed=5, **changes)
    spec = read_model(target)
    drafter = make_tiny_drafter(
        tmp_path / "drafter",
        hidden_size=spec.hidden_size,
        sliding_window=7 if any(spec.windows) else None,
    )
    expected, plain = generate(target, None, "torch")
    got, stats = generate(target, drafter, "triton")
    wrong = [knob for knob, mine, theirs in zip(KNOB_NAMES, got, expected, strict=True) if mine != theirs]
    assert not wrong, "these differ"
    assert stats.num_drafts > 0
    routed = [layer.routed.router for layer in spec.layers if layer.routed is not None]
    for counted in (plain, stats):
        assert counted.routed_layers % max(len(routed), 1) == 0
        experts = [rule.num_experts for rule in routed] or [0]
        assert bool(routed) == (0 < counted.experts_read <= counted.routed_layers * max(experts))


# DSpark's trees: test_device_trees.py.
DSPARK = pytest.param({"dspark": True}, marks=pytest.mark.if_changed)


@pytest.mark.parametrize("kind", [{"sliding_window": 20, "second": True}, DSPARK], ids=str)
def test_a_drafter_with_paths_drafts_on_the_device_as_on_the_host(
    tiny_qwen3: Path, tmp_path: Path, kind: dict[str, Any]
) -> None:
    drafter = make_tiny_drafter(tmp_path, **kind)
    hot = [replace(p, temperature=4.0, max_tokens=5) for p in PARAMS[1:]]
    found: list[list[tuple[list[int], list[int]]]] = []
    for backend in ("triton", "torch"):
        with opened(tiny_qwen3, drafter, backend) as llm:
            answers = llm.generate([{"prompt_token_ids": case} for case in CASES[1:]], hot)
        found.append([(o.outputs[0].token_ids, o.metrics.acceptance_histogram) for o in answers])
    assert found[0] == found[1]
    assert sum(count for _, counts in found[0] for count in counts[1:]) > 0


# Beside a drafter: the next test.
@pytest.mark.parametrize("mixed", [False, pytest.param(True, marks=pytest.mark.if_changed)])
def test_copies_change_no_token(
    tiny_qwen3: Path, tiny_drafter: Path, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host makes them, and steps do not run ahead of it."""
    monkeypatch.setattr("manta.drafter.suffix.mixing._SUFFIX_PRIOR", TRUSTED_COPIES)
    method = {"model": str(tiny_drafter), "suffix_drafts": True} if mixed else {"method": "suffix"}
    spec = {
        **method,
        "num_speculative_tokens": 3,
        "adaptive": False,
        "suffix_decoding_max_cached_requests": 4,
    }
    knobs = [replace(KNOBS[name], seed=3, max_tokens=6) for name in ("greedy", "all")]
    cases = [[20] * 3 + [110] * 3, [5, 6] * 6]  # the target continues with 110
    found = []
    for backend, of_side in (("triton", spec), ("torch", None)):
        how = {"speculative_config": of_side, "async_scheduling": True}
        with opened(tiny_qwen3, None, backend, **how) as llm:
            found.append(tokens_of(llm, cases, knobs))
            stats = llm.stats()
        assert (stats.num_accepted_tokens > 0) == (of_side is not None)
        assert (stats.num_copied_accepted_tokens > 0) == (mixed and of_side is not None)
    assert found[0] == found[1]


@pytest.mark.parametrize("method", ["dflash", pytest.param("mtp", marks=pytest.mark.if_changed)])
def test_copies_beside_a_drafter_are_chosen_as_on_the_host(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request has a copy, then both have, and the drafter's pass is left out."""
    monkeypatch.setattr("manta.drafter.suffix.mixing._SUFFIX_PRIOR", TRUSTED_COPIES)
    monkeypatch.setattr("manta.drafter.suffix.mixing._MIN_PASSES", 1)
    if method == "mtp":
        target, drafter = make_mtp_target(tmp_path / "target", "glm4_moe", seed=5), None
    else:
        target, drafter = make_tiny_target(tmp_path / "target", "qwen3", seed=5), make_tiny_drafter(tmp_path)
    prompts = [[7, 8, 9, 10] * 4, [5]]
    twins = Twins.open(target, drafter, prompts, method=method, suffix_drafts=True)
    enter = [twins.steps.admit(slot, known, GREEDY) for slot, known in enumerate(prompts)]
    results = [twins.run([0, 0], [len(p) for p in prompts], [0, 0], admitted=enter)]
    for _ in range(5 if method == "dflash" else 9):
        results.append(twins.run(twins.computed(), [4, 3], [3, 2], waits=True))
    kinds = {
        (*each.is_copied.tolist(), each.is_pass_skipped) for each in results if each.is_copied is not None
    }
    assert kinds >= {(False, False, False), (False, True, False), (True, True, True)}


def test_running_ahead_changes_no_token(tiny_llama: Path, tiny_drafter: Path) -> None:
    expected, _ = generate(tiny_llama, None, "torch")
    ahead = {"async_scheduling": True, "num_pages": 3, "max_num_batched_tokens": 18}
    got, stats = generate(tiny_llama, tiny_drafter, "triton", **ahead)
    wrong = [knob for knob, mine, theirs in zip(KNOB_NAMES, got, expected, strict=True) if mine != theirs]
    assert not wrong, "these differ"
    assert stats.num_drafts > 0 and stats.preemptions > 0


def test_rules_and_log_probabilities_give_the_hosts(tiny_llama: Path, tiny_drafter: Path) -> None:
    """The second request has neither; steps run ahead, so the host does not know the generated tokens."""
    rules = {"presence_penalty": 2.0, "repetition_penalty": 2.0, "allowed_token_ids": tuple(range(1, 40))}
    requested = [
        replace(PARAMS[0], logprobs=2, prompt_logprobs=1, **rules),
        PARAMS[1],
        replace(PARAMS[2], logprobs=0, prompt_logprobs=3, frequency_penalty=2.0),
    ]
    expected = outputs(tiny_llama, None, "torch", requested)
    plain, _ = generate(tiny_llama, None, "torch")
    assert [output.outputs[0].token_ids for output in expected] != plain
    ahead = {"async_scheduling": True, "max_num_batched_tokens": 18}
    for mine, theirs in zip(
        outputs(tiny_llama, tiny_drafter, "triton", requested, **ahead), expected, strict=True
    ):
        assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert mine.metrics.num_draft_tokens > 0
        for got, wanted in (
            (mine.outputs[0].logprobs, theirs.outputs[0].logprobs),
            (mine.prompt_logprobs, theirs.prompt_logprobs),
        ):
            assert (got is None) == (wanted is None)
            for place, other in zip(got or (), wanted or (), strict=True):
                assert list(place or ()) == list(other or ())
                values = [[reported.logprob for reported in (each or {}).values()] for each in (place, other)]
                assert values[0] == pytest.approx(values[1], abs=1e-4)


def test_steps_of_all_kinds_never_wait_and_equal_the_hosts(tiny_qwen3: Path, tiny_drafter: Path) -> None:
    prompts = [[5, 6, 7], [9] * 7, [11], [12, 13], [14] * 4]
    warm, narrow = (replace(GREEDY, temperature=1.0, top_k=k, seed=9) for k in (0, 4))
    telling = replace(narrow, logprobs=2, prompt_logprobs=1)
    sampling = [
        replace(GREEDY, logprobs=1, prompt_logprobs=3, prompt_length=3),
        warm,
        replace(telling, prompt_length=1),
        GREEDY,
        replace(warm, prompt_logprobs=0, prompt_length=2),
    ]
    twins = Twins.open(tiny_qwen3, tiny_drafter, prompts)
    enter = [twins.steps.admit(*of) for of in zip(range(5), prompts, sampling, strict=True)]
    first = twins.run([0, 0], [3, 4], [0, 0], admitted=enter[:2], samples=[True, False])
    assert first.timings.verify_s > 0 and first.timings.draft_s == 0
    # Slots 0 and 2 decode.
    mixed = twins.run([3, 4, 0, 0, 0], [4, 3, 1, 2, 4], [3, 0, 0, 0, 0], admitted=enter[2:])
    assert mixed.num_tokens.min() == 1 and mixed.timings.draft_s > 0
    ragged = twins.run(twins.computed(), [2, 1, 2, 2, 1], [1, 0, 1, 1, 0])
    assert ragged.token_ids.shape == (5, 2)
    assert all(seconds > 0 for seconds in asdict(ragged.timings).values())


def test_a_trimmed_step_fills_its_rows_and_equals_the_hosts(tiny_qwen3: Path, tiny_drafter: Path) -> None:
    """The step has a prompt, and log probabilities of rows that the host cannot locate."""
    prompts = [[5, 6, 7], [9] * 7, [11, 3], [14] * 4]
    warm = replace(GREEDY, temperature=1.0, seed=9)
    sampling = [replace(GREEDY, logprobs=1), warm, replace(warm, top_k=4, logprobs=2), GREEDY]
    twins = Twins.open(tiny_qwen3, tiny_drafter, prompts)
    enter = [twins.steps.admit(*of) for of in zip(range(4), prompts, sampling, strict=True)]
    twins.run([0, 0, 0], [3, 7, 2], [0, 0, 0], admitted=enter[:3])
    kept: list[list[int]] = []
    for num_rows in (6, 8):
        trim = Trim(
            bias_K=np.array([0.5, 0.0, -0.5], np.float32),
            slope_K=np.array([1.0, 1.0, 1.0], np.float32),
            bias_R=np.array([0.0, 0.3, 0.0, 0.0], np.float32),
            weights_R=np.array([1.0, 1.0, 1.5, 0.0], np.float32),
            seconds_N=np.empty(0, np.float32),
            num_rows=num_rows,
        )
        computed = twins.computed()[:3]
        prompt = {"admitted": enter[3:], "samples": [True] * 3 + [False]} if num_rows == 6 else {}
        more = ([0], [2], [0]) if num_rows == 6 else ([2], [2], [0])
        result = twins.run(computed + more[0], [4, 4, 3] + more[1], [3, 3, 2] + more[2], trim=trim, **prompt)
        assert result.num_drafts is not None and result.logprobs is not None
        kept.append(result.num_drafts.tolist())
        assert sum(kept[-1]) == num_rows - 3 and kept[-1][-1] == 0
    assert kept[0] != kept[1]
    plain = twins.run(twins.computed(), [1] * 4, [0] * 4, writes_context=False)
    assert plain.num_drafts is None and plain.margins is None and plain.timings.inject_s == 0


def test_ngram_lookup_never_waits_and_equals_the_hosts(tiny_qwen3: Path) -> None:
    prompts = [[20] * 3 + [110] * 3, [5, 6]]  # the target continues with 110
    twins = Twins.open(tiny_qwen3, None, prompts, method="ngram")
    enter = [twins.steps.admit(*of) for of in zip(range(2), prompts, strict=True)]
    twins.run([0, 0], [6, 2], [0, 0], admitted=enter)
    assert twins.run(twins.computed(), [4, 3], [3, 2]).num_tokens.tolist() == [4, 1]


def eagle3(folder: Path) -> tuple[Path, Path]:
    target = make_tiny_target(folder / "target", "qwen3")
    return target, write_drafter(folder / "drafter", EAGLE3["speculators normed before fc"])


def assistant(folder: Path) -> tuple[Path, Path]:
    """Its window is shorter than the first prompt."""
    target = make_tiny_target(folder / "target", "gemma4")
    return target, make_assistant(folder / "drafter", target)


def latents_and_experts(folder: Path) -> tuple[Path, None]:
    """Padding reads no experts."""
    return make_mtp_target(folder, "deepseek_v3", num_mtp_layers=1), None


def a_layer_for_each_draft(folder: Path) -> tuple[Path, None]:
    return make_mtp_target(folder, "mimo_v2", num_mtp_layers=3), None


@pytest.mark.parametrize(
    ("make", "method"),
    [
        (eagle3, "eagle3"),
        pytest.param(latents_and_experts, "mtp", marks=pytest.mark.if_changed),
        (a_layer_for_each_draft, "mtp"),
        pytest.param(assistant, "mtp", marks=pytest.mark.if_changed),
    ],
)
def test_chains_never_wait_and_equal_the_hosts(
    make: Callable[[Path], tuple[Path, Path | None]], method: str, tmp_path: Path
) -> None:
    """Margins are compared for ragged chains with padding and a prompt, and at the end of a page."""
    prompts = [[9] * 16, [11], [5, 6, 7]]
    twins = Twins.open(*make(tmp_path), prompts, method=method)
    sampling = (GREEDY, replace(GREEDY, temperature=1.0, seed=9) if method == "eagle3" else GREEDY, GREEDY)
    enter = [twins.steps.admit(*of) for of in zip(range(3), prompts, sampling, strict=True)]
    twins.run([0, 0], [16, 1], [0, 0], admitted=enter[:2])
    twins.run([*twins.computed()[:2], 0], [3, 2, 3], [2, 1, 0], admitted=enter[2:])
    last = twins.run(twins.computed(), [1, 3, 4], [0, 2, 3])
    assert last.margins is not None and np.isfinite(last.margins).sum() == 5
    assert last.timings.draft_s > 0


@pytest.mark.if_changed
def test_a_drafter_of_gemma_4s_layers_equals_the_hosts(tmp_path: Path) -> None:
    """Its values are normed keys, in the block as in the context."""
    target = make_tiny_target(tmp_path / "target", "gemma4")
    sizes = {"hidden_size": 72, "vocab_size": TINY_VOCAB, "mask_token_id": TINY_VOCAB - 1, "block_size": 4}
    taps = {"num_target_layers": 4, "target_layer_ids": [0, 1, 2]}
    config = deepspec_gemma4(**sizes, **taps, markov_rank=0, enable_confidence_head=False)
    write_drafter(tmp_path / "drafter", config, drafter_tensors(config))
    prompts = [[9] * 16, [11]]
    twins = Twins.open(target, tmp_path / "drafter", prompts)
    enter = [twins.steps.admit(*of) for of in zip(range(2), prompts, strict=True)]
    twins.run([0, 0], [16, 1], [0, 0], admitted=enter)
    last = twins.run(twins.computed(), [4, 2], [3, 1])
    assert last.margins is not None and np.isfinite(last.margins).sum() == 4


def test_the_better_choice_of_two_ranks_wins_and_ties_go_to_the_first() -> None:
    scores = torch.tensor([[1.5, -2.0, 3.0, -float("inf")], [1.0, -1.0, 3.0, 0.5]])
    ids = torch.tensor([[4, 5, 6, 0], [70, 80, 90, 100]])
    theirs = torch.stack((scores[1].view(torch.int32), ids[1].int())).unsqueeze(0)
    assert best_of_ranks(ids[0], scores[0], OtherRank(theirs)).tolist() == [4, 80, 6, 100]


@pytest.mark.parametrize("wait", ["from_numpy", "tensor", "item", "tolist", "nonzero"])
def test_waits_for_the_device_are_counted(wait: str) -> None:
    if ON_GPU:
        pytest.skip("PyTorch counts")
    values, ways = (
        torch.ones(3),
        {
            "from_numpy": lambda: torch.from_numpy(np.ones(3, np.float32)).to("cpu").add(values),
            "tensor": lambda: torch.tensor([1.0]) + values,
            "item": lambda: values.sum().item(),
            "tolist": lambda: values.add(1).tolist(),
            "nonzero": lambda: values[values > 0],
        },
    )
    with counting_waits() as waits:
        values.add(1).mul_(2)
        assert not waits
        ways[wait]()
    assert waits


@pytest.mark.parametrize(("seqs", "count"), [(64, 294), (256, 394)])
def test_a_kind_of_pass_is_captured_for_every_step(seqs: int, count: int) -> None:
    kinds = StepKinds(seqs, 15, 2048)
    captured = kinds.all()
    assert len(captured) == len(set(captured)) == count
    assert len(StepKinds(seqs, 15, 8192).all()) == {64: 294, 256: 406}[seqs], "an H100's rows"
    assert {kind.width for kind in captured if kind.drafts} == {2, 4, 6, 8, 12, 16}
    assert {kind.width for kind in captured if not kind.drafts} == {1, 4, 16}
    found = set[PassKind]()
    for requests in range(1, seqs + 1):
        for width in range(1, 17):
            most_rows = min(requests * width, 2048)
            for rows in range(requests, most_rows + 1, max(1, (most_rows - requests) // 29)):
                kind = kinds.target(requests, width, rows, filters=False, writes_context=True)
                found.add(kind)
                assert kind.num_requests >= requests and kind.width >= width and kind.num_rows >= rows
                if rows > 5:
                    assert kind.num_rows <= max(rows * 1.5, rows + 2), "nearly as many as are asked for"
            if width > 1:
                block = kinds.block(requests, width, filters=True)
                found.add(block)
                assert block.num_rows >= most_rows and block.num_requests >= requests
                assert block.num_requests in (requests, seqs) or block.num_requests < requests * 1.5
                assert width <= block.width <= max(width * 1.5, 2)
    assert found <= set(captured)
    assert kinds.target(seqs, 1, seqs, filters=True, writes_context=False) in captured


def test_the_largest_passes_are_captured_first() -> None:
    kinds = StepKinds(256, 15, 2048)
    largest, captured = kinds.largest(), kinds.all()
    assert [kind.drafts for kind in largest] == [False, False, True, True]
    assert [kind.filters for kind in largest] == [True, False, True, False]
    for first in largest:
        assert first.num_rows == 2048 == max(k.num_rows for k in captured if k.drafts == first.drafts)
    assert kinds.rows[-1] == 2048 and set(kinds.rows) == {k.num_rows for k in captured if not k.drafts}
    assert {kind.width for kind in StepKinds(4, 0, 2048).all()} == {1}
    assert [kind.num_requests for kind in StepKinds(5, 0, 2048).all()[::2]] == [5, 4, 3, 2, 1]


def test_a_backend_that_cannot_run_here_is_refused(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from manta.actors.engine.uniproc_executor import make_executor

    with pytest.raises(ConfigError, match="flash_attn") as caught:
        make_executor(settings(tiny_qwen3, attention_backend="flash_attn"))
    assert caught.value.param == "attention_backend"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="runs on GPUs") as caught:
        make_executor(settings(tiny_qwen3, attention_backend="triton", device="cpu"))
    assert caught.value.param == "attention_backend"
    with pytest.raises(ConfigError, match="attention_backend='tritn'"):
        settings(tiny_qwen3, attention_backend="tritn")


@pytest.fixture(scope="module")
def tiny_states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    return make_tiny_target(folder, "qwen3_5", seed=5, num_hidden_layers=2, **SMALL_STATES)


def test_states_after_accepted_and_rejected_drafts_equal_the_hosts(tiny_states: Path, tmp_path: Path) -> None:
    with opened(tiny_states, None, "torch") as llm:
        (said,) = tokens_of(llm, [[5, 6, 7]], [replace(KNOBS["greedy"], max_tokens=24)])
    stood: set[int] = set()
    for cut in (0, 1):
        prompt = [5, 6, 7, *said[:6], 90 + cut, *said[: cut + 2]]
        twins = Twins.open(tiny_states, None, [prompt, [9] * 5], method="ngram")
        enter = [twins.steps.admit(slot, tokens) for slot, tokens in enumerate(twins.known)]
        twins.run([0], [len(prompt)], [0], admitted=enter[:1])
        result = twins.run([len(prompt), 0], [4, 5], [3, 0], admitted=enter[1:])
        stood.add(int(result.num_tokens[0]) - 1)
        result = twins.run(twins.computed(), [4, 4], [3, 3])
        stood |= set((result.num_tokens - 1).tolist())
        cache, memory = twins.device.cache.states, twins.host.cache.states
        assert cache is not None and memory is not None
        for mine, theirs in zip(cache.tensors[:2], memory.tensors[:2], strict=True):
            torch.testing.assert_close(mine[:, :2].cpu(), theirs[:, :2].cpu(), atol=1e-4, rtol=1e-4)
    assert len(stood) > 1, stood
