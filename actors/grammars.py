"""The door for grammars: what users write becomes a `Grammar`, compiled once to see that it can be.

    structured_outputs, response_format ─▶ StructuredOutputsParams ─▶ Grammar, in one of three forms

Whatever is wrong is told here, by the field it came in. Sizes are bounded, and with them the time to compile
(some ten milliseconds of the largest): `AsyncEngine` does it in the encoder's threads, `LLM` inline. What
llguidance does not know of JSON Schema is refused: an answer that heeds half a schema is wrong in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..cluster.errors import RequestError
from ..cluster.executor import ExecutorInfo
from ..cluster.grammar import Grammar, GrammarKind, StructuredOutputsParams
from ..cluster.request import SamplingParams
from ..drafter.grammars.compiler import GrammarCompiler, GrammarError, lark_of
from .json_schemas import written_schema
from .structural_tags import lark_of_tags
from .tokenizer import Tokenizer

MAX_GRAMMAR_CHARS = 131_072
MAX_CHOICES = 4096


class GrammarDoor:
    """Of one engine.

    Args:
        tokenizer: None where an engine runs without one; then every grammar is refused.
        vocab_size, eos_token_ids: of the model.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._compiler = None
        if tokenizer is not None and eos_token_ids:
            self._compiler = GrammarCompiler(tokenizer.to_json(), vocab_size, eos_token_ids)

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, info: ExecutorInfo) -> GrammarDoor:
        return cls(tokenizer, info.vocab_size, info.eos_token_ids)

    def let_in(self, params: SamplingParams) -> SamplingParams:
        """The parameters with the grammar that their `structured_outputs` ask for.

        Raises:
            RequestError: it cannot be held to; names the field.
        """
        asked = params.structured_outputs
        if params.grammar is not None:
            self.check(params.grammar, "grammar")
            return params
        if asked is None:
            return params
        grammar = grammar_of(asked)
        self.check(grammar, asked.field)
        return replace(params, grammar=grammar)

    def check(self, grammar: Grammar, field: str) -> None:
        """Raise RequestError, naming `field`, if a grammar cannot be held to."""
        if self._compiler is None:
            raise RequestError(
                f"{field}: this engine cannot hold an answer to a grammar: it runs without a tokenizer "
                "(skip_tokenizer_init), or its model names no end-of-sequence token. Leave it out.",
                param=field,
            )
        _check_size(grammar.text, field)
        try:
            self._compiler.matcher(grammar)
        except GrammarError as error:
            raise _refusal(field, str(error)) from None


def grammar_of(asked: StructuredOutputsParams) -> Grammar:
    """What was asked for, in llguidance's words. Raises RequestError for what is seen without compiling."""
    kind, text = _READERS[asked.way](asked)
    return Grammar(kind, text, asked.after_token_ids)


def _of_schema(asked: StructuredOutputsParams) -> tuple[GrammarKind, str]:
    schema = _parsed(asked.json, asked.field)
    return "json_schema", written_schema(schema, asked.field, whitespace=not asked.disable_any_whitespace)


def _of_any_object(asked: StructuredOutputsParams) -> tuple[GrammarKind, str]:
    return _of_schema(replace(asked, json={"type": "object"}, json_object=None))


def _of_regex(asked: StructuredOutputsParams) -> tuple[GrammarKind, str]:
    return "regex", _text(asked.regex, asked.field)


def _of_choice(asked: StructuredOutputsParams) -> tuple[GrammarKind, str]:
    choice: tuple[object, ...] = asked.choice or ()
    if not 1 <= len(choice) <= MAX_CHOICES or not all(isinstance(text, str) for text in choice):
        raise _refusal(asked.field, f"choices are 1 to {MAX_CHOICES} texts")
    return "lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choice)


def _of_grammar(asked: StructuredOutputsParams) -> tuple[GrammarKind, str]:
    text = _text(asked.grammar, asked.field)
    _check_size(text, asked.field)
    try:
        return "lark", lark_of(text)
    except GrammarError as error:
        raise _refusal(asked.field, str(error)) from None


def _of_tags(asked: StructuredOutputsParams) -> tuple[GrammarKind, str]:
    tags = _parsed(asked.structural_tag, asked.field)
    if not isinstance(tags, Mapping):
        raise _refusal(asked.field, "structural tags are an object")
    return "lark", lark_of_tags(tags, asked.field)


_READERS = {
    "json": _of_schema,
    "regex": _of_regex,
    "choice": _of_choice,
    "grammar": _of_grammar,
    "json_object": _of_any_object,
    "structural_tag": _of_tags,
}


def _parsed(value: Any, field: str) -> Any:  # Any: JSON
    """JSON that may have come as text."""
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
    return value


def _check_size(text: str, field: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise _refusal(field, f"{len(text)} characters; at most {MAX_GRAMMAR_CHARS} are taken")


def _refusal(field: str, reason: str) -> RequestError:
    return RequestError(f"{field}: {reason}.", param=field)
