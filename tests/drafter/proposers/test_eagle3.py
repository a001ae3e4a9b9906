"""EAGLE-3 drafters: chains equal the published mathematics over pages, chunks, hits and preemption.

test_lossless.py tests that no token changes, test_target_parallel.py several ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from manta.actors.targets.loading.load_plan import plan_load
from manta.cluster.config import EngineConfig
from manta.cluster.errors import CheckpointError, ConfigError
from manta.cluster.request.request import SamplingParams
from manta.drafter.dflash.target_features import TargetFacts
from manta.drafter.eagle3.checkpoint import eagle3_shapes
from manta.drafter.eagle3.config import Eagle3Config
from safetensors.torch import load_file
from support.checkpoints.drafters import (
    EAGLE3,
    EAGLE3_BLOCK,
    drafter_tensors,
    eagle3_speculators,
    sglang,
    write_drafter,
)
from support.checkpoints.tiny import TINY_VOCAB, transformers_model
from support.engines.recorded_chains import Served, same_chains
from support.engines.steps import settings
from support.oracles.oracle_dflash import gumbel
from support.oracles.oracle_eagle3 import Eagle3Oracle, chains

NUM_DRAFTS = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
WARM = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)


def prompt(length: int) -> list[int]:
    return torch.randint(1, TINY_VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()


PROMPTS = [prompt(n) for n in (1, 18, 37)]


def eagle3(target: Path, drafter: Path, **changes: object) -> EngineConfig:
    drafts = {"num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
    spec = {"method": "eagle3", "model": str(drafter), **drafts}
    return settings(target, speculative_config=spec, page_size=8, **changes)


@pytest.fixture(scope="module")
def hugging_face(tiny_qwen3: Path):
    return transformers_model(tiny_qwen3)


@pytest.fixture(scope="module")
def plain(tiny_qwen3: Path) -> Callable[[SamplingParams], list[list[int]]]:
    """Return the tokens of the prompts by plain decoding."""
    return cache(lambda params: Served(settings(tiny_qwen3)).tokens(PROMPTS, params))


noise = cache(gumbel)


@pytest.mark.parametrize(
    ("variant", "params"), [(name, (GREEDY, WARM)[i % 2]) for i, name in enumerate(EAGLE3)]
)
def test_every_position_of_a_chain_equals_the_reference(
    variant: str, params: SamplingParams, tiny_qwen3: Path, hugging_face, plain, tmp_path: Path
) -> None:
    """Prompts come in chunks and batches, with rejections; fp32 logits are equal up to rounding."""
    folder = write_drafter(tmp_path, EAGLE3[variant])
    served = Served(eagle3(tiny_qwen3, folder, max_num_batched_tokens=16))
    new = served.tokens(PROMPTS, params)
    assert new == plain(params)
    weights = {name: tensor.detach().double() for name, tensor in hugging_face.state_dict().items()}
    ends = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    oracle = Eagle3Oracle(EAGLE3[variant], load_file(folder / "model.safetensors"), *ends)
    assert served.chains is not None
    for i, tokens in enumerate(PROMPTS):
        ours = {at: found for (name, at), found in served.chains.seen.items() if name == f"r{i}"}
        assert len(ours) > 2

        def choose(z: torch.Tensor, at: int, seed: int = 10 + i) -> int:
            return int((z + noise(seed, at, TINY_VOCAB) if params.temperature else z).argmax())

        expected = chains(hugging_face, oracle, [*tokens, *new[i]], list(ours), NUM_DRAFTS, choose)
        for at, (drafts, logits) in ours.items():
            right, theirs = expected[at]
            assert drafts == right[: len(drafts)], (i, at)
            for z, z_right in zip(logits, theirs, strict=False):
                kept = z_right.isfinite()
                assert torch.equal(kept, z.isfinite())
                assert torch.allclose(z[kept].double(), z_right[kept], atol=2e-4), (i, at)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("eagle3"), EAGLE3["speculators"])


def test_a_prefix_hit_keeps_the_drafters_features(tiny_qwen3: Path, folder: Path) -> None:
    """Pages hold entries and the newest feature, which were computed in another request's steps."""
    shared = prompt(40)
    batch = [shared, [*shared, 7, 8, 9], [*shared[:32], 5], shared]
    cold = Served(eagle3(tiny_qwen3, folder, enable_prefix_caching=False))
    warm = Served(eagle3(tiny_qwen3, folder))
    for i, tokens in enumerate(batch):
        assert warm.tokens([tokens], WARM, i) == cold.tokens([tokens], WARM, i)
    assert warm.chains is not None and cold.chains is not None
    assert same_chains(warm.chains.seen, cold.chains.seen) > 20
    assert list(warm.num_cached.values()) == [0, 40, 32, 32]  # of a whole prompt all but the last page


def test_preemption_keeps_the_drafters_features(tiny_qwen3: Path, folder: Path) -> None:
    prompts = [prompt(n) for n in (30, 31, 32, 33)]
    long = replace(WARM, max_tokens=40)
    free = Served(eagle3(tiny_qwen3, folder, enable_prefix_caching=False))
    for caching in (False, True):
        short = Served(eagle3(tiny_qwen3, folder, num_pages=24, enable_prefix_caching=caching))
        assert short.tokens(prompts, long) == free.tokens(prompts, long)
        assert short.engine.stats().preemptions > 0
        assert short.chains is not None and free.chains is not None
        assert same_chains(short.chains.seen, free.chains.seen) > 40


def test_the_drafter_can_be_replaced(tiny_qwen3: Path, folder: Path, tmp_path: Path) -> None:
    other = write_drafter(tmp_path, EAGLE3["speculators"], drafter_tensors(EAGLE3["speculators"], seed=2))
    swapped, fresh = Served(eagle3(tiny_qwen3, folder)), Served(eagle3(tiny_qwen3, other))
    swapped.tokens([prompt(20)], WARM)
    swapped.executor.swap_drafter(str(other))
    assert swapped.tokens([prompt(21)], WARM, 1) == fresh.tokens([prompt(21)], WARM, 1)
    assert swapped.chains is not None and fresh.chains is not None
    assert same_chains(swapped.chains.seen, fresh.chains.seen) > 3


def test_page_sizes_include_the_features(tiny_qwen3: Path, folder: Path) -> None:
    from manta.actors.targets.loading.memory_budget import page_bytes

    plan = plan_load(eagle3(tiny_qwen3, folder))
    per_token = 2 * 2 * 16 * 4  # keys and values of two heads, fp32
    (with_drafter,), (without,) = page_bytes(plan), page_bytes(plan, drafter=False)
    assert with_drafter - without == 8 * per_token + 64 * 4


def _without(config: dict, name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in drafter_tensors(config).items() if key != name}


def _with(config: dict, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return drafter_tensors(config) | tensors


GOOD = sglang()
BROKEN: dict[str, tuple[dict, dict[str, torch.Tensor] | None, str]] = {
    "another architecture": (
        sglang(architectures=["DFlashDraftModel"]),
        None,
        "architectures=.*LlamaForCausalLMEagle3",
    ),
    "another method": (
        eagle3_speculators(speculators_model_type="dflash"),
        None,
        "speculators_model_type='dflash'.*'eagle3'",
    ),
    "two layers": (sglang(num_hidden_layers=2), None, "num_hidden_layers=2 must be 1"),
    "another target's taps": (
        sglang(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}),
        None,
        "eagle_aux_hidden_state_layer_ids.*target that has 4",
    ),
    "another target's vocabulary": (sglang(vocab_size=200), None, "vocab_size=200.*128"),
    "another target's size": (sglang(hidden_size=32), None, "target_hidden_size=32.*64"),
    "more draft tokens than tokens": (
        sglang(draft_vocab_size=129),
        None,
        "draft_vocab_size.*at most vocab_size",
    ),
    "norms of taps": (eagle3_speculators(fc_norm=True), None, "fc_norm=True.*not yet supported"),
    "drafting in parallel": (
        sglang(eagle_config={"parallel_draft_step": 2}),
        None,
        "eagle_config.parallel_draft_step=2 must be 1",
    ),
    "no last hidden states": (
        sglang(eagle_config={"use_aux_hidden_state": False}),
        None,
        "use_aux_hidden_state",
    ),
    "no map": (GOOD, _without(GOOD, "d2t"), "tensor d2t is missing"),
    "no head": (GOOD, _without(GOOD, "lm_head.weight"), "tensor lm_head.weight is missing"),
    "no hidden norm": (GOOD, _without(GOOD, "midlayer.hidden_norm.weight"), "hidden_norm.weight is missing"),
    "queries of one input": (
        GOOD,
        _with(GOOD, **{"midlayer.self_attn.q_proj.weight": torch.zeros(64, 64)}),
        r"q_proj.weight has shape \[64, 64\]",
    ),
    "another fc": (
        GOOD,
        _with(GOOD, **{"fc.weight": torch.zeros(64, 64)}),
        r"fc.weight has shape \[64, 64\]",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_defects_of_a_checkpoint_are_named(name: str, tiny_qwen3: Path, tmp_path: Path) -> None:
    config, tensors, said = BROKEN[name]
    folder = write_drafter(tmp_path, config, tensors or drafter_tensors(GOOD))
    with pytest.raises(CheckpointError, match=said):
        plan_load(eagle3(tiny_qwen3, folder))


def test_a_vocabulary_map_must_map_to_tokens(tiny_qwen3: Path, tmp_path: Path) -> None:
    folder = write_drafter(tmp_path, GOOD, _with(GOOD, d2t=torch.full((96,), 100)))
    with pytest.raises(CheckpointError, match="d2t must map each draft token"):
        Served(eagle3(tiny_qwen3, folder))


def test_taps_are_counted_by_each_formats_convention(tmp_path: Path) -> None:
    """By default the inputs of blocks 2, L / 2 and L - 3 are tapped."""
    silent = {"eagle_config": None}
    beside = {**silent, "eagle_aux_hidden_state_layer_ids": [2, 18, 33]}
    inside = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}}
    of_format = eagle3_speculators(eagle_aux_hidden_state_layer_ids=[2, 18, 33])
    for config in (sglang(**silent), sglang(**beside), sglang(**inside), of_format):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert Eagle3Config.load(tmp_path, 36).target_layer_ids == (1, 17, 32)


SPECFORGE = {  # of Llama-3.1-8B-Instruct, as its training writes it
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
}
CONVERTED = {  # nm-testing/EAGLE3-LLaMA3.1-Instruct-8B-converted
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": 32000,
    "has_no_defaults_at_init": False,
    "norm_before_residual": False,
    "speculators_model_type": "eagle3",
    "target_hidden_size": None,
    "transformer_layer_config": {
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "vocab_size": 128256,
    },
}


def test_published_configs_of_one_drafter_are_read_the_same(tmp_path: Path) -> None:
    read = []
    for config in (SPECFORGE, CONVERTED):
        (tmp_path / "config.json").write_text(json.dumps(config))
        read.append(Eagle3Config.load(tmp_path, 32))
        read[-1].check_fits(TargetFacts(4096, 32, 128256, 4096))
    assert replace(read[1], layout="sglang") == read[0]
    assert (read[0].target_layer_ids, read[0].head_dim) == ((1, 15, 28), 128)
    assert eagle3_shapes(read[0])["fc.weight"] == (4096, 3 * 4096)
    assert eagle3_shapes(read[0])["layers.0.self_attn.k_proj.weight"] == (1024, 8192)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (sglang(residual_scale=0.5), "residual_scale=0.5 must be absent or false"),
        (eagle3_speculators(residual_scale=0.5), "residual_scale=0.5 must be absent or false"),
        (sglang(eagle_config={"tap_norms": True}), "eagle_config.tap_norms=True must be absent or false"),
        (eagle3_speculators(eagle_aux_hidden_state_layer_ids=[1, 1, 3]), r"ids=\[1, 1, 3\].*all different"),
    ],
)
def test_unknown_keys_and_layers_tapped_twice_are_refused(config: dict, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words):
        Eagle3Config.load(tmp_path, 4)
    (tmp_path / "config.json").write_text(json.dumps(sglang(num_anchors=5, loss_decay_gamma=7.0)))
    assert Eagle3Config.load(tmp_path, 4).num_taps == 3


def test_unsupported_configs_are_refused(tiny_qwen3: Path, folder: Path, tmp_path: Path) -> None:
    spec = {"method": "eagle3", "model": str(folder)}
    for changes, said in (
        ({"placement": "split"}, 'placement=.split. is not supported with method="eagle3"'),
        ({"placement": "shared"}, "placement=.shared. is not supported"),
        ({"input_embedding_scale": 2.0}, "input_embedding_scale=2.0 is not supported"),
        ({"prompt_lookup_max": 3}, "prompt_lookup_max=3 is not supported"),
    ):
        with pytest.raises(ConfigError, match=said):
            settings(tiny_qwen3, speculative_config={**spec, **changes})
    with pytest.raises(CheckpointError, match='method="eagle3"'):
        plan_load(settings(tiny_qwen3, speculative_config={"model": str(folder)}))
    nested = write_drafter(tmp_path, sglang())
    with pytest.raises(CheckpointError, match='method="eagle3"'):
        plan_load(settings(tiny_qwen3, speculative_config={"model": str(nested)}))


def test_a_block_drafter_is_recognized(tiny_qwen3: Path, tiny_drafter: Path) -> None:
    with pytest.raises(CheckpointError, match=r'architectures=.*method="dflash"'):
        plan_load(eagle3(tiny_qwen3, tiny_drafter))


def test_the_training_length_is_no_limit(tiny_qwen3: Path, folder: Path) -> None:
    assert EAGLE3_BLOCK["max_position_embeddings"] < plan_load(eagle3(tiny_qwen3, folder)).max_model_len
