"""Matrices of quantized checkpoints have the numbers that their format defines, read whole or in parts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from manta.cluster.errors import CheckpointError
from manta.drafter.compute.checkpoint.loading.quantized_tensors import QuantizedFolder
from manta.drafter.compute.checkpoint.loading.read_quantization import read_quantization
from manta.drafter.compute.checkpoint.quantization.awq import AWQ
from manta.drafter.compute.checkpoint.quantization.bit_packing import unpack
from manta.drafter.compute.checkpoint.quantization.checkpoint_quantization import CheckpointQuantization
from safetensors.torch import load_file, save_file
from support.oracles.quantized_checkpoints import AUTO_ROUND, AWQ_CONFIG, FORMATS, GPTQ_CONFIG, KINDS, decode

MODULE = "model.layers.0.mlp.up_proj"
NAME = f"{MODULE}.weight"
ROWS, COLUMNS = 64, 96


def open_one(
    name: str, folder: Path, dtype: torch.dtype = torch.float32
) -> tuple[QuantizedFolder, torch.Tensor]:
    """Return a folder with one matrix in a format, and the matrix's numbers."""
    form = FORMATS[name]
    matrix = form.encoder(MODULE)(np.random.default_rng(3), ROWS, COLUMNS)
    save_file(
        {f"{MODULE}.{part}": tensor.clone() for part, tensor in matrix.tensors.items()},
        folder / "m.safetensors",
    )
    return QuantizedFolder(folder, quantization_of(name, folder), dtype), decode(matrix)


def quantization_of(name: str, folder: Path) -> CheckpointQuantization:
    config = FORMATS[name].config
    if config is None:
        written = FORMATS[name].hf_quant_config
        assert written is not None
        config = {"quant_method": "modelopt", **written["quantization"]}
    quantization = read_quantization({"quantization_config": config}, folder, param="model")
    assert quantization is not None
    return quantization


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_and_all_its_parts_have_the_numbers_of_the_format(name: str, tmp_path: Path) -> None:
    tensors, expected = open_one(name, tmp_path)
    tensors.check(NAME, (ROWS, COLUMNS))
    tensors.refuse_stray_scales([NAME])
    assert tensors.shapes == {NAME: (ROWS, COLUMNS)}
    assert torch.equal(tensors.get(NAME), expected)
    for part in (slice(0, 32), slice(5, 49), slice(30, 64), slice(23, 25), slice(63, 64)):
        assert torch.equal(tensors.slice(NAME, part), expected[part])
        assert torch.equal(tensors.slice(NAME, part, 1), expected[:, part])


@pytest.mark.parametrize("name", FORMATS)
def test_16_bits_are_rounded_once(name: str, tmp_path: Path) -> None:
    tensors, expected = open_one(name, tmp_path, torch.bfloat16)
    found = tensors.get(NAME)
    assert found.dtype is torch.bfloat16 and torch.equal(found, expected.bfloat16())


def stored_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "m.safetensors")


def reopened(name: str, folder: Path, tensors: dict[str, torch.Tensor]) -> QuantizedFolder:
    save_file(tensors, folder / "m.safetensors")
    return QuantizedFolder(folder, quantization_of(name, folder), torch.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_a_missing_part_is_refused_by_name(name: str, tmp_path: Path) -> None:
    open_one(name, tmp_path)
    stored = stored_in(tmp_path)
    codes = ("weight", "weight_packed", "qweight")
    optional = ("input_scale", "input_global_scale", *(["g_idx"] if "act_order" not in name else []))
    parts = [part for part in stored if not part.endswith(tuple(f".{each}" for each in (*codes, *optional)))]
    assert parts
    for missing in parts:
        tensors = reopened(name, tmp_path, {part: each for part, each in stored.items() if part != missing})
        with pytest.raises(CheckpointError, match=rf"tensor {MODULE}\.\w+ is missing"):
            tensors.check(NAME, (ROWS, COLUMNS))


@pytest.mark.parametrize("name", KINDS)
def test_truncated_scales_and_codes_are_refused_by_name(name: str, tmp_path: Path) -> None:
    open_one(name, tmp_path)
    stored = stored_in(tmp_path)
    for part, tensor in stored.items():
        if tensor.dim() < 2:
            continue
        tensors = reopened(name, tmp_path, {**stored, part: tensor[:-1].clone()})
        with pytest.raises(CheckpointError, match=rf"{part} has shape .*ask for"):
            tensors.check(NAME, (ROWS, COLUMNS))


SCALES = re.compile(r".+\.(?:weight_(?:global_)?scale\w*|scales)")


@pytest.mark.parametrize("name", [*KINDS, "ct_w8a16", "fp8_per_tensor", "ct_nvfp4"])
def test_scales_that_are_no_finite_numbers_are_refused_by_name(name: str, tmp_path: Path) -> None:
    has_codes = open_one(name, tmp_path)[0].codes(NAME) is not None
    stored = stored_in(tmp_path)
    scales = [part for part in stored if SCALES.fullmatch(part)]
    assert scales
    for part in scales:
        tensors = reopened(name, tmp_path, {**stored, part: stored[part].float().int()})
        with pytest.raises(CheckpointError, match=rf"{part} is stored as I32; it must be"):
            tensors.check(NAME, (ROWS, COLUMNS))
        is_byte = stored[part].itemsize == 1
        for value in [0xFF] if is_byte else [float("nan"), float("inf")]:  # a NaN of E8M0 and of E4M3
            wrong = stored[part].clone()
            (wrong.view(torch.uint8) if is_byte else wrong).view(-1)[-1] = value
            tensors = reopened(name, tmp_path, {**stored, part: wrong})
            for read in [tensors.get, tensors.codes] if has_codes else [tensors.get]:
                with pytest.raises(CheckpointError, match=rf"{part} holds scales that are no finite numbers"):
                    read(NAME)


def test_scales_of_experts_that_stay_packed_are_finite(tmp_path: Path) -> None:
    name, quantization = "model.layers.0.mlp.experts.down_proj_scales", {"quant_method": "mxfp4"}
    save_file({name: torch.tensor([[3, 255]], dtype=torch.uint8)}, tmp_path / "m.safetensors")
    declared = read_quantization({"quantization_config": quantization}, tmp_path, param="model")
    assert declared is not None
    tensors = QuantizedFolder(tmp_path, declared, torch.bfloat16)
    assert tensors.slice(name, slice(0, 1), 1).tolist() == [[3]]
    with pytest.raises(CheckpointError, match=rf"{name} holds scales that are no finite numbers"):
        tensors.get(name)


@pytest.mark.parametrize("name", KINDS)
def test_a_matrix_of_another_shape_than_config_json_requires_is_refused(name: str, tmp_path: Path) -> None:
    tensors, _ = open_one(name, tmp_path)
    for shape in ((ROWS + 32, COLUMNS), (ROWS, COLUMNS + 96)):
        with pytest.raises(CheckpointError, match=r"has shape .*ask for"):
            tensors.check(NAME, shape)
    with pytest.raises(CheckpointError, match=r"which is no matrix"):
        tensors.check(NAME, (ROWS,))


STORED = "is stored as I32, but quantization_config says that it is"
# The declared format, the stored one, and words.
OTHERS = [
    ("awq", "gptq", r"qweight has shape \[12, 64\].*\[96, 8\]"),
    ("gptq", "awq", r"qweight has shape \[96, 8\].*\[12, 64\]"),
    ("gptq", "ct_w4a16", f"weight_packed {STORED} GPTQ INT4"),
    ("ct_w4a16", "gptq", f"qweight {STORED} INT4 in groups"),
    ("ct_w4a16", "ct_w8a16", r"weight_packed has shape \[64, 24\].*\[64, 12\]"),
    ("ct_w8a16", "ct_w4a16", r"weight_packed has shape \[64, 12\].*\[64, 24\]"),
    ("ct_w4a16_asymmetric", "ct_w4a16", "weight_zero_point is missing"),
    ("ct_w4a16", "mxfp4", r"weight_packed is stored as U8, but quantization_config says that it is INT4"),
    ("fp8_blocks", "fp8_per_tensor", r"weight_scale has shape \[\].*\[3, 3\]"),
    ("fp8_blocks", "ct_int8", r"up_proj.weight is stored as I8; it must be F32"),
    ("ct_nvfp4", "mxfp4", r"weight_scale has shape \[64, 3\].*\[64, 6\]"),
]


@pytest.mark.parametrize(("declared", "stored", "message"), OTHERS)
def test_another_format_than_config_json_declares_is_refused(
    declared: str, stored: str, message: str, tmp_path: Path
) -> None:
    open_one(stored, tmp_path)
    tensors = QuantizedFolder(tmp_path, quantization_of(declared, tmp_path), torch.float32)
    with pytest.raises(CheckpointError, match=message):
        tensors.check(NAME, (ROWS, COLUMNS))


def test_a_quantized_matrix_that_config_json_ignores_is_refused(tmp_path: Path) -> None:
    open_one("ct_w4a16", tmp_path)
    config = {**(FORMATS["ct_w4a16"].config or {}), "ignore": ["re:.*up_proj"]}
    quantization = read_quantization({"quantization_config": config}, tmp_path, param="model")
    assert quantization is not None
    tensors = QuantizedFolder(tmp_path, quantization, torch.float32)
    with pytest.raises(
        CheckpointError, match=r"weight_packed is stored as I32.*says that it is not quantized"
    ):
        tensors.check(NAME, (ROWS, COLUMNS))


def test_plain_matrices_under_a_declared_quantization_are_refused(tmp_path: Path) -> None:
    tensors = reopened("gptq", tmp_path, {NAME: torch.zeros(ROWS, COLUMNS)})
    tensors.check(NAME, (ROWS, COLUMNS))
    with pytest.raises(
        CheckpointError, match=r"says gptq: GPTQ INT4 in groups of 32, but no matrix is stored so"
    ):
        tensors.refuse_stray_scales([NAME])


def test_groups_without_a_scale_are_refused(tmp_path: Path) -> None:
    open_one("gptq_act_order", tmp_path)
    stored = stored_in(tmp_path)
    stored[f"{MODULE}.g_idx"][7] = 3
    with pytest.raises(CheckpointError, match=r"g_idx names groups 0 to 3, but there are 3"):
        reopened("gptq_act_order", tmp_path, stored).get(NAME)


def test_a_shape_that_contradicts_its_codes_is_refused(tmp_path: Path) -> None:
    open_one("ct_w4a16", tmp_path)
    stored = stored_in(tmp_path)
    stored[f"{MODULE}.weight_shape"][1] = 64
    with pytest.raises(
        CheckpointError, match=r"weight_shape is \[64, 64\], but its codes have shape \[64, 12\]"
    ):
        reopened("ct_w4a16", tmp_path, stored).get(NAME)


CT = FORMATS["ct_w4a16"].config or {}
FP8, MODELOPT, MX_FP = {"quant_method": "fp8"}, {"quant_method": "modelopt"}, {"data_type": "mx_fp"}
# A format's configuration, changes of it, and words.
REFUSED: list[tuple[dict[str, object], dict[str, object], str]] = [
    ({}, {"quant_method": "bitsandbytes"}, r"quant_method='bitsandbytes' must be one of fp8,"),
    ({}, {"load_in_8bit": True}, r"quant_method is missing; it must be one of fp8,.*use the unquantized"),
    (FP8, {"fmt": "e5m2"}, "fmt='e5m2' must be 'float8_e4m3fn' or 'e4m3'"),
    (FP8, {"expert_dtype": "fp4"}, "expert_dtype='fp4' must be 'fp8'"),
    (GPTQ_CONFIG, {"bits": 5}, "bits=5 must be 2 or 3 or 4 or 8"),
    (GPTQ_CONFIG, {"checkpoint_format": "marlin"}, "format='marlin' must be 'gptq' or 'gptq_v2'"),
    (GPTQ_CONFIG, {"group_size": 0}, "group_size=0 must be a positive integer, or -1 for whole rows"),
    (GPTQ_CONFIG, {"dynamic": {"+:(": {}}}, r"dynamic.* must be a regular expression"),
    (AWQ_CONFIG, {"version": "gemv"}, "version='gemv' must be 'gemm'"),
    (AWQ_CONFIG, {"zero_point": False}, "zero_point=False must be true"),
    (AUTO_ROUND, {"packing_format": "auto_round:llm_compressor"}, "packing_format=.*others are not served"),
    (AUTO_ROUND, MX_FP, "data_type='mx_fp' must be 'int'"),
    (AUTO_ROUND, {"extra_config": {"lm_head": MX_FP}}, r"extra_config\.lm_head\.data_type='mx_fp' must be"),
    (AUTO_ROUND, {"bits": 5}, "bits=5 must be 2, 3, 4 or 8, or 16 for modules that are not quantized"),
    (MODELOPT, {"quant_algo": "NVFP4_AWQ"}, "quant_algo='NVFP4_AWQ' must be one of FP8,"),
    (MODELOPT, {"quant_algo": "MIXED_PRECISION"}, "quantized_layers is missing; .* for MIXED_PRECISION"),
    (CT, {"format": "marlin-24"}, r"group_0\.format='marlin-24, int of 4 bits.*others are not served"),
    (CT, {"quantization_status": "calibration"}, "quantization_status='calibration' must be"),
    (CT, {"transform_config": {"config_groups": {"u": {}}}}, "transform_config=.*absent"),
    (CT, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config=.*absent or dense"),
]


@pytest.mark.parametrize(("config", "changes", "words"), REFUSED)
def test_unsupported_formats_are_refused_by_name(
    config: dict[str, object], changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_quantization({"quantization_config": {**config, **changes}}, tmp_path, param="model")


NEVER_ENDS_WITH_RE = r"(([a-z_.0-9])+)+\$"
NEVER_ENDS = "(.+)" * 12 + "".join(f"\\{group}" for group in range(1, 13))


@pytest.mark.parametrize(
    ("config", "place"),
    [
        (GPTQ_CONFIG, lambda text: {"dynamic": {f"-:{text}": {}}}),
        (FP8, lambda text: {"modules_to_not_convert": [text]}),
        (AUTO_ROUND, lambda text: {"extra_config": {text: {"bits": 16}}}),
        (CT, lambda text: {"ignore": [f"re:{text}"]}),
    ],
    ids=["gptq", "fp8", "auto-round", "compressed-tensors"],
)
def test_expressions_that_never_end_are_answered_or_refused(
    config: dict[str, object], place: Callable[[str], dict[str, object]], tmp_path: Path
) -> None:
    module = "model.layers.0.self_attn.q_proj"
    for text in (NEVER_ENDS_WITH_RE, NEVER_ENDS):
        given = {"quantization_config": {**config, **place(text)}}
        found = read_quantization(given, tmp_path, param="model")
        assert found is not None
        if text is NEVER_ENDS_WITH_RE:
            assert found.scheme_of(module) is not None
            continue
        with pytest.raises(CheckpointError, match=r"takes more than 1 s for .*nested repetitions"):
            found.scheme_of(module)


def test_config_json_and_hf_quant_config_must_agree(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": "NVFP4", "group_size": 16}}'
    )
    same = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    assert str(read_quantization({"quantization_config": same}, tmp_path, param="model")) == "modelopt: NVFP4"
    assert str(read_quantization({}, tmp_path, param="model")) == "modelopt: NVFP4"
    other = {"quant_method": "modelopt", "quant_algo": "FP8"}
    with pytest.raises(
        CheckpointError, match=r"says modelopt: FP8.*hf_quant_config\.json says modelopt: NVFP4"
    ):
        read_quantization({"quantization_config": other}, tmp_path, param="model")


MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.language_model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    },
}


UP, GATE = "model.layers.1.mlp.up_proj", "mlp.gate"
INSIDE = "model.language_model.layers.1.mlp.up_proj"
AWQ_INT4, GPTQ_INT8, INT4 = "AWQ INT4 in groups of 32", "GPTQ INT8 in groups of 32", "INT4 in groups of 32"
FP8_WHOLE, MODELOPT_FP8 = "FP8 with a scale per tensor or channel", {**MODELOPT, "quant_algo": "FP8"}
GROUPS = FORMATS["ct_groups"].config or {}
PATTERNS = {"-:.*down": {}, r"+:.*\.up": {"bits": 8}}
FLOAT, FP16 = ({"bits": 16, "data_type": kind} for kind in ("float", "fp"))
# A format's configuration, changes of it, a module, and its form (None: it is not quantized).
MODULES: list[tuple[dict[str, object], dict[str, object], str, str | None]] = [
    (CT, {"ignore": ["re:.*self_attn.*"]}, "layers.1.self_attn.q_proj", None),
    (CT, {"ignore": [UP]}, INSIDE, None),
    (CT, {}, "model.embed_tokens", None),
    (GROUPS, {}, "model.layers.1.self_attn.q_proj", "INT8 with a scale per channel"),
    (GROUPS, {}, UP, INT4),
    (AWQ_CONFIG, {"modules_to_not_convert": [GATE]}, "model.layers.1.mlp.gate", None),
    (AWQ_CONFIG, {"modules_to_not_convert": [GATE]}, "model.layers.1.mlp.gate_proj", AWQ_INT4),
    (FP8, {"modules_to_not_convert": [r"model\.layers\.\d\.mlp"]}, UP, None),
    (FP8, {"ignored_layers": ["model.layers.1"]}, "model.layers.11.mlp.up_proj", FP8_WHOLE),
    (GPTQ_CONFIG, {"dynamic": PATTERNS}, "model.layers.1.mlp.down_proj", None),
    (GPTQ_CONFIG, {"dynamic": PATTERNS}, UP, GPTQ_INT8),
    (AUTO_ROUND, {"extra_config": {UP: {"bits": 8}}}, UP, GPTQ_INT8),
    (AUTO_ROUND, {"extra_config": {".*lm_head.*": FLOAT}}, "lm_head", None),
    (AUTO_ROUND, {"extra_config": {f"layers.1.{GATE}": FP16}}, "layers.1.mlp.gate", None),
    (MIXED, {}, "model.layers.0.mlp.up_proj", "NVFP4"),
    (MIXED, {}, "model.layers.0.self_attn.q_proj", "FP8 with a scale per tensor"),
    (MIXED, {}, "model.layers.0.self_attn.k_proj", None),
    (MIXED, {}, "model.layers.0.mlp.experts.3.up_proj", "NVFP4"),
    (MIXED, {"quant_method": None}, "model.layers.0.mlp.up_proj", "NVFP4"),
    (MODELOPT_FP8, {"ignore": ["model.layers.0.self_attn*"]}, "model.layers.0.self_attn.q_proj", None),
    (MODELOPT_FP8, {"ignore": ["lm_head"]}, "lm_head", None),
]


@pytest.mark.parametrize(("config", "changes", "module", "expected"), MODULES)
def test_lists_of_modules_are_read_as_the_formats_mean_them(
    config: dict[str, object], changes: dict[str, object], module: str, expected: str | None, tmp_path: Path
) -> None:
    quantization = read_quantization({"quantization_config": {**config, **changes}}, tmp_path, param="model")
    assert quantization is not None
    scheme = quantization.scheme_of(module)
    assert (None if scheme is None else str(scheme)) == expected


def test_awq_and_gptq_words_have_the_published_order() -> None:
    codes = torch.tensor([[0x76543210]], dtype=torch.int32)
    assert unpack(codes, 4).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert unpack(torch.cat([codes, codes], 1).T[:1], 4).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert AWQ.unpack(torch.tensor([[0x75316420]], dtype=torch.int32), 4).tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7]
    ]
    threes = sum((place % 8) << (3 * place) for place in range(32))
    words = [(threes >> (32 * word)) & 0xFFFFFFFF for word in range(3)]
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    assert unpack(torch.tensor([signed], dtype=torch.int32), 3).tolist() == [
        [place % 8 for place in range(32)]
    ]
