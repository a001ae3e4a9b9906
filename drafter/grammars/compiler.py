"""Grammars for one model's tokens: compiled by llguidance, within limits.

Nothing here says what users may ask for or how it is worded: that is `actors/grammars.py`, which compiles
each grammar once to see whether it can be. `states.py` compiles it again where tokens are chosen. Compiling
takes a millisecond, of the largest texts that the door lets in a hundred, so a few compiled ones are kept.

llguidance works lazily: states of a grammar's lexer are made when masks first need them, and matchers of the
same compiled grammar share them. So a grammar can run out of states long after it was compiled; `forget`
makes room for a fresh one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Literal

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from ...cluster.grammar import Grammar

MAX_KEPT = 32
# A state takes 1 to 2 KB; ordinary schemas need some hundreds.
MAX_LEXER_STATES = 20_000
# Of the library's defaults: a mask takes 20 ms at the very most, compiling a few hundred.
MAX_GRAMMAR_SIZE = 100_000

Written = tuple[Literal["json_schema", "regex", "lark"], str]


class GrammarError(Exception):
    """A grammar that cannot be compiled; the text says why, for users."""


class GrammarCompiler:
    """Makes matchers for a model's tokens. Threads may share one.

    Args:
        tokenizer_json: of the `tokenizers` library.
        vocab_size: of the model; tokens that only the tokenizer has are never chosen.
        eos_token_ids: the model's end-of-sequence tokens, at least one.

    Attributes:
        mask_words: 32-bit words of a mask, which has a bit for every token of model and tokenizer.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        assert eos_token_ids, "without an end token no text can end where its grammar does"
        eos = list(eos_token_ids)
        tokens = LLTokenizer(tokenizer_json, eos_token=eos)
        if tokens.vocab_size < vocab_size:
            tokens = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos)
        self._tokens = tokens
        self._limits = LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES, max_grammar_size=MAX_GRAMMAR_SIZE, verbose_errors=False
        )
        self._kept: OrderedDict[Written, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self.eos_token_ids = eos_token_ids
        self.vocab_size = tokens.vocab_size
        self.mask_words = (tokens.vocab_size + 31) // 32

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """One that has seen no token. Raises GrammarError."""
        written = (grammar.kind, grammar.text)
        with self._lock:
            kept = self._kept.get(written)
            if kept is not None:
                self._kept.move_to_end(written)
        if kept is None:
            kept = self._compile(written)
            with self._lock:
                self._kept[written] = kept
                while len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
        return kept.deep_copy()

    def forget(self, grammar: Grammar) -> None:
        """Compile this one anew when it is next needed."""
        with self._lock:
            self._kept.pop((grammar.kind, grammar.text), None)

    def _compile(self, written: Written) -> LLMatcher:
        try:
            matcher = LLMatcher(self._tokens, _in_llguidance(written), limits=self._limits, log_level=0)
        except ValueError as error:  # JSON that is none
            raise GrammarError(str(error)) from None
        if matcher.is_error():
            raise GrammarError(_reason(matcher.get_error()))
        warnings = matcher.get_grammar_warnings()
        if warnings:
            raise GrammarError(warnings[0])
        return matcher


def lark_of(text: str) -> str:
    """A grammar in Lark as it is, one in the EBNF of llama.cpp in Lark. Raises GrammarError."""
    try:
        return any_to_lark(text)
    except Exception as error:  # the converter is a small parser that raises whatever it meets
        raise GrammarError(f"neither Lark nor EBNF: {error}") from None


def _in_llguidance(written: Written) -> str:
    kind, text = written
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, overrides={"lenient": False})
    return LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text)


def _reason(error: str) -> str:
    """Its own words, in one line, without its state."""
    return " ".join(error.replace("<non-verbose/>", "").split())
