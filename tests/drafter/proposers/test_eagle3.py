"""EAGLE-3 drafters: chains equal the published mathematics over pages, chunks, hits and preemption.

test_lossless.py tests that no token changes, test_target_parallel.py several ranks.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from manta.actors.targets.loading.resolved_config import resolve_config
from manta.cluster.config import EngineConfig
from manta.cluster.errors import CheckpointError
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
from support.checkpoints.tiny import transformers_model
from support.engines.steps import settings
from support.oracles.oracle_eagle3 import Eagle3Oracle, chains
from support.oracles.recorded_chains import (
    GREEDY,
    WARM,
    Choice,
    Served,
    assert_chains_equal,
    assert_prefix_hits_keep_chains,
    prompt,
    same_chains,
)

NUM_DRAFTS = 4


def eagle3(target: Path, drafter: Path, **changes: object) -> EngineConfig:
    drafts = {"num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
    spec = {"method": "eagle3", "model": str(drafter), **drafts}
    return settings(target, speculative_config=spec, page_size=8, **changes)


@pytest.fixture(scope="module")
def hugging_face(tiny_qwen3: Path):
    return transformers_model(tiny_qwen3)


@pytest.mark.parametrize(
    ("variant", "params"), [(name, (GREEDY, WARM)[i % 2]) for i, name in enumerate(EAGLE3)]
)
def test_every_position_of_a_chain_equals_the_reference(
    variant: str, params: SamplingParams, tiny_qwen3: Path, hugging_face, tmp_path: Path
) -> None:
    """Prompts come in chunks and batches, with rejections; fp32 logits are equal up to rounding."""
    folder = write_drafter(tmp_path, EAGLE3[variant])
    weights = {name: tensor.detach().double() for name, tensor in hugging_face.state_dict().items()}
    ends = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    oracle = Eagle3Oracle(EAGLE3[variant], load_file(folder / "model.safetensors"), *ends)

    def chains_of(tokens: list[int], anchors: list[int], choose: Choice) -> dict:
        return chains(hugging_face, oracle, tokens, anchors, NUM_DRAFTS, choose)

    assert_chains_equal(eagle3(tiny_qwen3, folder, max_num_batched_tokens=16), params, chains_of)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("eagle3"), EAGLE3["speculators"])


def test_a_prefix_hit_keeps_the_drafters_features(tiny_qwen3: Path, folder: Path) -> None:
    """Pages hold entries and the newest feature, which were computed in another request's steps."""
    cached = assert_prefix_hits_keep_chains(eagle3(tiny_qwen3, folder))
    assert cached == [0, 40, 32, 32]  # of a whole prompt all but the last page


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

    plan = resolve_config(eagle3(tiny_qwen3, folder))
    per_token = 2 * 2 * 16 * 4  # keys and values of two heads, fp32
    (with_drafter,), (without,) = page_bytes(plan), page_bytes(plan, drafter=False)
    assert with_drafter - without == 8 * per_token + 64 * 4


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
    **{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1},
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-05},
    **{"tie_word_embeddings": False, "vocab_size": 128256, "draft_vocab_size": 32000},
}
OUTSIDE = ("architectures", "draft_vocab_size", "tie_word_embeddings")
IN_A_LAYER = {"attention_bias": False, "head_dim": 128, "mlp_bias": False, "pretraining_tp": 1}
CONVERTED = {  # nm-testing/EAGLE3-LLaMA3.1-Instruct-8B-converted
    **{"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 32000},
    **{"norm_before_residual": False, "has_no_defaults_at_init": False, "target_hidden_size": None},
    "transformer_layer_config": {
        **{key: SPECFORGE[key] for key in SPECFORGE if key not in OUTSIDE},
        **{**IN_A_LAYER, "rope_scaling": None, "rope_theta": 10000.0},
    },
}


def test_keys_of_training_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(sglang(num_anchors=5, loss_decay_gamma=7.0)))
    assert Eagle3Config.load(tmp_path, 4).num_taps == 3


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


def test_a_chain_drafter_is_recognized(tiny_qwen3: Path, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match='method="eagle3"'):
        resolve_config(settings(tiny_qwen3, speculative_config={"model": str(folder)}))
    nested = write_drafter(tmp_path, sglang())
    with pytest.raises(CheckpointError, match='method="eagle3"'):
        resolve_config(settings(tiny_qwen3, speculative_config={"model": str(nested)}))


def test_a_block_drafter_is_recognized(tiny_qwen3: Path, tiny_drafter: Path) -> None:
    with pytest.raises(CheckpointError, match=r'architectures=.*method="dflash"'):
        resolve_config(eagle3(tiny_qwen3, tiny_drafter))


def test_the_training_length_is_no_limit(tiny_qwen3: Path, folder: Path) -> None:
    assert EAGLE3_BLOCK["max_position_embeddings"] < resolve_config(eagle3(tiny_qwen3, folder)).max_model_len
