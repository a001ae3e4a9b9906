"""Tokenizer: the `tokenizers` library plus the checkpoint's chat template.

Reads `tokenizer.json` (any fast tokenizer) or Kimi's `tiktoken.model` (`tiktoken_tokenizer.py`). Thread-safe:
the tokenizer is never changed after loading.

`TokenCoverage` bounds the text per token, which gives a lower bound of a text's tokens without encoding it:

    text ─ normalizer ─▶ characters ─ pre-tokenizer, BPE ─▶ tokens
         at most 4 : 1 (NFC, NFKC)                        at most the longest entry : 1

A text that cannot fit the model is rejected in microseconds, where encoding takes a second per 2 MB. The
bound must never reject a text that fits, so it is only computed for tokenizers that lose no characters: each
step must be one known to keep or lengthen text, and the vocabulary must cover every byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from ...cluster.errors import CheckpointError, RequestError
from ..checkpoints.checkpoint_paths import has_tokenizer
from ..checkpoints.file_names import TIKTOKEN_MODEL, TOKENIZER_JSON
from .chat_template import ChatTemplate
from .client_messages import Message, parse_arguments, without_surrogates
from .detokenizer import IncrementalDetokenizer, TokenPieces
from .special_tokens import SpecialTokenGuard
from .text_growth import Part, check_growth, parts, serialized
from .tiktoken_tokenizer import sorts_tools, tiktoken_backend
from .tokenizer_config import read_chat_templates, read_special_tokens

_FOREIGN = ("variables", "tools", "documents")  # rendering arguments besides messages


class Tokenizer:
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str],
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        sorts_tools: bool = False,
        trust_templates: bool = False,
        split_special_tokens: bool = False,
    ) -> None:
        self._backend = backend
        self._trust_templates = trust_templates
        # number of ids, including added tokens
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.coverage = token_coverage(backend)  # maximum text per token; None if there is no such bound
        self.template = None  # the chat template; None if the checkpoint has none
        if chat_template:
            self.template = ChatTemplate(
                chat_template, special_tokens, template_kwargs, sorts_tools=sorts_tools
            )
        written = self.template.source if self.template else ""
        self._guard = SpecialTokenGuard(backend, written) if split_special_tokens else None
        self._pieces = TokenPieces(backend)
        self._token_texts: dict[int, str] = {}

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        trust_templates: bool = False,
        split_special_tokens: bool = False,
    ) -> Tokenizer:
        """Read the tokenizer, its special tokens' names and the chat templates from a checkpoint folder.

        Args:
            chat_template: Jinja source instead of all of the checkpoint's templates.
            template_kwargs: default template variables.
            trust_templates: requests may contain their own Jinja template.
            split_special_tokens: special tokens in messages are encoded as text (`special_tokens.py`).
        """
        backend = _read_backend(folder)
        backend.no_padding()
        backend.no_truncation()
        byte_level = "ByteLevel(" in f"{backend.pre_tokenizer} {backend.decoder}"
        try:
            return cls(
                backend,
                read_chat_templates(folder) if chat_template is None else chat_template,
                read_special_tokens(folder, byte_level=byte_level),
                template_kwargs,
                sorts_tools=sorts_tools(folder),
                trust_templates=trust_templates,
                split_special_tokens=split_special_tokens,
            )
        except RequestError as error:  # raised by the template
            remedy = "" if chat_template is not None else " Give another one: chat_template, --chat-template."
            raise CheckpointError(error.message + remedy, param=error.param) from error

    def to_json(self) -> str:
        return self._backend.to_str()

    def encode(self, text: str, *, add_special_tokens: bool = True, guarded: bool = False) -> list[int]:
        """`guarded`: the text is the second one of `render`."""
        return self.encoding(text, add_special_tokens=add_special_tokens, guarded=guarded).ids

    def encoding(
        self, text: str, *, add_special_tokens: bool = True, guarded: bool = False
    ) -> tokenizers.Encoding:
        """Return the library's encoding, without creating a list of ids."""
        backend = self._encoder(guarded)
        return _encoded(text, lambda part: backend.encode(part, add_special_tokens=add_special_tokens))

    def encode_unlocked(
        self, text: str, *, add_special_tokens: bool = True, guarded: bool = False
    ) -> tokenizers.Encoding:
        """Return the library's encoding without holding the GIL, for use in a thread."""
        encode, specials = self._encoder(guarded).encode_batch_fast, add_special_tokens
        return _encoded(text, lambda part: encode([part], add_special_tokens=specials)[0])

    def _encoder(self, guarded: bool) -> tokenizers.Tokenizer:
        if not guarded:
            return self._backend
        assert self._guard is not None, "only a guard makes such texts"
        return self._guard.backend

    def decode_unlocked(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode without holding the GIL, for use in a thread."""
        return self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return the text of a token; it is cached, because log probabilities need twenty per position."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a token that follows others; None if it has none."""
        return self._pieces.bytes_of(token_id)

    def tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return the vocabulary's own spelling of tokens, None for ids beyond it."""
        return [self._backend.id_to_token(token_id) for token_id in token_ids]

    def ids_in_vocabulary(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the ids in the vocabulary and below `vocab_size`, the limit of grammars."""
        tokens = zip(token_ids, self.tokens(token_ids), strict=True)
        return tuple(i for i, token in tokens if token is not None and i < self.vocab_size)

    # Any: the arguments of `ChatTemplate.render`.
    def apply_chat_template(
        self, messages: Sequence[Message], *, source: str | None = None, **options: Any
    ) -> str:
        return self.render(messages, source=source, **options)[0]

    # Any: the arguments of `ChatTemplate.render`.
    def render(
        self, messages: Sequence[Message], *, source: str | None = None, **options: Any
    ) -> tuple[str, str | None]:
        """Return the prompt text, and a second text to encode as `guarded` if special tokens in messages are
        text.

        `source`: the name of one of the model's templates, or Jinja source. Raises RequestError if there is
        no template, or it rejects the messages, or requests may not contain templates.
        """
        named = self.template is not None and source in self.template.names
        if source is not None and not named and not self._trust_templates:
            raise RequestError(
                "chat_template: this server accepts no templates in requests, as they are code. Leave it "
                "out, or start the server with --trust-request-chat-template.",
                param="chat_template",
            )
        if self.template is None:
            raise RequestError(
                "messages: this model has no chat template. Use /v1/completions with a prompt, or a "
                "tokenizer that has one.",
                param="messages",
            )
        template = self.template if source is None else self.template.another(source)
        messages = parse_arguments(messages)
        if self._guard is None:
            return template.render(messages, **options), None
        options |= {name: self._guard.mark(options[name]) for name in _FOREIGN if options.get(name)}
        return self._guard.read(template.render(self._guard.mark_messages(messages), **options))

    def template_uses(self, variable: str) -> bool:
        return self.template is not None and self.template.uses(variable)

    @cached_property
    def special_token_ids(self) -> Mapping[str, int]:
        added = self._backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @cached_property
    def added_token_ids(self) -> Mapping[str, int]:
        """Ids of all added tokens by text: special ones, and others that are never split."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items()}

    @cached_property
    def _specials(self) -> frozenset[int]:
        return frozenset(self.special_token_ids.values())

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        kept_token_ids: Sequence[int] = (),
    ) -> IncrementalDetokenizer:
        """`skip_special_tokens`: leave special tokens out of the text, except for `kept_token_ids`."""
        hidden: frozenset[int] = frozenset()
        if skip_special_tokens:
            hidden = self._specials.difference(kept_token_ids)
        return self._pieces.kind(self._pieces, prompt_token_ids, hidden)


def _encoded(text: str, encode: Callable[[str], tokenizers.Encoding]) -> tokenizers.Encoding:
    """Encode with U+FFFD for lone surrogates, which the library rejects."""
    try:
        return encode(text)
    except TypeError:
        return encode(without_surrogates(text))


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / TOKENIZER_JSON
    if not has_tokenizer(folder):
        raise CheckpointError(
            f"tokenizer: {folder} holds neither {TOKENIZER_JSON} nor {TIKTOKEN_MODEL}. Set `tokenizer` to a "
            "folder that does, or save the checkpoint's tokenizer with transformers (save_pretrained).",
            param="tokenizer",
        )
    if not path.is_file():
        return tiktoken_backend(folder)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise CheckpointError(f"tokenizer: {path} cannot be read: {error}.", param="tokenizer") from error
    check_growth(backend, path)
    return backend


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
    normalizers = list(parts(serialized(backend.normalizer), "normalizers"))
    splitters = list(parts(serialized(backend.pre_tokenizer), "pretokenizers"))
    added = backend.get_added_tokens_decoder().values()
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if not (
        all(map(_normalizer_keeps, normalizers))
        and all(map(_splitter_keeps, splitters))
        and _model_keeps(backend.model, vocabulary, [*normalizers, *splitters])
        and not any(token.lstrip or token.rstrip for token in added)  # eat whitespace
    ):
        return None
    longest = max(map(len, [*vocabulary, *_added(backend, added)]))
    kinds = [part["type"] for part in normalizers]
    shrink = COMPOSED_CHARS ** sum(kind in COMPOSING for kind in kinds)
    rewritten = any(kind in REWRITING for kind in kinds)
    return TokenCoverage(longest * shrink, longest * (shrink if rewritten else 1))


def _normalizer_keeps(part: Part) -> bool:
    if part["type"] == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and len(part["content"]) >= len(pattern)
    return part["type"] in NORMALIZERS


def _splitter_keeps(part: Part) -> bool:
    return part["type"] in PRE_TOKENIZERS and part.get("behavior") != "Removed"


def _model_keeps(model: Any, vocabulary: Mapping[str, int], steps: list[Part]) -> bool:
    """Return whether every byte has a token; otherwise text is dropped or merged."""
    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if any(step["type"] == "ByteLevel" for step in steps):
        return set(ByteLevel.alphabet()) <= vocabulary.keys()
    return model.byte_fallback and {f"<0x{byte:02X}>" for byte in range(256)} <= vocabulary.keys()


def _added(backend: tokenizers.Tokenizer, added: Iterable[tokenizers.AddedToken]) -> Iterator[str]:
    """Yield the added tokens as matched: in the text and in the normalized text."""
    for token in added:
        yield token.content
        if token.normalized and backend.normalizer is not None:
            yield backend.normalizer.normalize_str(token.content)
