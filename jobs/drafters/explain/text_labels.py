"""Labels of generated text: language, code or prose, thinking or not. Simple rules, without a model.

* *Code*: within a code fence, or at least `_CODE_SYMBOLS` of the visible characters are `_SYMBOLS`.
* *Language*: the script of at least `_SCRIPT_SHARE` of the letters; for Latin letters the language
  that has most of the common words, or "latin" if few do. Code has no language.

The rules see the last `WINDOW` characters before a block, prompt included, so a label changes within an
answer. They are meant for statistics over many blocks; single labels are often wrong.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

WINDOW = 240
_CODE_SYMBOLS = 0.06
_SYMBOLS = frozenset("{}[]()<>=;_#*+/\\|&@$%^`~")
_SCRIPT_SHARE = 0.3
_MIN_LETTERS = 12
_MIN_COMMON_WORDS = 0.12  # share of words; English prose has about 0.4
_SCRIPTS = {"CJK": "chinese", "HIRAGANA": "japanese", "KATAKANA": "japanese", "HANGUL": "korean"}
_COMMON_WORDS = {
    "english": "the of and to in is that for it with as was on be this are by from or not",
    "german": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine wir",
    "french": "de la le et les des en un du une que est pour qui dans par sur pas au il",
    "spanish": "de la que el en y los se del las un por con no una para es al lo como",
    "italian": "di che la il un in per non con una sono da del si le dei come alla i è",
    "portuguese": "de que e do da em um para com não uma os no se na por mais as dos ao",
    "dutch": "de van het een en in is dat op te zijn met voor niet aan er om ook als bij",
    "polish": "w i na z do nie się że jest o to jak po a co za od przez ale był",
}
_COMMON = {name: frozenset(words.split()) for name, words in _COMMON_WORDS.items()}
_WORD = re.compile(r"[^\W\d_]+")


def content_of(before: str) -> str:
    """Return "code" or "prose" for what follows this text."""
    if before.count("```") % 2:
        return "code"
    tail = before.rpartition("```")[2][-WINDOW:]
    visible = [char for char in tail if not char.isspace()]
    symbols = sum(char in _SYMBOLS for char in visible)
    return "code" if visible and symbols >= _CODE_SYMBOLS * len(visible) else "prose"


def language_of(text: str) -> str | None:
    """Return the language of the end of a text; None if there are too few letters."""
    tail = text[-WINDOW:]
    scripts = Counter(unicodedata.name(char, "?").split()[0] for char in tail if char.isalpha())
    if scripts.total() < _MIN_LETTERS:
        return None
    if scripts["HIRAGANA"] + scripts["KATAKANA"] > 0.1 * scripts.total():
        return "japanese"
    others = Counter({name: count for name, count in scripts.items() if name != "LATIN"})
    if others and others.total() >= _SCRIPT_SHARE * scripts.total():
        script = others.most_common(1)[0][0]
        return _SCRIPTS.get(script, script.lower())
    words = [word.lower() for word in _WORD.findall(tail)]
    shares = {name: sum(word in common for word in words) / len(words) for name, common in _COMMON.items()}
    best = max(shares, key=lambda name: shares[name])
    return best if shares[best] >= _MIN_COMMON_WORDS else "latin"


def is_thinking(before: str, begin: str, end: str, *, opened: bool) -> bool:
    """Return whether an answer is within its reasoning after the text `before`; `opened`: it began there."""
    last_begin, last_end = before.rfind(begin), before.rfind(end)
    if last_begin == last_end:  # neither occurs
        return opened
    return last_begin > last_end
