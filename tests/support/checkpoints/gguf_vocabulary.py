"""Writes a tokenizer.json into a GGUF file by the rules of llama.cpp's converter, with the package `gguf`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

SPACE = "▁"
SPECIAL_LOOKING = re.compile(r"<[|｜].*[|｜]>|<unused\d+>", re.S)


def write_vocabulary(
    path: Path,
    tokenizer: Mapping[str, Any],  # Any: the content of a tokenizer.json of BPE
    *,
    kind: str,
    pre: str | None = None,
    num_rows: int = 0,
    keys: Mapping[str, Any] | None = None,  # Any: texts, numbers and flags by key, after `tokenizer.`
) -> None:
    """Write a file without tensors; the arguments are those of `add_vocabulary`."""
    writer = GGUFWriter(path, "llama")
    add_vocabulary(writer, tokenizer, kind=kind, pre=pre, num_rows=num_rows)
    write_keys(writer, keys or {})


def add_vocabulary(
    writer: GGUFWriter,
    tokenizer: Mapping[str, Any],  # Any: the content of a tokenizer.json of BPE
    *,
    kind: str,
    pre: str | None = None,
    num_rows: int = 0,
) -> None:
    """Add tokens and merges.

    Args:
        kind: `tokenizer.ggml.model`. For `llama`, the merges become scores.
        num_rows: rows of the embedding; those without a token get a name.
    """
    model = tokenizer["model"]
    tokens = {token_id: (text, TokenType.NORMAL) for text, token_id in model["vocab"].items()}
    if kind != "gpt2":
        of_byte = re.compile(r"<0x[0-9A-F]{2}>")
        tokens |= {i: (t, TokenType.BYTE) for i, (t, _) in tokens.items() if of_byte.fullmatch(t)}
    for token in tokenizer["added_tokens"]:
        tokens[token["id"]] = added(token["content"], token["special"])
    padding = {i: (f"[PAD{i}]", TokenType.UNUSED) for i in range(max(num_rows, max(tokens) + 1))}
    tokens = dict(sorted((padding | tokens).items()))
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    writer.add_tokenizer_model(kind)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list([text for text, _ in tokens.values()])
    writer.add_token_types([int(each) for _, each in tokens.values()])
    if kind == "llama":
        ranks = {left + right: rank for rank, (left, right) in reversed([*enumerate(merges)])}
        writer.add_token_scores([-float(ranks.get(text, len(merges))) for text, _ in tokens.values()])
    else:
        writer.add_token_merges([" ".join(merge) for merge in merges])


def added(text: str, special: bool) -> tuple[str, TokenType]:
    if special or SPECIAL_LOOKING.fullmatch(text):
        return text, TokenType.CONTROL
    return text.replace(SPACE, " "), TokenType.USER_DEFINED


def write_keys(writer: GGUFWriter, keys: Mapping[str, Any]) -> None:  # Any: see `write_vocabulary`
    for key, value in keys.items():
        match value:
            case bool():
                writer.add_bool(f"tokenizer.{key}", value)
            case int():
                writer.add_uint32(f"tokenizer.{key}", value)
            case str():
                writer.add_string(f"tokenizer.{key}", value)
            case _:
                writer.add_array(f"tokenizer.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
