"""An upper bound of the text per token, which gives a lower bound of a text's tokens without encoding it.

    text ─ normalizer ─▶ characters ─ pre-tokenizer, BPE ─▶ tokens
         at most 4 : 1 (NFC, NFKC)                        at most the longest entry : 1

A text that cannot fit the model is rejected in microseconds, where encoding takes a second per 2 MB. The
bound must never reject a text that fits, so it is only computed for tokenizers that lose no characters: each
step must be one known to keep or lengthen text, and the vocabulary must cover every byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

Part: TypeAlias = Mapping[str, Any]  # Any: a piece of tokenizer.json.

# Unicode's longest canonical decomposition: composition joins at most this many characters.
COMPOSED_CHARS = 4
COMPOSING = frozenset({"NFC", "NFKC"})
REWRITING = frozenset({"Prepend", "Replace", "ByteLevel"})
NORMALIZERS = frozenset({"NFD", "NFKD", "Lowercase"}) | COMPOSING | REWRITING
PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Split", "Punctuation"})


@dataclass(frozen=True, slots=True)
class TokenCoverage:
    """The maximum number of characters that one token covers. Composition does not affect pure ASCII."""

    chars: int
    ascii_chars: int

    def min_tokens(self, text: str) -> int:
        return -(-len(text) // self._per_token(text))

    def tail(self, text: str, num_tokens: int) -> str:
        """Return an end of the text with at least `num_tokens` tokens, or all of it."""
        return text[-num_tokens * self._per_token(text) :]

    def _per_token(self, text: str) -> int:
        return self.ascii_chars if text.isascii() else self.chars


def token_coverage(backend: tokenizers.Tokenizer) -> TokenCoverage | None:
    """Return None if it is unbounded or unknown."""
    serialized: Part = json.loads(backend.to_str())
    normalizers = list(_parts(serialized["normalizer"], "normalizers"))
    splitters = list(_parts(serialized["pre_tokenizer"], "pretokenizers"))
    if not (
        all(map(_normalizer_keeps, normalizers))
        and all(map(_splitter_keeps, splitters))
        and _model_keeps(serialized["model"], [*normalizers, *splitters])
        and not any(
            token["lstrip"] or token["rstrip"] for token in serialized["added_tokens"]
        )  # eat whitespace
    ):
        return None
    longest = max(map(len, [*serialized["model"]["vocab"], *_added(backend, serialized)]))
    kinds = [part["type"] for part in normalizers]
    shrink = COMPOSED_CHARS ** sum(kind in COMPOSING for kind in kinds)
    rewritten = any(kind in REWRITING for kind in kinds)
    return TokenCoverage(longest * shrink, longest * (shrink if rewritten else 1))


def _parts(part: Part | None, children: str) -> Iterator[Part]:
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for child in part[children]:
        yield from _parts(child, children)


def _normalizer_keeps(part: Part) -> bool:
    if part["type"] == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and len(part["content"]) >= len(pattern)
    return part["type"] in NORMALIZERS


def _splitter_keeps(part: Part) -> bool:
    return part["type"] in PRE_TOKENIZERS and part.get("behavior") != "Removed"


def _model_keeps(model: Part, steps: list[Part]) -> bool:
    """Return whether every byte has a token; otherwise text is dropped or merged."""
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return False
    if any(step["type"] == "ByteLevel" for step in steps):
        return set(ByteLevel.alphabet()) <= model["vocab"].keys()
    return model["byte_fallback"] and {f"<0x{byte:02X}>" for byte in range(256)} <= model["vocab"].keys()


def _added(backend: tokenizers.Tokenizer, serialized: Part) -> Iterator[str]:
    """Yield the added tokens as matched: in the text and in the normalized text."""
    for token in serialized["added_tokens"]:
        yield token["content"]
        if token["normalized"] and backend.normalizer is not None:
            yield backend.normalizer.normalize_str(token["content"])
