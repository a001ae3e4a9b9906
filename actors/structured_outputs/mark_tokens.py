"""Texts of grammars in which marks are tokens, as llguidance's Lark.

llguidance holds special tokens, and every added token of the form `<...>` whatever its tokenizer says, to be
no text: no text of a grammar matches them. So a mark that is such a token is named by its id.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cached_property

from ..tokenization.tokenizer import Tokenizer
from .lark_text import quoted


class MarkTokens:
    """Finds the tokens in texts. `ids`: of tokens by text. `special`: those that are special tokens."""

    def __init__(self, ids: Mapping[str, int], special: Collection[str] = ()) -> None:
        self._ids = ids
        self._plain = {mark: token_id for mark, token_id in ids.items() if mark not in special}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> MarkTokens:
        """Return the marks of a vocabulary: all tokens that text does not match."""
        special = tokenizer.special_token_ids
        return cls(
            {
                mark: token_id
                for mark, token_id in tokenizer.added_token_ids.items()
                if mark in special or (mark[:1], mark[-1:]) == ("<", ">")
            },
            special,
        )

    def __contains__(self, mark: str) -> bool:
        return mark in self._ids

    def find(self, text: str, at: int = 0) -> tuple[int, int] | None:
        """Return where the first mark begins and ends, the longest one there; None if there is none."""
        found = None if self._pattern is None else self._pattern.search(text, at)
        return None if found is None else found.span()

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        marks = sorted(filter(None, self._ids), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, marks))) if marks else None

    def plain_but(self, texts: Collection[str]) -> str:
        """Return the Lark of the marks that are no special tokens and in none of these texts; "" for none."""
        ids = [token_id for mark, token_id in self._plain.items() if not any(mark in text for text in texts)]
        return f"<[{','.join(map(str, sorted(ids)))}]>" if ids else ""

    def lark(self, text: str) -> str:
        parts: list[str] = []
        at = 0
        while (found := self.find(text, at)) is not None:
            begin, end = found
            parts += [quoted(text[at:begin])] * (begin > at)
            parts.append(f"<[{self._ids[text[begin:end]]}]>")
            at = end
        return " ".join([*parts, quoted(text[at:])] if at < len(text) or not parts else parts)
