"""Gemma 4's assistant: its chains equal those of transformers' candidate generator; no token changes.

test_lossless.py has cells of the grid, test_device_runner.py compares the device's chains.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from manta.actors.targets.loading.load_plan import plan_load
from manta.actors.targets.loading.memory_budget import page_bytes
from manta.actors.targets.loading.rank_loader import load_runner
from manta.cluster.config import EngineConfig, SpeculativeConfig
from manta.cluster.errors import CheckpointError, ConfigError
from manta.cluster.request.request import SamplingParams
from support.checkpoints.mtp_targets import make_assistant
from support.checkpoints.tiny import TINY_VOCAB, changed, make_tiny_target, transformers_model
from support.engines.recorded_chains import Served, same_chains
from support.engines.steps import Steps, settings
from support.engines.thread_ranks import ThreadRank, ThreadRanks
from support.oracles.oracle_dflash import gumbel
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

NUM_DRAFTS = 3
CLUSTERS, CLUSTERED = (16, 5), {"use_ordered_embeddings": True}
WINDOW = 9
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
WARM = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
noise = cache(gumbel)


def prompt(length: int) -> list[int]:
    return torch.randint(1, TINY_VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()


PROMPTS = [prompt(n) for n in (1, 18, 37)]


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
    """transformers' generator for the token after any, with noise; it records logits without the noise.

    Its mask lets a sliding layer see one key more than `sliding_window`, and Manta's rows one key less than
    the target's window: those that a plain row of the target sees beside its own.
    """

    def __init__(self, target: Path, assistant: Path) -> None:
        self._target = transformers_model(target)
        self._assistant = transformers_model(assistant)
        self._assistant.config.text_config.sliding_window = WINDOW - 2
        self._assistant.generation_config.num_assistant_tokens = NUM_DRAFTS

    @torch.no_grad()
    def chain(self, tokens: list[int], seed: int | None) -> tuple[list[int], list[torch.Tensor]]:
        """Return drafts after `tokens`, of which the target has computed all but the last."""
        seen: list[torch.Tensor] = []

        def choose(module: object, args: object, out) -> None:
            if module.masked_embedding is not None:  # tokens of other clusters get one logit below all others
                out.logits[out.logits == out.logits.min()] = -torch.inf
            seen.append(out.logits[0, 0].clone())
            if seed is not None:
                out.logits += noise(seed, len(tokens) + len(seen) - 1, TINY_VOCAB)

        hook = self._assistant.register_forward_hook(choose)
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
    served = Served(assisted(gemma4, assistant, max_num_batched_tokens=16))
    new = served.tokens(PROMPTS, params)
    assert new == Served(settings(gemma4)).tokens(PROMPTS, params)
    generator = Generator(gemma4, assistant)
    assert served.chains is not None
    for i, tokens in enumerate(PROMPTS):
        ours = {at: found for (name, at), found in served.chains.seen.items() if name == f"r{i}"}
        assert len(ours) > 1
        for at, (drafts, logits) in ours.items():
            sequence = [*tokens, *new[i]][: at + 1]
            right, theirs = generator.chain(sequence, 10 + i if params.temperature else None)
            assert drafts == right[: len(drafts)], (i, at)
            for z, z_right in zip(logits, theirs, strict=False):
                assert torch.allclose(z, z_right, atol=2e-4), (i, at)
                num_possible = TINY_VOCAB if clusters is None else TINY_VOCAB // clusters[0] * clusters[1]
                assert z.isfinite().sum() == num_possible


def test_a_prefix_hit_keeps_the_states(gemma4: Path, assistant: Path) -> None:
    shared = prompt(40)
    batch = [shared, [*shared, 7, 8, 9], [*shared[:32], 5], shared]
    cold = Served(assisted(gemma4, assistant, enable_prefix_caching=False))
    warm = Served(assisted(gemma4, assistant))
    for i, tokens in enumerate(batch):
        assert warm.tokens([tokens], WARM, i) == cold.tokens([tokens], WARM, i)
    assert warm.chains is not None and cold.chains is not None
    assert same_chains(warm.chains.seen, cold.chains.seen) > 10
    assert max(warm.num_cached.values()) >= 32


@pytest.mark.parametrize("clusters", [None, CLUSTERS], ids=["all tokens", "clusters"])
def test_two_ranks_read_their_heads_of_the_target(
    clusters: tuple[int, int] | None, gemma4: Path, tmp_path: Path
) -> None:
    """The full layers have one head of K and V, which both ranks have. Drafts are told by their margins."""
    assistant = make_assistant(tmp_path, gemma4, clusters=clusters)
    config = assisted(gemma4, assistant, page_size=16, num_pages=80)

    def work(rank: ThreadRank | None) -> list[tuple[list[int], list[float]]]:
        ranks = 1 if rank is None else rank.world_size
        runner, info = load_runner(replace(config, tensor_parallel_size=ranks), rank)
        steps, known, found = Steps(2, num_groups=len(info.page_groups)), list(PROMPTS[1]), []
        plan = steps.plan([0], [0], [len(known)], admitted=[steps.admit(0, known)])
        for _ in range(6):
            result = runner.execute(plan)
            new = result.token_ids[0, : result.num_tokens[0]].tolist()
            known += new
            found.append((new, [] if result.margins is None else result.margins[0].tolist()))
            plan = steps.plan([0], [len(known) - 1], [1 + NUM_DRAFTS], [NUM_DRAFTS])
        return found

    expected = work(None)
    assert [len(margins) for _, margins in expected[1:]] == [NUM_DRAFTS] * 5
    for found in ThreadRanks(2).run(work):
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        for (_, ours), (_, right) in zip(found, expected, strict=True):
            assert ours == pytest.approx(right, rel=1e-2)


def test_a_draft_window_limits_what_the_full_layer_sees(gemma4: Path, assistant: Path) -> None:
    plan = plan_load(assisted(gemma4, assistant, {"draft_window": 4}))
    assert plan.drafter is not None and [layer.window for layer in plan.drafter.layers] == [4, 4, 4]
    limited, whole = (Served(assisted(gemma4, assistant, {"draft_window": window})) for window in (4, 0))
    assert limited.tokens(PROMPTS, WARM) == whole.tokens(PROMPTS, WARM)
    assert limited.chains is not None and whole.chains is not None
    both = limited.chains.seen.keys() & whole.chains.seen.keys()
    assert any(not torch.allclose(limited.chains.seen[at][1][0], whole.chains.seen[at][1][0]) for at in both)


def test_it_takes_no_pages_but_a_state_for_each(gemma4: Path, assistant: Path) -> None:
    plan = plan_load(assisted(gemma4, assistant))
    (with_assistant,), (without,) = page_bytes(plan), page_bytes(plan, drafter=False)
    assert with_assistant - without == 72 * 4
    assert plan.pages.groups == plan_load(settings(gemma4, page_size=8)).pages.groups
    assert plan.drafter is not None and [layer.window for layer in plan.drafter.layers] == [8, 8, None]


def test_the_classes_of_12b_are_read(gemma4: Path, tmp_path: Path) -> None:
    plan = plan_load(assisted(gemma4, make_assistant(tmp_path, gemma4, unified=True)))
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
        plan_load(assisted(gemma4, assistant, {"hf_overrides": changes}, load_format="dummy"))


def test_other_targets_and_missing_tensors_are_refused(
    gemma4: Path, assistant: Path, tiny_qwen3: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="backbone_hidden_size=72 is not the target's"):
        plan_load(assisted(tiny_qwen3, assistant))
    deeper = changed(assistant, tmp_path / "deeper")
    (deeper / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="deeper"):
        plan_load(assisted(gemma4, deeper))


def test_settings_of_blocks_are_refused_with_an_assistant() -> None:
    spec = SpeculativeConfig(method="mtp", model="m", hf_overrides={}, quantization="int8")
    assert spec.has_model and spec.drafter == "m"
    with pytest.raises(ConfigError, match=r'tree_width=2 is not supported with method="mtp"'):
        SpeculativeConfig(method="mtp", model="m", tree_width=2)
    with pytest.raises(ConfigError, match=r'placement=.* is not supported with method="mtp"'):
        SpeculativeConfig(method="mtp", model="m", placement="split")
