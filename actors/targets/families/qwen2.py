"""Qwen2 and Qwen2.5: queries, keys and values always have biases; heads have no norms."""

from __future__ import annotations

from ....drafter.compute.checkpoint.hf_config import Json, parse
from ..model.model_spec import ModelSpec
from .shared.llama_like import QwenConfig, read_plain


def read(raw: Json, file: str) -> ModelSpec:
    config = parse(QwenConfig, raw, file)
    return read_plain(raw, file, config, windows=config.windows(file), bias=True)
