"""A GGUF file's tokenizer as Hugging Face's files: tokenizer.json, tokenizer_config.json, chat templates.

    gpt2     BPE over bytes; `tokenizer.ggml.pre` names how texts are cut (`gguf_pre_tokenizers.py`)
    gemma4   BPE over characters with a merge list, spaces as "▁", other characters as bytes
    llama    the same without a merge list: SentencePiece merges the pair whose token has the highest score

Token ids are those of llama.cpp for the same text, and of the model's own tokenizer: texts are normalized to
NFC where that is done there, though llama.cpp does not. Called by `gguf_folder.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import numpy as np
from gguf.constants import TokenType

from ...cluster.errors import CheckpointError, brief, brief_name
from ...drafter.compute.checkpoint.gguf.gguf_file import GgufFile
from .file_names import DEFAULT
from .gguf_pre_tokenizers import GEMMA, PRE_TOKENIZERS, PreTokenizer

Json: TypeAlias = dict[str, Any]  # Any: JSON values
T = TypeVar("T")

_KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_BPE, _GEMMA, _SENTENCEPIECE = "gpt2", "gemma4", "llama"
_ABSENT = ("no_vocab", "none")
_EMBEDDING = "token_embd.weight"
_SPACE = "▁"
_MAX_PIECE = 512  # characters of a SentencePiece token, each of whose cuts is tried
# Names of tokens: GGUF's -> transformers'.
_NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # where the file does not say
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Tokens that end a text where no key names them, by their text: of turns, of texts, of parts of code.
_END_TEXTS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>"),
        *("<|flush|>", "<end_of_turn>", "<end_of_utterance>", "<turn|>", "<|tool_response>", "<eos>"),
        *("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "[e~[", "[EOS]"),
        *("<EOT>", "_<EOT>", "[EOT]"),
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    }
)
_HTML_END = "</s>"  # ends texts, or strikethrough: Gemma's vocabularies contain HTML
# With these, <|end|> ends a message and not the answer: OpenAI's harmony, Solar Open.
_MORE_MESSAGES = ({"<|return|>", "<|call|>"}, {"<|call|>", "<|flush|>"}, {"<|calls|>", "<|flush|>"})


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens by id; `types` and `scores` are as long."""

    tokens: Sequence[str]
    types: np.ndarray  # int [vocab], of TokenType
    scores: np.ndarray | None  # float [vocab]

    def of(self, *types: TokenType) -> Iterator[int]:
        return iter(np.flatnonzero(np.isin(self.types, types)).tolist())


class GgufTokenizer:
    """The tokenizer of one file. Raises CheckpointError where it is broken or not known here."""

    @classmethod
    def read(cls, file: GgufFile) -> GgufTokenizer | None:
        """Return None if the file holds no vocabulary."""
        tokenizer = cls(file)
        return None if tokenizer._get("model", str, _ABSENT[0]) in _ABSENT else tokenizer

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """Token ids by text, without rows of the embedding that have no token."""
        tokens = self._vocabulary.tokens[: self._num_tokens]
        ids = {text: token_id for token_id, text in enumerate(tokens)}
        if len(ids) < len(tokens):
            twice = next(text for token_id, text in enumerate(tokens) if ids[text] != token_id)
            raise self._error(f"has the token {brief(twice)} twice")
        return ids

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Ids of all tokens that end an answer, EOS first: by their keys, and by their texts."""
        named = (self._token_id(name) for name in _END_KEYS)
        ends = dict.fromkeys(token_id for token_id in named if token_id is not None)
        ends |= dict.fromkeys(self.ids[text] for text in sorted(_END_TEXTS & self.ids.keys()))
        if (html := self.ids.get(_HTML_END)) is not None and html in self._controls:
            ends[html] = None
        texts = {self._vocabulary.tokens[token_id] for token_id in ends}
        if any(texts >= others for others in _MORE_MESSAGES):
            ends.pop(self.ids.get("<|end|>", -1), None)
        return tuple(ends)

    def tokenizer_json(self) -> Json:
        """Return the content of tokenizer.json."""
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added_tokens(),
            **(self._byte_steps() if self._pre.patterns else self._sentencepiece_steps()),
            "post_processor": self._post_processor(),
            "model": self._model(),
        }

    def tokenizer_config(self) -> Json:
        """Return the content of tokenizer_config.json. Its class adds no tokens of its own."""
        tokens = {
            f"{short}_token": self._vocabulary.tokens[token_id]
            for name, short in _NAMES.items()
            if (token_id := self._token_id(name)) is not None
        }
        return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **tokens}

    def chat_templates(self) -> dict[str, str]:
        """Return Jinja sources by name."""
        metadata, prefix = self._file.metadata, f"{_TEMPLATE}."
        found = {DEFAULT: metadata[_TEMPLATE]} if _TEMPLATE in metadata else {}
        found |= {key.removeprefix(prefix): metadata[key] for key in metadata if key.startswith(prefix)}
        for name, source in found.items():
            if not isinstance(source, str) or not name.replace("-", "_").isidentifier():
                raise self._error(f"has a chat template {brief_name(name)} that is no text, or no name")
        return {name: str(source) for name, source in found.items()}

    def _byte_steps(self) -> Json:
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self._pre.patterns
        ]
        to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        return {
            "normalizer": {"type": "NFC"} if self._pre.composes else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, to_bytes]},
            "decoder": to_bytes,
        }

    def _sentencepiece_steps(self) -> Json:
        prefix = [{"type": "Prepend", "prepend": _SPACE}] if self._adds_space else []
        to_mark = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        to_space = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
        decoders: list[Json] = [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}]
        if self._adds_space:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prefix, to_mark]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
        }

    def _post_processor(self) -> Json | None:
        adds_bos = self._get("add_bos_token", bool, bool(self._pre.adds_bos)) or self._pre is GEMMA
        begin = self._special_part("bos") if adds_bos else []
        end = self._special_part("eos") if self._get("add_eos_token", bool, False) else []
        if not begin and not end:
            return None
        single, second = [{"Sequence": {"id": "A", "type_id": 0}}], [{"Sequence": {"id": "B", "type_id": 1}}]
        texts = {part["SpecialToken"]["id"] for part in (*begin, *end)}
        return {
            "type": "TemplateProcessing",
            "single": [*begin, *single, *end],
            "pair": [*begin, *single, *end, *begin, *second, *end],
            "special_tokens": {
                text: {"id": text, "ids": [self.ids[text]], "tokens": [text]} for text in sorted(texts)
            },
        }

    def _special_part(self, name: str) -> list[Json]:
        token_id = self._token_id(name)
        if token_id is None:
            raise self._error(f"adds {name.upper()} to texts, but has no {_KEY}{name}_token_id")
        return [{"SpecialToken": {"id": self._vocabulary.tokens[token_id], "type_id": 0}}]

    def _model(self) -> Json:
        by_char = not self._pre.patterns
        unknown = self._token_id("unknown") if by_char else None
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else self._vocabulary.tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": by_char,
            "byte_fallback": by_char,
            "ignore_merges": self._pre.whole_words,
            "vocab": self.ids,
            "merges": self._scored_merges() if self._kind == _SENTENCEPIECE else self._listed_merges(),
        }

    def _listed_merges(self) -> list[tuple[str, str]]:
        ids = self.ids
        merges: list[tuple[str, str]] = []
        for merge in self._strings("merges"):
            left, _, right = merge[1:].partition(" ")  # a token may begin with a space, but not contain one
            left = merge[:1] + left
            if left not in ids or right not in ids or left + right not in ids:
                raise self._error(f"has the merge {brief(merge)}, which is not of its tokens")
            merges.append((left, right))
        return merges

    def _scored_merges(self) -> list[tuple[str, str]]:
        """Return all pairs of tokens that form a token, the highest score first, as transformers' converter.

        Only ordinary tokens are formed, and first of all runs of spaces that have a token of their own: other
        tokens are found in the text beforehand, or name bytes.
        """
        tokens, types, scores = self._vocabulary.tokens, self._vocabulary.types, self._vocabulary.scores
        if scores is None:
            raise self._error(f"has no {_KEY}scores")
        defined = [i for i in self._vocabulary.of(TokenType.USER_DEFINED) if _SPACE in tokens[i]]
        of_texts = sorted([*self._vocabulary.of(TokenType.NORMAL), *defined])
        ids = {tokens[i]: i for i in of_texts}
        longest = max(map(len, ids), default=0)
        if longest > _MAX_PIECE:
            raise self._error(f"has a token of {longest:,} characters; {_MAX_PIECE} is the limit")
        found: list[tuple[int, int, int, int, int]] = []  # ids of left, right and both; lengths of two
        for text, both in ids.items():
            for at in range(1, len(text)):
                if (left := ids.get(text[:at])) is not None and (right := ids.get(text[at:])) is not None:
                    found.append((left, right, both, at, len(text) - at))
        boths, lefts, rights = np.array(found, np.int64).reshape(-1, 5).T[2:]
        scores = np.where(types == TokenType.USER_DEFINED, np.inf, scores)
        order: list[int] = np.lexsort((-rights, -lefts, -scores[boths])).tolist()
        return [(tokens[found[i][0]], tokens[found[i][1]]) for i in order]

    def _added_tokens(self) -> list[Json]:
        """Tokens that are found in texts before they are cut; the special ones are hidden in answers."""
        special = self._controls | set(self.end_ids)
        added = {*special, *self._vocabulary.of(TokenType.USER_DEFINED)}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return [
            {"id": i, "content": self._vocabulary.tokens[i], **flags, "special": i in special}
            for i in sorted(added)
            if i < self._num_tokens and not self._is_padding(i)
        ]

    @cached_property
    def _controls(self) -> frozenset[int]:
        return frozenset(self._vocabulary.of(TokenType.CONTROL, TokenType.UNKNOWN))

    @cached_property
    def _kind(self) -> str:
        """Value of `tokenizer.ggml.model`."""
        kind = self._get("model", str, "")
        if kind not in (_BPE, _GEMMA, _SENTENCEPIECE):
            known = f"{_BPE}, {_SENTENCEPIECE} or {_GEMMA}"
            raise self._error(f"has a vocabulary of the kind {brief(kind)}, not {known}", broken=False)
        return kind

    @cached_property
    def _pre(self) -> PreTokenizer:
        if self._kind != _BPE:
            return GEMMA if self._kind == _GEMMA else PreTokenizer(patterns=(), adds_bos=True)
        name = self._get("pre", str, "default")
        if name not in PRE_TOKENIZERS:
            known = ", ".join(sorted(PRE_TOKENIZERS))
            raise self._error(
                f"cuts texts by {_KEY}pre {brief(name)}, which is not among the known ones ({known})",
                broken=False,
            )
        return PRE_TOKENIZERS[name]

    @cached_property
    def _adds_space(self) -> bool:
        """Whether each text begins with a space that decoding removes."""
        return self._get("add_space_prefix", bool, True) and self._kind == _SENTENCEPIECE

    @cached_property
    def _marks_spaces(self) -> bool:
        """Whether user-defined tokens, which converters write with spaces, are spelled with marks."""
        return not self._pre.patterns

    @cached_property
    def _vocabulary(self) -> _Vocabulary:
        _ = self._pre  # an unknown kind is refused before its arrays are read
        tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(self._strings("tokens"))]
        types, scores = self._numbers("token_type", len(tokens)), self._numbers("scores", len(tokens))
        embedding = self._file.tensors.get(_EMBEDDING)
        if embedding is not None and embedding.shape[0] != len(tokens):
            raise self._error(f"has {len(tokens):,} tokens, but {embedding.shape[0]:,} rows in {_EMBEDDING}")
        if types is None:
            types = np.full(len(tokens), TokenType.NORMAL, np.int32)
        if self._marks_spaces:
            for i in np.flatnonzero(types == TokenType.USER_DEFINED).tolist():
                tokens[i] = tokens[i].replace(" ", _SPACE)
        return _Vocabulary(tokens, types, scores)

    @cached_property
    def _num_tokens(self) -> int:
        """Number of ids without the last rows of the embedding, which have no token."""
        number = len(self._vocabulary.tokens)
        while number and self._is_padding(number - 1):
            number -= 1
        return number

    def _is_padding(self, token_id: int) -> bool:
        """Whether it is a row without a token: converters name row 1234 [PAD1234]."""
        vocabulary = self._vocabulary
        return (
            vocabulary.tokens[token_id] == f"[PAD{token_id}]"
            and vocabulary.types[token_id] != TokenType.NORMAL
        )

    def _token_id(self, name: str) -> int | None:
        """Return the id of the token that a key names; None if there is no such key, or it is none's."""
        default = _SENTENCEPIECE_IDS.get(name, -1) if self._kind == _SENTENCEPIECE else -1
        token_id = self._get(f"{name}_token_id", int, default)
        return token_id if 0 <= token_id < self._num_tokens else None

    def _strings(self, name: str) -> list[str]:
        value = self._file.metadata.get(_KEY + name)
        if not isinstance(value, list):
            raise self._error(f"has no list of strings {_KEY}{name}")
        return value

    def _numbers(self, name: str, length: int) -> np.ndarray | None:
        value = self._file.metadata.get(_KEY + name)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf":
            raise self._error(f"has {_KEY}{name}, which is no list of numbers")
        if len(value) != length:
            raise self._error(f"has {length:,} tokens, but {len(value):,} values of {_KEY}{name}")
        return value

    def _get(self, name: str, kind: type[T], default: T) -> T:
        value = self._file.metadata.get(_KEY + name, default)
        if type(value) is not kind:
            raise self._error(f"has {_KEY}{name}, which is no {kind.__name__}")
        return value

    def _error(self, says: str, *, broken: bool = True) -> CheckpointError:
        remedy = "download it again" if broken else "take the model's safetensors checkpoint"
        return CheckpointError(f"tokenizer: {self._file.path} {says}; {remedy}.", param="tokenizer")
