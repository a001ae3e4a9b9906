"""Turns structured-output requests into a `Grammar` and checks that it can be compiled.

    structured_outputs, response_format ─▶ StructuredOutputsParams ─▶ Grammar, in one of three forms

Errors name the request field. Sizes are bounded here. Time, memory and nesting are bounded by a killable
process that compiles each grammar first (`grammar_validator.py`); then the ranks compile it in parallel with
their steps and hold it while the request is open. `left_out` names what of a JSON schema cannot be enforced.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal, Protocol, runtime_checkable

from ...cluster.config import EngineConfig, StructuredOutputsConfig
from ...cluster.errors import OverloadedError, RequestError
from ...cluster.request.request import SamplingParams
from ...cluster.request.structured_outputs import Grammar, GrammarKind, StructuredOutputsParams
from ...cluster.step.executor import ExecutorInfo
from ...drafter.grammars.compiler import GrammarError, lark_of
from ..tokenization.tokenizer import Tokenizer
from .grammar_validator import QUICK_S, SLOW_S, GrammarValidator
from .json_grammar import COMPACT, INDENTED, json_rule
from .json_schema import MAX_GRAMMAR_CHARS, SchemaReader
from .lark_text import quoted
from .mark_tokens import MarkTokens
from .schema_keywords import RESTRICTING, ascii_classes
from .structural_tags import NO_MARKS, lark_of_tags, lark_regex

logger = logging.getLogger(__name__)

MAX_CHOICES = 4096
MAX_LOGGED = 64  # schemas whose keywords that are not enforced are logged
# Two quick trials at a time and one slow one, so that slow grammars do not delay others.
NUM_QUICK, NUM_SLOW = 2, 1
DEFAULTS = StructuredOutputsConfig()
# Grammars of open requests that are not cheap: each takes up to 128 MiB on every rank. Others wait.
MAX_LARGE = 8
LARGE_TIMEOUT_S = 600.0


@runtime_checkable
class HoldsGrammars(Protocol):
    """An executor with ranks that compile grammars alongside their steps. Thread-safe."""

    def hold_grammar(self, grammar: Grammar) -> None:
        """Compile on every rank and hold until `release_grammar`. Blocks; raises GrammarError."""
        ...

    def release_grammar(self, grammar: Grammar) -> None: ...


class GrammarFrontend:
    """Checks the grammars of one engine's requests.

    `tokenizer`: without one every grammar is rejected. `holder` compiles what `hold` has checked; None if
    steps compile, as in `LLM`. `config`: see there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        holder: HoldsGrammars | None = None,
        config: StructuredOutputsConfig = DEFAULTS,
    ) -> None:
        self._validator = None
        self._config = config
        self._marks = NO_MARKS if tokenizer is None else MarkTokens.of(tokenizer)
        self._logged: set[tuple[str, ...]] = set()
        if tokenizer is not None and (known := tokenizer.ids_in_vocabulary(eos_token_ids)):
            self._validator = GrammarValidator(tokenizer.to_json(), vocab_size, known)
        self._holder = holder
        self._quick = ThreadPoolExecutor(NUM_QUICK, thread_name_prefix="manta-grammars")
        self._slow = ThreadPoolExecutor(NUM_SLOW, thread_name_prefix="manta-slow-grammars")
        self._large: Counter[Grammar] = Counter()
        self._capacity = threading.Condition()  # guards `_large`
        self._is_closed = False

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer | None,
        info: ExecutorInfo,
        config: EngineConfig,
        holder: HoldsGrammars | None = None,
    ) -> GrammarFrontend:
        outputs = StructuredOutputsConfig.of(config.structured_outputs_config)
        if outputs.backend not in ("auto", "guidance"):
            logger.warning("backend=%s has no effect: llguidance enforces grammars", outputs.backend)
        return cls(tokenizer, info.vocab_size, info.eos_token_ids, holder, outputs)

    def compile(self, params: SamplingParams) -> SamplingParams:
        """Add the grammar for `structured_outputs`. Blocks. Raises RequestError, which names the field."""
        found = self._checked(params, QUICK_S) or self._checked(params, SLOW_S)
        assert found is not None, "a slow trial answers"
        return found

    @asynccontextmanager
    async def hold(self, params: SamplingParams) -> AsyncGenerator[SamplingParams, None]:
        """Do as `compile`, of a grammar, held on every rank. May also raise OverloadedError."""
        found = await self._run_in_thread(self._quick, QUICK_S, params)
        if found is None:
            found = await self._run_in_thread(self._slow, SLOW_S, params)
        assert found is not None, "a slow trial answers"
        try:
            yield found
        finally:
            self._release(found)

    def close(self) -> None:
        """End the threads and the process that tries grammars. Idempotent."""
        with self._capacity:
            self._is_closed = True
            self._capacity.notify_all()
        for threads in (self._quick, self._slow):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._validator is not None:
            self._validator.close()

    async def _run_in_thread(
        self, threads: ThreadPoolExecutor, cpu_s: float, params: SamplingParams
    ) -> SamplingParams | None:
        future = threads.submit(self._check_and_hold, params, cpu_s)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._undo)
            raise

    def _undo(self, future: Future[SamplingParams | None]) -> None:
        if not future.cancelled() and future.exception() is None and (found := future.result()) is not None:
            self._release(found)

    def _check_and_hold(self, params: SamplingParams, cpu_s: float) -> SamplingParams | None:
        """Check and hold a grammar; None if that takes longer than `cpu_s`."""
        found = self._checked(params, cpu_s)
        if found is None or found.grammar is None:
            return found
        grammar = found.grammar
        if not grammar.is_cheap and cpu_s < SLOW_S:
            return None
        if not grammar.is_cheap:
            self._wait_for_capacity(grammar, _field(params))
        try:
            if self._holder is not None:
                self._holder.hold_grammar(grammar)
        except BaseException as error:
            self._uncount(grammar)
            if isinstance(error, GrammarError):
                raise _refusal(_field(params), str(error)) from None
            raise
        return found

    def _wait_for_capacity(self, grammar: Grammar, field: str) -> None:
        """Count a large grammar once it may be compiled. Raises OverloadedError."""

        def has_capacity() -> bool:
            return self._is_closed or grammar in self._large or len(self._large) < MAX_LARGE

        with self._capacity:
            if not self._capacity.wait_for(has_capacity, LARGE_TIMEOUT_S):
                raise OverloadedError(
                    f"{field}: {MAX_LARGE} other large grammars have been in use for {LARGE_TIMEOUT_S:g} s. "
                    "Retry, or make this one simpler."
                )
            self._large[grammar] += 1

    def _release(self, params: SamplingParams) -> None:
        grammar = params.grammar
        if grammar is None:
            return
        self._uncount(grammar)
        if self._holder is not None:
            try:
                self._quick.submit(self._holder.release_grammar, grammar)
            except RuntimeError:  # the threads were shut down, and the holder too
                logger.debug("a grammar was released after the end")

    def _uncount(self, grammar: Grammar) -> None:
        with self._capacity:
            if grammar in self._large and not grammar.is_cheap:
                self._large[grammar] -= 1
                self._large += Counter()  # drop grammars that no request uses
                self._capacity.notify_all()

    def _checked(self, params: SamplingParams, cpu_s: float) -> SamplingParams | None:
        """Add the checked grammar; None if that takes longer than `cpu_s`."""
        outputs = params.structured_outputs
        if params.grammar is not None:
            kind, text, after = params.grammar.kind, params.grammar.text, params.grammar.after_token_ids
        elif outputs is not None:
            ((kind, text), names) = _written(outputs, self._config, self._marks)
            after = outputs.after_token_ids
            self._log_left_out(names)
        else:
            return params
        grammar = self._compile_trial(kind, text, after, params, cpu_s)
        return None if grammar is None else replace(params, grammar=grammar)

    def _log_left_out(self, names: tuple[str, ...]) -> None:
        """Log keywords that are not enforced, once: rows of a batch have them by the thousand.

        Paths and unknown keywords are a client's text, so they are counted.
        """
        keywords = {name.rpartition(".")[2] for name in names}
        known = tuple(sorted(keywords & RESTRICTING))
        if names and known not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(known)
            listed = ", ".join([*known, *(["unknown ones"] if keywords - RESTRICTING else [])])
            logger.warning("JSON schemas have %d keywords that cannot be enforced: %s", len(names), listed)

    def _compile_trial(
        self, kind: str, text: str, after: tuple[int, ...], params: SamplingParams, cpu_s: float
    ) -> Grammar | None:
        field = _field(params)
        if self._validator is None:
            raise RequestError(
                f"{field}: this engine cannot constrain an answer: it runs without a tokenizer "
                "(skip_tokenizer_init), or its tokenizer has no end-of-sequence token. Leave it out.",
                param=field,
            )
        forbidden = tuple(word[0] for word in params.bad_words_token_ids if len(word) == 1)
        result = self._validator.try_grammar(
            kind, text, cpu_s, allowed=params.allowed_token_ids, forbidden=forbidden
        )
        if result.is_slow and cpu_s < SLOW_S:
            return None
        if result.refusal is not None:
            raise _refusal(field, result.refusal)
        written: GrammarKind = "lark" if kind == "grammar" else kind  # type: ignore[assignment]
        text = text if result.text is None else result.text
        return Grammar(written, text, after, result.is_cheap, result.forces, result.mask_s)


_Kind = GrammarKind | Literal["grammar"]


def written_grammar(
    outputs: StructuredOutputsParams,
    config: StructuredOutputsConfig = DEFAULTS,
    marks: MarkTokens = NO_MARKS,
) -> tuple[_Kind, str]:
    """Return a grammar for llguidance, or EBNF that may have to become Lark. Raises RequestError.

    `marks`: those of the model, for structural tags.
    """
    return _written(outputs, config, marks)[0]


def left_out(outputs: StructuredOutputsParams | None) -> tuple[str, ...]:
    """Return the paths of keywords in JSON schemas that cannot be enforced. Raises RequestError."""
    if outputs is None:
        return ()
    if outputs.constraint == "json":  # its grammar is written later, and not in the event loop
        reader = SchemaReader(strict=outputs.strict)
        reader.read(_parsed(outputs.json, outputs.field), outputs.field)
        return (*outputs.left_out, *reader.left_out)
    return _written(outputs, DEFAULTS, NO_MARKS)[1]


def _written(
    outputs: StructuredOutputsParams, config: StructuredOutputsConfig, marks: MarkTokens
) -> tuple[tuple[_Kind, str], tuple[str, ...]]:
    if outputs.constraint == "frame":
        return ("lark", outputs.frame or ""), outputs.left_out
    (kind, text), names = _constraint(outputs, config, marks)
    if outputs.frame is not None:
        kind, text = "lark", _framed(outputs.frame, kind, text, outputs.field)
    return (kind, text), (*outputs.left_out, *names)


def _framed(frame: str, kind: _Kind, text: str, field: str) -> str:
    """Return the Lark of an answer with its frame; the rule `answer` is the constraint."""
    if kind == "regex":
        return f"{frame}\nanswer: {lark_regex(text, field)}"
    if kind == "grammar":
        try:
            text = lark_of(text)
        except GrammarError as error:
            raise _refusal(field, str(error)) from None
    return f"{frame}\nanswer: %lark {{\n{text}\n}}"


def _constraint(
    outputs: StructuredOutputsParams, config: StructuredOutputsConfig, marks: MarkTokens
) -> tuple[tuple[_Kind, str], tuple[str, ...]]:
    field = outputs.field
    reader = SchemaReader(strict=outputs.strict, closes_objects=config.disable_additional_properties)
    layout = COMPACT if outputs.disable_any_whitespace or config.disable_any_whitespace else INDENTED
    match outputs.constraint:
        case "json" | "json_object":
            schema = _parsed(outputs.json, field) if outputs.constraint == "json" else {"type": "object"}
            written = "lark", f"start: {json_rule(reader.read(schema, field), layout)}"
        case "regex":
            written = "regex", ascii_classes(_text(outputs.regex, field))
        case "grammar":
            written = "grammar", _text(outputs.grammar, field)
        case "choice":
            written = "lark", _lark_of_choice(outputs.choice or (), field)
        case _:
            tags = _parsed(outputs.structural_tag, field)
            if not isinstance(tags, Mapping):
                raise _refusal(field, "structural tags are an object")
            written = "lark", lark_of_tags(tags, field, reader, layout, marks)
    return written, tuple(reader.left_out)


def _field(params: SamplingParams) -> str:
    return "grammar" if params.structured_outputs is None else params.structured_outputs.field


def _lark_of_choice(choice: tuple[object, ...], field: str) -> str:
    texts = [text for text in choice if isinstance(text, str)]
    if not 1 <= len(choice) <= MAX_CHOICES or len(texts) < len(choice):
        raise _refusal(field, f"choices are 1 to {MAX_CHOICES} texts")
    # One terminal: llguidance accepts at most 2,000 alternatives of rules.
    text = " | ".join(map(quoted, texts))
    _check_size(text, field)
    return f"start: CHOICE\nCHOICE: {text}"


def _parsed(value: Any, field: str) -> Any:  # Any: JSON
    """Parse JSON that was sent as text."""
    if not isinstance(value, str):
        return value
    _check_size(value, field)
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _refusal(field, f"it is no JSON: {error}") from None


def _text(value: object, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise _refusal(field, "a text is needed, and not an empty one")
    _check_size(value, field)
    return value


def _check_size(text: str, field: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise _refusal(field, f"{len(text)} characters; at most {MAX_GRAMMAR_CHARS} are allowed")


def _refusal(field: str, reason: str) -> RequestError:
    return RequestError(f"{field}: {reason}.", param=field)
