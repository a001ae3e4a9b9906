"""Compiles grammars for one model's tokens with llguidance, within limits.

`actors/structured_outputs/grammar_frontend.py` defines what users may ask for. Every grammar of a request has
been test-compiled in a sandbox process (`compile_sandbox.py`). It is compiled again here, in the process that
samples (`matchers.py`), by `hold`, concurrently with the steps. Grammars of open requests and a few recent
ones are cached.

llguidance is lazy: lexer states are made when masks first need them, and matchers of one compiled grammar
share them. So a grammar can exceed its limit of states long after it was compiled; `forget` lets it be
compiled again.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Literal, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from ...cluster.request.structured_outputs import Grammar

T = TypeVar("T")

MAX_CACHED = 32  # in addition to grammars that are held
# A state takes 1 to 2 KB; ordinary schemas need some hundreds. Forced text makes one per character with the
# GIL held: 0.1 s at this limit.
MAX_LEXER_STATES = 20_000
# llguidance's default is larger; at this limit a mask takes at most 20 ms, compiling a few hundred.
MAX_GRAMMAR_SIZE = 100_000
# Work for the first mask: 100 ms at most, where `(a{1000}){1000}` would take seconds.
MAX_LEXER_FUEL = 200_000
# Work for each later mask: a fourth and a fifth of the library's defaults, some 40 ms each.
MAX_STEP_LEXER_FUEL = 50_000
MAX_STEP_ITEMS = 10_000
# All forced tokens up to the next choice are computed at once, microseconds each with the GIL held.
MAX_FORCED = 512
# llguidance recurses through rules and schemas. A grammar that fits a trial's stack fits this one.
STACK_BYTES = 16 << 20

Written = tuple[Literal["json_schema", "regex", "lark"], str]
_STACK_SIZE = threading.Lock()  # threading.stack_size is global to the process


class GrammarError(Exception):
    """A grammar that cannot be compiled; the message is for users."""


class GrammarCompiler:
    """Makes matchers for a model's tokens. Thread-safe.

    Tokens beyond `vocab_size`, which only the tokenizer has, are never sampled. A mask has `mask_words`
    32-bit words.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        assert eos_token_ids, "without an end token no text can end where its grammar does"
        eos = list(eos_token_ids)
        tokens = LLTokenizer(tokenizer_json, eos_token=eos)
        if tokens.vocab_size < vocab_size:
            tokens = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos)
        self._tokens = tokens
        self._limits = LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=MAX_GRAMMAR_SIZE,
            initial_lexer_fuel=MAX_LEXER_FUEL,
            step_lexer_fuel=MAX_STEP_LEXER_FUEL,
            step_max_items=MAX_STEP_ITEMS,
            verbose_errors=False,
        )
        self._cached: OrderedDict[Written, LLMatcher] = OrderedDict()
        self._held: Counter[Written] = Counter()
        self._lock = threading.Lock()
        self.eos_token_ids = eos_token_ids
        self.vocab_size = tokens.vocab_size
        self.mask_words = (tokens.vocab_size + 31) // 32

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """Return a matcher that has consumed no token, compiled unless it is cached. Raises GrammarError."""
        return self._compiled((grammar.kind, grammar.text)).deep_copy()

    def hold(self, grammar: Grammar) -> None:
        """Compile a grammar without the GIL and keep it until `release`; GrammarError if it is not kept."""
        written = (grammar.kind, grammar.text)
        with self._lock:
            self._held[written] += 1
        try:
            self._compiled(written)
        except BaseException:
            self.release(grammar)
            raise

    def release(self, grammar: Grammar) -> None:
        written = (grammar.kind, grammar.text)
        with self._lock:
            self._held[written] -= 1
            if self._held[written] <= 0:
                del self._held[written]
            self._trim()

    def forget(self, grammar: Grammar) -> None:
        with self._lock:
            self._cached.pop((grammar.kind, grammar.text), None)

    def compile(self, written: Written) -> LLMatcher:
        """Compile a grammar on the calling thread's stack. Raises GrammarError."""
        try:
            matcher = LLMatcher(self._tokens, _in_llguidance(written), limits=self._limits, log_level=0)
        except ValueError as error:  # invalid JSON
            raise GrammarError(str(error)) from None
        if not matcher.is_error():
            matcher.compute_bitmask()  # exponential grammars fail here, not in a step
        if matcher.is_error():
            raise GrammarError(reason_of(matcher))
        warnings = matcher.get_grammar_warnings()
        if warnings:
            raise GrammarError(warnings[0])
        return matcher

    def _compiled(self, written: Written) -> LLMatcher:
        with self._lock:
            cached = self._cached.get(written)
            if cached is not None:
                self._cached.move_to_end(written)
                return cached
        cached = run_on_stack(STACK_BYTES, lambda: self.compile(written))
        with self._lock:
            self._cached[written] = cached
            self._trim()
        return cached

    def _trim(self) -> None:
        idle = [written for written in self._cached if written not in self._held]
        for written in idle[: max(0, len(idle) - MAX_CACHED)]:
            del self._cached[written]


def run_on_stack(num_bytes: int, work: Callable[[], T]) -> T:
    """Run `work` in a thread with a stack of this size; return its result or raise its error."""
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(work())
        except BaseException as error:  # raised again by the caller
            raised.append(error)

    with _STACK_SIZE:
        before = threading.stack_size(num_bytes)
        try:
            thread = threading.Thread(target=run, name="manta-grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if raised:
        raise raised[0]
    return returned[0]


def lark_of(text: str) -> str:
    """Return a grammar in Lark, converted from llama.cpp's EBNF if necessary. Raises GrammarError."""
    try:
        return any_to_lark(text)
    except Exception as error:  # the converter is a small parser that raises many kinds
        raise GrammarError(f"neither Lark nor EBNF: {error}") from None


def _in_llguidance(written: Written) -> str:
    kind, text = written
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, overrides={"lenient": False})
    return LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text)


def reason_of(matcher: LLMatcher) -> str:
    """Return why a matcher fails: llguidance's message without its state, as one line."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
