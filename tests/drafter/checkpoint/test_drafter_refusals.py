"""Drafter files that cannot be used are refused by name, before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from manta.cluster.errors import CheckpointError
from manta.drafter.compute.layers.linear import Linear
from manta.drafter.dflash.checkpoint import check_drafter, load_drafter
from manta.drafter.dflash.target_features import EmbeddingCopies, TargetFacts
from manta.drafter.eagle3.checkpoint import check_eagle3, load_eagle3
from support.checkpoints.drafters import (
    BACKBONE,
    HIDDEN,
    SECOND,
    SLIDING,
    TARGET_LAYERS,
    VOCAB,
    assistant,
    deepspec,
    deepspec_gemma4,
    drafter_tensors,
    dspark_speculators,
    eagle3_speculators,
    is_eagle3,
    sglang,
    specforge,
    speculators,
    write_drafter,
    z_lab,
)
from support.checkpoints.tiny import TINY_VOCAB

BLOCKS = TargetFacts(hidden_size=HIDDEN, num_layers=TARGET_LAYERS, vocab_size=VOCAB, max_model_len=64)
CHAINS = TargetFacts(hidden_size=64, num_layers=4, vocab_size=TINY_VOCAB, max_model_len=64)
TAPS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}
Config = dict[str, Any]


def check(folder: Path, config: Config) -> None:
    """Check a drafter's files for the target that its kind has in these tests."""
    if is_eagle3(config):
        check_eagle3(folder, CHAINS)
    else:
        check_drafter(folder, BLOCKS)


REFUSED: list[tuple[Config, str]] = [
    (z_lab(projector_type="mlp"), "projector_type='mlp' must be absent or false.*set it to null"),
    (z_lab(output_multiplier=0.4), "output_multiplier=0.4 must be absent or false"),
    (z_lab(residual_scale=0.5), "residual_scale=0.5 must be absent or false"),
    (assistant(residual_scale=0.5), "residual_scale=0.5 must be absent or false"),
    (speculators(norm_before_fc=True), "norm_before_fc=True must be absent or false"),
    (speculators(residual_scale=0.5), "residual_scale=0.5 must be absent or false"),
    (speculators(rope_theta=5.0), "rope_theta=5.0 must be absent or false"),
    (speculators(layer={"residual_scale": 0.5}), "transformer_layer_config.residual_scale=0.5"),
    (speculators(sliding_window=5, layer=SLIDING), "sliding_window=5 must be absent, or .*: 9"),
    (z_lab(dflash={"target_layer_ids": [1, 3, 3]}), r"target_layer_ids=\[1, 3, 3\].*all different"),
    (speculators(aux_hidden_state_layer_ids=[2, 2, 5]), r"ids=\[2, 2, 5\].*all different"),
    (assistant(target_layer_ids=[1, 1, 2]), r"ids=\[1, 1, 2\].*all different"),
    (z_lab(architectures=["DFlash2DraftModel"]), "conv_kernel_size is missing.*for DFlash2DraftModel"),
    (z_lab(architectures=["DFlashDraftModel", "DFlash2DraftModel"]), "architectures=.*must be one of"),
    ({"architectures": ["Eagle3LlamaForCausalLM"]}, "architectures=.*Eagle3.*are run with method="),
    (BACKBONE, "dflash_config is missing; it must be an object"),
    (z_lab(dflash={"selector_top_k": 16}), "dflash_config.selector_rank is missing; it must be given"),
    (z_lab(dflash={"conv_kernel_size": 2}), "dflash_config.conv_group_size is missing; it must be given"),
    (z_lab(dflash={**SECOND, "conv_group_size": 5}), "conv_group_size=5 must be a divisor of hidden_size"),
    (z_lab(dflash={**SECOND, "selector_top_k": 97}), "dflash_config.selector_top_k=97 must be at most"),
    (z_lab(draft_vocab_size=40, dflash=SECOND), "draft_vocab_size=40 must be vocab_size .*selector_rank"),
    (z_lab(dflash={"refiner_steps": 3}), "dflash_config.refiner_steps=3 must be absent or false"),
    (z_lab(dflash={"projector_type": "domino"}), "projector_type='domino'.*Domino's GRU over"),
    (z_lab(dflash={"projector_type": "mlp"}), "projector_type='mlp' must be 'dflash' or 'dspark'"),
    ({"medusa_num_heads": 3, "base_model_name_or_path": "x"}, "medusa_num_heads=3 must be absent"),
    (z_lab(architectures=["DominoDraftModel"]), "architectures=.*one of.*Domino's GRU over"),
    (z_lab(architectures=["LiLiCorrDraftModel"]), "architectures=.*LiLiCorr's transformer"),
    (z_lab(architectures=["Gemma4AssistantForCausalLM"]), "architectures=.*run with method=.mtp"),
    (deepspec_gemma4(layer_types=SLIDING["layer_types"]), "layer_types=.*full_attention in every entry"),
    (deepspec_gemma4(hidden_activation="silu"), "hidden_activation='silu' must be 'gelu_pytorch_tanh'"),
    (deepspec_gemma4(enable_moe_block=True), "enable_moe_block=True must be absent or false"),
    (z_lab(dflash={"causal": False, "causal_head": True}), "causal_head=True must be absent, or as"),
    (z_lab(dflash={"target_hidden_size": 48}), "target_hidden_size=48 must be hidden_size"),
    (z_lab(dflash={"markov_rank": 6}), "dflash_config.markov_rank=6 must be absent, or arch"),
    (deepspec(markov_head_type="rnn"), "markov_head_type='rnn' must be 'vanilla'.*gated, rnn"),
    (deepspec(markov_rank=0), "markov_rank=0 must be positive, for confidence_head_with_markov"),
    (deepspec(target_layer_ids=[1, 1, 2]), r"target_layer_ids=\[1, 1, 2\].*all different"),
    (specforge(dflash={"markov_head_type": "gated"}), "dflash_config.markov_head_type='gated' must be"),
    (specforge(markov_rank=8), "markov_rank=8 must be absent, or as dflash_config.markov_rank: 6"),
    (specforge(dflash={"selector_rank": 4, "selector_top_k": 4}), "selector_rank=4 must be absent"),
    (dspark_speculators(sample_from_anchor=None), "sample_from_anchor is missing.*vLLM false"),
    (dspark_speculators(**SECOND), "selector_rank=6 must be absent, for 'dspark'"),
    (z_lab(use_gemma_norm=True), "use_gemma_norm=True.*not yet supported"),
    (z_lab(swiglu_limit=7.0), "swiglu_limit=7.*not yet supported"),
    (z_lab(quantization_config={"quant_method": "quark"}), "quant_method='quark'.*others are not served"),
    (z_lab(dflash={"use_swa": True}), "dflash_config.swa_window_size is missing"),
    (z_lab(dflash={"block_size": 1}), "dflash_config.block_size=1 must be an integer from 2"),
    (z_lab(dflash={"output_multiplier": "2"}), "dflash_config.output_multiplier='2' must be a number"),
    (z_lab(mlp_bias=True), "mlp_bias=True.*not yet supported"),
    (z_lab(layer_types=["full_attention", "chunked_attention"]), "sliding_attention in every entry"),
    (z_lab(**SLIDING | {"sliding_window": None}), "sliding_window is missing"),
    (z_lab(num_hidden_layers=0), "num_hidden_layers=0 must be a positive integer"),
    (z_lab(num_attention_heads=0), "num_attention_heads=0 must be a positive integer"),
    (z_lab(head_dim=7), "head_dim=7 must be even"),
    (z_lab(hidden_size=True), "hidden_size=True must be a positive integer"),
    (z_lab(rope_scaling={"type": "dynamic"}), "rope_scaling.type='dynamic' must be one of"),
    (speculators(layer={"num_key_value_heads": 3}), "transformer_layer_config.num_key_value_heads=3"),
    (speculators(layer={"vocab_size": None}), "transformer_layer_config.vocab_size is missing"),
    (speculators(mask_token_id=None), "mask_token_id is missing; it must be an integer"),
    (z_lab(dflash={"lilicorr_num_layers": 2}), "lilicorr_num_layers=2 must be absent: LiLi"),
    (z_lab(dflash={"attention_sink_bias": 1}), "attention_sink_bias=1 must be true or false"),
    (z_lab(hidden_act="gelu"), "hidden_act"),
    (z_lab(block_size=None), "block_size is missing"),
    (z_lab(block_size=1), "block_size=1"),
    (z_lab(dflash={"mask_token_id": None}), "dflash_config.mask_token_id is missing"),
    (z_lab(dflash={"target_layer_ids": []}), "target_layer_ids"),
    (z_lab(dflash={"target_layer_ids": "1,2"}), "target_layer_ids.*list of integers"),
    (z_lab(dflash_config=3) | {"dflash_config": 3}, "dflash_config=3 must be an object"),
    (z_lab(layer_types=["full_attention"]), "layer_types"),
    (z_lab(num_key_value_heads=3), "num_key_value_heads"),
    (speculators(speculators_model_type="xpress"), "speculators_model_type='xpress' must be"),
    (speculators(projector_type="domino"), "projector_type='domino'.*Domino's GRU"),
    (speculators(markov_rank=6), "markov_rank=6 must be absent, or speculators_model_type 'dspark'"),
    (speculators(draft_ffn_type="moe"), "draft_ffn_type='moe'.*not yet supported"),
    (speculators(**SECOND, draft_vocab_size=40), "draft_vocab_size=40 must be vocab_size"),
    (speculators(draft_vocab_size=VOCAB + 1), "draft_vocab_size"),
    (speculators(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids is missing"),
    (sglang(residual_scale=0.5), "residual_scale=0.5 must be absent or false"),
    (eagle3_speculators(residual_scale=0.5), "residual_scale=0.5 must be absent or false"),
    (sglang(eagle_config={"tap_norms": True}), "eagle_config.tap_norms=True must be absent or false"),
    (eagle3_speculators(eagle_aux_hidden_state_layer_ids=[1, 1, 3]), r"ids=\[1, 1, 3\].*all different"),
    (sglang(num_hidden_layers=2), "num_hidden_layers=2 must be 1"),
    (eagle3_speculators(fc_norm=True), "fc_norm=True.*not yet supported"),
    (sglang(eagle_config={"parallel_draft_step": 2}), "eagle_config.parallel_draft_step=2 must be 1"),
    (sglang(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state"),
    (sglang(draft_vocab_size=129), "draft_vocab_size.*at most vocab_size"),
    # Sizes and taps of another target.
    (z_lab(hidden_size=64, num_attention_heads=8), "hidden_size=64 must be the target's hidden_size 32"),
    (z_lab(dflash={"target_layer_ids": [1, 3, 6]}), r"target_layer_ids=\[1, 3, 6\].*from 0 to 5"),
    (speculators(aux_hidden_state_layer_ids=[0, 3, 4]), r"ids=\[0, 3, 4\].*from 1 to 6"),
    (speculators(target_hidden_size=48), "target_hidden_size=48"),
    (z_lab(vocab_size=200), "vocab_size=200 must be the target's vocab_size 96"),
    (z_lab(num_target_layers=36), "num_target_layers=36"),
    (z_lab(dflash={"mask_token_id": VOCAB}), "mask_token_id=96 must be below"),
    (sglang(eagle_config=TAPS), "eagle_aux_hidden_state_layer_ids.*target that has 4"),
    (sglang(vocab_size=200), "vocab_size=200.*128"),
    (sglang(hidden_size=32), "target_hidden_size=32.*64"),
]


# Classes in vLLM 0.33's registry, and one that nobody knows.
OTHER_CLASSES = {
    "Qwen3XPressModel": "XPress's refiner",
    "DFlash2BeamDraftModel": "beams over",
    "DFlashLagunaForCausalLM": "DFlash drafters of this class",
    "MedusaModel": "Medusa's heads",
    "MLPSpeculatorPreTrainedModel": "MLP speculators",
    "PeagleLlamaForCausalLM": "P-EAGLE",
    "PEagleDraftModel": "P-EAGLE",
    "Eagle3Qwen3ForCausalLM": "EAGLE-3 drafters of this class",
    "EagleLlamaForCausalLM": "EAGLE-1 and EAGLE-2",
    "K3DSparkModel": "DSpark drafters of this class",
    "Qwen3NextMTP": 'need no model: method="mtp"',
    "DeepSeekMTPModel": 'need no model: method="mtp"',
    "Qwen3ForCausalLM": "a whole language model, a target",
    "Gemma3ForConditionalGeneration": "a whole language model, a target",
    "FlashMapDraftModel": "drafters of this class are not known",
}


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
@pytest.mark.parametrize("name", OTHER_CLASSES)
def test_a_drafter_of_another_class_is_refused_as_what_it_is(method: str, name: str, tmp_path: Path) -> None:
    """With method="dflash" only EAGLE-3's classes are sent to method="eagle3"."""
    (tmp_path / "config.json").write_text(json.dumps(z_lab(architectures=[name])))
    with pytest.raises(CheckpointError, match=OTHER_CLASSES[name]) as caught:
        if method == "eagle3":
            check_eagle3(tmp_path, CHAINS)
        else:
            check_drafter(tmp_path, BLOCKS)
    assert name in caught.value.message and 'method="eagle3"' not in caught.value.message


@pytest.mark.parametrize(("config", "words"), REFUSED)
def test_unusable_files_are_refused_by_name(config: Config, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words) as caught:
        check(tmp_path, config)
    assert str(tmp_path) in caught.value.message


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (z_lab(), "architectures=.*LlamaForCausalLMEagle3"),
        (eagle3_speculators(speculators_model_type="dflash"), "speculators_model_type='dflash'.*'eagle3'"),
    ],
)
def test_other_kinds_are_refused_as_eagle3(config: Config, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        check_eagle3(write_drafter(tmp_path, config), CHAINS)


Q_PROJ = "midlayer.self_attn.q_proj.weight"
# A drafter, a tensor, its shape (None: it is missing), and words.
TENSORS: list[tuple[Config, str, tuple[int, ...] | None, str]] = [
    (z_lab(), "layers.1.mlp.up_proj.weight", None, "layers.1.mlp.up_proj.weight is missing"),
    (z_lab(), "fc.weight", (HIDDEN, 2 * HIDDEN), r"fc.weight has shape \[32, 64\].*\[32, 96\]"),
    (sglang(), "d2t", None, "tensor d2t is missing"),
    (sglang(), "lm_head.weight", None, "tensor lm_head.weight is missing"),
    (sglang(), "midlayer.hidden_norm.weight", None, "hidden_norm.weight is missing"),
    (sglang(), Q_PROJ, (64, 64), r"q_proj.weight has shape \[64, 64\]"),
    (sglang(), "fc.weight", (64, 64), r"fc.weight has shape \[64, 64\]"),
]


@pytest.mark.parametrize(("config", "name", "shape", "words"), TENSORS)
def test_missing_and_misshapen_tensors_are_named(
    config: Config, name: str, shape: tuple[int, ...] | None, words: str, tmp_path: Path
) -> None:
    tensors = drafter_tensors(config)
    del tensors[name]
    if shape is not None:
        tensors[name] = torch.zeros(shape)
    write_drafter(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=words):
        check(tmp_path, config)


@pytest.mark.parametrize("config", [speculators(draft_vocab_size=40), sglang()], ids=["dflash", "eagle3"])
def test_a_vocabulary_map_must_map_to_the_targets_vocabulary(config: Config, tmp_path: Path) -> None:
    tensors = drafter_tensors(config)
    tensors["d2t"] = torch.full(tensors["d2t"].shape, 100)
    write_drafter(tmp_path, config, tensors)
    load, facts = (load_eagle3, CHAINS) if is_eagle3(config) else (load_drafter, BLOCKS)
    rows = torch.zeros(facts.vocab_size, facts.hidden_size)
    with pytest.raises(CheckpointError, match="d2t must map each draft token"):
        load(tmp_path, facts, EmbeddingCopies(rows, Linear(rows)), torch.float32, "cpu")
