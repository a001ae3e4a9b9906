"""Llama 2 and 3, and models of the same shape: plain blocks, with optional biases."""

from __future__ import annotations

from ....drafter.compute.checkpoint.hf_config import Json, parse
from ..model.model_spec import ModelSpec
from .shared.llama_like import PlainConfig, read_plain


class LlamaConfig(PlainConfig):
    attention_bias: bool = False
    mlp_bias: bool = False


def read(raw: Json, file: str) -> ModelSpec:
    config = parse(LlamaConfig, raw, file)
    bias = config.attention_bias
    return read_plain(raw, file, config, bias=bias, out_bias=bias, mlp_bias=config.mlp_bias)
