"""The bound on a token's characters holds for every text, and is absent where it would not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from manta.actors.tokenization.tokenizer import TokenCoverage, token_coverage
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
# What shrinks, swallows or is looked up in pieces: combining marks, Hangul letters, spaces, special tokens.
PIECES = [
    "a",
    " ",
    "  " * 20,
    "\n",
    "e\u0301",
    "\u03b1\u0313\u0300\u0345",
    "\u1112\u1161\u11ab",
    "ﬃ",
    "İ",
    "\u212a",
]
TEXTS = st.lists(
    st.one_of(st.sampled_from([*PIECES, "<|im_start|>", "<|im"]), st.text(max_size=8)), max_size=40
)


def byte_level(**changes: Any) -> tokenizers.Tokenizer:
    vocab = {letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    merges = []
    for left, right in (("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("ĠĠĠĠ", "ĠĠĠĠ"), ("a", "a"), ("Ì", "ģ")):
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(changes.pop("vocab", vocab), changes.pop("merges", merges)))
    backend.normalizer = changes.pop("normalizer", normalizers.NFC())
    backend.pre_tokenizer = changes.pop("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.add_special_tokens([AddedToken("<|im_start|>", normalized=False, **changes)])
    return backend


def byte_fallback(**changes: Any) -> tokenizers.Tokenizer:
    vocab = {**BYTES, "\u2581": 256, "a": 257, "\u2581a": 258, "<unk>": 259}
    model = models.BPE(
        vocab, [("\u2581", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True, **changes
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.ByteFallback()
    return backend


KEEPING = [
    byte_level(),
    byte_level(normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    byte_level(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])),
    byte_fallback(),
]


@given(TEXTS)
def test_no_text_has_fewer_tokens_than_the_bound_says(pieces: list[str]) -> None:
    text = "".join(pieces).encode("utf-8", "ignore").decode()
    for backend in KEEPING:
        coverage = token_coverage(backend)
        assert coverage is not None
        assert coverage.min_tokens(text) <= len(backend.encode(text).ids)
        tail = coverage.tail(text, 3)
        assert text.endswith(tail) and (tail == text or len(backend.encode(tail).ids) >= 3)


@pytest.mark.parametrize("piece", PIECES)
def test_runs_of_the_longest_tokens_keep_the_bound(piece: str) -> None:
    for backend in KEEPING:
        coverage = token_coverage(backend)
        assert coverage is not None
        assert coverage.min_tokens(piece * 500) <= len(backend.encode(piece * 500).ids)


def test_the_shipped_tokenizer_has_a_bound(shipped_pair: tuple[Path, Path]) -> None:
    backend = tokenizers.Tokenizer.from_file(str(shipped_pair[0] / "tokenizer.json"))
    longest = max(map(len, backend.get_vocab()))
    assert token_coverage(backend) == TokenCoverage(chars=4 * longest, ascii_chars=longest)


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        (byte_level(rstrip=True), "<|im_start|>" + " " * 5000),
        (byte_level(lstrip=True), " " * 5000 + "<|im_start|>"),
        (byte_level(normalizer=normalizers.Strip()), "a" + " " * 5000),
        (byte_level(normalizer=normalizers.StripAccents()), "a" + "\u0301" * 5000),
        (byte_level(normalizer=normalizers.Replace(tokenizers.Regex(" +"), " ")), " " * 5000),
        (byte_level(normalizer=normalizers.Replace("    ", "a")), " " * 4000),
        (byte_level(pre_tokenizer=pre_tokenizers.Split(" ", "removed")), "a" + " " * 5000),
        (byte_level(vocab={"a": 0}, merges=[]), "a" + "b" * 5000),  # unknown characters are dropped
        (byte_level(pre_tokenizer=pre_tokenizers.WhitespaceSplit()), "a" + " " * 5000),
        (tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")), "b" * 5000),
    ],
)
def test_a_token_of_unbounded_text_means_no_bound(backend: tokenizers.Tokenizer, text: str) -> None:
    assert len(backend.encode(text).ids) < 1200  # legal, however long
    assert token_coverage(backend) is None
