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
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from ...cluster.config import EngineConfig, StructuredOutputsConfig
from ...cluster.errors import RequestError
from ...cluster.request.request import SamplingParams
from ...cluster.request.structured_outputs import Grammar, GrammarKind, StructuredOutputsParams
from ...cluster.step.executor import ExecutorInfo
from ...drafter.grammars.compiler import GrammarError, lark_of
from ..tokenization.tokenizer import Tokenizer
from .compile_turns import DEADLINE_S, Compilation, CompileTurns
from .grammar_validator import QUICK_S, SLOW_S, GrammarValidator, TrialResult
from .grammar_verdicts import GrammarVerdict, VerdictCache, digest_of
from .json_grammar import COMPACT, INDENTED, json_rule
from .json_schema import MAX_GRAMMAR_CHARS, SchemaReader
from .lark_text import quoted
from .mark_tokens import MarkTokens
from .rank_grammars import HoldsGrammars, RankGrammars, refusal
from .schema_keywords import RESTRICTING, ascii_classes
from .structural_tags import NO_MARKS, lark_of_tags, lark_regex

logger = logging.getLogger(__name__)

MAX_CHOICES = 4096
MAX_LOGGED = 64  # schemas whose keywords that are not enforced are logged
DEFAULTS = StructuredOutputsConfig()


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
        self._verdicts = VerdictCache()
        self._turns = CompileTurns()
        self._ranks = RankGrammars(holder, self._turns)

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
        known = tokenizer if info.has_grammars else None
        return cls(known, info.vocab_size, info.eos_token_ids, holder, outputs)

    def compile(self, params: SamplingParams) -> SamplingParams:
        """Add the grammar for `structured_outputs`. Blocks. Raises RequestError, which names the field."""
        if params.structured_outputs is None and params.grammar is None:
            return params
        digest = digest_of(params)
        verdict = self._verdicts.get(digest)
        for cpu_s in (QUICK_S, SLOW_S):
            verdict = verdict or self._check(params, digest, cpu_s)[0]
        assert verdict is not None, "a slow trial answers"
        return replace(params, grammar=verdict.accepted())

    @asynccontextmanager
    async def hold(
        self, params: SamplingParams, owner: str | None = None, *, background: bool = False
    ) -> AsyncGenerator[SamplingParams, None]:
        """Do as `compile`, of a grammar, held on every rank. May also raise OverloadedError.

        `owner`: digest of the request's key; keys take turns, and online requests of one key may compile for
        a limited time per minute (RateLimitError). `background`: those of a batch wait for it.
        """
        deadline_s = None if background else asyncio.get_running_loop().time() + DEADLINE_S
        compilation = Compilation(_field(params), owner, deadline_s)
        verdict = await self._verdict(params, compilation)
        grammar = verdict.accepted()
        async with self._ranks.hold(grammar, verdict.cpu_s, compilation):
            yield replace(params, grammar=grammar)

    def close(self) -> None:
        """End the threads and the process that tries grammars. Idempotent."""
        self._turns.close()
        if self._validator is not None:
            self._validator.close()

    async def _verdict(self, params: SamplingParams, compilation: Compilation) -> GrammarVerdict:
        """Return the cached verdict, else that of a quick trial, else that of a slow one."""
        digest = digest_of(params)
        verdict = self._verdicts.get(digest)
        for cpu_s in (QUICK_S, SLOW_S):
            if verdict is None:
                check = partial(self._check, params, digest, cpu_s)
                verdict = await self._turns.run(compilation, check, quick=cpu_s == QUICK_S)
        assert verdict is not None, "a slow trial answers"
        return verdict

    def _check(
        self, params: SamplingParams, digest: bytes | None, cpu_s: float
    ) -> tuple[GrammarVerdict | None, float]:
        """Return the verdict, None if a trial takes longer than `cpu_s`, and the CPU seconds spent."""
        if (known := self._verdicts.get(digest)) is not None:
            return known, 0.0
        began_s, spent_s = time.thread_time(), 0.0
        try:
            kind, text, after = self._text_of(params)
            result = self._try(kind, text, params, cpu_s)
            spent_s = result.cpu_s
            if result.is_slow and cpu_s < SLOW_S:
                return None, spent_s + time.thread_time() - began_s
            if result.refusal is not None:
                raise refusal(_field(params), result.refusal)
            written: GrammarKind = "lark" if kind == "grammar" else kind
            text = text if result.text is None else result.text
            grammar = Grammar(written, text, after, result.is_cheap, result.forces, result.mask_s)
            verdict = GrammarVerdict(grammar, cpu_s=spent_s)
        except RequestError as error:
            verdict = GrammarVerdict(refusal=(error.message, error.param))
        self._verdicts.put(digest, verdict)
        return verdict, spent_s + time.thread_time() - began_s

    def _text_of(self, params: SamplingParams) -> tuple[_Kind, str, tuple[int, ...]]:
        """Return the request's grammar in a form for trials, and the tokens after which it applies."""
        outputs = params.structured_outputs
        if params.grammar is not None:
            return params.grammar.kind, params.grammar.text, params.grammar.after_token_ids
        assert outputs is not None, "a request without a grammar needs no check"
        (kind, text), names = _written(outputs, self._config, self._marks)
        self._log_left_out(names)
        return kind, text, outputs.after_token_ids

    def _try(self, kind: str, text: str, params: SamplingParams, cpu_s: float) -> TrialResult:
        field = _field(params)
        if self._validator is None:
            raise RequestError(
                f"{field}: this engine cannot constrain an answer: it runs without a tokenizer "
                "(skip_tokenizer_init), its tokenizer has no end-of-sequence token, or llguidance does not "
                "support it. Leave it out.",
                param=field,
            )
        forbidden = tuple(word[0] for word in params.bad_words_token_ids if len(word) == 1)
        return self._validator.try_grammar(
            kind, text, cpu_s, allowed=params.allowed_token_ids, forbidden=forbidden
        )

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
            raise refusal(field, str(error)) from None
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
                raise refusal(field, "structural tags are an object")
            written = "lark", lark_of_tags(tags, field, reader, layout, marks)
    return written, tuple(reader.left_out)


def _field(params: SamplingParams) -> str:
    return "grammar" if params.structured_outputs is None else params.structured_outputs.field


def _lark_of_choice(choice: tuple[object, ...], field: str) -> str:
    texts = [text for text in choice if isinstance(text, str)]
    if not 1 <= len(choice) <= MAX_CHOICES or len(texts) < len(choice):
        raise refusal(field, f"choices are 1 to {MAX_CHOICES} texts")
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
        raise refusal(field, f"it is no JSON: {error}") from None


def _text(value: object, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise refusal(field, "a text is needed, and not an empty one")
    _check_size(value, field)
    return value


def _check_size(text: str, field: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise refusal(field, f"{len(text)} characters; at most {MAX_GRAMMAR_CHARS} are allowed")
