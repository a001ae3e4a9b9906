"""How much text one token can cover: a lower bound of a text's tokens that needs no encoding.

A text that cannot fit the model is refused by it in microseconds, where encoding takes a second per 2 MB. The
bound must never refuse a text that fits, so it is only given for tokenizers that lose no character on the
way: each step is one of those known to keep or lengthen text, and the vocabulary covers every byte.

    text ─ normalizer ─▶ characters ─ pre-tokenizer, BPE ─▶ tokens
         at most 4 : 1 (NFC, NFKC)                        at most the longest entry : 1

Used by `Tokenizer`, once per checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

Part: TypeAlias = Mapping[str, Any]  # Any: a piece of tokenizer.json.

# Unicode's longest canonical decomposition: composing makes one character of at most so many.
COMPOSED_CHARS = 4
COMPOSING = frozenset({"NFC", "NFKC"})
REWRITING = frozenset({"Prepend", "Replace", "ByteLevel"})
NORMALIZERS = frozenset({"NFD", "NFKD", "Lowercase"}) | COMPOSING | REWRITING
PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Split", "Punctuation"})


@dataclass(frozen=True, slots=True)
class TokenCoverage:
    """The most characters of a text that one token stands for. ASCII alone is not composed."""

    chars: int
    ascii_chars: int

    def fewest_tokens(self, text: str) -> int:
        """The text has at least so many tokens."""
        return -(-len(text) // self._per_token(text))

    def tail(self, text: str, num_tokens: int) -> str:
        """An end of the text that has at least `num_tokens` tokens; all of it if it is shorter."""
        return text[-num_tokens * self._per_token(text) :]

    def _per_token(self, text: str) -> int:
        return self.ascii_chars if text.isascii() else self.chars


def token_coverage(backend: tokenizers.Tokenizer) -> TokenCoverage | None:
    """The coverage, or None when a token may stand for any amount of text (or that is not known)."""
    whole: Part = json.loads(backend.to_str())
    normalizers = list(_parts(whole["normalizer"], "normalizers"))
    splitters = list(_parts(whole["pre_tokenizer"], "pretokenizers"))
    if not (
        all(map(_normalizer_keeps, normalizers))
        and all(map(_splitter_keeps, splitters))
        and _model_keeps(whole["model"], [*normalizers, *splitters])
        and not any(token["lstrip"] or token["rstrip"] for token in whole["added_tokens"])  # eat whitespace
    ):
        return None
    longest = max(map(len, [*whole["model"]["vocab"], *_added(backend, whole)]))
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
    """Whether every byte has a token: what has none is dropped, or any run of it becomes one unknown."""
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return False
    if any(step["type"] == "ByteLevel" for step in steps):
        return set(ByteLevel.alphabet()) <= model["vocab"].keys()
    return model["byte_fallback"] and {f"<0x{byte:02X}>" for byte in range(256)} <= model["vocab"].keys()


def _added(backend: tokenizers.Tokenizer, whole: Part) -> Iterator[str]:
    """Added tokens as they are looked for: in the text, or in the normalized text."""
    for token in whole["added_tokens"]:
        yield token["content"]
        if token["normalized"] and backend.normalizer is not None:
            yield backend.normalizer.normalize_str(token["content"])
