"""Shows a GGUF file as a Hugging Face checkpoint: config.json, generation_config.json, and its tensors.

Called by the reader of tensors (`gguf_folder.py`), and where a file becomes a folder with a tokenizer. The
definitions of architectures are in the modules that `_ARCHITECTURES` joins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from gguf.constants import GGMLQuantizationType

from .....cluster.errors import CheckpointError, brief_name
from ..hf_config import wrong
from .architecture import Architecture, Config, Part, num_layers_of
from .drafter_architectures import ARCHITECTURES as DRAFTERS
from .gguf_file import GgufFile
from .hybrid_architectures import ARCHITECTURES as HYBRID
from .metadata_keys import ARCHITECTURE, MetadataKeys
from .mixture_architectures import ARCHITECTURES as MIXTURES
from .plain_architectures import ARCHITECTURES as PLAIN
from .split_files import METHOD
from .tensor_views import TensorView

_ARCHITECTURES: Mapping[str, Architecture] = {**PLAIN, **MIXTURES, **HYBRID, **DRAFTERS}

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_OTHERS: Mapping[str, Part] = {
    _EMBEDDING: Part("model.embed_tokens.weight"),
    "output_norm.weight": Part("model.norm.weight"),
    _HEAD: Part("lm_head.weight"),
}
_LAYER = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>.+)", re.S)
_SUFFIXES = ("weight", "bias")
_TOKENS = "tokenizer.ggml.tokens"
_TOKEN_IDS = {"bos_token_id": ("bos",), "eos_token_id": ("eos", "eot", "eom"), "pad_token_id": ("padding",)}
_SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def config_of(file: GgufFile) -> Config:
    """Return the content of config.json. Raises CheckpointError for an architecture that is not supported."""
    keys, found = _definition(file)
    model = {"architectures": [found.class_name], "model_type": found.model_type}
    stored = {"quantization_config": {"quant_method": METHOD, "files": [str(path) for path in file.paths]}}
    if is_drafter(file):
        return {**model, **found.config(keys), **stored}
    if not keys.flag("attention.causal", True):
        raise keys.wrong("attention.causal", False, "true: models of embeddings are not supported")
    return {
        **model,
        "hidden_size": keys.count("embedding_length"),
        "num_hidden_layers": num_layers_of(keys),
        "vocab_size": _vocab_size(file),
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": _HEAD not in file.tensors,
        "dtype": _dtype(file),
        **found.config(keys),
        **token_ids_of(file),
        **stored,
    }


def is_drafter(file: GgufFile) -> bool:
    """Return whether a file holds a drafter, of which no tokenizer is read."""
    return file.metadata.get(ARCHITECTURE) in DRAFTERS


def generation_config_of(file: GgufFile) -> Config:
    """Return the content of generation_config.json: token ids, and the publisher's sampling if any."""
    stated = {name: file.metadata.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
    sampling = {
        # The file has fp32: 0.6 would be read as 0.6000000238.
        name: float(str(np.float32(value))) if isinstance(value, float) else value
        for name, value in stated.items()
        if isinstance(value, int | float)
    }
    return {**token_ids_of(file), **({"do_sample": True, **sampling} if sampling else {})}


def token_ids_of(file: GgufFile) -> Config:
    """Return ids that the file states; of several end tokens a list."""
    found: Config = {}
    for name, kinds in _TOKEN_IDS.items():
        stated = [file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in kinds]
        ids = list(dict.fromkeys(each for each in stated if type(each) is int))
        if ids:
            found[name] = ids if len(ids) > 1 else ids[0]
    return found


def views_of(file: GgufFile) -> Mapping[str, TensorView]:
    """Return the tensors by their names in the Hugging Face checkpoint.

    Raises CheckpointError for an architecture that is not supported, or a tensor that it does not have.
    """
    keys, found = _definition(file)
    views, num_layers = dict[str, TensorView](), num_layers_of(keys)
    for info in file.tensors.values():
        part = _part_of(info.name, found, num_layers)
        if part is None:
            raise CheckpointError(
                f"{file.path}: {brief_name(info.name)} is no tensor of {keys.architecture} that is known"
                " here. Take a file that llama.cpp's own converter wrote."
            )
        views |= part.rule(keys, info, part.name)
    return views


def _definition(file: GgufFile) -> tuple[MetadataKeys, Architecture]:
    keys = MetadataKeys(file)
    found = _ARCHITECTURES.get(keys.architecture)
    if found is None:
        wanted = f"one of {', '.join(_ARCHITECTURES)}: others are not supported"
        raise wrong(str(file.path), ARCHITECTURE, keys.architecture, wanted)
    return keys, found


def _part_of(name: str, found: Architecture, num_layers: int) -> Part | None:
    """Return a tensor's part with its whole name; layers from `num_layers` on predict further tokens."""
    matched = _LAYER.fullmatch(name)
    if matched is None:
        return found.others.get(name, _OTHERS.get(name))
    layer, named = matched["layer"], matched["part"]
    prefix, beside = found.mtp if int(layer) >= num_layers else (found.before_layer, {})
    parts = {**{key: replace(part, name=prefix + part.name) for key, part in found.layer.items()}, **beside}
    module, _, suffix = named.rpartition(".")
    if named in parts:
        part = parts[named]
    elif module in parts and suffix in _SUFFIXES:
        part = replace(parts[module], name=f"{parts[module].name}.{suffix}")
    else:
        return None
    return replace(part, name=part.name.replace("{layer}", layer))


def _vocab_size(file: GgufFile) -> int:
    embedding, tokens = file.tensors.get(_EMBEDDING), file.metadata.get(_TOKENS)
    if embedding is None:
        raise CheckpointError(f"{file.path} has no {_EMBEDDING}: it holds no whole language model.")
    if isinstance(tokens, list) and len(tokens) != embedding.shape[0]:
        raise CheckpointError(
            f"{file.path} has {len(tokens)} tokens in {_TOKENS}, but {embedding.shape[0]} rows of"
            f" {_EMBEDDING}; convert the model again."
        )
    return embedding.shape[0]


def _dtype(file: GgufFile) -> str:
    """Return the dtype to compute in: fp32 if all matrices have it, else bf16, as models are published."""
    matrices = {info.type for info in file.tensors.values() if len(info.shape) > 1}
    return "float32" if matrices <= {GGMLQuantizationType.F32, GGMLQuantizationType.F64} else "bfloat16"
