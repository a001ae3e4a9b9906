"""Converts a drafter to a GGUF file that llama.cpp runs.

    folder ─▶ Conversion: config.json, tensors, notes ─▶ drafter_writer ─▶ file ─▶ read again and compared

llama.cpp runs less than Manta. Where it needs another form of the same drafter, the conversion has that
form, and a note where fewer drafts may be accepted. What it cannot run is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....actors.checkpoints.checkpoint_paths import resolve_checkpoint
from ....actors.checkpoints.gguf_vocabulary import read_vocabulary
from ....actors.targets.families import read_model
from ....actors.targets.model.model_spec import ModelSpec
from ....cluster.errors import CheckpointError, ConfigError
from ....drafter.compute.checkpoint.gguf.drafter_writer import Value, write_drafter
from ....drafter.compute.checkpoint.hf_config import Json, read_json
from ....drafter.compute.checkpoint.loading.quantized_tensors import open_folder
from ....drafter.compute.checkpoint.safetensors_reader import TensorFolder
from ....drafter.compute.layers.rope import RopeConfig
from ....drafter.dflash.checkpoint import check_drafter, named_as_ours
from ....drafter.dflash.config import ConvolutionSize, DrafterConfig
from ....drafter.dflash.target_features import TargetFacts
from ....drafter.drafter_spec import DrafterShape
from ....drafter.eagle3.checkpoint import HEAD, check_eagle3
from ....drafter.eagle3.config import Eagle3Config
from ....drafter.eagle3.config_formats import is_eagle3
from .drafter_files import SMALL_FILES, licence_of
from .format_conversion import as_z_lab, check_same

_GGUF = ".gguf"
_NUM_TAPS = 3  # of an EAGLE-3 drafter
_UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")  # tensors that only trainers read
_ROTATED = ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")

Config = dict[str, Any]  # Any: JSON values


@dataclass(slots=True)
class Conversion:
    """What is written: `expected` is the configuration that the file must have."""

    architecture: str
    expected: DrafterShape
    config: Config
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list[str])


def convert_to_gguf(name: str, target_name: str, output: Path) -> list[str]:
    """Write drafter `name` to the file `output`; returns sentences about what is not as before.

    Raises ConfigError for a drafter that llama.cpp cannot run.
    """
    if output.suffix != _GGUF or output.exists():
        raise ConfigError(f"output={str(output)!r} must be a new file that ends in {_GGUF}.", param="output")
    target_folder = resolve_checkpoint(target_name, field="target", files=SMALL_FILES)
    target, folder = read_model(target_folder), resolve_checkpoint(name, field="drafter")
    raw = read_json(folder, param="drafter")
    facts = TargetFacts(target.hidden_size, target.num_layers, target.vocab_size, 0, target.embed_scale)
    conversion = (
        _convert_eagle3(folder, facts) if is_eagle3(raw) else _convert_dflash(folder, raw, target, facts)
    )
    length = raw.get("transformer_layer_config", raw).get("max_position_embeddings")
    conversion.config["max_position_embeddings"] = length or target.max_position_embeddings
    metadata: dict[str, Value] = {"general.type": "model", "general.name": Path(name).name}
    if licence := licence_of(folder):
        metadata["general.license"] = licence
    metadata |= read_vocabulary(target_folder, target.vocab_size, target.eos_token_ids)
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_drafter(output, conversion.architecture, conversion.config, conversion.tensors, metadata)
        _check(conversion, output, facts)
    except BaseException:
        output.unlink(missing_ok=True)
        raise
    return conversion.notes


def _convert_dflash(folder: Path, raw: Json, target: ModelSpec, facts: TargetFacts) -> Conversion:
    config = check_drafter(folder, facts)
    tensors = {named_as_ours(name): tensor for name, tensor in _tensors(folder, config).items()}
    _refuse(
        ("attention_bias", config.attention_bias, "no biases of attention"),
        ("Gemma 4's blocks", config.gemma4, "them, which this command does not write"),
        ("mask_embedding.pt", config.mask_embedding, "no mask embedding beside the target's embedding"),
        (
            "an anchor that predicts",
            config.samples_anchor and config.markov is None,
            "it with a Markov head alone",
        ),
        ("a confidence head on hidden states alone", config.confidence_head == "hidden", "none"),
        (
            "convolutions",
            config.convolutions is not None and config.selector is None,
            "them with a selector alone",
        ),
        (
            "an embedding, but no head",
            "embed_tokens.weight" in tensors and HEAD not in tensors,
            "its own head",
        ),
    )
    conversion = Conversion("dflash", config, {}, tensors)
    for adapt in (_in_halves, _with_convolutions, _with_fewer_candidates):
        config = conversion.expected = adapt(config, conversion)
    if len({layer.causal for layer in config.layers}) > 1:
        conversion.notes.append(
            "The drafter is causal in some layers and not in others; llama.cpp has one setting for all and "
            "runs it without: expect that fewer drafts are accepted there."
        )
    written = as_z_lab(config, raw, target)
    if all(layer.window is None for layer in config.layers):
        del written["layer_types"]
    nested = written["dflash_config"]
    if facts.embed_scale != 1.0:  # which llama.cpp applies only if the file says so
        nested.setdefault("input_embedding_scale", facts.embed_scale)
    if config.samples_anchor or config.markov is not None:
        written["sample_from_anchor"] = config.samples_anchor
        nested["enable_confidence_head"] = config.confidence_head is not None
    conversion.config = written | _sizes(config)
    return conversion


def _in_halves(config: DrafterConfig, conversion: Conversion) -> DrafterConfig:
    """Order the rows of heads so that rotated pairs are half of the rotated rows apart."""
    if not config.rope.interleaved:
        return config
    rotated = config.rope.rotary_dim or config.head_dim
    order_D = torch.cat(
        [torch.arange(begin, rotated, 2) for begin in (0, 1)] + [torch.arange(rotated, config.head_dim)]
    )
    for name, rows in conversion.tensors.items():
        if name.endswith(_ROTATED):
            conversion.tensors[name] = rows.unflatten(0, (-1, config.head_dim))[:, order_D].flatten(0, 1)
    return replace(config, rope=replace(config.rope, interleaved=False))


def _with_convolutions(config: DrafterConfig, conversion: Conversion) -> DrafterConfig:
    """Add convolutions that change nothing: llama.cpp reads a selector only with some."""
    if config.selector is None or config.convolutions is not None:
        return config
    hidden, dtype = config.hidden_size, conversion.tensors["fc.weight"].dtype
    for layer in range(config.num_layers):
        for name in ("attention_conv", "mlp_conv"):
            conversion.tensors |= {
                f"layers.{layer}.{name}.base_kernel": torch.ones(2, 1, hidden, dtype=dtype),
                f"layers.{layer}.{name}.kernel_projection.weight": torch.zeros(2, hidden, dtype=dtype),
            }
    return replace(config, convolutions=ConvolutionSize(num_taps=1, group_size=hidden))


def _with_fewer_candidates(config: DrafterConfig, conversion: Conversion) -> DrafterConfig:
    """Limit the candidates to those for which llama.cpp has room: k (k + 1) numbers in hidden_size."""
    if config.selector is None:
        return config
    top_k = config.selector.top_k
    while top_k * (top_k + 1) > config.hidden_size:
        top_k -= 1
    if top_k < config.selector.top_k:
        conversion.notes.append(
            f"The selector has {top_k} candidates instead of {config.selector.top_k}, for llama.cpp has no"
            f" room for more with hidden_size {config.hidden_size}."
        )
    return replace(config, selector=replace(config.selector, top_k=top_k))


def _convert_eagle3(folder: Path, facts: TargetFacts) -> Conversion:
    config = check_eagle3(folder, facts)
    _refuse(
        ("attention_bias", config.attention_bias, "no biases of attention"),
        ("norms of heads", config.head_norms, "none"),
        ("sliding layers", config.layers[0].window is not None, "none"),
        ("interleaved pairs", config.rope.interleaved, "them in another order"),
        (f"{config.num_taps} taps", config.num_taps != _NUM_TAPS, f"exactly {_NUM_TAPS}"),
    )
    tensors = {
        name.removeprefix("model.").replace("midlayer.", "layers.0.", 1): tensor
        for name, tensor in _tensors(folder, config).items()
    }
    written = _sizes(config) | {
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
    }
    return Conversion("eagle3", config, written, tensors)


def _tensors(folder: Path, config: DrafterShape) -> dict[str, Tensor]:
    if config.quantization is not None:
        raise ConfigError(
            f"drafter={str(folder)!r} is quantized ({config.quantization}): convert the unquantized drafter.",
            param="drafter",
        )
    files = TensorFolder(folder)
    return {name: files.get(name) for name in files.shapes if name not in _UNUSED}


def _refuse(*cases: tuple[str, bool, str]) -> None:
    for what, is_there, runs in cases:
        if is_there:
            raise ConfigError(
                f"to=gguf: the drafter has {what}; llama.cpp runs {runs}. Manta reads it directly.",
                param="to",
            )


def _sizes(config: DrafterShape) -> Config:
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": float(config.rms_norm_eps),
        "vocab_size": config.vocab_size,
        "rope_parameters": _rope(config.rope),
    }


def _rope(rope: RopeConfig) -> Config:
    found = {"rope_type": rope.kind, "rope_theta": rope.theta, **rope.scaling}
    if rope.rotary_dim:
        found["partial_rotary_factor"] = rope.rotary_dim / rope.head_dim
    return found


def _check(conversion: Conversion, output: Path, facts: TargetFacts) -> None:
    """Raise an error unless the file reads back as it was planned."""
    folder = resolve_checkpoint(str(output), field="output")
    found: DrafterShape
    if isinstance(conversion.expected, Eagle3Config):
        found = check_eagle3(folder, facts)
    else:
        found = check_drafter(folder, facts)
    check_same(conversion.expected, found, facts.embed_scale, "gguf")
    files = open_folder(folder, found.quantization)
    if files.shapes.keys() != conversion.tensors.keys():
        raise CheckpointError(f"{output}: other tensors were written than planned; check the disk.")
    for name, tensor in conversion.tensors.items():
        stored = files.get(name).to(tensor.dtype)
        if not torch.equal(stored.flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)):
            raise CheckpointError(f"{output}: {name} differs after writing; check the disk.")
