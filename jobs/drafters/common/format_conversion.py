"""Converts a drafter between z-lab's and Speculators' format. Weights are copied bit by bit.

The result is read again: every field of `DrafterConfig` must have the same meaning and every tensor the same
bits, else the output is removed. A setting that the other format cannot express is thus refused by name.
Called by `jobs/drafters/cli.py`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file

from ....actors.checkpoints.checkpoint_paths import resolve_checkpoint
from ....actors.targets.families import read_model
from ....actors.targets.model.model_spec import ModelSpec
from ....cluster.errors import CheckpointError, ConfigError
from ....drafter.compute.checkpoint.hf_config import Json, read_json
from ....drafter.compute.checkpoint.safetensors_reader import TensorFolder
from ....drafter.compute.layers.rope import RopeConfig
from ....drafter.dflash.checkpoint import check_drafter, named_as_ours
from ....drafter.dflash.config import DrafterConfig
from ....drafter.dflash.target_features import TargetFacts
from ....drafter.drafter_spec import DrafterShape
from .drafter_files import SMALL_FILES

Format = Literal["z-lab", "speculators", "gguf"]
# Fields that may differ: the location, and facts of the target that only one format repeats.
_NOT_COMPARED = ("file", "layout", "num_target_layers", "target_hidden_size", "quantization")
# Keys that are written for the new format; all others are copied.
_OF_WRAPPING = (
    "architectures",
    "auto_map",
    "block_size",
    "dflash_config",
    "draft_vocab_size",
    "is_causal",
    "mask_token_id",
    "model_type",
    "num_target_layers",
    "target_layer_ids",
)
_Written = dict[str, Any]  # Any: JSON values


def convert_drafter(name: str, target_name: str, to: Format, output: Path) -> None:
    """Write drafter `name` in format `to`; ConfigError for a setting that the format cannot express."""
    if output.exists():
        raise ConfigError(f"output={str(output)!r} exists already: give a new folder.", param="output")
    target = read_model(resolve_checkpoint(target_name, field="target", files=SMALL_FILES))
    folder = resolve_checkpoint(name, field="drafter")
    facts = TargetFacts(target.hidden_size, target.num_layers, target.vocab_size, 0, target.embed_scale)
    config, raw = check_drafter(folder, facts), read_json(folder, param="drafter")
    if config.quantization is not None:
        raise ConfigError(
            f"drafter={name!r} is quantized ({config.quantization}): convert the unquantized drafter. Manta "
            "reads this one directly.",
            param="drafter",
        )
    if config.samples_anchor or config.markov is not None:
        raise ConfigError(
            f"drafter={name!r} has DSpark's heads or an anchor that predicts, which are not converted. Manta "
            "reads it directly.",
            param="drafter",
        )
    if to == "speculators":
        written = _as_speculators(config, raw, target, target_name)
    else:
        written = as_z_lab(config, raw, target)
    output.mkdir(parents=True)
    try:
        _write(folder, written, output)
        if config.mask_embedding:
            shutil.copyfile(folder / "mask_embedding.pt", output / "mask_embedding.pt")
        check_same(config, check_drafter(output, facts), facts.embed_scale, to)
        _check_bits(TensorFolder(folder), TensorFolder(output))
    except BaseException:
        shutil.rmtree(output)
        raise


def _as_speculators(config: DrafterConfig, raw: Json, target: ModelSpec, target_name: str) -> _Written:
    second = config.convolutions is not None and config.selector is not None
    return {
        "speculators_model_type": "dflash2" if second else "dflash",
        "architectures": ["DFlash2Speculator" if second else "DFlashSpeculator"],
        "transformer_layer_config": _backbone(config, raw),
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        # Speculators names the layer before which the hidden state is captured, we the layer after which.
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "target_hidden_size": target.hidden_size,
        "sliding_window_non_causal": not any(layer.causal for layer in config.layers),
        **_dflash2_keys(config),
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.max_drafts}],
            "verifier": {"name_or_path": target_name, "architectures": [target.architecture]},
        },
    }


def as_z_lab(config: DrafterConfig, raw: Json, target: ModelSpec) -> _Written:
    """Return the config.json in z-lab's format; keys of `raw` without a field are kept."""
    second = config.convolutions is not None and config.selector is not None
    kinds = {layer.causal for layer in config.layers}
    factor = config.input_embedding_scale
    scales: _Written = {
        "attention_sink_bias": config.attention_sinks,
        "attention_value_scale": config.attention_value_scale,
        "output_multiplier": config.output_multiplier,
        "final_logit_softcapping": config.logit_softcap,
    }
    dflash = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        **_dflash2_keys(config),
        **{key: value for key, value in scales.items() if value not in (None, False, 1.0)},
    }
    if factor is not None and factor != target.embed_scale:  # an absent key means the target's
        dflash["input_embedding_scale"] = factor
    written = {
        **_backbone(config, raw),
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "block_size": config.block_size,
        "num_target_layers": target.num_layers,
        "dflash_config": dflash,
    }
    if config.maps_vocabulary:
        written["draft_vocab_size"] = config.draft_vocab_size
    if len(kinds) == 1:  # else the key is left out: causality follows the window
        written["is_causal"] = kinds.pop()
    return written


def _backbone(config: DrafterConfig, raw: Json) -> _Written:
    """Return the keys of the Qwen3 layers, with windows and sizes resolved from defaults and other keys."""
    nested = raw.get("transformer_layer_config", raw)
    windows = [layer.window for layer in config.layers]
    kept = {key: value for key, value in nested.items() if key not in _OF_WRAPPING}
    return kept | {
        "model_type": "qwen3",
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        "sliding_window": next((window for window in windows if window is not None), None),
    }


def _dflash2_keys(config: DrafterConfig) -> _Written:
    keys: _Written = {}
    if (conv := config.convolutions) is not None:
        keys |= {"conv_kernel_size": conv.num_taps, "conv_group_size": conv.group_size}
    if (selector := config.selector) is not None:
        keys |= {"selector_rank": selector.rank, "selector_top_k": selector.top_k}
    return keys


def _write(folder: Path, config: _Written, output: Path) -> None:
    source = TensorFolder(folder)
    tensors = {named_as_ours(name): source.get(name) for name in source.shapes}
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    (output / "model.safetensors").chmod(0o644)
    text = json.dumps(config, indent=2, sort_keys=True)
    (output / "config.json").write_text(text + "\n", encoding="utf-8")
    if (card := folder / "README.md").is_file():
        shutil.copyfile(card, output / card.name)


def check_same(one: DrafterShape, other: DrafterShape, embed_scale: float, to: Format) -> None:
    """Raise ConfigError for the first setting that the new drafter does not have as the old one has it."""
    for field in dataclasses.fields(one):
        was, now = (_comparable(config, field.name, embed_scale) for config in (one, other))
        if field.name not in _NOT_COMPARED and was != now:
            was, now = (getattr(config, field.name) for config in (one, other))
            raise ConfigError(
                f"to={to}: this format cannot express {field.name}={was} (it would read as {now}). Keep the "
                "drafter in its format, which Manta reads directly.",
                param="to",
            )


def _comparable(config: DrafterShape, field: str, embed_scale: float) -> object:
    """Return a setting's effect, in the precision of GGUF; None as a scale means the target's."""
    value = getattr(config, field)
    if field == "input_embedding_scale" and value is None:
        value = embed_scale
    if isinstance(value, RopeConfig):
        numbers = (*value.frequencies().tolist(), *value.scales().tolist(), value.score_scale)
        return value.rotary_dim, value.interleaved, [f"{number:.5g}" for number in numbers]
    return float(np.float32(value)) if isinstance(value, float) else value


def _check_bits(one: TensorFolder, other: TensorFolder) -> None:
    for name in one.shapes:
        was, now = one.get(name), other.get(named_as_ours(name))
        same = was.dtype == now.dtype and torch.equal(was.view(torch.uint8), now.view(torch.uint8))
        if not same:
            raise CheckpointError(f"{other.folder}: {name} differs after writing; check the disk.")
