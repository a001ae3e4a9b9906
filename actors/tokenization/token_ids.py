"""Token ids of a folder's tokenizer, read from its files alone; a load plan checks a target with them.

Machines that only examine and time kernels have no `tokenizers` library, and a plan encodes no text. Called
by `targets/loading/load_plan.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...cluster.errors import CheckpointError
from .checkpoint_paths import TOKENIZER_JSON
from .tiktoken_tokenizer import tiktoken_ids
from .tokenizer_config import read_special_tokens


@dataclass(frozen=True, slots=True)
class TokenIds:
    """The token ids of a tokenizer, known without loading it.

    Attributes:
        known: all its token ids.
        end: id of its `eos_token`, if it has one.
    """

    known: frozenset[int]
    end: int | None

    @classmethod
    def read(cls, folder: Path) -> TokenIds | None:
        """Read a folder's files; None if they are malformed, which loading the tokenizer reports."""
        file = folder / TOKENIZER_JSON
        try:
            raw = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
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
