"""Mistral 7B and its variants: plain blocks; either all layers or none have a sliding window."""

from __future__ import annotations

from ....drafter.compute.checkpoint.hf_config import Json, parse
from ..model.model_spec import ModelSpec
from .shared.llama_like import PlainConfig, read_plain


def read(raw: Json, file: str) -> ModelSpec:
    config = parse(PlainConfig, raw, file)
    return read_plain(raw, file, config, windows=(config.sliding_window,) * config.num_hidden_layers)
