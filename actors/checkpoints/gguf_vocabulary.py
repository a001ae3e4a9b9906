"""The vocabulary of a tokenizer.json as GGUF's metadata, for a drafter's file.

llama.cpp loads a drafter only with its target's tokens, but never cuts a text with them: the name of the
pre-tokenizer (`tokenizer.ggml.pre`) is its default, not the target's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf.constants import TokenType

from ...cluster.errors import ConfigError
from ...drafter.compute.checkpoint.gguf.drafter_writer import Value
from ...drafter.compute.checkpoint.hf_config import read_json
from .checkpoint_paths import TOKENIZER_JSON

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def read_vocabulary(folder: Path, vocab_size: int, end_ids: tuple[int, ...]) -> dict[str, Value]:
    """Return the keys `tokenizer.ggml.*` of a target, with unused tokens up to `vocab_size`.

    Raises ConfigError if the target has no tokenizer.json, or one of a type that llama.cpp does not have.
    """
    if not (folder / TOKENIZER_JSON).is_file():
        raise ConfigError(
            f"target: {folder} has no {TOKENIZER_JSON}; llama.cpp loads no drafter without the tokens of its"
            " target.",
            param="target",
        )
    raw = read_json(folder, TOKENIZER_JSON, param="target")
    model: Mapping[str, Any] = raw["model"]  # Any: JSON values
    scores, is_sentencepiece = _scores(model)
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [int(TokenType.UNUSED)] * vocab_size
    kinds = {token: TokenType.BYTE for token in scores if is_sentencepiece and _BYTE.fullmatch(token)}
    added = {each["content"]: each for each in raw.get("added_tokens") or ()}
    places = {**_ids(model), **{token: each["id"] for token, each in added.items()}}
    for token, place in places.items():
        if place >= vocab_size:
            raise ConfigError(
                f"target: {folder} has the token {place}, but only {vocab_size} logits.", param="target"
            )
        kind = kinds.get(token, TokenType.NORMAL)
        if token in added:
            kind = TokenType.CONTROL if added[token].get("special") else TokenType.USER_DEFINED
        tokens[place], types[place] = token, int(kind)
    found: dict[str, Value] = {"tokenizer.ggml.model": "llama" if is_sentencepiece else "gpt2"}
    found |= {"tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": tokens}
    found["tokenizer.ggml.token_type"] = types
    if is_sentencepiece:
        found["tokenizer.ggml.scores"] = [float(scores.get(token, -1e4)) for token in tokens]
    else:
        found["tokenizer.ggml.merges"] = [
            each if isinstance(each, str) else " ".join(each) for each in model["merges"]
        ]
    return found | ({"tokenizer.ggml.eos_token_id": end_ids[0]} if end_ids else {})


def _scores(model: Mapping[str, Any]) -> tuple[dict[str, float], bool]:  # Any: JSON values
    """Return the score of each token, and whether the tokenizer is SentencePiece's."""
    match model.get("type"):
        case "BPE":
            return {token: -float(place) for token, place in model["vocab"].items()}, bool(
                model.get("byte_fallback")
            )
        case "Unigram":
            return dict(model["vocab"]), True
        case other:
            raise ConfigError(f"target: tokenizers of the type {other!r} are not written.", param="target")


def _ids(model: Mapping[str, Any]) -> dict[str, int]:  # Any: JSON values
    if model["type"] == "Unigram":
        return {token: place for place, (token, _) in enumerate(model["vocab"])}
    return dict(model["vocab"])
