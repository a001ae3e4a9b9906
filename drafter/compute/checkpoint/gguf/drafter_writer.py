"""Writes a drafter as a GGUF file, from the definitions that read it (`drafter_architectures.py`).

What llama.cpp cannot run is changed or refused before, by `jobs/drafters/common/gguf_conversion.py`, the
caller. Matrices keep their dtype. Vectors and the kernels of convolutions are stored in fp32, which
llama.cpp needs where it adds or multiplies with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGUFValueType
from torch import Tensor

from .....cluster.errors import ConfigError, brief_name
from .architecture import FREQUENCIES, Architecture, Config, Part
from .drafter_architectures import ARCHITECTURES, KEYS, MASK_TOKEN, Key
from .rope_keys import frequency_factors, rope_metadata

# A value of the metadata; integers are stored in 32 bits without a sign.
Value = str | bool | int | float | list[str] | list[int] | list[float]
_LAYER = re.compile(r"layers\.(?P<layer>\d+)\.(?P<name>.+)", re.S)


def write_drafter(
    path: Path,
    architecture: str,
    config: Config,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Value],
) -> None:
    """Write a drafter.

    Args:
        architecture: one of `ARCHITECTURES`.
        config: config.json as `config_of` would read it from the file.
        tensors: by the names of z-lab's or SGLang's format.
        metadata: further keys, such as those of the vocabulary.

    Raises ConfigError for a tensor that llama.cpp has no place for.
    """
    writer, definition = GGUFWriter(path, architecture), ARCHITECTURES[architecture]
    for key, value in metadata.items():
        _add(writer, key, value)
    for key in KEYS[architecture]:
        if (value := _value(config, key)) is not None:
            _add(writer, f"{architecture}.{key.name}", key.kind.stored(value), key.kind.type)
    for key, value in rope_metadata(config["rope_parameters"], config["head_dim"]).items():
        _add(writer, f"{architecture}.{key}", value)
    if (mask := config.get("dflash_config", {}).get("mask_token_id")) is not None:
        _add(writer, MASK_TOKEN, mask)
    for name, tensor in tensors.items():
        stored, part = _part(definition, name)
        _add_tensor(writer, stored, part.stored(tensor, config))
    if (factors := frequency_factors(config["rope_parameters"], config["head_dim"])) is not None:
        _add_tensor(writer, FREQUENCIES, factors)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _value(config: Config, key: Key) -> object:
    *outer, last = key.place.split(".")
    for level in outer:
        config = config.get(level, {})
    return config.get(last)


def _part(definition: Architecture, name: str) -> tuple[str, Part]:
    """Return the name of a tensor in the file, and its part."""
    layer = _LAYER.fullmatch(name)
    parts, named = (definition.others, name) if layer is None else (definition.layer, layer["name"])
    before = "" if layer is None else f"blk.{layer['layer']}."
    module, _, suffix = named.rpartition(".")
    for stored, part in parts.items():
        if part.name == named:
            return before + stored, part
        if part.name == module and suffix in ("weight", "bias"):
            return f"{before}{stored}.{suffix}", part
    raise ConfigError(f"to=gguf: llama.cpp's format has no place for {brief_name(name)}.", param="to")


def _add(writer: GGUFWriter, key: str, value: object, kind: str | None = None) -> None:
    if isinstance(value, list):
        return writer.add_array(key, value)
    kinds = {str: "STRING", bool: "BOOL", int: "UINT32", float: "FLOAT32"}
    writer.add_key_value(key, value, GGUFValueType[kind or kinds[type(value)]])


def _add_tensor(writer: GGUFWriter, name: str, tensor: Tensor) -> None:
    if tensor.dim() < 2 and tensor.is_floating_point():
        tensor = tensor.float()
    tensor = tensor.contiguous()
    if tensor.dtype is torch.bfloat16:
        writer.add_tensor(name, tensor.view(torch.uint8).numpy(), raw_dtype=GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, tensor.numpy())
