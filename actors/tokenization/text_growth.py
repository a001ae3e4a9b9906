"""Bounds how much longer a checkpoint's normalizer or decoder can make a text.

`tokenizers` replaces patterns in a text without a limit: forty steps that double a letter ask for a terabyte,
and a failed allocation in Rust ends the process. So the bound is computed from tokenizer.json at load, and a
tokenizer above it is refused. Unicode's own forms are not counted: they lengthen few characters, and each
once.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from ...cluster.errors import CheckpointError

MAX_GROWTH = 64.0
UNICODE_BYTES = 33  # of the longest text that a character has in Unicode's compatibility forms

Part = Mapping[str, Any]  # Any: a piece of tokenizer.json


def check_growth(backend: tokenizers.Tokenizer, path: Path) -> None:
    """Raise CheckpointError if a text may become more than MAX_GROWTH times as long."""
    kinds = ("normalizer", backend.normalizer, "normalizers"), ("decoder", backend.decoder, "decoders")
    for name, part, children in kinds:
        growth = 1.0
        for step in parts(serialized(part), children):
            growth *= _growth(step)
        if growth > MAX_GROWTH:
            raise CheckpointError(
                f"tokenizer: the {name} in {path} can make a text {growth:.3g} times as long; at most "
                f"{MAX_GROWTH:g} times is allowed. Remove steps that replace text by longer text.",
                param="tokenizer",
            )


def serialized(part: Any) -> Part | None:  # Any: a class of the tokenizers package
    """Return a part as in tokenizer.json, which is not parsed as a whole for its large vocabulary."""
    return None if part is None else json.loads(part.__getstate__())


def parts(part: Part | None, children: str) -> Iterator[Part]:
    """Yield the steps of a part, those in sequences one by one."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for child in part[children]:
        yield from parts(child, children)


def _growth(step: Part) -> float:
    match step["type"]:
        case "Replace":
            return max(1.0, _replaced(step["pattern"], len(step["content"])))
        case "Prepend":
            return 1.0 + len(step["prepend"])
        case "Precompiled":
            return max(1.0, _longest(b64decode(step["precompiled_charsmap"])) / UNICODE_BYTES)
        case _:
            return 1.0


def _replaced(pattern: Part, length: int) -> float:
    """Return the bound for a replacement of this length; an expression may match between all letters."""
    text = pattern.get("String")
    return length / len(text) if text else 1.0 + length


def _longest(charsmap: bytes) -> int:
    """Return the bytes of the longest text in a SentencePiece map: size of a trie, the trie, the texts."""
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return max(map(len, texts.split(b"\0")))
