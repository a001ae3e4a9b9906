"""Qwen3, dense: heads of 128, normed queries and keys."""

from __future__ import annotations

from ....drafter.compute.config_json import Json, parse
from ..model.spec import ModelSpec
from .plain import QwenConfig, read_plain


class Qwen3Config(QwenConfig):
    """config.json of Qwen3ForCausalLM."""

    attention_bias: bool = False


def read(raw: Json, file: str) -> ModelSpec:
    config = parse(Qwen3Config, raw, file)
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
