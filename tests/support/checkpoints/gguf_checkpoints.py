"""Writes a tiny checkpoint of transformers as GGUF, as llama.cpp's converter would.

Names come from the `gguf` package, as do the encoders of types; types that it only decodes get random blocks.
The second checkpoint that is written has the decoded values in Hugging Face's form: what the file must be
read as. Where a value goes is found by converting the elements' numbers instead of the elements.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from manta.drafter.compute.checkpoint.gguf.architectures import config_of, generation_config_of
from manta.drafter.compute.checkpoint.gguf.gguf_file import GgufFile
from safetensors.torch import load_file, save_file
from torch import Tensor

Config = dict[str, Any]  # Any: JSON values
Converted = dict[str, Tensor]
_SUFFIXES = (".weight", ".bias")
MIXED = (
    "Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q5_1", "Q5_0", "Q3_K", "Q4_1", "Q5_K", "Q2_K", "IQ4_NL", "F16", "BF16",
)  # fmt: skip


@dataclass(frozen=True)
class GgufFamily:
    """How the converter writes a family.

    Attributes:
        arch: of the `gguf` package.
        metadata: adds keys beside the common ones.
        convert: moves the elements of one tensor, given by its name in Hugging Face's checkpoint.
        plus_one: ends of names of norms to which 1 is added.
        extra: tensors that are made of the config.
    """

    arch: MODEL_ARCH
    metadata: Callable[[GGUFWriter, Config], None] = lambda writer, config: None
    convert: Callable[[str, Tensor, Config], Converted] = lambda name, tensor, config: {name: tensor}
    plus_one: tuple[str, ...] = ()
    extra: Callable[[Config], Mapping[str, Tensor]] = field(default=lambda config: {})


def _permuted(tensor: Tensor, heads: int) -> Tensor:
    """Rows of heads with the two halves of a head interleaved, for pairs that are neighbors."""
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _llama(name: str, tensor: Tensor, config: Config) -> Converted:
    for part, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if f"{part}." in name:
            tensor = _permuted(tensor, config[key])
    return {name: tensor}


def _llama_frequencies(config: Config) -> Mapping[str, Tensor]:
    rope = config["rope_parameters"]
    if rope["rope_type"] != "llama3":
        return {}
    factors: list[float] = []
    for i in range(0, config["head_dim"], 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / config["head_dim"])
        length, low, high = (
            rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        smooth = (length / wavelength - low) / (high - low)
        if wavelength < length / high:
            factors.append(1)
        elif wavelength > length / low:
            factors.append(rope["factor"])
        else:
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": torch.tensor(factors)}


def _experts(writer: GGUFWriter, config: Config) -> None:
    writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _gemma3(writer: GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(config["_sliding_window_pattern"])


GGUF_FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily(MODEL_ARCH.LLAMA, convert=_llama, extra=_llama_frequencies),
    "qwen2": GgufFamily(MODEL_ARCH.QWEN2),
    "qwen3": GgufFamily(MODEL_ARCH.QWEN3),
    "qwen3_moe": GgufFamily(MODEL_ARCH.QWEN3MOE, _experts),
    "gemma3": GgufFamily(MODEL_ARCH.GEMMA3, _gemma3, plus_one=("norm.weight",)),
}


def publish_gguf(
    saved: Path, folder: Path, family: str, types: Sequence[str] = ("Q8_0",), *, split: int = 0
) -> tuple[Path, Path]:
    """Return a folder that shows a GGUF file, and one with the same values in safetensors.

    `types` are given to the matrices in turn, where their rows have whole blocks.
    """
    config = json.loads((saved / "config.json").read_text())
    tensors, form = load_file(saved / "model.safetensors"), GGUF_FAMILIES[family]
    folder.mkdir(parents=True)
    writer = GGUFWriter(folder / "model.gguf", gguf.MODEL_ARCH_NAMES[form.arch], split_max_tensors=split)
    _add_metadata(writer, config, form)
    names = gguf.get_tensor_name_map(form.arch, config["num_hidden_layers"])
    first, numbers = 0, dict[str, Tensor]()
    for name, tensor in tensors.items():
        numbers[name] = torch.arange(first, first + tensor.numel()).view(tensor.shape)
        first += tensor.numel()
    flat = torch.zeros(first)
    random = np.random.default_rng(7)
    of_values, of_numbers = (_converted(each, form, config) for each in (tensors, numbers))
    in_turn = cycle(types)
    for name, tensor in sorted(of_values.items()):
        shift = float(name.endswith(form.plus_one) if form.plus_one else 0)
        kind = GGMLQuantizationType.F32 if tensor.dim() == 1 else _type_of(tensor, next(in_turn))
        stored = names.get_name(name, _SUFFIXES)
        assert stored is not None, f"the package has a name for {name}"
        encoded = _encoded((tensor + shift).contiguous(), kind, random)
        writer.add_tensor(stored, encoded, raw_dtype=kind)
        flat[of_numbers[name].flatten()] = _decoded(encoded, kind).flatten() - shift
    for name, tensor in form.extra(config).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = {name: flat[number].clone() for name, number in numbers.items()}
    return show(next(folder.glob("*.gguf")), folder / "shown"), _plain(saved, folder / "plain", values)


def show(file: Path, folder: Path) -> Path:
    """Write the files that a GGUF file is shown as, without a tokenizer."""
    folder.mkdir()
    opened = GgufFile(file)
    (folder / "config.json").write_text(json.dumps(config_of(opened)))
    (folder / "generation_config.json").write_text(json.dumps(generation_config_of(opened)))
    return folder


def _plain(saved: Path, folder: Path, values: Mapping[str, Tensor]) -> Path:
    shutil.copytree(saved, folder)
    save_file(dict(values), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _add_metadata(writer: GGUFWriter, config: Config, form: GgufFamily) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
    parameters = config["rope_parameters"]
    rope = parameters.get("full_attention", parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_eos_token_id(config["eos_token_id"])
    form.metadata(writer, config)


def _converted(tensors: Mapping[str, Tensor], form: GgufFamily, config: Config) -> Converted:
    found: Converted = {}
    experts: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        for part, moved in form.convert(name, tensor, config).items():
            before, _, after = part.partition(".experts.")
            number, _, matrix = after.partition(".")
            if number.isdigit():
                experts.setdefault(f"{before}.experts.{matrix}", []).append(moved)
                assert len(experts[f"{before}.experts.{matrix}"]) == int(number) + 1, "experts come in order"
            elif after == "gate_up_proj":
                gate, up = moved.chunk(2, dim=1)
                found[f"{before}.experts.gate_proj.weight"] = gate
                found[f"{before}.experts.up_proj.weight"] = up
            elif after == "down_proj":
                found[f"{before}.experts.down_proj.weight"] = moved
            else:
                found[part] = moved
    return found | {name: torch.stack(each) for name, each in experts.items()}


def _type_of(tensor: Tensor, wanted: str) -> GGMLQuantizationType:
    kind = GGMLQuantizationType[wanted]
    if tensor.shape[-1] % GGML_QUANT_SIZES[kind][0]:
        return GGMLQuantizationType.F32
    return kind


def _encoded(tensor: Tensor, kind: GGMLQuantizationType, random: np.random.Generator) -> np.ndarray:
    array = tensor.numpy()
    try:
        return gguf.quants.quantize(array, kind)
    except NotImplementedError:
        return random_blocks(kind, array.shape, random)


def random_blocks(
    kind: GGMLQuantizationType, shape: tuple[int, ...], random: np.random.Generator
) -> np.ndarray:
    """Return blocks with random codes, whose scales make values of about 0.1."""
    width, size = GGML_QUANT_SIZES[kind]
    raw = random.integers(0, 256, (*shape[:-1], shape[-1] // width, size), dtype=np.uint8)
    for at, scale in _SCALES[kind.name]:
        numbers = scale * random.uniform(0.5, 1.5, raw.shape[:-1])
        raw[..., at : at + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


_SCALES = {  # offsets of numbers in fp16, and their size
    "Q2_K": ((80, 0.01), (82, 0.01)),
    "Q3_K": ((108, 0.002),),
    "Q4_K": ((0, 0.0005), (2, 0.003)),
    "Q5_K": ((0, 0.0002), (2, 0.003)),
    "Q6_K": ((208, 0.0001),),
    "IQ4_NL": ((0, 0.001),),
}


def _decoded(encoded: np.ndarray, kind: GGMLQuantizationType) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(encoded, kind)))
