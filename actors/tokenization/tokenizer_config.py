"""Reads a checkpoint's tokenizer settings: names of special tokens, and chat templates.

Reads tokenizer_config.json, special_tokens_map.json, chat_template.jinja and additional_chat_templates/ by
the rules of transformers' `AutoTokenizer` (5.24), without importing it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...cluster.errors import CheckpointError
from ...cluster.json_text import parse_json
from ...drafter.compute.checkpoint.hf_config import Json, read_json
from ..checkpoints.file_names import DEFAULT, TOKENIZER_JSON
from .tiktoken_tokenizer import tiktoken_ids

_SETTINGS, _OLD_SETTINGS = "tokenizer_config.json", "special_tokens_map.json"
_TEMPLATE_FILE, _TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"

_QWEN = {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
# Special tokens of transformers' classes where no file names them. `TokenizersBackend` has none.
CLASS_TOKENS: Mapping[str, Mapping[str, str]] = {
    "Qwen2Tokenizer": _QWEN,
    "Qwen3_5Tokenizer": _QWEN,
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GemmaTokenizer": {
        **{"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"},
        **{"pad_token": "<pad>", "mask_token": "<mask>"},
    },
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
}
# Classes that transformers selects by `model_type` of config.json. For these it uses its own class, whatever
# class the files name ...
_CORRECTED = {"qwen2": "Qwen2Tokenizer", "qwen3_5": "Qwen3_5Tokenizer", "qwen3_5_moe": "Qwen3_5Tokenizer"}
# ... for these no class, unless the files name none ...
_GENERIC = frozenset({"mistral", "glm4_moe", "minimax_m2", "mimo_v2_flash", "kimi_k25"})
# ... and for these its own class if the files name none.
_BY_MODEL = {
    **_CORRECTED,
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma3", "gemma3_text"), "GemmaTokenizer"),
}


def read_special_tokens(folder: Path, *, byte_level: bool) -> dict[str, str]:
    """Return special tokens by names in templates. `byte_level` rules out a true `LlamaTokenizer`."""
    found = dict(_read(folder, _SETTINGS))
    defaults = CLASS_TOKENS.get(_class_name(folder, found, byte_level), {})
    if "added_tokens_decoder" not in found:  # written by transformers before 4.34
        found |= _read(folder, _OLD_SETTINGS)
    named = {**defaults, **{name: value for name, value in found.items() if name.endswith("_token")}}
    if isinstance(extra := found.get("extra_special_tokens"), Mapping):
        named |= extra
    texts = {name: _text(value) for name, value in named.items()}
    return {name: text for name, text in texts.items() if text is not None}


def read_chat_templates(folder: Path) -> dict[str, str]:
    """Return Jinja sources by name; files before tokenizer_config.json. Raises CheckpointError."""
    files = {DEFAULT: folder / _TEMPLATE_FILE} if (folder / _TEMPLATE_FILE).is_file() else {}
    files |= {path.name.removesuffix(".jinja"): path for path in (folder / _TEMPLATE_FOLDER).glob("*.jinja")}
    if files:
        return {name: _template_text(path) for name, path in sorted(files.items())}
    given = _read(folder, _SETTINGS).get("chat_template")
    if isinstance(given, str):
        return {DEFAULT: given} if given else {}
    try:
        pairs = [(entry["name"], entry["template"]) for entry in given or ()]
    except (TypeError, KeyError):
        pairs = [(None, None)]
    named = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    if len(named) < len(pairs):
        raise CheckpointError(
            f"tokenizer: {folder / _SETTINGS}: chat_template must be Jinja, or a list of objects with "
            "a unique `name` and a `template`. Or give another one: chat_template, --chat-template.",
            param="tokenizer",
        )
    return named


def _read(folder: Path, name: str) -> Json:
    return read_json(folder, name, param="tokenizer", required=False)


def _class_name(folder: Path, settings: Json, byte_level: bool) -> str:
    """Return the class that transformers selects; "" if it has no own special tokens."""
    config = _read(folder, "config.json")
    kind = str(config.get("model_type") or "")
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if not isinstance(named, str):
        return _BY_MODEL.get(kind, "")
    named = named.removesuffix("Fast")
    if kind in _GENERIC or (named == "LlamaTokenizer" and byte_level and kind not in _CORRECTED):
        return ""
    return _CORRECTED.get(kind, named)


def _text(value: Any) -> str | None:  # Any: JSON values
    """Return the text of a token, which is a string or an object with flags."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _template_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"tokenizer: {path} cannot be read: {error}.", param="tokenizer") from None


@dataclass(frozen=True, slots=True)
class TokenIds:
    """The token ids of a tokenizer, known without loading it."""

    known: frozenset[int]  # all its token ids
    end: int | None  # id of its `eos_token`, if it has one

    @classmethod
    def read(cls, folder: Path) -> TokenIds | None:
        """Return None if the files are malformed, which loading the tokenizer reports."""
        file = folder / TOKENIZER_JSON
        try:
            raw = parse_json(file.read_text(encoding="utf-8")) if file.is_file() else {}
            ids = _ids(raw) if raw else tiktoken_ids(folder)
            parts = json.dumps([raw.get("pre_tokenizer"), raw.get("decoder")])
            named = read_special_tokens(folder, byte_level="ByteLevel" in parts)
            return cls(frozenset(ids.values()), ids.get(named.get("eos_token", "")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, CheckpointError):
            return None


def _ids(raw: Mapping[str, Any]) -> dict[str, int]:
    vocabulary = raw["model"]["vocab"]
    if not isinstance(vocabulary, dict):  # Unigram: pieces with their scores, by id
        vocabulary = {piece: token_id for token_id, (piece, _) in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in raw.get("added_tokens", ())}}
