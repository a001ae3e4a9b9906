"""Every published drafter loads and drafts: its config.json's keys and names, with reduced sizes.

Only sizes, taps and the mask's id are those of a tiny target.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import drafters as checkpoints
from support.checkpoints.drafters import HIDDEN, VOCAB
from support.checkpoints.rope_configs import GPT_OSS, KIMI, LLAMA3
from support.oracles.drafter_requests import assert_blocks_equal, load_pair

# Keys that transformers also writes, without meaning here.
NOTES = {
    **{"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "transformers_version": "5.15.0"},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "attention_dropout": 0.0, "use_cache": False},
    **{"dtype": "bfloat16", "initializer_range": 0.02, "max_window_layers": 5, "tie_word_embeddings": False},
}
SECOND = {"conv_group_size": 16, "conv_kernel_size": 2, "selector_rank": 12, "selector_top_k": 16}
LLAMA = {**LLAMA3, "original_max_position_embeddings": 8192}


def layers(sliding: int, full: int = 0) -> dict[str, Any]:
    types = ["sliding_attention"] * sliding + ["full_attention"] * full
    window = {"sliding_window": 11, "use_sliding_window": True} if sliding else {}
    return {"layer_types": types, "num_hidden_layers": sliding + full, **window}


def theta(value: float) -> dict[str, Any]:
    return {"rope_theta": None, "rope_parameters": {"rope_theta": value, "rope_type": "default"}}


def z_lab(nested: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """Return a z-lab config; a block size in `nested` (`dflash_config`) replaces the outer one."""
    top = {"block_size": None} if nested and "block_size" in nested else {}
    made = checkpoints.z_lab(**{**NOTES, **top, **keys}, dflash=nested or {})
    return {key: value for key, value in made.items() if value is not None}


def z_lab_2(nested: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    kind = {"architectures": ["DFlash2DraftModel"], "is_causal": False}
    return z_lab({**SECOND, **(nested or {})}, **kind, **layers(2), **keys)


def speculators(kind: str, backbone: dict[str, Any], **keys: Any) -> dict[str, Any]:
    said = {"algorithm": kind, "verifier": {"architectures": ["Qwen3ForCausalLM"]}}
    beside = {"speculators_version": "0.6.0", "speculators_config": said, "dtype": "bfloat16"}
    kind_of = {"speculators_model_type": kind, "block_size": 8}
    return checkpoints.speculators(layer=backbone, **kind_of, **beside, **keys)


PUBLISHED = {
    "Qwen3-8B-DFlash-b16": z_lab(rope_theta=1000000, rope_scaling=None, **layers(0, 2)),
    "LLaMA3.1-8B-Instruct-DFlash": z_lab(block_size=10, rope_theta=500000.0, rope_scaling=LLAMA),
    "Qwen3-Coder-30B-A3B-DFlash": z_lab(rope_theta=10000000, **layers(0, 3)),
    "gpt-oss-20b-DFlash": z_lab(block_size=8, rope_theta=150000, rope_scaling=GPT_OSS, rms_norm_eps=1e-5),
    "gpt-oss-120b-DFlash": z_lab(
        block_size=10, rope_theta=None, rope_parameters={"rope_theta": 150000.0, **GPT_OSS}
    ),
    "gemma-4-31B-it-DFlash": z_lab(
        {"block_size": 16, "final_logit_softcapping": 3.0}, rope_theta=1000000, **layers(1, 1)
    ),
    "Qwen3-Coder-Next-DFlash": z_lab({"block_size": 16}, rope_theta=5000000, **layers(0, 3)),
    "Qwen3.5-9B-DFlash": z_lab({"block_size": 16}, **theta(1e7), **layers(5, 1)),
    "Qwen3.6-27B-DFlash": z_lab({"block_size": 16}, **theta(1e7), **layers(4, 1)),
    "Qwen3.8-27B-DFlash2": z_lab_2({"block_size": 8}, **theta(1e7)),
    "Muse-Glimmer-30B-DFlash2": z_lab_2(
        {"block_size": 16, "output_multiplier": 0.19611613513818404, "final_logit_softcapping": 20.0},
        rms_norm_eps=1e-5,
        **theta(5e5),
    ),
    "Muse-Glimmer-30B-assistant": {
        **{key: value for key, value in checkpoints.assistant(**NOTES).items() if key != "rope_theta"},
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "rms_norm_eps": 1e-5,
    },
    "Kimi-K2.6-DFlash": z_lab({"block_size": 8}, rope_theta=50000.0, rope_scaling=KIMI, rms_norm_eps=1e-5),
    "MiniMax-M2.7-DFlash": z_lab(block_size=8, rope_theta=5000000),
    "GLM-5.3-Flash-DFlash2": z_lab_2({"block_size": 8}, rope_theta=1000000),
    "MiMo-V2.5-Pro-FP4-DFlash": z_lab(
        {
            "mask_token_id": VOCAB + 8,
            "use_swa": True,
            "swa_window_size": 11,
            "causal": False,
            "attention_sink_bias": True,
            "attention_value_scale": 0.612,
        },
        block_size=8,
        partial_rotary_factor=0.5,
    ),
    "Qwen3-8B-speculator.dflash": speculators(
        "dflash", {**layers(1, 1), **theta(1e6)}, draft_vocab_size=40, sliding_window_non_causal=False
    ),
    "Qwen3-8B-speculator.dflash2": speculators(
        "dflash2",
        {**layers(2), **theta(1e6)},
        **SECOND,
        architectures=["DFlash2DraftModel"],
        sliding_window_non_causal=True,
        sample_from_anchor=False,
        draft_ffn_type="dense",
        projector_type="dflash",
        shift_label=False,
    ),
}
LENGTH = 45
OWN_WEIGHTS = "MiniMax-M2.7-DFlash"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_drafters_blocks_equal_the_oracles(name: str, tmp_path: Path):
    config = PUBLISHED[name]
    pair = load_pair(tmp_path, config, own=torch.randn(2, VOCAB, HIDDEN) if name == OWN_WEIGHTS else None)
    block_size = {"block_size": 16, **config, **config.get("dflash_config", {})}["block_size"]
    assert pair.ours.config.max_drafts == block_size - 1
    assert_blocks_equal(pair, [LENGTH], [block_size - 1], atol=1e-4)
