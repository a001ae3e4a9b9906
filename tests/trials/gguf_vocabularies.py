"""Compares tokenizers read from GGUF files with llama.cpp's vectors and with published tokenizers.

    python tests/trials gguf_vocabularies LLAMA_CPP [PRE=TOKENIZER.json ...]

`LLAMA_CPP` holds `models/ggml-vocab-*.gguf`, with texts (`.inp`) and llama.cpp's ids (`.out`) beside: it is
llama.cpp's repository, or the folder `vendor/llama.cpp` of llama-cpp-python's source distribution on PyPI. A
published tokenizer.json is written into a GGUF file and read back; `PRE` is its `tokenizer.ggml.pre`, or
`llama` or `gemma4`, kinds of vocabularies without one. Exit status 1: an id differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from manta.actors.checkpoints.gguf_tokenizer import GgufTokenizer
from manta.cluster.errors import CheckpointError
from manta.drafter.compute.checkpoint.gguf.gguf_file import GgufFile
from support.checkpoints.gguf_vocabulary import write_vocabulary
from support.paths import ROOT

BETWEEN = "\n__ggml_vocab_test__\n"
WITHOUT_PRE = ("llama", "gemma4")
NUM_RANDOM = 3000
RANGES = ((0x20, 0x7F), (0xA0, 0x530), (0x590, 0xE80), (0x3040, 0x9FA6), (0xAC00, 0xD7A4), (0x1F300, 0x1FAFF))
PIECES = (
    "'s",
    " 'M",
    "'ll",
    "  ",
    "\n",
    "\t",
    "\r\n",
    "\u00a0",
    "\u3000",
    "\u0301",
    "123",
    "٣४½",
    "Ⅷ",
    "▁▁",
    "Ġ",
)


def backend(path: Path) -> tokenizers.Tokenizer:
    tokenizer = GgufTokenizer.read(GgufFile(path))
    assert tokenizer is not None, "the file has a vocabulary"
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer.tokenizer_json()))


def compare_vectors(path: Path) -> int:
    """Return the number of texts with other ids, without those that normalization to NFC changes."""
    own = backend(path)
    given = path.with_name(f"{path.name}.inp").read_bytes().decode().removesuffix(BETWEEN).split(BETWEEN)
    lines = path.with_name(f"{path.name}.out").read_text().splitlines()
    expected = [list(map(int, line.split())) for line in lines]
    texts = list(zip(given, expected, strict=True))
    other = [text for text, ids in texts if own.encode(text, add_special_tokens=False).ids != ids]
    composed = [text for text in other if own.normalizer and unicodedata.normalize("NFC", text) != text]
    print(f"{path.name}: {len(texts)} texts, {len(other) - len(composed)} differ, {len(composed)} by NFC")
    return len(other) - len(composed)


def compare_published(pre: str, file: Path) -> int:
    """Return the number of texts with other ids or another decoding than in the published tokenizer."""
    raw, published = json.loads(file.read_text(encoding="utf-8")), tokenizers.Tokenizer.from_file(str(file))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        kind = pre if pre in WITHOUT_PRE else "gpt2"
        keys: dict[str, Any] = {"ggml.bos_token_id": 0}  # Any: see `write_vocabulary`
        if kind != "gpt2":
            keys["ggml.unknown_token_id"] = raw["model"]["vocab"][raw["model"]["unk_token"]]
            keys["ggml.add_space_prefix"] = False
        write_vocabulary(path, raw, kind=kind, pre=None if kind == pre else pre, keys=keys)
        own = backend(path)
    texts = list(sample(raw))
    num_other = 0
    for text in texts:
        ids = published.encode(text, add_special_tokens=False).ids
        same = own.encode(text, add_special_tokens=False).ids == ids
        num_other += not (same and own.decode(ids, False) == published.decode(ids, False))
    print(f"{pre} ({file}): {len(texts)} texts, {num_other} differ")
    return num_other


def sample(raw: Mapping[str, Any]) -> Iterator[str]:  # Any: the content of a tokenizer.json
    """Yield this repository's documents and code, random texts of several scripts, and runs."""
    rng = random.Random(5)
    for path in (*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("cluster/**/*.py"))):
        yield path.read_text(encoding="utf-8")[:3000]
    added = [token["content"] for token in raw["added_tokens"]]
    pools = [*([chr(code) for code in range(*codes)] for codes in RANGES), PIECES, added]
    for _ in range(NUM_RANDOM):
        chosen = rng.sample(pools, rng.randint(1, 4))
        yield "".join(rng.choice(rng.choice(chosen)) for _ in range(rng.randint(1, 30)))
    for count in range(1, 80):
        for text in (" ", "\n", "\t", "1", "ab", "é", " \n"):
            yield text * count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("published", nargs="*", metavar="PRE=TOKENIZER.json")
    options = parser.parse_args()
    vocabularies = sorted(options.llama_cpp.glob("models/ggml-vocab-*.gguf"))
    if not vocabularies:
        raise SystemExit(f"{options.llama_cpp} holds no models/ggml-vocab-*.gguf")
    num_other = 0
    for path in vocabularies:
        try:
            num_other += compare_vectors(path) if path.with_name(f"{path.name}.inp").exists() else 0
        except CheckpointError as error:
            print(f"{path.name}: {error.message[:140]}")
    for each in options.published:
        pre, _, file = each.partition("=")
        num_other += compare_published(pre, Path(file))
    return int(num_other > 0)


if __name__ == "__main__":
    sys.exit(main())
