"""A tokenizer read from a GGUF file gives the ids and texts of the one that was written into it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import tokenizers
from gguf import GGUFWriter, TokenType
from hypothesis import example, given
from hypothesis import strategies as st
from manta.actors.checkpoints.gguf_pre_tokenizers import PRE_TOKENIZERS
from manta.actors.checkpoints.gguf_tokenizer import GgufTokenizer
from manta.cluster.errors import CheckpointError
from manta.drafter.compute.checkpoint.gguf.gguf_file import GgufFile
from support.checkpoints.gguf_vocabulary import SPACE, write_keys, write_vocabulary
from support.paths import ROOT
from tokenizers import decoders, normalizers, processors, trainers
from tokenizers.models import BPE
from transformers.tokenization_utils_base import generate_merges

SHIPPED = ROOT / "models" / "target" / "tokenizer.json"
CORPUS = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))[:12]]
TEXT = "I've  12345 WE'LL naïveText, HTMLParser::x\n\n  »é/\n\nе\N{COMBINING ACUTE ACCENT}да 日本3"
# Pieces of TEXT by the families' own tokenizer.json.
PIECES = {
    "llama-bpe": (
        "I|'ve| | |123|45| WE|'LL| naïveText|,| HTMLParser|::|x|\n\n| | »|é|/\n\n|е|\u0301да| 日本|3"
    ),
    "qwen2": (
        "I|'ve| | |1|2|3|4|5| WE|'LL| naïveText|,| HTMLParser|::|x|\n\n| | »|é|/\n\n|е|\u0301да| 日本|3"
    ),
    "tekken": (
        "I|'ve| | |1|2|3|4|5| WE|'LL| naïve|Text|,| HTMLParser|::|x|\n\n| | »|é|/\n\n|е\u0301да| 日本|3"
    ),
    "gpt-4o": "I've| | |123|45| WE'LL| naïve|Text|,| HTMLParser|::|x|\n\n| | »|é|/\n\n|е\u0301да| 日本|3",
    "deepseek-v3": (
        "I|'ve|  |123|45| WE|'LL| naïveText|,| HTMLParser|::|x|\n\n| | »|é|/\n\n|е\u0301да| |日本|3"
    ),
}
TEXTS = st.one_of(
    st.text(max_size=40),
    st.text(st.sampled_from("ab ▁\n\t'sé1٣<|im_end|>日本🙂\u0301 "), max_size=40),
    st.sampled_from([text[at : at + 80] for text in CORPUS for at in range(0, 4000, 80)]),
)


def read(path: Path) -> GgufTokenizer:
    tokenizer = GgufTokenizer.read(GgufFile(path))
    assert tokenizer is not None
    return tokenizer


def backend(tokenizer: GgufTokenizer) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer.tokenizer_json()))


def copied(raw: Mapping[str, Any], **options: Any) -> tokenizers.Tokenizer:  # Any: of `write_vocabulary`
    with TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        write_vocabulary(path, raw, **options)
        return backend(read(path))


@cache
def shipped() -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    raw = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return tokenizers.Tokenizer.from_file(str(SHIPPED)), copied(raw, kind="gpt2", pre="qwen2", num_rows=4100)


@cache
def gemma() -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """A tokenizer with Gemma's steps, and its copies from a merge list and from scores."""
    own = tokenizers.Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    own.normalizer = normalizers.Replace(" ", SPACE)
    own.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    own.train_from_iterator([text[i : i + 200] for text in CORPUS for i in range(0, 4000, 200)], trainer)
    raw = json.loads(own.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if not token["content"].startswith("<0x")]
    runs, longest = [SPACE * count for count in range(2, 9)], 8
    raw["model"]["merges"] = [
        *(
            [SPACE * left, SPACE * right]
            for left in range(longest - 1, 0, -1)
            for right in range(longest - left, 0, -1)
        ),
        *(merge for merge in raw["model"]["merges"] if set("".join(merge)) != {SPACE}),
    ]
    vocab = raw["model"]["vocab"]
    for text in (*runs, "<b>"):
        vocab.setdefault(text, len(vocab))
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        raw["added_tokens"].append({"id": vocab[text], "content": text, **flags})
    raw["added_tokens"].sort(key=lambda token: token["id"])
    own = tokenizers.Tokenizer.from_str(json.dumps(raw))
    own.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 2)])
    keys = {"ggml.bos_token_id": 2, "ggml.unknown_token_id": 3}
    listed = copied(raw, kind="gemma4", keys=keys)
    return own, listed, copied(raw, kind="llama", keys={**keys, "ggml.add_space_prefix": False})


@given(TEXTS)
@example("e\u0301 <|im_start|>user\n<|im_end|>[PAD4096]")
def test_the_shipped_tokenizer_gives_the_same_ids_and_texts_from_gguf(text: str) -> None:
    own, copy = shipped()
    encoded = own.encode(text)
    assert copy.encode(text).ids == encoded.ids
    for hidden in (True, False):
        assert copy.decode(encoded.ids, hidden) == own.decode(encoded.ids, hidden)
    assert copy.get_vocab() == own.get_vocab()


@given(TEXTS)
@example("    \N{LOWER ONE EIGHTH BLOCK}\N{LOWER ONE EIGHTH BLOCK} a<b>            b<bos>")
def test_gemmas_steps_give_the_same_ids_and_texts_from_a_merge_list_and_from_scores(text: str) -> None:
    own, *copies = gemma()
    encoded = own.encode(text)
    for copy in copies:
        assert copy.encode(text).ids == encoded.ids
        assert copy.decode(encoded.ids, False) == own.decode(encoded.ids, False)


@pytest.mark.parametrize("pre", PIECES)
def test_texts_are_cut_as_by_the_familys_own_tokenizer(pre: str) -> None:
    steps = [
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        for pattern in PRE_TOKENIZERS[pre].patterns
    ]
    found = tokenizers.pre_tokenizers.Sequence(steps).pre_tokenize_str(TEXT)
    assert [piece for piece, _ in found] == PIECES[pre].split("|")


@given(st.data())
def test_merges_from_scores_are_those_of_transformers(data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.text("abc", min_size=1, max_size=6), unique=True, max_size=40))
    scores = data.draw(st.lists(st.integers(-5, 0), min_size=len(pieces), max_size=len(pieces)))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.gguf"
        write_pieces(path, {piece: float(score) for piece, score in zip(pieces, scores, strict=True)})
        found = read(path).tokenizer_json()["model"]["merges"]
    vocab = {piece: 3 + i for i, piece in enumerate(pieces)}
    expected = generate_merges(vocab, dict(zip(pieces, map(float, scores), strict=True)))
    assert found == expected


def write_pieces(
    path: Path,
    scores: Mapping[str, float],
    types: Mapping[str, TokenType] | None = None,
    keys: Mapping[str, Any] | None = None,  # Any: of `write_keys`
) -> None:
    """Write a SentencePiece vocabulary of `<unk>`, `<s>`, `</s>` and these pieces."""
    special = {"<unk>": TokenType.UNKNOWN, "<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL}
    all_types = {**special, **dict.fromkeys(scores, TokenType.NORMAL), **(types or {})}
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *scores])
    writer.add_token_scores([0.0, 0.0, 0.0, *scores.values()])
    writer.add_token_types([int(all_types[text]) for text in (*special, *scores)])
    write_keys(writer, keys or {})


def greedy(text: str, scores: Mapping[str, float]) -> list[str]:
    """Join the neighbors whose joint piece has the highest score until no two of them are a piece."""
    symbols = list(text)
    while True:
        joint = [(scores.get(a + b, -np.inf), -at) for at, (a, b) in enumerate(pairwise(symbols))]
        score, at = max(joint, default=(-np.inf, 0))
        if score == -np.inf:
            return symbols
        symbols[-at : 2 - at] = ["".join(symbols[-at : 2 - at])]


def test_sentencepiece_joins_the_pair_with_the_highest_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    rng = random.Random(7)
    pieces = {*(chr(97 + i) for i in range(4)), SPACE}
    while len(pieces) < 60:
        pieces.add("".join(rng.choice("abcd▁") for _ in range(rng.randint(2, 5))))
    order = sorted(pieces, key=lambda piece: (len(piece) > 1, rng.random()))
    scores = {piece: -float(i) for i, piece in enumerate(order)}
    of_bytes = {f"<0x{byte:02X}>": 0.0 for byte in range(256)}
    types = dict.fromkeys(of_bytes, TokenType.BYTE)
    write_pieces(tmp_path / "a.gguf", {**scores, **of_bytes}, types)
    copy = backend(read(tmp_path / "a.gguf"))
    for _ in range(300):
        text = "".join(rng.choice("abcd ") for _ in range(rng.randint(1, 12)))
        assert copy.encode(text).tokens == ["<s>", *greedy(SPACE + text.replace(" ", SPACE), scores)]
        assert copy.decode(copy.encode(text).ids) == text
    assert copy.encode("é</s>a").tokens == ["<s>", SPACE, "<0xC3>", "<0xA9>", "</s>", *greedy("▁a", scores)]
    assert copy.decode(copy.encode("é\n").ids) == "é\n"


def test_flags_of_begin_and_end_are_the_files(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_pieces(path, {SPACE: 0.0, "a": 0.0})
    assert backend(read(path)).encode("a").tokens == ["<s>", SPACE, "a"]  # llama.cpp's default
    write_pieces(path, {SPACE: 0.0, "a": 0.0}, keys={"ggml.add_bos_token": False, "ggml.add_eos_token": True})
    assert backend(read(path)).encode("a").tokens == [SPACE, "a", "</s>"]
    write_pieces(path, {"a": 0.0}, keys={"ggml.add_eos_token": True, "ggml.eos_token_id": 99})
    with pytest.raises(CheckpointError, match="adds EOS to texts, but has no tokenizer"):
        read(path).tokenizer_json()


def test_names_of_special_tokens_and_templates_are_the_files(tmp_path: Path) -> None:
    keys = {
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.padding_token_id": 3,
        "chat_template": "{{ bos_token }}",
        "chat_template.tool_use": "{{ tools }}",
    }
    write_pieces(tmp_path / "a.gguf", {"<pad>": 0.0}, {"<pad>": TokenType.CONTROL}, keys)
    tokenizer = read(tmp_path / "a.gguf")
    named = {name: text for name, text in tokenizer.tokenizer_config().items() if name.endswith("_token")}
    expected = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    assert named == expected
    assert tokenizer.chat_templates() == {"default": "{{ bos_token }}", "tool_use": "{{ tools }}"}
    write_pieces(tmp_path / "a.gguf", {}, keys={"chat_template.../../x": "a"})
    with pytest.raises(CheckpointError, match=r"has a chat template \.\./\.\./x that is no text, or no name"):
        read(tmp_path / "a.gguf").chat_templates()


CONTROL = TokenType.CONTROL
ENDS: dict[str, tuple[dict[str, TokenType], dict[str, int], list[str]]] = {
    "keys, EOS first": ({"a": CONTROL, "b": CONTROL}, {"eos": 4, "eot": 3, "eom": 2}, ["b", "a", "</s>"]),
    "texts": (
        {"<|im_end|>": CONTROL, "<|endoftext|>": TokenType.USER_DEFINED, "<|im_start|>": CONTROL},
        {"eos": 3},
        ["<|im_end|>", "</s>", "<|endoftext|>"],
    ),
    "harmony": (
        {"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL},
        {"eos": 4},
        ["<|return|>", "</s>", "<|call|>"],
    ),
    "phi": ({"<|end|>": CONTROL}, {}, ["</s>", "<|end|>"]),
}


@pytest.mark.parametrize("case", ENDS)
def test_answers_end_at_tokens_that_keys_or_texts_name(case: str, tmp_path: Path) -> None:
    types, ids, ends = ENDS[case]
    keys = {f"ggml.{name}_token_id": token_id for name, token_id in ids.items()}
    write_pieces(tmp_path / "a.gguf", dict.fromkeys(types, 0.0), types, keys)
    tokenizer = read(tmp_path / "a.gguf")
    texts = {token_id: text for text, token_id in tokenizer.ids.items()}
    found = [texts[token_id] for token_id in tokenizer.end_ids]
    assert (found[0], sorted(found)) == (ends[0], sorted(ends))
    special = {token["content"] for token in tokenizer.tokenizer_json()["added_tokens"] if token["special"]}
    assert special >= set(ends)


def test_strikethrough_of_html_ends_no_answer(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<eos>", "<bos>", "</s>"])
    writer.add_token_scores([0.0] * 4)
    writer.add_token_types([int(each) for each in (CONTROL, CONTROL, CONTROL, TokenType.USER_DEFINED)])
    write_keys(writer, {"ggml.eos_token_id": 1})
    assert read(tmp_path / "a.gguf").end_ids == (1,)


# Changes of a file with the tokens a, b and ab, and the message.
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"model": "rwkv"}, 'a vocabulary of the kind "rwkv", not gpt2, llama or gemma4'),
    "pre": (
        {"pre": "viking"},
        'cuts texts by tokenizer.ggml.pre "viking", which is not among',
    ),
    "types": ({"token_type": [1, 1]}, "has 3 tokens, but 2 values of tokenizer.ggml.token_type"),
    "scores": ({"scores": [1.0]}, "has 3 tokens, but 1 values of tokenizer.ggml.scores"),
    "words as types": ({"token_type": ["a", "b", "c"]}, "token_type, which is no list of numbers"),
    "rows": ({"rows": 4}, "has 3 tokens, but 4 rows in token_embd.weight"),
    "twice": ({"tokens": ["a", "b", "a"]}, 'has the token "a" twice'),
    "foreign merge": ({"merges": ["a b", "b a"]}, 'has the merge "b a", which is not of its tokens'),
    "no merge": ({"merges": ["ab"]}, 'has the merge "ab", which is not of its tokens'),
    "merges missing": ({"merges": None}, "has no list of strings tokenizer.ggml.merges"),
    "tokens missing": ({"tokens": None}, "has no list of strings tokenizer.ggml.tokens"),
    "flag": ({"add_bos_token": "yes"}, "has tokenizer.ggml.add_bos_token, which is no bool"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_and_unknown_vocabularies_are_one_sentence(case: str, tmp_path: Path) -> None:
    changes, message = BROKEN[case]
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"], **changes}
    rows = keys.pop("rows", None)
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    if rows is not None:
        writer.add_tensor("token_embd.weight", np.zeros((rows, 2), np.float32))
    write_keys(writer, {f"ggml.{key}": value for key, value in keys.items() if value is not None})
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path / "a.gguf").tokenizer_json()
    assert message in caught.value.message
    assert caught.value.param == "tokenizer"


def test_a_sentencepiece_token_of_many_characters_is_refused(tmp_path: Path) -> None:
    write_pieces(tmp_path / "a.gguf", {"a" * 513: 0.0})
    with pytest.raises(CheckpointError, match="has a token of 513 characters; 512 is the limit"):
        read(tmp_path / "a.gguf").tokenizer_json()


def test_a_file_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    for keys in ({}, {"ggml.model": "none"}):
        write_keys(GGUFWriter(tmp_path / "a.gguf", "llama"), keys)
        assert GgufTokenizer.read(GgufFile(tmp_path / "a.gguf")) is None
