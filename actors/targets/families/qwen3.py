"""Qwen3, dense: heads of size 128, normed queries and keys."""

from __future__ import annotations

from ....drafter.compute.checkpoint.hf_config import Json, parse
from ..model.model_spec import ModelSpec
from .shared.llama_like import QwenConfig, read_plain


class Qwen3Config(QwenConfig):
    attention_bias: bool = False


def read(raw: Json, file: str) -> ModelSpec:
    return read_dense_qwen3(raw, file, parse(Qwen3Config, raw, file))


def read_dense_qwen3(raw: Json, file: str, config: Qwen3Config) -> ModelSpec:
    """Return a model whose layers all have dense MLPs."""
    bias = config.attention_bias
    return read_plain(
        raw,
        file,
        config,
        head_dim=128,
        windows=config.windows(file),
        qk_norm=True,
        bias=bias,
        out_bias=bias,
    )
