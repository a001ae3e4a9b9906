"""Writes a tiny checkpoint of transformers as GGUF, as llama.cpp's converter would.

Names come from the `gguf` package, as do the encoders of types; types that it only decodes get random blocks.
The second checkpoint that is written has the decoded values in Hugging Face's form: what the file must be
read as. Where a value goes is found by converting the elements' numbers instead of the elements.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from .gguf_vocabulary import add_vocabulary

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
        plus_one: ends of names of norms to which 1 is added, unless they end with one of `as_stored`.
        keeps_gate_up: whether gate and up rows of experts stay in one tensor.
        extra: tensors that are made of the config.
    """

    arch: MODEL_ARCH
    metadata: Callable[[GGUFWriter, Config], None] = lambda writer, config: None
    convert: Callable[[str, Tensor, Config], Converted] = lambda name, tensor, config: {name: tensor}
    plus_one: tuple[str, ...] = ()
    as_stored: tuple[str, ...] = ()
    keeps_gate_up: bool = False
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
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    writer.add_expert_count(next(config[key] for key in keys if config.get(key)))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])


def _gemma3(writer: GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(config["_sliding_window_pattern"])


def _gpt_oss(writer: GGUFWriter, config: Config) -> None:
    _experts(writer, config)
    writer.add_sliding_window(config["sliding_window"])


def _gpt_oss_tensor(name: str, tensor: Tensor, config: Config) -> Converted:
    if name.endswith("sinks"):
        return {f"{name}.weight": tensor}
    if name.endswith("down_proj_bias"):
        return {name.replace("_bias", ".bias"): tensor}
    if name.endswith("down_proj"):
        return {f"{name}.weight": tensor.transpose(1, 2)}
    if name.endswith("gate_up_proj_bias"):
        start = name.removesuffix("gate_up_proj_bias")
        return {f"{start}{kind}_proj.bias": tensor[:, i::2] for i, kind in enumerate(("gate", "up"))}
    if name.endswith("gate_up_proj"):
        start, rows = name.removesuffix("gate_up_proj"), tensor.transpose(1, 2)
        return {f"{start}{kind}_proj.weight": rows[:, i::2] for i, kind in enumerate(("gate", "up"))}
    return {name: tensor}


def _sigmoid_experts(writer: GGUFWriter, config: Config) -> None:
    _experts(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])


def _glm4_moe(writer: GGUFWriter, config: Config) -> None:
    _sigmoid_experts(writer, config)
    writer.add_rope_dimension_count(
        int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"])
    )


def _minimax_m2(writer: GGUFWriter, config: Config) -> None:
    _experts(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_rope_dimension_count(config["rotary_dim"])


def _deepseek(writer: GGUFWriter, config: Config) -> None:
    _sigmoid_experts(writer, config)
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_scaling_yarn_log_mul(0.1 * config["rope_parameters"]["mscale_all_dim"])


def _deepseek_tensor(name: str, tensor: Tensor, config: Config) -> Converted:
    if not name.endswith("kv_b_proj.weight"):
        return {name: tensor}
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    of_keys, of_values = tensor.view(heads, -1, rank).split(
        [config["qk_nope_head_dim"], config["v_head_dim"]], 1
    )
    start = name.removesuffix("kv_b_proj.weight")
    return {f"{start}k_b_proj.weight": of_keys.transpose(1, 2), f"{start}v_b_proj.weight": of_values}


def _gemma4(writer: GGUFWriter, config: Config) -> None:
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    own = next(iter(config["per_layer_config"].values()))
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_key_length(own["head_dim"])
    writer.add_value_length(own["head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_head_count_kv(
        [config["num_key_value_heads"] if each else own["num_key_value_heads"] for each in slides]
    )
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(own["head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["top_k_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _gemma4_tensor(name: str, tensor: Tensor, config: Config) -> Converted:
    return {f"{name}.weight" if name.endswith("layer_scalar") else name: tensor}


def _gemma4_frequencies(config: Config) -> Mapping[str, Tensor]:
    pairs = next(iter(config["per_layer_config"].values()))["head_dim"] // 2
    share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    rotated = int(pairs * share)
    return {"rope_freqs.weight": torch.tensor([1.0] * rotated + [1e30] * (pairs - rotated))}


def _qwen35(writer: GGUFWriter, config: Config) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(2)
    writer.add_rope_dimension_count(
        int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"])
    )
    if "num_experts" in config:
        _experts(writer, config)
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _qwen35_tensor(name: str, tensor: Tensor, config: Config) -> Converted:
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    of_keys = 2 * key_heads * config["linear_key_head_dim"]

    def by_number(rows: Tensor) -> Tensor:
        heads = rows.unflatten(0, (key_heads, value_heads // key_heads, -1))
        return heads.transpose(0, 1).flatten(0, 2)

    layers = config["num_hidden_layers"]
    name = name.replace("mtp.layers.0.", f"model.layers.{layers}.")
    for mine, theirs in (
        ("fc", "eh_proj"),
        ("pre_fc_norm_embedding", "enorm"),
        ("pre_fc_norm_hidden", "hnorm"),
        ("norm", "shared_head.norm"),
    ):
        name = name.replace(f"mtp.{mine}.", f"model.layers.{layers}.{theirs}.")
    if "linear_attn" not in name:
        return {name: tensor}
    match name.rpartition("linear_attn.")[2]:
        case "in_proj_qkv.weight":
            tensor = torch.cat((tensor[:of_keys], by_number(tensor[of_keys:])))
        case "conv1d.weight":
            tensor = tensor.squeeze(1)
            tensor = torch.cat((tensor[:of_keys], by_number(tensor[of_keys:])))
        case "in_proj_z.weight" | "in_proj_a.weight" | "in_proj_b.weight" | "A_log":
            tensor = by_number(tensor)
        case "dt_bias":
            return {name.replace("dt_bias", "dt_proj.bias"): by_number(tensor)}
        case "out_proj.weight":
            tensor = by_number(tensor.T).T
    return {name: tensor}


_QWEN35_SHIFTED: dict[str, Any] = {"plus_one": ("norm.weight",), "as_stored": ("linear_attn.norm.weight",)}

GGUF_FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily(MODEL_ARCH.LLAMA, convert=_llama, extra=_llama_frequencies),
    "qwen2": GgufFamily(MODEL_ARCH.QWEN2),
    "qwen3": GgufFamily(MODEL_ARCH.QWEN3),
    "qwen3_moe": GgufFamily(MODEL_ARCH.QWEN3MOE, _experts),
    "gemma3": GgufFamily(MODEL_ARCH.GEMMA3, _gemma3, plus_one=("norm.weight",)),
    "gpt_oss": GgufFamily(MODEL_ARCH.GPT_OSS, _gpt_oss, _gpt_oss_tensor),
    "glm4_moe": GgufFamily(MODEL_ARCH.GLM4_MOE, _glm4_moe),
    "minimax_m2": GgufFamily(MODEL_ARCH.MINIMAXM2, _minimax_m2),
    "deepseek_v3": GgufFamily(MODEL_ARCH.DEEPSEEK2, _deepseek, _deepseek_tensor),
    "gemma4": GgufFamily(
        MODEL_ARCH.GEMMA4, _gemma4, _gemma4_tensor, extra=_gemma4_frequencies, keeps_gate_up=True
    ),
    "qwen3_5": GgufFamily(MODEL_ARCH.QWEN35, _qwen35, _qwen35_tensor, **_QWEN35_SHIFTED),
    "qwen3_5_moe": GgufFamily(MODEL_ARCH.QWEN35MOE, _qwen35, _qwen35_tensor, **_QWEN35_SHIFTED),
}


def publish_gguf(
    saved: Path, folder: Path, family: str, types: Sequence[str] = ("Q8_0",), *, split: int = 0
) -> tuple[Path, Path]:
    """Return a folder that shows a GGUF file, and one with the same values in safetensors.

    `types` are given to the matrices in turn, where their rows have whole blocks. A tokenizer in `saved` must
    be one of `support/checkpoints/text_pair.py`.
    """
    config = json.loads((saved / "config.json").read_text())
    tensors, form = load_file(saved / "model.safetensors"), GGUF_FAMILIES[family]
    folder.mkdir(parents=True)
    writer = GGUFWriter(folder / "model.gguf", gguf.MODEL_ARCH_NAMES[form.arch], split_max_tensors=split)
    num_further = config.get("num_nextn_predict_layers") or any(name.startswith("mtp.") for name in tensors)
    _add_metadata(writer, config, form, int(num_further))
    names = gguf.get_tensor_name_map(form.arch, config["num_hidden_layers"] + 1)
    first, numbers = 0, dict[str, Tensor]()
    for name, tensor in tensors.items():
        numbers[name] = torch.arange(first, first + tensor.numel()).view(tensor.shape)
        first += tensor.numel()
    flat = torch.zeros(first)
    random = np.random.default_rng(7)
    of_values, of_numbers = (_converted(each, form, config) for each in (tensors, numbers))
    in_turn = cycle(types)
    for name, tensor in sorted(of_values.items()):
        kind = _type_of(name, tensor, in_turn)
        encoded = _encoded(_changed(name, tensor, form).contiguous(), kind, random)
        writer.add_tensor(_stored_name(names, name), encoded, raw_dtype=kind)
        flat[of_numbers[name].flatten()] = _undone(name, _decoded(encoded, kind), form).flatten()
    if (saved / "tokenizer.json").exists():
        vocabulary = json.loads((saved / "tokenizer.json").read_text())
        add_vocabulary(writer, vocabulary, kind="gpt2", pre="gpt-2", num_rows=config["vocab_size"])
        writer.add_chat_template(json.loads((saved / "tokenizer_config.json").read_text())["chat_template"])
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


def _add_metadata(writer: GGUFWriter, config: Config, form: GgufFamily, num_further: int) -> None:
    """Add the keys; the number of layers includes `num_further` for multi-token prediction."""
    writer.add_block_count(config["num_hidden_layers"] + num_further)
    if num_further:
        writer.add_nextn_predict_layers(num_further)
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
            elif after == "gate_up_proj" and not form.keeps_gate_up:
                gate, up = moved.chunk(2, dim=1)
                found[f"{before}.experts.gate_proj.weight"] = gate
                found[f"{before}.experts.up_proj.weight"] = up
            elif after in ("gate_up_proj", "down_proj"):
                found[f"{part}.weight"] = moved
            else:
                found[part] = moved
    return found | {name: torch.stack(each) for name, each in experts.items()}


def _changed(name: str, tensor: Tensor, form: GgufFamily) -> Tensor:
    if name.endswith("A_log"):
        return -tensor.exp()
    return tensor + 1 if _is_shifted(name, form) else tensor


def _undone(name: str, tensor: Tensor, form: GgufFamily) -> Tensor:
    if name.endswith("A_log"):
        return (-tensor).log()
    return tensor - 1 if _is_shifted(name, form) else tensor


def _is_shifted(name: str, form: GgufFamily) -> bool:
    return name.endswith(form.plus_one or ("?",)) and not name.endswith(form.as_stored or ("?",))


# The package's list of qwen35's tensors has none of the layer that llama.cpp names as GLM's.
_OF_MTP = gguf.get_tensor_name_map(MODEL_ARCH.GLM4_MOE, 8)


def _stored_name(names: gguf.TensorNameMap, name: str) -> str:
    layer = name.removeprefix("model.layers.").partition(".")[0]
    if name.endswith("router.scale"):
        return f"blk.{layer}.ffn_gate_inp.scale"
    if name.endswith("per_expert_scale"):
        return f"blk.{layer}.ffn_down_exps.scale"
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    stored = names.get_name(name, _SUFFIXES) or _OF_MTP.get_name(name, _SUFFIXES)
    assert stored is not None, f"the package has a name for {name}"
    return stored


_IN_FP32 = ("ffn_gate_inp", "gate.weight", "router.proj.weight", "router.weight", "conv1d.weight")


def _type_of(name: str, tensor: Tensor, in_turn: Iterator[str]) -> GGMLQuantizationType:
    """Return the next type; fp32 for tensors that stay so in files, and without whole blocks."""
    if tensor.dim() == 1 or name.endswith((*_IN_FP32, ".bias")):
        return GGMLQuantizationType.F32
    kind = GGMLQuantizationType[next(in_turn)]
    return GGMLQuantizationType.F32 if tensor.shape[-1] % GGML_QUANT_SIZES[kind][0] else kind


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
