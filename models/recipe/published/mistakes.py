"""Puts mistakes into sentences and functions, for prompts that ask to correct them. Nothing is random."""

import re
from collections.abc import Callable
from hashlib import sha256

_OTHER_NUMBER = {"is": "are", "are": "is", "was": "were", "were": "was", "has": "have", "have": "has"}
# Replacements of words, each tried in turn; a sentence gets the first two that change it.
_IN_SENTENCES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"\b(is|are|was|were|has|have)\b", lambda match: _OTHER_NUMBER[match[0]]),
    (r"\btheir\b", "there"),
    (r"\bits\b", "it's"),
    (r"\b(an?|the) (?=[a-z])", ""),
    (r"\b([A-Za-z]+)ed\b", r"\1"),
    (r"\b([a-z]{3,})ies\b", r"\1ys"),
    (r"\b([a-z]{4,}[^s\W])s\b", r"\1"),
    (r"\b([a-z]{3})([a-z])([a-z])([a-z]+)\b", r"\1\3\2\4"),
)
_IN_CODE = (
    (r" == ", " = "),
    (r" < ", " > "),
    (r" <= ", " < "),
    (r" >= ", " > "),
    (r" \+ 1", ""),
    (r" - 1", ""),
    (r" and ", " or "),
    (r" not in ", " in "),
    (r" is None", " is not None"),
    (r" \+ ", " - "),
    (r" \+= ", " = "),
    (r"\bTrue\b", "False"),
    (r"\[0\]", "[1]"),
    (r"\breturn ", ""),
)


def with_mistakes(sentence: str) -> str:
    """Return the sentence with two mistakes, or fewer if it has no more places for them."""
    start = sha256(sentence.encode()).digest()[0] % len(_IN_SENTENCES)
    changed, num_mistakes = sentence, 0
    for pattern, replacement in (*_IN_SENTENCES[start:], *_IN_SENTENCES[:start]):
        broken = re.sub(pattern, replacement, changed, count=1)
        if broken != changed:
            changed, num_mistakes = broken, num_mistakes + 1
        if num_mistakes == 2:
            break
    return changed


def with_wrong_operator(code: str) -> str | None:
    """Return the code with one mistake below its first line; None if it has no place for one."""
    head, separator, body = code.partition("\n")
    start = sha256(code.encode()).digest()[0] % len(_IN_CODE)
    for pattern, replacement in (*_IN_CODE[start:], *_IN_CODE[:start]):
        broken = re.sub(pattern, replacement, body, count=1)
        if broken != body:
            return head + separator + broken
    return None
