"""Small random weights of published targets, in the form that their files declare.

The product's table says in which scheme a module is stored; tensors are written by the formats' definitions
(`oracles/quantized_checkpoints.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from manta.actors.targets.families import read_model
from manta.actors.targets.model.weights import target_shapes
from manta.drafter.compute.checkpoint.dummy_weights import RandomTensors
from manta.drafter.compute.checkpoint.quantization.awq import Awq
from manta.drafter.compute.checkpoint.quantization.eight_bit import EightBit
from manta.drafter.compute.checkpoint.quantization.fp4 import CompressedNvfp4, ModelOptNvfp4, Mxfp4Linear
from manta.drafter.compute.checkpoint.quantization.gptq import Gptq
from manta.drafter.compute.checkpoint.quantization.packed_integers import PackedIntegers
from manta.drafter.compute.checkpoint.quantization.scheme import Scheme
from safetensors.torch import save_file

from support.oracles.quantized_checkpoints import Encoder, awq, fp8, gptq, mxfp4, nvfp4, packed
from support.published.corpus import write

# Sizes that groups of 128 inputs divide.
_SIZES = {
    **dict.fromkeys(("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 128),
    **{"intermediate_size": 256, "vocab_size": 512, "eos_token_id": 1},
    **dict.fromkeys(("v_head_dim", "swa_v_head_dim", "linear_value_head_dim"), 32),
}


def write_packed(name: str, folder: Path) -> Path:
    """Write an entry of the corpus with small sizes and weights."""
    write(name, folder, small=True)
    file = folder / "config.json"
    file.write_text(json.dumps(_resized(json.loads(file.read_text()))))
    spec = read_model(folder)
    assert spec.quantization is not None, "a quantized checkpoint"
    body = "model.language_model." if spec.architecture.endswith("ForConditionalGeneration") else "model."
    random, shapes, tensors = np.random.default_rng(0), target_shapes(spec), dict[str, torch.Tensor]()
    plain = RandomTensors(shapes, torch.bfloat16, torch.device("cpu"))
    for ours, shape in shapes.items():
        stored = body + ours.removeprefix("model.") if ours.startswith("model.") else ours
        module = stored.removesuffix(".weight")
        scheme = (
            spec.quantization.scheme_of(module) if stored.endswith(".weight") and len(shape) == 2 else None
        )
        if scheme is None or "embed_tokens" in stored or stored.endswith(".gate.weight"):
            tensors[stored] = plain.get(ours)
            continue
        matrix = encoder_of(scheme)(random, *shape)
        tensors |= {f"{module}.{part}": tensor.clone() for part, tensor in matrix.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _resized(raw: dict[str, Any]) -> dict[str, Any]:
    if "text_config" in raw:
        return {**raw, "text_config": _resized(raw["text_config"])}
    return {**raw, **{key: size for key, size in _SIZES.items() if key in raw}}


def encoder_of(scheme: Scheme) -> Encoder:
    match scheme:
        case EightBit(code="F8_E4M3", block=None, granularity="channel"):
            return fp8("weight_scale", lambda o, i: (o, 1), lambda o, i: (o, 0))
        case EightBit(code="F8_E4M3", block=None):
            return fp8("weight_scale", lambda o, i: (), lambda o, i: ())
        case EightBit(code="F8_E4M3", block=(rows, columns)):
            return fp8(
                "weight_scale_inv",
                lambda o, i: (-(-o // rows), -(-i // columns)),
                lambda o, i: (o // rows, i // columns),
            )
        case PackedIntegers(bits=bits, group=group, symmetric=symmetric, act_order=act_order):
            return packed(bits, group, symmetric=symmetric, act_order=act_order)
        case Gptq(bits=bits, group=group, zero_offset=offset, act_order=act_order):
            return gptq(bits, group, offset=offset, act_order=act_order)
        case Awq(group=group):
            return awq(group)
        case ModelOptNvfp4() | CompressedNvfp4():
            return nvfp4(compressed=isinstance(scheme, CompressedNvfp4))
        case Mxfp4Linear():
            return mxfp4
    raise AssertionError(f"no encoder for {scheme}")
