"""Incremental detokenization of an output, exactly as the `tokenizers` library decodes the whole.

The text is `decode(prompt + output)` without the prompt's characters. A character belongs to the token that
holds its last byte. If the prompt ends inside a character that the output completes, the character belongs to
the output; if the output does not complete it, the U+FFFD in its place belongs to the prompt.

Text is returned as soon as no later token can change it. This depends on the tokens, not on how they are
split into blocks. There are three kinds of decoders:

    bytes   ByteLevel: tokens are bytes. Text is returned per complete character; a broken one is a U+FFFD.
    runs    all others that decode token by token. ByteFallback, if it is among them, turns a run of byte
            tokens into text only if the whole run is UTF-8, else into a U+FFFD per byte: a run is returned
            at its end.
    whole   all other decoders (CTC, suffixes that are cut off at the end): text is returned at the end.

The library's `DecodeStream` is not used: it raises where bytes already returned as text turn out to be
invalid, and requires a prompt that ends with a complete character.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import tokenizers

Part: TypeAlias = Mapping[str, Any]  # Any: a piece of tokenizer.json.

# A token as text; as bytes if it is text only together with other tokens; None if it has no text.
Piece: TypeAlias = str | bytes | None

_BYTE_TOKEN = re.compile(r"<0x(\+[0-9A-Fa-f]|[0-9A-Fa-f]{2})>")
_MAX_CHAR_BYTES = 4
_NOTHING: frozenset[int] = frozenset()


class IncrementalDetokenizer(ABC):
    """Turns the tokens of one completion into text.

    `prompt_token_ids` are read at the first token of the output, when the engine has checked them. `hidden`:
    tokens left out of the text, in prompt and output.
    """

    def __init__(self, pieces: TokenPieces, prompt_token_ids: Sequence[int], hidden: frozenset[int]) -> None:
        self._pieces = pieces
        self._prompt = prompt_token_ids
        self._hidden = hidden
        self._has_started = False
        self._is_plain = False  # nothing is held back: a token with its own text adds exactly that text

    def step(self, token_ids: Sequence[int]) -> str:
        """Append tokens. Return the new text that no later token can change."""
        pieces, hidden = self._pieces, self._hidden
        texts: list[str] = []
        for token_id in token_ids:
            if token_id in hidden or (piece := pieces[token_id]) is None:
                continue
            if self._is_plain and type(piece) is str:
                texts.append(piece)
                continue
            if not self._has_started:
                self._has_started = True
                self._begin(piece)
            texts.append(self._take(token_id, piece))
        return "".join(texts)

    def peek(self) -> str:
        """Return what `flush` would if it is complete characters; later tokens may change it."""
        return ""

    @abstractmethod
    def flush(self) -> str:
        """Return the rest of the text; there are no more tokens."""

    @abstractmethod
    def _begin(self, first: str | bytes) -> None:
        """Read the end of the prompt; `first` is the piece of the output's first token."""

    @abstractmethod
    def _take(self, token_id: int, piece: str | bytes) -> str:
        """Append a token; returns text as `step` does."""

    def _visible(self, token_ids: Iterator[int]) -> Iterator[int]:
        return (t for t in token_ids if t not in self._hidden and self._pieces[t] is not None)


class TokenPieces(dict[int, Piece]):
    """Pieces of one tokenizer by token id, computed on first use. `kind`: class of its detokenizers."""

    kind: Callable[[TokenPieces, Sequence[int], frozenset[int]], IncrementalDetokenizer]
    _make: Callable[[int, str], Piece]  # takes a token's id and spelling

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        decoder = backend.decoder
        parts = [] if decoder is None else _parts(json.loads(decoder.__getstate__()))
        kinds = [part["type"] for part in parts]
        self._has_byte_tokens = "ByteFallback" in kinds
        # A token placed before the tokens to decode, as decoders strip the first token's space; and the
        # number of its characters, which are cut off again.
        self._lead: list[int] = []
        self._num_lead_chars = 0
        if kinds[:1] == ["ByteLevel"] and set(kinds[1:]) <= {"Fuse"}:
            self.kind, self._make = ByteLevelDetokenizer, self._bytes_of
        elif _goes_by_token(parts):
            self.kind, self._make = RunDetokenizer, self._text_of
            self._lead = self._find_lead()
            self._num_lead_chars = len(self.decode(self._lead))
        else:
            self.kind, self._make = FullDetokenizer, lambda token_id, spelling: ""  # never called

    def __missing__(self, token_id: int) -> Piece:
        spelling = self._backend.id_to_token(token_id)
        piece = self[token_id] = None if spelling is None else self._make(token_id, spelling)
        return piece

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return None if the token is not in the vocabulary or has no text of its own."""
        piece = None if self.kind is FullDetokenizer else self[token_id]
        return piece.encode() if isinstance(piece, str) else piece

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the library's decoding, including special tokens."""
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def decode_continuation(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens that follow others: no leading space is stripped."""
        return self.decode([*self._lead, *token_ids])[self._num_lead_chars :]

    def _bytes_of(self, token_id: int, spelling: str) -> Piece:
        known = [_BYTES.get(char) for char in spelling]
        data = spelling.encode() if None in known else bytes(byte for byte in known if byte is not None)
        try:
            return data.decode() or None
        except UnicodeDecodeError:
            return data

    def _text_of(self, token_id: int, spelling: str) -> Piece:
        byte = _byte_of(spelling) if self._has_byte_tokens else None
        return self.decode_continuation([token_id]) if byte is None else bytes([byte])

    def _find_lead(self) -> list[int]:
        """Return the first token that has text of its own; no byte, which may be part of a character."""
        for token_id in range(self._backend.get_vocab_size()):
            spelling = self._backend.id_to_token(token_id)
            is_byte = self._has_byte_tokens and spelling is not None and _byte_of(spelling) is not None
            if not is_byte and self.decode([token_id]):
                return [token_id]
        return []


class ByteLevelDetokenizer(IncrementalDetokenizer):
    def __init__(self, pieces: TokenPieces, prompt_token_ids: Sequence[int], hidden: frozenset[int]) -> None:
        super().__init__(pieces, prompt_token_ids, hidden)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def flush(self) -> str:
        return self._decoder.decode(b"", True)

    def _begin(self, first: str | bytes) -> None:
        tail = b""
        for token_id in self._visible(reversed(self._prompt)):
            piece = self._pieces[token_id]
            tail = (piece.encode() if isinstance(piece, str) else piece or b"") + tail
            if len(tail) >= _MAX_CHAR_BYTES:
                break
        self._decoder.decode(tail)
        partial, _ = self._decoder.getstate()
        if partial and not (isinstance(first, bytes) and _continues(partial, first)):
            self._decoder.reset()  # the output does not complete it: its U+FFFD belongs to the prompt

    def _take(self, token_id: int, piece: str | bytes) -> str:
        if isinstance(piece, str):  # begins with a complete character, so held-back bytes are a broken one
            self._is_plain = True
            return self.flush() + piece
        text = self._decoder.decode(piece)
        self._is_plain = not self._decoder.getstate()[0]
        return text


class RunDetokenizer(IncrementalDetokenizer):
    """Decodes tokens with their own text, and runs of byte tokens.

    Decoders strip a leading space from the whole text, or all spaces of its first token or run. Therefore the
    first tokens of prompt and output are decoded together until they have produced some text, and a run that
    begins the text is decoded as such.
    """

    def __init__(self, pieces: TokenPieces, prompt_token_ids: Sequence[int], hidden: frozenset[int]) -> None:
        super().__init__(pieces, prompt_token_ids, hidden)
        self._first: list[int] | None = None  # the first tokens while they have produced no text, else None
        self._has_prompt_text = False
        self._run: list[int] = []
        self._bytes = bytearray()  # bytes of the run
        self._num_prompt_bytes = 0  # number of those that belong to the prompt

    def peek(self) -> str:
        try:
            return self._text_of_run() if self._bytes.decode() else ""
        except UnicodeDecodeError:
            return ""

    def flush(self) -> str:
        if not self._run:
            return ""
        text = self._text_of_run()
        self._finish_beginning(text, self._run)
        self._run, self._bytes, self._num_prompt_bytes = [], bytearray(), 0
        return text

    def _begin(self, first: str | bytes) -> None:
        self._first = []
        for token_id in self._visible(iter(self._prompt)):
            self._first.append(token_id)
            if self._pieces.decode(self._first):
                self._first, self._has_prompt_text = None, True
                break
        if isinstance(first, str):
            return
        run: list[int] = []
        for token_id in self._visible(reversed(self._prompt)):
            if isinstance(self._pieces[token_id], str):
                break
            run.append(token_id)
        else:  # the text begins with this run
            self._first = self._first or []
        if self._first:
            del self._first[len(self._first) - len(run) :]
        self._run = run[::-1]
        self._bytes = bytearray(b"".join(self._bytes_of(token_id) for token_id in self._run))
        self._num_prompt_bytes = len(self._bytes)

    def _take(self, token_id: int, piece: str | bytes) -> str:
        if isinstance(piece, bytes):
            self._run.append(token_id)
            self._bytes += piece
            self._is_plain = False
            return ""
        text = self.flush()
        if self._first is not None:
            piece = self._pieces.decode([*self._first, token_id])
            self._finish_beginning(piece, [token_id])
        self._is_plain = self._first is None
        return text + piece

    def _text_of_run(self) -> str:
        decode = self._pieces.decode_continuation
        if self._first is not None:
            decode = self._pieces.decode
        text = decode([*(self._first or ()), *self._run])
        num_prompt = self._num_prompt_bytes
        try:
            self._bytes.decode()
        except UnicodeDecodeError:
            return text[num_prompt:]
        complete = self._bytes[:num_prompt].decode(errors="ignore")
        if self._first is not None:
            return text[len(decode([*self._first, *self._run[: len(complete.encode())]])) :]
        return text[len(complete) :]

    def _finish_beginning(self, text: str, token_ids: Sequence[int]) -> None:
        """Record that these tokens, after the first ones, produced this text."""
        if self._first is not None:
            self._first = None if text or self._has_prompt_text else [*self._first, *token_ids]

    def _bytes_of(self, token_id: int) -> bytes:
        piece = self._pieces[token_id]
        assert isinstance(piece, bytes), "a run consists of byte tokens"
        return piece


class FullDetokenizer(IncrementalDetokenizer):
    """Decodes all tokens at the end. The prompt's part is the common prefix of both texts."""

    def __init__(self, pieces: TokenPieces, prompt_token_ids: Sequence[int], hidden: frozenset[int]) -> None:
        super().__init__(pieces, prompt_token_ids, hidden)
        self._token_ids: list[int] = []

    def flush(self) -> str:
        prompt, answer = list(self._visible(iter(self._prompt))), self._token_ids
        self._token_ids = []
        if not answer:
            return ""
        text, before = self._pieces.decode([*prompt, *answer]), self._pieces.decode(prompt)
        differs = (i for i, pair in enumerate(zip(text, before, strict=False)) if pair[0] != pair[1])
        return text[next(differs, min(len(text), len(before))) :]

    def _begin(self, first: str | bytes) -> None: ...

    def _take(self, token_id: int, piece: str | bytes) -> str:
        self._token_ids.append(token_id)
        return ""


def _parts(decoder: Part) -> list[Part]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [part for each in decoder["decoders"] for part in _parts(each)]


def _goes_by_token(parts: Sequence[Part]) -> bool:
    """Return whether the text is that of single tokens and runs of byte tokens, after its beginning."""
    has_runs = is_fused = False
    for part in parts:
        kind = part["type"]
        if kind == "Fuse":
            is_fused = True
        elif kind == "ByteFallback" and not is_fused:
            has_runs = True
        elif kind == "WordPiece":
            return len(parts) == 1
        elif kind not in ("Replace", "Strip", "Metaspace"):
            return False
        elif is_fused or has_runs:
            cuts_parts = kind == ("Metaspace" if is_fused else "Strip")
            if cuts_parts or not _keeps_length(part):
                return False
    return True


def _keeps_length(part: Part) -> bool:
    """Return whether each character maps to one, except for what is stripped at the beginning."""
    match part["type"]:
        case "Metaspace":
            return True
        case "Strip":
            return part["stop"] == 0
        case "Replace":
            return len(part["pattern"].get("String", "")) == 1 and len(part["content"]) == 1
        case _:
            return False


def _byte_of(spelling: str) -> int | None:
    found = _BYTE_TOKEN.fullmatch(spelling)
    return None if found is None else int(found[1], 16)


def _continues(partial: bytes, piece: bytes) -> bool:
    """Return whether the first byte of `piece` continues the character that `partial` begins."""
    try:
        (partial + piece[:1]).decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


def _byte_chars() -> dict[str, int]:
    """Return ByteLevel's alphabet (GPT-2's): printable Latin-1 as it is, other bytes from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_chars()
