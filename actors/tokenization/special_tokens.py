r"""Special tokens that messages contain, encoded as ordinary text: the setting `split_special_tokens`.

A chat template makes one text of its own markers and of what users wrote. A user that writes a marker
(`<|im_end|>\n<|im_start|>system`) would close the message and open another one. With the setting:

    messages ─ mark ─▶ template ─ read ─▶ text, and the same with the template's own markers in other words
                                              │ encoded by a copy of the tokenizer that knows those words
                                              ▼
                                          token ids

Marks are random characters for private use that break each marker before the template sees it. Texts in which
no user wrote a marker are encoded as always, by the tokenizer itself. Thread-safe.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import tokenizers

from ...cluster.errors import ConfigError

_PRIVATE_USE = 0x100000  # plane 16 of Unicode, from which marks and words are drawn
_MARK_CHARS = 4
_NAMED = re.compile(r"<\|.*\|>", re.S)  # special tokens by their form, whatever the tokenizer calls them


class SpecialTokenGuard:
    """Separates the special tokens of a template from those that messages contain.

    Guarded are the tokenizer's special tokens, and those of its other added tokens that the chat template
    writes (`<think>`, `<tool_call>`) or that are written <|so|>, but no words, spaces or HTML. Raises
    ConfigError if the tokenizer cannot distinguish special tokens from text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, template: str) -> None:
        self._mark = _random_chars(_MARK_CHARS)
        escaped = json.dumps(self._mark)[1:-1]
        self._marks = re.compile(f"{self._mark}|{re.escape(escaped)}", re.I)
        added = backend.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        others = {token.content for token in added.values() if not token.special}
        others = {
            text for text in others if not text.isspace() and (text in template or _NAMED.fullmatch(text))
        }
        serialized = json.loads(backend.to_str())
        names = {text for text in special | others if len(text) > 1}
        nonce = _random_chars(_MARK_CHARS)
        self._words = {text: nonce + chr(_PRIVATE_USE + at) for at, text in enumerate(sorted(names))}
        self._texts = re.compile(_either(sorted(names, key=len, reverse=True)))
        self._starts = _Starts(names, self._mark)
        self._special_starts = _Starts(names & special, self._mark, but=names - special)
        self.backend = _renamed(serialized, self._words)

    def mark(self, value: Any, *, is_answer: bool = False) -> Any:  # Any: JSON
        """Mark all texts and names in the value.

        `is_answer`: the value is a message of the model (templates search for its reasoning and calls); only
        special tokens are marked in it.
        """
        starts = self._special_starts if is_answer else self._starts
        return map_texts(value, starts.mark)

    def mark_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [self.mark(each, is_answer=each.get("role") == "assistant") for each in messages]

    def read(self, rendered: str) -> tuple[str, str | None]:
        """Return the text without marks, and what `backend` encodes instead if users wrote a marker."""
        if self._marks.search(rendered) is None:
            return rendered, None
        own = self._texts.sub(lambda found: self._words[found[0]], rendered)
        text, own = self._marks.sub("", rendered), self._marks.sub("", own)
        return text, own if self._texts.search(own) else None


class _Starts:
    """Marks every possible beginning of some texts: the first two characters, or the first one at an end.

    Excludes places where one of the texts in `but` begins.
    """

    def __init__(self, texts: Iterable[str], mark: str, but: Iterable[str] = ()) -> None:
        starts = sorted({text[:2] for text in texts})
        firsts = "".join(sorted({re.escape(start[0]) for start in starts}))
        self._mark = mark
        pattern = f"(?!{_either(but)})(?={_either(starts)}).|[{firsts}](?=\\s*$)"
        self._found = re.compile(pattern, re.S) if starts else None

    def mark(self, text: str) -> str:
        return text if self._found is None else self._found.sub(lambda found: found[0] + self._mark, text)


def map_texts(value: Any, change: Callable[[str], str]) -> Any:  # Any: JSON
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_texts(name, change): map_texts(each, change) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(each, change) for each in value]
    return value


def _random_chars(count: int) -> str:
    return "".join(chr(_PRIVATE_USE + secrets.randbelow(0xFFFE)) for _ in range(count))


def _either(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, texts)) or r"(?!)"


def _merges_without(merges: Iterable[Any], texts: Mapping[str, str]) -> list[Any]:
    """Drop merges that can produce one of these tokens from ordinary text."""
    pairs = ((each, each.split(" ", 1) if isinstance(each, str) else each) for each in merges)
    return [each for each, (left, right) in pairs if not {left, right, left + right} & texts.keys()]


def _renamed(serialized: dict[str, Any], words: Mapping[str, str]) -> tokenizers.Tokenizer:
    """Rename some of the added tokens, under the same ids."""
    vocab = serialized["model"]["vocab"]
    ids: dict[str, int] = {}
    for token in serialized["added_tokens"]:
        if (word := words.get(token["content"])) is None:
            continue
        ids[word] = token["id"]
        if isinstance(vocab, dict):
            cast("dict[str, int]", vocab).pop(token["content"], None)
            vocab[word] = token["id"]
        elif token["id"] < len(vocab):  # Unigram: pieces with their scores, by id
            vocab[token["id"]][0] = word
        token["content"] = word
    if "merges" in serialized["model"]:
        serialized["model"]["merges"] = _merges_without(serialized["model"]["merges"], words)
    if (unknown := words.get(serialized["model"].get("unk_token") or "")) is not None:
        serialized["model"]["unk_token"] = unknown
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(serialized))
    except Exception as error:  # the library raises bare Exception
        raise _refusal(str(error)) from error
    backend.no_padding()
    backend.no_truncation()
    if any(backend.token_to_id(word) != token_id for word, token_id in ids.items()):
        raise _refusal("its special tokens cannot be renamed")
    return backend


def _refusal(why: str) -> ConfigError:
    return ConfigError(
        f"split_special_tokens: this tokenizer cannot distinguish special tokens from text ({why}). "
        "Leave it out.",
        param="split_special_tokens",
    )
