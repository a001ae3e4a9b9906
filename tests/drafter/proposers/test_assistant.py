"""Gemma 4's assistant: its chains equal those of transformers' candidate generator; no token changes.

test_lossless.py has cells of the grid, test_device_runner.py compares the device's chains.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from manta.actors.targets.loading.memory_budget import page_bytes
from manta.actors.targets.loading.rank_loader import load_runner
from manta.actors.targets.loading.resolved_config import resolve_config
from manta.cluster.config import EngineConfig
from manta.cluster.errors import CheckpointError
from manta.cluster.request.request import SamplingParams
from support.checkpoints.mtp_targets import make_assistant
from support.checkpoints.tiny import changed, make_tiny_target, transformers_model
from support.engines.steps import settings
from support.engines.thread_ranks import ThreadRank, ThreadRanks
from support.oracles.recorded_chains import (
    GREEDY,
    PROMPTS,
    WARM,
    Choice,
    Served,
    assert_chains_equal,
    assert_prefix_hits_keep_chains,
    decode_alone,
    texts,
)
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

NUM_DRAFTS = 3
CLUSTERS, CLUSTERED = (16, 5), {"use_ordered_embeddings": True}
WINDOW = 9


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("gemma4"), "gemma4")


@pytest.fixture(scope="module")
def assistant(gemma4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_assistant(tmp_path_factory.mktemp("assistant"), gemma4)


def assisted(target: Path, drafter: Path, of_drafter: dict | None = None, **changes: object) -> EngineConfig:
    spec = {"method": "mtp", "model": str(drafter), "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
    return settings(
        target, **{"speculative_config": {**spec, **(of_drafter or {})}, "page_size": 8, **changes}
    )


class Generator:
    """transformers' generator for the token after any, with chosen tokens; it records the logits.

    Its mask lets a sliding layer see one key more than `sliding_window`, and Manta's rows one key less than
    the target's window: those that a plain row of the target sees beside its own.
    """

    def __init__(self, target: Path, assistant: Path) -> None:
        self._target = transformers_model(target)
        self._assistant = transformers_model(assistant)
        self._assistant.config.text_config.sliding_window = WINDOW - 2
        self._assistant.generation_config.num_assistant_tokens = NUM_DRAFTS

    @torch.no_grad()
    def chain(self, tokens: list[int], choose: Choice) -> tuple[list[int], list[torch.Tensor]]:
        """Return drafts after `tokens`, of which the target has computed all but the last."""
        seen: list[torch.Tensor] = []

        def record(module: object, args: object, out) -> None:
            if module.masked_embedding is not None:  # tokens of other clusters get one logit below all others
                out.logits[out.logits == out.logits.min()] = -torch.inf
            seen.append(out.logits[0, 0].clone())
            chosen = choose(seen[-1], len(tokens) + len(seen) - 1)
            out.logits.fill_(-1e4)[0, 0, chosen] = 0.0

        hook = self._assistant.register_forward_hook(record)
        embeddings, config = self._target.get_input_embeddings(), self._target.generation_config
        config.max_length = 512
        generator = SinglePositionMultiTokenCandidateGenerator(self._assistant, embeddings, config)
        ids = torch.tensor([tokens])
        outputs = self._target(
            ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True, use_cache=False
        )
        found, _ = generator.get_candidates(ids, {}, outputs, is_first_iteration=False, n_last_matches=0)
        hook.remove()
        return found[0, len(tokens) :].tolist(), seen


@pytest.mark.parametrize("clusters", [None, CLUSTERS], ids=["all tokens", "clusters"])
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "T=1"])
def test_chains_equal_transformers_generator_and_no_token_changes(
    params: SamplingParams, clusters: tuple[int, int] | None, gemma4: Path, assistant: Path, tmp_path: Path
) -> None:
    """Prompts come in chunks and batches, longer than the window, with rejections; small pages."""
    if clusters is not None:
        assistant = make_assistant(tmp_path, gemma4, clusters=clusters)
    generator = Generator(gemma4, assistant)

    def chains_of(tokens: list[int], anchors: list[int], choose: Choice) -> dict:
        return {at: generator.chain(tokens[: at + 1], choose) for at in anchors}

    assert_chains_equal(assisted(gemma4, assistant, max_num_batched_tokens=16), params, chains_of)


def test_a_prefix_hit_keeps_the_states(gemma4: Path, assistant: Path) -> None:
    assert_prefix_hits_keep_chains(assisted(gemma4, assistant))


@pytest.mark.parametrize("clusters", [None, CLUSTERS], ids=["all tokens", "clusters"])
def test_two_ranks_read_their_heads_of_the_target(
    clusters: tuple[int, int] | None, gemma4: Path, tmp_path: Path
) -> None:
    """The full layers have one head of K and V, which both ranks have. Drafts are told by their margins."""
    assistant = make_assistant(tmp_path, gemma4, clusters=clusters)
    config = assisted(gemma4, assistant, page_size=16, num_pages=80)

    def work(rank: ThreadRank | None) -> list[tuple[list[int], int, list[float]]]:
        ranks = 1 if rank is None else rank.world_size
        runner, _ = load_runner(replace(config, tensor_parallel_size=ranks), rank)
        return decode_alone(runner, PROMPTS[1], NUM_DRAFTS, 6)

    expected = work(None)
    assert [len(margins) for *_, margins in expected[1:]] == [NUM_DRAFTS] * 5
    for found in ThreadRanks(2).run(work):
        assert texts(found) == texts(expected)
        for (*_, ours), (*_, right) in zip(found, expected, strict=True):
            assert ours == pytest.approx(right, rel=1e-2)


def test_a_draft_window_limits_what_the_full_layer_sees(gemma4: Path, assistant: Path) -> None:
    plan = resolve_config(assisted(gemma4, assistant, {"draft_window": 4}))
    assert plan.drafter is not None and [layer.window for layer in plan.drafter.layers] == [4, 4, 4]
    limited, whole = (Served(assisted(gemma4, assistant, {"draft_window": window})) for window in (4, 0))
    assert limited.tokens(PROMPTS, WARM) == whole.tokens(PROMPTS, WARM)
    assert limited.chains is not None and whole.chains is not None
    both = limited.chains.seen.keys() & whole.chains.seen.keys()
    assert any(not torch.allclose(limited.chains.seen[at][1][0], whole.chains.seen[at][1][0]) for at in both)


def test_it_takes_no_pages_but_a_state_for_each(gemma4: Path, assistant: Path) -> None:
    plan = resolve_config(assisted(gemma4, assistant))
    (with_assistant,), (without,) = page_bytes(plan), page_bytes(plan, drafter=False)
    assert with_assistant - without == 72 * 4
    assert plan.pages.groups == resolve_config(settings(gemma4, page_size=8)).pages.groups
    assert plan.drafter is not None and [layer.window for layer in plan.drafter.layers] == [8, 8, None]


def test_the_classes_of_12b_are_read(gemma4: Path, tmp_path: Path) -> None:
    plan = resolve_config(assisted(gemma4, make_assistant(tmp_path, gemma4, unified=True)))
    assert plan.num_speculative_tokens == NUM_DRAFTS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone_hidden_size": 64}, r"backbone_hidden_size=64 is not the target's hidden_size \(72\)"),
        ({**CLUSTERED, "num_centroids": 48}, r"num_centroids=48 must be a divisor of vocab_size \(128\)"),
        (
            {**CLUSTERED, "num_centroids": 4, "centroid_intermediate_top_k": 5},
            r"centroid_intermediate_top_k=5 must be at most num_centroids \(4\)",
        ),
        ({"architectures": ["Gemma4ForCausalLM"]}, "architectures=.* must be"),
        ({"text_config": {"vocab_size": 64}}, r"vocab_size=64 is not the target's vocab_size \(128\)"),
        ({"text_config": {"num_key_value_heads": 4}}, "num_kv_heads=4, and the target's sliding layers 2"),
        (
            {"text_config": {"rope_parameters": {"sliding_attention": {"rope_theta": 1e5}}}},
            "layer 0 rotates otherwise than the target's sliding layers",
        ),
        ({"text_config": {"num_kv_shared_layers": 1}}, r"num_kv_shared_layers=1 must be .*\(3\)"),
    ],
)
def test_an_assistant_of_another_target_is_refused(
    changes: dict, message: str, gemma4: Path, assistant: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve_config(assisted(gemma4, assistant, {"hf_overrides": changes}, load_format="dummy"))


def test_other_targets_and_missing_tensors_are_refused(
    gemma4: Path, assistant: Path, tiny_qwen3: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="backbone_hidden_size=72 is not the target's"):
        resolve_config(assisted(tiny_qwen3, assistant))
    deeper = changed(assistant, tmp_path / "deeper")
    (deeper / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="deeper"):
        resolve_config(assisted(gemma4, deeper))
