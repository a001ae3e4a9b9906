"""Drafter checkpoints: what both formats mean, and what is refused before anything loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from manta.cluster.errors import CheckpointError
from manta.drafter.compute.checkpoint.safetensors_reader import TensorFolder
from manta.drafter.compute.layers.linear import Linear
from manta.drafter.dflash.checkpoint import check_drafter, load_drafter
from manta.drafter.dflash.config import DrafterConfig, MarkovSize
from manta.drafter.dflash.target_features import EmbeddingCopies, TargetFacts
from manta.drafter.drafter_spec import DraftLayer
from safetensors.torch import save_file
from support.checkpoints import drafters as checkpoints
from support.checkpoints.drafters import (
    BACKBONE,
    HEADS,
    HIDDEN,
    SECOND,
    SLIDING,
    TARGET_LAYERS,
    VOCAB,
    deepspec,
    deepspec_gemma4,
    dspark_speculators,
    specforge,
    speculators,
    z_lab,
)

FACTS = TargetFacts(hidden_size=HIDDEN, num_layers=TARGET_LAYERS, vocab_size=VOCAB, max_model_len=64)


def read(folder: Path, config: dict) -> DrafterConfig:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return DrafterConfig.load(folder)


FULL, CAUSAL = DraftLayer(False, None), DraftLayer(True, None)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (z_lab(), (FULL, FULL)),
        (z_lab(**SLIDING), (DraftLayer(True, 9), FULL)),
        (z_lab(**SLIDING, is_causal=False), (DraftLayer(False, 9), FULL)),
        (z_lab(**SLIDING, is_causal=True), (DraftLayer(True, 9), CAUSAL)),
        (z_lab(**SLIDING, is_causal=False, dflash={"causal": True}), (DraftLayer(False, 9), FULL)),
        (z_lab(**SLIDING, dflash={"causal": False}), (DraftLayer(False, 9), FULL)),
        (z_lab(dflash={"causal": True}), (CAUSAL, CAUSAL)),
        (z_lab(dflash={"use_swa": True, "swa_window_size": 4}), (DraftLayer(False, 4),) * 2),
        (
            z_lab(layer_types=["sliding_attention"], dflash={"use_swa": True, "swa_window_size": 4}),
            (DraftLayer(False, 4),) * 2,
        ),
        (z_lab(layer_types=[], sliding_window=9), (FULL, FULL)),
        (speculators(layer=SLIDING), (DraftLayer(True, 9), FULL)),
        (speculators(layer=SLIDING, sliding_window_non_causal=True), (DraftLayer(False, 9), FULL)),
    ],
)
def test_masks_follow_the_published_order_of_keys(config: dict, layers: tuple, tmp_path: Path):
    assert read(tmp_path, config).layers == layers


def test_both_formats_name_the_same_taps(tmp_path: Path):
    ours, theirs = read(tmp_path / "z", z_lab()), read(tmp_path / "s", speculators())
    assert ours.target_layer_ids == theirs.target_layer_ids == (1, 3, 4)
    assert (ours.layout, theirs.layout) == ("z-lab", "speculators")


def test_all_formats_of_dspark_mean_the_same(tmp_path: Path):
    theirs = read(tmp_path / "deepspec", deepspec())
    heads = {key: specforge()["dflash_config"][key] for key in HEADS}
    bare = z_lab(dflash={"projector_type": "dspark"})["dflash_config"]
    outside = {**specforge(**heads), "dflash_config": bare}
    deepspecs_class = specforge(architectures=["Qwen3DSparkModel"])
    read_others = {
        "specforge": read(tmp_path / "a", specforge()),
        "heads at the top": read(tmp_path / "b", outside),
        "DeepSpec's class, SpecForge's keys": read(tmp_path / "c", deepspecs_class),
        "z-lab's class": read(tmp_path / "d", specforge(architectures=["DFlashDraftModel"])),
        "speculators": read(tmp_path / "e", dspark_speculators()),
    }
    assert (theirs.max_drafts, theirs.markov, theirs.confidence_head) == (
        15,
        MarkovSize(6, 64),
        "hidden and token before",
    )
    same = {"layout": "", "file": "", "num_target_layers": None, "input_embedding_scale": 1.0}
    for other in read_others.values():
        assert replace(other, **same) == replace(theirs, **same)
    assert read(tmp_path / "f", dspark_speculators(sample_from_anchor=False, block_size=16)).max_drafts == 15


def test_a_nested_block_size_takes_precedence(tmp_path: Path):
    assert read(tmp_path, z_lab(block_size=16, dflash={"block_size": 8})).block_size == 8
    assert read(tmp_path, z_lab(block_size=10)).max_drafts == 9


def test_absent_null_or_neutral_keys_are_accepted(tmp_path: Path):
    keys = ("attention_sink_bias", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    plain = read(tmp_path, z_lab())
    neutral = dict.fromkeys((*keys, "lilicorr_depth"), False) | {"attention_value_scale": 1.0}
    null = dict.fromkeys((*neutral, "block_size", "causal", "use_swa", "final_logit_softcapping"))
    assert read(tmp_path, z_lab(dflash=neutral, mlp_bias=False, hidden_act=None)) == plain
    assert read(tmp_path, z_lab(dflash=null, architectures=None)) == plain
    assert read(tmp_path, z_lab(dflash={"final_logit_softcapping": 0})).logit_softcap is None


TRAINING = {"num_anchors": 512, "loss_decay_gamma": 7.0, "ce_loss_alpha": 1.0, "warmup_ratio": 0.04}
# What pydantic writes of Speculators' own class where nothing was set.
DEFAULTS = {
    "pure_draft_prefix_len": 1,
    "emb_dim": 256,
    "gru_hidden_dim": 1024,
    "lambda_base_start": 1.0,
    "lambda_base_decay_ratio": 1.0,
    "auf": False,
    "shift_label": False,
    "speculators_version": "0.5.0",
    "transformers_version": "5.15.0",
}


@pytest.mark.parametrize(
    ("plain", "noted"),
    [
        (z_lab(), z_lab(**TRAINING)),
        (z_lab(), z_lab(dflash=TRAINING)),
        (checkpoints.assistant(), checkpoints.assistant(**TRAINING)),
        (speculators(), speculators(**TRAINING, **DEFAULTS, layer=TRAINING)),
    ],
)
def test_training_notes_are_accepted_in_every_format(plain: dict, noted: dict, tmp_path: Path):
    assert read(tmp_path, noted) == read(tmp_path, plain)


def test_no_key_of_transformers_configs_is_refused():
    transformers = pytest.importorskip("transformers")
    from manta.drafter.dflash.config_parts import Backbone

    raw = {
        key: 1 for name in ("Qwen3", "Llama") for key in getattr(transformers, f"{name}Config")().to_dict()
    }
    assert Backbone._is_understood(raw) == raw


SCALES = {
    "input_embedding_scale": 5.5,
    "output_multiplier": 0.4,
    "final_logit_softcapping": 3.0,
    "attention_value_scale": 0.612,
    "attention_sink_bias": True,
}


@pytest.mark.parametrize(
    ("plain", "scaled"),
    [
        (z_lab(), z_lab(dflash=SCALES)),
        (speculators(), speculators(**SCALES)),
        (checkpoints.assistant(), checkpoints.assistant(**SCALES)),
    ],
)
def test_scales_mean_the_same_in_all_formats(plain: dict, scaled: dict, tmp_path: Path):
    scales = {"input_embedding_scale": 5.5, "output_multiplier": 0.4, "logit_softcap": 3.0}
    sinks = {"attention_value_scale": 0.612, "attention_sinks": True}
    assert read(tmp_path, scaled) == replace(read(tmp_path, plain), **scales, **sinks)


def test_speculators_windows_may_be_at_the_top_level(tmp_path: Path):
    inside = read(tmp_path, speculators(layer=SLIDING))
    assert inside.layers == (DraftLayer(True, 9), FULL)
    assert read(tmp_path, speculators(**SLIDING)) == inside
    assert read(tmp_path, speculators(**SLIDING, layer=SLIDING)) == inside
    assert (
        read(tmp_path, speculators(sliding_window=9, layer={"layer_types": SLIDING["layer_types"]})) == inside
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (z_lab(projector_type="mlp"), "projector_type='mlp' must be absent or false.*set it to null"),
        (z_lab(output_multiplier=0.4), "output_multiplier=0.4 must be absent or false"),
        (z_lab(residual_scale=0.5), "residual_scale=0.5 must be absent or false"),
        (checkpoints.assistant(residual_scale=0.5), "residual_scale=0.5 must be absent or false"),
        (speculators(norm_before_fc=True), "norm_before_fc=True must be absent or false"),
        (speculators(residual_scale=0.5), "residual_scale=0.5 must be absent or false"),
        (speculators(rope_theta=5.0), "rope_theta=5.0 must be absent or false"),
        (speculators(layer={"residual_scale": 0.5}), "transformer_layer_config.residual_scale=0.5"),
        (
            speculators(sliding_window=5, layer=SLIDING),
            "sliding_window=5 must be absent, or .*: 9",
        ),
        (z_lab(dflash={"target_layer_ids": [1, 3, 3]}), r"target_layer_ids=\[1, 3, 3\].*all different"),
        (speculators(aux_hidden_state_layer_ids=[2, 2, 5]), r"ids=\[2, 2, 5\].*all different"),
        (checkpoints.assistant(target_layer_ids=[1, 1, 2]), r"ids=\[1, 1, 2\].*all different"),
        (z_lab(architectures=["DFlash2DraftModel"]), "conv_kernel_size is missing.*for DFlash2DraftModel"),
        (z_lab(architectures=["DFlashDraftModel", "DFlash2DraftModel"]), "architectures=.*must be one of"),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "architectures=.*Eagle3.*are run with method="),
        (BACKBONE, "dflash_config is missing; it must be an object"),
        (z_lab(dflash={"selector_top_k": 16}), "dflash_config.selector_rank is missing; it must be given"),
        (z_lab(dflash={"conv_kernel_size": 2}), "dflash_config.conv_group_size is missing; it must be given"),
        (
            z_lab(dflash={**SECOND, "conv_group_size": 5}),
            "conv_group_size=5 must be a divisor of hidden_size",
        ),
        (z_lab(dflash={**SECOND, "selector_top_k": 97}), "dflash_config.selector_top_k=97 must be at most"),
        (z_lab(draft_vocab_size=40, dflash=SECOND), "draft_vocab_size=40 must be vocab_size .*selector_rank"),
        (z_lab(dflash={"refiner_steps": 3}), "dflash_config.refiner_steps=3 must be absent or false"),
        (
            z_lab(dflash={"projector_type": "domino"}),
            "projector_type='domino'.*Domino's GRU over",
        ),
        (
            z_lab(dflash={"projector_type": "mlp"}),
            "projector_type='mlp' must be 'dflash' or 'dspark'",
        ),
        (
            z_lab(architectures=["DominoDraftModel"]),
            "architectures=.*one of.*Domino's GRU over",
        ),
        (z_lab(architectures=["LiLiCorrDraftModel"]), "architectures=.*LiLiCorr's transformer"),
        (z_lab(architectures=["Gemma4AssistantForCausalLM"]), "architectures=.*run with method=.mtp"),
        (
            deepspec_gemma4(layer_types=["sliding_attention", "full_attention"]),
            "layer_types=.*full_attention in every entry",
        ),
        (deepspec_gemma4(hidden_activation="silu"), "hidden_activation='silu' must be 'gelu_pytorch_tanh'"),
        (deepspec_gemma4(enable_moe_block=True), "enable_moe_block=True must be absent or false"),
        (
            z_lab(dflash={"causal": False, "causal_head": True}),
            "causal_head=True must be absent, or as",
        ),
        (
            z_lab(dflash={"target_hidden_size": 48}),
            "target_hidden_size=48 must be hidden_size",
        ),
        (z_lab(dflash={"markov_rank": 6}), "dflash_config.markov_rank=6 must be absent, or arch"),
        (deepspec(markov_head_type="rnn"), "markov_head_type='rnn' must be 'vanilla'.*gated, rnn"),
        (deepspec(markov_rank=0), "markov_rank=0 must be positive, for confidence_head_with_markov"),
        (deepspec(target_layer_ids=[1, 1, 2]), r"target_layer_ids=\[1, 1, 2\].*all different"),
        (specforge(dflash={"markov_head_type": "gated"}), "dflash_config.markov_head_type='gated' must be"),
        (specforge(markov_rank=8), "markov_rank=8 must be absent, or as dflash_config.markov_rank: 6"),
        (
            specforge(dflash={"selector_rank": 4, "selector_top_k": 4}),
            "selector_rank=4 must be absent",
        ),
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
        (
            z_lab(dflash={"lilicorr_num_layers": 2}),
            "lilicorr_num_layers=2 must be absent: LiLi",
        ),
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
    ],
)
def test_unusable_files_are_refused_by_name(config: dict, words: str, tmp_path: Path):
    with pytest.raises(CheckpointError, match=words) as caught:
        read(tmp_path, config)
    assert str(tmp_path) in caught.value.message


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (z_lab(hidden_size=64, num_attention_heads=8), "hidden_size=64 must be the target's hidden_size 32"),
        (z_lab(dflash={"target_layer_ids": [1, 3, 6]}), r"target_layer_ids=\[1, 3, 6\].*from 0 to 5"),
        (speculators(aux_hidden_state_layer_ids=[0, 3, 4]), r"ids=\[0, 3, 4\].*from 1 to 6"),
        (speculators(target_hidden_size=48), "target_hidden_size=48"),
        (z_lab(vocab_size=200), "vocab_size=200 must be the target's vocab_size 96"),
        (z_lab(num_target_layers=36), "num_target_layers=36"),
        (z_lab(dflash={"mask_token_id": VOCAB}), "mask_token_id=96 must be below"),
    ],
)
def test_a_drafter_for_another_target_is_refused_before_weights_are_read(
    config: dict, words: str, tmp_path: Path
):
    read(tmp_path, config)  # no weights in the folder at all
    with pytest.raises(CheckpointError, match=words):
        check_drafter(tmp_path, FACTS)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path):
    tensors = checkpoints.drafter_tensors(z_lab())
    missing = {k: v for k, v in tensors.items() if k != "layers.1.mlp.up_proj.weight"}
    checkpoints.write_drafter(tmp_path / "a", z_lab(), missing)
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.up_proj.weight is missing"):
        check_drafter(tmp_path / "a", FACTS)
    narrow = tensors | {"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}
    checkpoints.write_drafter(tmp_path / "b", z_lab(), narrow)
    with pytest.raises(CheckpointError, match=r"fc.weight has shape \[32, 64\].*\[32, 96\]"):
        check_drafter(tmp_path / "b", FACTS)


def test_corrupt_truncated_and_absent_files_are_named(tmp_path: Path):
    folder = checkpoints.write_drafter(tmp_path, z_lab())
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for broken in (whole[: len(whole) // 2], b"not safetensors", b""):
        file.write_bytes(broken)
        with pytest.raises(CheckpointError, match=r"model.safetensors is corrupt or cut short"):
            check_drafter(folder, FACTS)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        check_drafter(folder, FACTS)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json cannot be read as JSON"):
        check_drafter(folder, FACTS)
    with pytest.raises(CheckpointError, match="does not exist"):
        DrafterConfig.load(tmp_path / "nowhere")


def test_shards_are_read_through_their_index(tmp_path: Path):
    tensors = checkpoints.drafter_tensors(z_lab())
    folder = checkpoints.write_drafter(tmp_path, z_lab(), tensors)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, members in shards.items():
        save_file({n: tensors[n] for n in members}, folder / file)
    index = {"weight_map": {n: file for file, members in shards.items() for n in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    opened = TensorFolder(folder)
    assert all(torch.equal(opened.get(n), tensors[n]) for n in names)
    assert torch.equal(opened.slice("fc.weight", slice(2, 5)), tensors["fc.weight"][2:5])
    assert torch.equal(opened.slice("fc.weight", slice(2, 5), dim=1), tensors["fc.weight"][:, 2:5])
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b.safetensors is missing although the index names it"):
        check_drafter(folder, FACTS)


def test_an_index_names_files_of_its_own_folder_which_may_be_links(tmp_path: Path):
    tensors = checkpoints.drafter_tensors(z_lab())
    folder = checkpoints.write_drafter(tmp_path / "snapshot", z_lab(), tensors)
    index = folder / "model.safetensors.index.json"
    blob = tmp_path / "blobs/0123"
    blob.parent.mkdir()
    (folder / "model.safetensors").rename(blob)
    shard = "model-00001-of-00001.safetensors"
    (folder / shard).symlink_to(blob)  # as in the hub's cache
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, shard)}))
    assert TensorFolder(folder).shapes.keys() == tensors.keys()
    (tmp_path / "other.safetensors").write_bytes(blob.read_bytes())
    outside = str(tmp_path / "other.safetensors")
    for name in (
        "../other.safetensors",
        outside,
        "../blobs/0123",
        "x/../../other.safetensors",
        "a\0.safetensors",
        7,
    ):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
        with pytest.raises(CheckpointError, match="does not name a file in its own folder"):
            check_drafter(folder, FACTS)


def test_a_vocabulary_map_must_map_to_the_targets_vocabulary(tmp_path: Path):
    config = speculators(draft_vocab_size=40)
    tensors = checkpoints.drafter_tensors(config)
    tensors["d2t"] = torch.full((40,), VOCAB)
    checkpoints.write_drafter(tmp_path, config, tensors)
    shared_embeddings = EmbeddingCopies(torch.zeros(VOCAB, HIDDEN), Linear(torch.zeros(VOCAB, HIDDEN)))
    with pytest.raises(CheckpointError, match="d2t"):
        load_drafter(tmp_path, FACTS, shared_embeddings, torch.float32, "cpu")


def test_a_mask_embedding_of_the_wrong_size_is_refused(tmp_path: Path):
    checkpoints.write_drafter(tmp_path, z_lab(), mask_embedding=torch.zeros(HIDDEN + 1))
    shared_embeddings = EmbeddingCopies(torch.zeros(VOCAB, HIDDEN), Linear(torch.zeros(VOCAB, HIDDEN)))
    with pytest.raises(CheckpointError, match=r"mask_embedding.pt must hold one vector of hidden_size 32"):
        load_drafter(tmp_path, FACTS, shared_embeddings, torch.float32, "cpu")
