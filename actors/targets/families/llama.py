"""Families of plain blocks: Llama 2 and 3, Mistral 7B, Qwen2 and 2.5, Qwen3 dense and with routed experts.

Sources for Qwen3 with experts: transformers' modeling_qwen3_moe.py and configuration_qwen3_moe.py.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import field_validator

from ....drafter.compute.checkpoint.hf_config import Json, parse
from ..model.model_spec import ModelSpec
from .shared.llama_like import TENSORS, PlainConfig, QwenConfig, read_plain
from .shared.qwen_moe import EXPERT_TENSORS, SoftmaxExpertsConfig


class LlamaConfig(PlainConfig):
    attention_bias: bool = False
    mlp_bias: bool = False


class Qwen3Config(QwenConfig):
    attention_bias: bool = False


class Qwen3MoeConfig(Qwen3Config, SoftmaxExpertsConfig):
    """Keys as in transformers, which also ignores that Qwen3-Coder states a shared expert of size 0."""

    @field_validator("shared_expert_intermediate_size")
    @classmethod
    def _check_no_shared_expert(cls, size: int | None) -> int | None:
        if size:
            raise ValueError("must be 0 or absent: this class has no shared expert")
        return size


def read_llama(raw: Json, file: str) -> ModelSpec:
    config = parse(LlamaConfig, raw, file)
    bias = config.attention_bias
    return read_plain(raw, file, config, bias=bias, out_bias=bias, mlp_bias=config.mlp_bias)


def read_mistral(raw: Json, file: str) -> ModelSpec:
    config = parse(PlainConfig, raw, file)
    return read_plain(raw, file, config, windows=(config.sliding_window,) * config.num_hidden_layers)


def read_qwen2(raw: Json, file: str) -> ModelSpec:
    """Return a model with biases of queries, keys and values, and without norms of heads."""
    config = parse(QwenConfig, raw, file)
    return read_plain(raw, file, config, windows=config.windows(file), bias=True)


def read_qwen3(raw: Json, file: str) -> ModelSpec:
    return _read_dense_qwen3(raw, file, parse(Qwen3Config, raw, file))


def read_qwen3_moe(raw: Json, file: str) -> ModelSpec:
    config = parse(Qwen3MoeConfig, raw, file)
    dense, mlps = _read_dense_qwen3(raw, file, config), config.mlps(file)
    layers = tuple(replace(layer, mlp=mlp) for layer, mlp in zip(dense.layers, mlps, strict=True))
    return replace(dense, layers=layers, tensors={**TENSORS, **EXPERT_TENSORS})


def _read_dense_qwen3(raw: Json, file: str, config: Qwen3Config) -> ModelSpec:
    bias, windows = config.attention_bias, config.windows(file)
    return read_plain(
        raw, file, config, head_dim=128, windows=windows, qk_norm=True, bias=bias, out_bias=bias
    )
