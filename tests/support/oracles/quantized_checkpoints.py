"""Tiny checkpoints in published quantization formats, and the numbers that they stand for.

Written from the formats' definitions, apart from the product's readers: matrices are filled with random codes
and scales, packed bit by bit, and decoded from the codes, never from what was packed.
`tests/drafter/checkpoint/test_format_packages.py` compares the product with the formats' own code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from manta.drafter.compute.checkpoint.packed_codes import PackedCodes
from safetensors.torch import load_file, save_file

GROUP = 32
F32 = np.float32
Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix's tensors by what follows the module's name, and its numbers, fp32."""

    tensors: Tensors
    numbers: np.ndarray


Encoder = Callable[[np.random.Generator, int, int], StoredMatrix]


@dataclass(frozen=True)
class Format:
    """A format: `quantization_config`, and the encoder of a module.

    Attributes:
        hf_quant_config: content of this file.
        extra: further tensors of a checkpoint, by full name, such as scales of K and V.
    """

    config: Config | None
    encoder: Callable[[str], Encoder]
    hf_quant_config: Config | None = None
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)


def e4m3(byte: int) -> float:
    """OCP FP8 E4M3: a sign, four bits of exponent with bias 7, three of mantissa; no infinities."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, (byte >> 3) & 0xF, byte & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3 = np.array([e4m3(byte) for byte in range(256)], F32)
_HALF_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = np.array([*_HALF_E2M1, *(-value for value in _HALF_E2M1)], F32)


def pack_bits(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Unsigned codes [R, N] as a stream of bits in int32 [R, ceil(N * bits / 32)], the first code lowest."""
    stream = (codes[:, :, None] >> np.arange(bits) & 1).reshape(len(codes), -1).astype(np.uint32)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32))).reshape(len(codes), -1, 32)
    words = (stream << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    return torch.from_numpy(words.view(np.int32))


def _floats(scales: torch.Tensor) -> np.ndarray:
    return scales.float().numpy()


def _bytes(random: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Codes of FP8 without its two NaNs."""
    codes = random.integers(0, 256, (rows, columns)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    return codes


def _scales(random: np.random.Generator, shape: tuple[int, ...], largest: float) -> torch.Tensor:
    """Scales that keep the numbers at 0.1 or below."""
    return torch.tensor(0.1 / largest * random.uniform(0.5, 1.0, shape), dtype=torch.float32)


def fp8(scale_name: str, shape_of: Callable[[int, int], tuple[int, ...]], place: Any, **more: Any) -> Encoder:
    """FP8 with a scale of `shape_of` each row and column's `place` (of arrays of rows and columns).

    `more` are scales of activations by name.
    """

    def encode(random: np.random.Generator, rows: int, columns: int) -> StoredMatrix:
        codes, scales = _bytes(random, rows, columns), _scales(random, shape_of(rows, columns), 448.0)
        tensors = {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), scale_name: scales, **more}
        return StoredMatrix(tensors, E4M3[codes] * _floats(scales)[place(*np.indices(codes.shape))])

    return encode


def int8(random: np.random.Generator, rows: int, columns: int) -> StoredMatrix:
    codes = random.integers(-128, 128, (rows, columns)).astype(np.int8)
    zeros = random.integers(-20, 20, (rows, 1)).astype(np.int8)
    scales = _scales(random, (rows, 1), 128.0).bfloat16()
    stored = {
        "weight": torch.from_numpy(codes),
        "weight_scale": scales,
        "weight_zero_point": torch.from_numpy(zeros),
    }
    return StoredMatrix(stored, (codes.astype(F32) - zeros) * _floats(scales))


def packed(bits: int, group: int | None, *, symmetric: bool = True, act_order: bool = False) -> Encoder:
    """compressed-tensors' pack-quantized."""

    def encode(random: np.random.Generator, rows: int, columns: int) -> StoredMatrix:
        size = group or columns
        groups, middle = columns // size, 2 ** (bits - 1)
        codes = random.integers(0, 2**bits, (rows, columns))
        zeros = np.full((rows, groups), middle) if symmetric else random.integers(0, 2**bits, (rows, groups))
        scales = _scales(random, (rows, groups), middle).bfloat16()
        index = np.arange(columns) // size
        tensors = {
            "weight_packed": pack_bits(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = pack_bits(zeros.T, bits).T.contiguous()
        if act_order:
            index = random.permutation(index)
            tensors["weight_g_idx"] = torch.from_numpy(index.astype(np.int32))
        return StoredMatrix(tensors, F32(codes - zeros[:, index]) * _floats(scales)[:, index])

    return encode


def gptq(bits: int, group: int | None, *, offset: int = 1, act_order: bool = False) -> Encoder:
    def encode(random: np.random.Generator, rows: int, columns: int) -> StoredMatrix:
        size = group or columns
        groups = columns // size
        codes = random.integers(0, 2**bits, (columns, rows))
        zeros = random.integers(offset, 2**bits, (groups, rows))
        scales = _scales(random, (groups, rows), 2 ** (bits - 1)).half()
        index = np.arange(columns) // size
        if act_order:
            index = random.permutation(index)
        tensors = {
            "qweight": pack_bits(codes.T, bits).T.contiguous(),
            "qzeros": pack_bits(zeros - offset, bits),
            "scales": scales,
            "g_idx": torch.from_numpy(index.astype(np.int32)),
        }
        return StoredMatrix(tensors, (F32(codes - zeros[index]) * _floats(scales)[index]).T)

    return encode


def awq(group: int | None) -> Encoder:
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble k of a word holds the output order[k] (AutoAWQ's AWQ_ORDER)

    def words(codes: np.ndarray) -> torch.Tensor:
        return pack_bits(codes.reshape(len(codes), -1, 8)[:, :, order].reshape(codes.shape), 4)

    def encode(random: np.random.Generator, rows: int, columns: int) -> StoredMatrix:
        size = group or columns
        groups = columns // size
        codes, zeros = random.integers(0, 16, (columns, rows)), random.integers(0, 16, (groups, rows))
        scales = _scales(random, (groups, rows), 8).half()
        tensors = {"qweight": words(codes), "qzeros": words(zeros), "scales": scales}
        index = np.arange(columns) // size
        return StoredMatrix(tensors, (F32(codes - zeros[index]) * _floats(scales)[index]).T)

    return encode


def _fp4_codes(random: np.random.Generator, rows: int, columns: int) -> tuple[np.ndarray, torch.Tensor]:
    codes = random.integers(0, 16, (rows, columns)).astype(np.uint8)
    return codes, torch.from_numpy(codes[:, ::2] | (codes[:, 1::2] << 4))


def mxfp4(random: np.random.Generator, rows: int, columns: int) -> StoredMatrix:
    codes, pairs = _fp4_codes(random, rows, columns)
    exponents = random.integers(118, 123, (rows, columns // 32)).astype(np.uint8)
    stored = {"weight_packed": pairs, "weight_scale": torch.from_numpy(exponents)}
    return StoredMatrix(stored, E2M1[codes] * F32(2.0 ** (exponents.repeat(32, 1).astype(int) - 127)))


def nvfp4(*, compressed: bool) -> Encoder:
    """compressed-tensors' layout, which divides by the matrix's scale, or ModelOpt's, which multiplies."""

    def encode(random: np.random.Generator, rows: int, columns: int) -> StoredMatrix:
        codes, pairs = _fp4_codes(random, rows, columns)
        scales = random.integers(0x30, 0x60, (rows, columns // 16)).astype(np.uint8)
        whole = F32(3451.7) if compressed else F32(1 / 3451.7)
        of_groups = torch.from_numpy(scales).view(torch.float8_e4m3fn)
        if compressed:
            tensors = {"weight_packed": pairs, "weight_scale": of_groups}
            tensors |= {
                "weight_global_scale": torch.tensor([whole]),
                "input_global_scale": torch.tensor([2.0]),
            }
        else:
            tensors = {"weight": pairs, "weight_scale": of_groups}
            tensors |= {"weight_scale_2": torch.tensor(whole), "input_scale": torch.tensor(0.5)}

        of_group = E4M3[scales].repeat(16, 1)
        scale = of_group / whole if compressed else of_group * whole
        return StoredMatrix(tensors, E2M1[codes] * scale)

    return encode


def _weights(bits: int, **more: Any) -> Config:
    stated = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, "observer": "minmax"}
    return {**stated, "actorder": None, "block_structure": None, "group_size": None, **more}


def compressed_tensors(layout: str, *groups: Config, **more: Any) -> Config:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        **more,
    }


def _group(weights: Config, *targets: str, **more: Any) -> Config:
    none = {"input_activations": None, "output_activations": None}
    return {"targets": list(targets or ("Linear",)), "weights": weights, **none, **more}


_W4 = _weights(4, strategy="group", group_size=GROUP)
_W8 = _weights(8, strategy="channel")
_FP8 = _weights(8, type="float")
_DYNAMIC = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
_FP4 = {"num_bits": 4, "type": "float", "symmetric": True}
_BLOCK = (24, 40)  # divides nothing that is cut

GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": False, "data_type": "int"}


def _always(encoder: Encoder) -> Callable[[str], Encoder]:
    return lambda _: encoder


def _mixed(module: str) -> Encoder:
    """Attention in eight bits per channel, MLPs in four bits."""
    return packed(8, None) if "self_attn" in module else packed(4, GROUP)


def _block_fp8(name: str) -> Encoder:
    return fp8(
        name,
        lambda o, i: (-(-o // _BLOCK[0]), -(-i // _BLOCK[1])),
        lambda o, i: (o // _BLOCK[0], i // _BLOCK[1]),
    )


_tensor_fp8 = fp8("weight_scale", lambda o, i: (), lambda o, i: (), input_scale=torch.tensor(0.25))
_channel_fp8 = fp8("weight_scale", lambda o, i: (o, 1), lambda o, i: (o, 0))
_KV_SCALES = {f"model.layers.0.self_attn.{part}_proj.{part}_scale": torch.tensor(0.5) for part in "kv"}

FORMATS: dict[str, Format] = {
    "fp8_blocks": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(_BLOCK)},
        _always(_block_fp8("weight_scale_inv")),
    ),
    "fp8_per_tensor": Format({"quant_method": "fp8", "activation_scheme": "static"}, _always(_tensor_fp8)),
    "fbgemm_fp8": Format(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        _always(_channel_fp8),
    ),
    "ct_fp8_channel": Format(
        compressed_tensors(
            "float-quantized", _group({**_FP8, "strategy": "channel"}, input_activations=_DYNAMIC)
        ),
        _always(_channel_fp8),
    ),
    "ct_fp8_blocks": Format(
        compressed_tensors(
            "float-quantized", _group({**_FP8, "strategy": "block", "block_structure": list(_BLOCK)})
        ),
        _always(_block_fp8("weight_scale")),
    ),
    "ct_int8": Format(
        compressed_tensors("int-quantized", _group({**_W8, "symmetric": False}, input_activations=_DYNAMIC)),
        _always(int8),
    ),
    "ct_w4a16": Format(compressed_tensors("pack-quantized", _group(_W4)), _always(packed(4, GROUP))),
    "ct_w4a16_asymmetric": Format(
        compressed_tensors("pack-quantized", _group({**_W4, "symmetric": False})),
        _always(packed(4, GROUP, symmetric=False)),
    ),
    "ct_w8a16": Format(compressed_tensors("pack-quantized", _group(_W8)), _always(packed(8, None))),
    "ct_act_order": Format(
        compressed_tensors("pack-quantized", _group({**_W4, "actorder": "group"})),
        _always(packed(4, GROUP, act_order=True)),
    ),
    "ct_groups": Format(
        compressed_tensors("pack-quantized", _group(_W8, r"re:.*self_attn\..*_proj$"), _group(_W4, "Linear")),
        _mixed,
    ),
    "gptq": Format(GPTQ_CONFIG, _always(gptq(4, GROUP))),
    "gptq_act_order": Format({**GPTQ_CONFIG, "desc_act": True}, _always(gptq(4, GROUP, act_order=True))),
    "gptq_8_bits_v2": Format(
        {**GPTQ_CONFIG, "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
        _always(gptq(8, None, offset=0)),
    ),
    "gptq_3_bits": Format({**GPTQ_CONFIG, "bits": 3}, _always(gptq(3, GROUP))),
    "gptq_2_bits": Format({**GPTQ_CONFIG, "bits": 2}, _always(gptq(2, GROUP))),
    "awq": Format(AWQ_CONFIG, _always(awq(GROUP))),
    "auto_round_gptq": Format(
        {**AUTO_ROUND, "packing_format": "auto_round:auto_gptq"}, _always(gptq(4, GROUP))
    ),
    "auto_round_plain_zeros": Format(
        {**AUTO_ROUND, "packing_format": "auto_round:gptqmodel"}, _always(gptq(4, GROUP, offset=0))
    ),
    "auto_round_awq": Format({**AUTO_ROUND, "packing_format": "auto_round:auto_awq"}, _always(awq(GROUP))),
    "mxfp4": Format(
        compressed_tensors("mxfp4-pack-quantized", _group({**_FP4, "strategy": "group", "group_size": 32})),
        _always(mxfp4),
    ),
    "ct_nvfp4": Format(
        compressed_tensors(
            "nvfp4-pack-quantized", _group({**_FP4, "strategy": "tensor_group", "group_size": 16})
        ),
        _always(nvfp4(compressed=True)),
    ),
    "modelopt_nvfp4": Format(
        None,
        _always(nvfp4(compressed=False)),
        hf_quant_config={
            "producer": {"name": "modelopt", "version": "0.29.0"},
            "quantization": {
                "quant_algo": "NVFP4",
                "kv_cache_quant_algo": "FP8",
                "group_size": 16,
                "exclude_modules": ["lm_head", "model.embed_tokens*"],
            },
        },
        extra=_KV_SCALES,
    ),
    "modelopt_fp8": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "kv_cache_scheme": "FP8"},
        _always(_tensor_fp8),
    ),
}
# One format of each kind of codes.
KINDS = ("fp8_blocks", "ct_int8", "ct_w4a16", "gptq_act_order", "awq", "mxfp4", "modelopt_nvfp4")
# Formats whose codes no product takes: inputs out of order, codes of other sizes, groups of another size than
# 2^n, or zeros that int8 cannot have.
DEQUANTIZED = (
    *("ct_act_order", "gptq_act_order", "gptq_3_bits", "gptq_2_bits", "fp8_blocks", "ct_fp8_blocks"),
    *("ct_int8", "gptq_8_bits_v2"),
)


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    return name.endswith("_proj.weight") and tensor.dim() == 2


def publish(
    saved: Path, folder: Path, name: str, *, seed: int = 0, unquantized: str | None = None
) -> tuple[Path, Path]:
    """Write a checkpoint in a format, and one with the numbers that it stands for, from a plain one.

    `unquantized`: expression for matrices that stay as they are; config.json does not name them.

    Returns:
        Both folders; their matrices are random, other tensors as in `saved`.
    """
    form, random = FORMATS[name], np.random.default_rng(seed)
    quantized, plain = dict[str, torch.Tensor](form.extra), dict[str, torch.Tensor]()
    for full_name, tensor in load_file(saved / "model.safetensors").items():
        plain[full_name] = tensor
        is_kept = unquantized is not None and re.search(unquantized, full_name) is not None
        if is_kept or not is_linear(full_name, tensor):
            quantized[full_name] = tensor
            continue
        module = full_name.removesuffix(".weight")
        rows, columns = tensor.shape
        matrix = form.encoder(module)(random, rows, columns)
        quantized |= {f"{module}.{part}": stored.clone() for part, stored in matrix.tensors.items()}
        plain[full_name] = decode(matrix)
    keys = json.loads((saved / "config.json").read_text())
    stated = {**keys, "quantization_config": form.config} if form.config is not None else keys
    folders = folder / "quantized", folder / "plain"
    for place, config, tensors in zip(folders, (stated, keys), (quantized, plain), strict=True):
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(config))
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    if form.hf_quant_config is not None:
        (folders[0] / "hf_quant_config.json").write_text(json.dumps(form.hf_quant_config))
    return folders


def decode(matrix: StoredMatrix) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(matrix.numbers))


def tensors_of(value: object, at: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of a layer by the path of their fields; packed ones dequantized."""
    if isinstance(value, PackedCodes):
        yield at, value.dequantized(torch.float32)
    elif isinstance(value, torch.Tensor):
        yield at, value
    elif is_dataclass(value):
        for each in fields(value):
            yield from tensors_of(getattr(value, each.name), f"{at}.{each.name}")
