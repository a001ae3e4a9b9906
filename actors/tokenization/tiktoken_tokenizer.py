"""Tokenizers as Moonshot publishes them: `tiktoken.model` without tokenizer.json.

    tiktoken.model         a line per token: its bytes in base64, and its rank, which is its id
    tokenizer_config.json  `added_tokens_decoder`: ids after the ranks; `auto_map`: the publisher's own code
    tokenization_kimi.py   that code: its `pat_str` splits a text into pieces before bytes are merged

From these, transformers' `TikTokenConverter` builds a tokenizer of the `tokenizers` library: two tokens are a
merge if their concatenated bytes are a token, in the order of ranks. The code is parsed, never run: for its
pattern, and for whether it sorts the keys of tools. Only Kimi's pattern is accepted: `tiktoken` and
`tokenizers` interpret patterns differently, and they have been compared for this one alone
(docs/decisions/tiktoken-tokenizers.md).
"""

from __future__ import annotations

import ast
import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ...cluster.errors import CheckpointError
from ...drafter.compute.checkpoint.hf_config import HfConfig, parse, read_json
from ..checkpoints.file_names import TIKTOKEN_MODEL
from ..checkpoints.gguf_pre_tokenizers import KIMI_PATTERN

if TYPE_CHECKING:
    import tokenizers

_SETTINGS = "tokenizer_config.json"
_SORTS = "deep_sort_dict"  # function name in tokenization_kimi.py


class _AddedToken(HfConfig):
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


class _Published(HfConfig):
    """The part of tokenizer_config.json that names the publisher's code.

    `auto_map`: transformers' class -> the file and class of that code, or two (the second for a fast
    tokenizer, which does not exist here).
    """

    auto_map: dict[str, Any] = Field(default_factory=dict)  # Any: JSON values

    def code(self) -> str | None:
        named = self.auto_map.get("AutoTokenizer")
        first = named[0] if isinstance(named, tuple) and named else named
        module = first.rpartition(".")[0] if isinstance(first, str) else ""
        return f"{module}.py" if module.isidentifier() else None


class _Settings(_Published):
    added_tokens_decoder: dict[str, _AddedToken] = Field(
        default_factory=dict, description="an object: by id, a token's `content` and flags"
    )

    def added(self, file: str) -> dict[int, _AddedToken]:
        try:
            return dict(sorted((int(key), token) for key, token in self.added_tokens_decoder.items()))
        except ValueError:
            raise _unreadable(f"{file}: added_tokens_decoder has a key that is no token id.") from None


def tiktoken_backend(folder: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of a `tiktoken.model`, which adds no tokens. Raises CheckpointError."""
    import tokenizers  # not needed for token ids: machines that only time kernels do not have it
    from transformers.convert_slow_tokenizer import TikTokenConverter

    settings, ranks = _settings(folder), read_ranks(folder / TIKTOKEN_MODEL)
    _check_pattern(folder, settings)

    class Converter(TikTokenConverter):
        """Replaces the package `tiktoken`, which the base class needs only to read this file."""

        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return ranks

    backend = Converter(TIKTOKEN_MODEL, KIMI_PATTERN).converted()
    added = _added_tokens(len(ranks), settings.added(_SETTINGS))
    backend.add_tokens([tokenizers.AddedToken(**token.model_dump()) for token in added.values()])
    for token_id, token in added.items():
        if backend.token_to_id(token.content) != token_id:
            raise _unreadable(
                f"{folder / _SETTINGS}: added_tokens_decoder says that {token_id} is {token.content!r}, but "
                f"that is another token, too, or {TIKTOKEN_MODEL} has this id."
            )
    return backend


def tiktoken_ids(folder: Path) -> dict[str, int]:
    ranks = read_ranks(folder / TIKTOKEN_MODEL)
    added = _added_tokens(len(ranks), _settings(folder).added(_SETTINGS))
    ids = {token.decode("latin-1"): token_id for token, token_id in ranks.items()}
    return {**ids, **{token.content: token_id for token_id, token in added.items()}}


def read_ranks(file: Path) -> dict[bytes, int]:
    """Return bytes -> rank: 0 to n - 1, with every single byte. Raises CheckpointError."""
    try:
        lines = [line.split() for line in file.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (OSError, ValueError) as error:
        raise _unreadable(f"{file} cannot be read: {error}.") from None
    if len(ranks) != len(lines) or set(ranks.values()) != set(range(len(lines))):
        raise _unreadable(f"{file}: its {len(lines)} ranks must be 0 to {len(lines) - 1}, of a token each.")
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise _unreadable(f"{file}: some byte is no token, so some texts would lose characters.")
    return ranks


def sorts_tools(folder: Path) -> bool:
    """Return whether the publisher's code sorts the keys of tools, as Kimi's does. Raises CheckpointError."""
    raw = read_json(folder, _SETTINGS, param="tokenizer", required=False)
    name = parse(_Published, raw, _SETTINGS).code()
    if name is None or not (folder / name).is_file():
        return False
    return any(isinstance(node, ast.Name) and node.id == _SORTS for node in _parsed(folder / name))


def _settings(folder: Path) -> _Settings:
    raw = read_json(folder, _SETTINGS, param="tokenizer", required=False)
    return parse(_Settings, raw, _SETTINGS)


def _added_tokens(num_ranks: int, named: dict[int, _AddedToken]) -> dict[int, _AddedToken]:
    """Return the ids from the ranks up to the last named one; unnamed ones are reserved, as published."""
    reserved = range(num_ranks, max(named, default=-1) + 1)
    unnamed = {i: _AddedToken(content=f"<|reserved_token_{i}|>", special=True) for i in reserved}
    return dict(sorted((unnamed | named).items()))


def _check_pattern(folder: Path, settings: _Settings) -> None:
    name = settings.code()
    if name is None:
        raise _unreadable(
            f"{folder / _SETTINGS} is missing, or names no code in auto_map.AutoTokenizer; {TIKTOKEN_MODEL} "
            "alone does not define how texts are split."
        )
    file = folder / name
    if not file.is_file():
        raise _unreadable(
            f"{folder} has no {name}, which defines how texts are split for its {TIKTOKEN_MODEL}. Add "
            "the publisher's: it is parsed for the pattern and never run."
        )
    if published_pattern(file) != KIMI_PATTERN:
        raise _unreadable(
            f"{file} cuts texts by another `pat_str` than Kimi's, the only one that is known here."
        )


def published_pattern(file: Path) -> str | None:
    """Return the value of `pat_str` in code that is only parsed; None if it is not plain text."""
    for node in _parsed(file):
        match node:
            case ast.Assign(targets=[ast.Name(id="pat_str")], value=value):
                return _text(value)
    return None


def _parsed(file: Path) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError, SyntaxError) as error:
        raise _unreadable(f"{file} cannot be read: {error}.") from None


def _text(value: ast.expr) -> str | None:
    """Return the text of a literal, or of literals joined by `str.join`; None for other expressions."""
    match value:
        case ast.Constant(value=str() as text):
            return text
        case ast.Call(func=ast.Attribute(value=glue, attr="join"), args=[ast.List() | ast.Tuple() as parts]):
            texts = [_text(part) for part in (glue, *parts.elts)]
            known = [text for text in texts if text is not None]
            return known[0].join(known[1:]) if len(known) == len(texts) else None
    return None


def _unreadable(what: str) -> CheckpointError:
    return CheckpointError(
        f"tokenizer: {what} Or set `tokenizer` to a folder that holds a tokenizer.json.", param="tokenizer"
    )
