r"""How `gpt2` vocabularies in GGUF files cut texts into words: `tokenizer.ggml.pre`, a name per family.

The patterns are those of the families' own tokenizer.json. A pattern applies to the pieces that the earlier
ones leave, and what it does not match is a piece, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# `pat_str` of moonshotai's tokenization_kimi.py, the same from Kimi-K2-Instruct to K2.6.
KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """Rules of one family.

    Attributes:
        patterns: regular expressions in the order in which they apply. Empty: texts are not cut, and spaces
            are "▁" (SentencePiece).
        composes: texts are normalized to NFC first.
        whole_words: a word that is a token is that token, whatever the merges say.
        adds_bos: texts begin with BOS unless the file says otherwise; None: whatever it says.
    """

    patterns: tuple[str, ...]
    composes: bool = False
    whole_words: bool = False
    adds_bos: bool | None = False


def _words(*words: str, digits: str, symbols: str = r"[^\s\p{L}\p{N}]", ends: str = r"[\r\n]") -> str:
    """Return the pattern that most families share: words, digits, symbols, ends of lines, other spaces."""
    return "|".join(
        (*words, digits, rf" ?{symbols}+{ends}*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    )


_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_ONE, _THREE = r"\p{N}", r"\p{N}{1,3}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_GPT_4O = tuple(f"{word}{_SUFFIX}?" for word in _CASED)
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CHINESE = "[一-龥ࠀ-一가-\ud7ff]+"
# DeepSeek's first tokenizer names the letters with two cases in the Unicode of its time, without these.
_CASELESS = (
    r"\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c8a}\x{2d00}-\x{2d2d}\x{a790}-\x{a7fa}\x{ab30}-\x{ab68}"
    r"\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{16e7f}\x{1d400}-\x{1d7cb}\x{1df00}-\x{1df2a}"
)
_ASCII_SYMBOL = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""

_LLAMA_3 = PreTokenizer(patterns=(_words(_SUFFIX, _WORD, digits=_THREE),), whole_words=True, adds_bos=True)
_QWEN_2 = PreTokenizer(patterns=(_words(_SUFFIX, _WORD, digits=_ONE),), composes=True)
_O200K = PreTokenizer(patterns=(_words(*_GPT_4O, digits=_THREE, ends=r"[\r\n/]"),))
_GLM_4 = PreTokenizer(patterns=_LLAMA_3.patterns, whole_words=True)

GEMMA = PreTokenizer(patterns=(), adds_bos=True)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer(
        patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"),
    ),
    "gpt-2": PreTokenizer(patterns=(_GPT_2,)),
    "smollm": PreTokenizer(patterns=(_ONE, _GPT_2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA_3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN_2),
    "qwen35": PreTokenizer(
        patterns=(
            _words(_SUFFIX, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", digits=_ONE, symbols=r"[^\s\p{L}\p{M}\p{N}]"),
        ),
        composes=True,
    ),
    "tekken": PreTokenizer(
        patterns=(_words(*_CASED, digits=_ONE, ends=r"[\r\n/]"),), whole_words=True, adds_bos=True
    ),
    **dict.fromkeys(("gpt-4o", "minimax-m2"), _O200K),
    "chatglm-bpe": PreTokenizer(patterns=_LLAMA_3.patterns),
    **dict.fromkeys(("glm4", "glm5"), _GLM_4),
    "deepseek-llm": PreTokenizer(
        patterns=(
            r"[\r\n]",
            rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_CASELESS}]]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _CHINESE,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer(patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, _ONE)),
    "deepseek-v3": PreTokenizer(
        patterns=(
            _THREE,
            "[一-龥぀-ゟ゠-ヿ]+",
            rf"{_ASCII_SYMBOL}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    "kimi-k2": PreTokenizer(patterns=(KIMI_PATTERN,)),
    "gemma4": GEMMA,
}
