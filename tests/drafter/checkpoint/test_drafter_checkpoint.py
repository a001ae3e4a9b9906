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
    HEADS,
    HIDDEN,
    SLIDING,
    TARGET_LAYERS,
    VOCAB,
    deepspec,
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


OFF = ("attention_sink_bias", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
NEUTRAL = dict.fromkeys((*OFF, "lilicorr_depth"), False) | {"attention_value_scale": 1.0}
NULL = dict.fromkeys((*NEUTRAL, "block_size", "causal", "use_swa", "final_logit_softcapping"))
TRAINING = {"num_anchors": 512, "loss_decay_gamma": 7.0, "ce_loss_alpha": 1.0, "warmup_ratio": 0.04}
# What pydantic writes of Speculators' own class where nothing was set.
DEFAULTS = {
    **{
        "pure_draft_prefix_len": 1,
        "emb_dim": 256,
        "gru_hidden_dim": 1024,
        "auf": False,
        "shift_label": False,
    },
    **{"lambda_base_start": 1.0, "lambda_base_decay_ratio": 1.0},
    **{"speculators_version": "0.5.0", "transformers_version": "5.15.0"},
}
KINDS = {"layer_types": SLIDING["layer_types"]}
# Files that mean the same: absent, null and neutral keys, notes of training, windows at either level.
SAME = [
    (z_lab(), z_lab(dflash=NEUTRAL, mlp_bias=False, hidden_act=None)),
    (z_lab(), z_lab(dflash=NULL, architectures=None)),
    (z_lab(), z_lab(dflash={"final_logit_softcapping": 0})),
    (z_lab(), z_lab(**TRAINING)),
    (z_lab(), z_lab(dflash=TRAINING)),
    (checkpoints.assistant(), checkpoints.assistant(**TRAINING)),
    (speculators(), speculators(**TRAINING, **DEFAULTS, layer=TRAINING)),
    (speculators(layer=SLIDING), speculators(**SLIDING)),
    (speculators(layer=SLIDING), speculators(**SLIDING, layer=SLIDING)),
    (speculators(layer=SLIDING), speculators(sliding_window=9, layer=KINDS)),
]


@pytest.mark.parametrize(("plain", "other"), SAME)
def test_keys_without_effect_are_accepted_in_every_format(plain: dict, other: dict, tmp_path: Path):
    assert read(tmp_path, other) == read(tmp_path, plain)


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
    outside = ("../other.safetensors", str(tmp_path / "other.safetensors"), "x/../../other.safetensors")
    for name in (*outside, "../blobs/0123", "a\0.safetensors", 7):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
        with pytest.raises(CheckpointError, match="does not name a file in its own folder"):
            check_drafter(folder, FACTS)


def test_a_mask_embedding_of_the_wrong_size_is_refused(tmp_path: Path):
    checkpoints.write_drafter(tmp_path, z_lab(), mask_embedding=torch.zeros(HIDDEN + 1))
    shared_embeddings = EmbeddingCopies(torch.zeros(VOCAB, HIDDEN), Linear(torch.zeros(VOCAB, HIDDEN)))
    with pytest.raises(CheckpointError, match=r"mask_embedding.pt must hold one vector of hidden_size 32"):
        load_drafter(tmp_path, FACTS, shared_embeddings, torch.float32, "cpu")
