"""The grammar of an answer, composed of its parts in the model's format: reasoning, calls, constrained text.

    answer:  reasoning? (calls | constrained text)                   a constraint, with or without tools
    answer:  reasoning? calls                                         calls are required
    answer:  reasoning? (text | call)*                                some tools are strict

`reasoning?` is left out where the grammar begins to apply after the reasoning (`Grammar.after_token_ids`).
The constrained text is the rule `answer`, which the frontend of structured outputs adds
(`StructuredOutputsParams.frame`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..structured_outputs.json_schema import SchemaReader, check_size
from ..structured_outputs.lark_text import ANY_TEXT, either, quoted, regex
from .argument_schema import ArgumentSchema
from .call_syntax import CallRules, CallSyntax, Schemas, ThinkingFormat
from .json_calls import JsonCalls
from .lark_writer import BLANKS, LarkWriter, without
from .messages import Messages

ANSWER = "answer"  # the name of the rule for constrained text
_NEWLINES = regex(r"\n{0,2}")  # after reasoning, as models write them
_MAY_BE_A_CALL = regex(BLANKS + r"[{<](?s:.*)")  # in formats whose calls have no mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """The reasoning that may come before the part of an answer that a grammar describes.

    `opened`: the prompt ends within it. `is_over`: it has ended where the grammar begins to apply.
    """

    format: ThinkingFormat | Messages | None = None
    opened: bool = False
    is_over: bool = False


class AnswerGrammar:
    """Writes grammars for answers with calls of these tools. `mark_ids`: ids of added tokens by text.

    Raises RequestError if the schemas are too large or too deep.
    """

    def __init__(
        self,
        calls: CallSyntax | None,
        schemas: Mapping[str, Mapping[str, Any]],  # Any: JSON
        mark_ids: Mapping[str, int],
        reasoning: Reasoning,
        strict: Collection[str] = (),
    ) -> None:
        check_size(schemas, "tools")
        self._calls = calls
        self._reasoning = reasoning
        self._lark = LarkWriter(mark_ids)
        self._schemas: dict[str, ArgumentSchema] = {}
        for name, schema in schemas.items():
            # Calls name declared arguments alone, which most schemas mean and few say.
            reader = SchemaReader(strict=name in strict, closes_objects=True)
            enforced = reader.read(schema, f"tools.{name}.parameters")
            self._lark.left_out += enforced.left_out
            self._schemas[name] = ArgumentSchema(enforced.schema if schema else {})

    @property
    def left_out(self) -> list[str]:
        """Names of what the schemas ask for and the grammar does not enforce."""
        return self._lark.left_out

    def forced(self, *, several: bool) -> str:
        """Return the Lark of at least one call. `several`: calls may follow each other."""
        return self._lark.grammar(self._after_reasoning(self._some_calls(several)))

    def constrained(self, *, several: bool) -> str:
        """Return the Lark of calls, if there are tools, or of the rule `answer`."""
        answer = ANSWER
        if isinstance(messages := self._reasoning.format, Messages):
            kind = f"({self._lark.text(' ' + messages.kind + 'json')})?" if messages.kind else ""
            answer = f"{self._lark.text(messages.final)} {kind} {self._lark.text(messages.body)} {ANSWER}"
        calls = [self._some_calls(several)] if self._schemas else []
        return self._lark.grammar(self._after_reasoning(either([*calls, answer])))

    def optional(self) -> str:
        """Return the Lark of text with optional calls."""
        assert self._calls is not None, "calls have a syntax"
        return self._lark.grammar(self._after_reasoning(self._optional_calls(self._calls, self._schemas)))

    def _some_calls(self, several: bool) -> str:
        assert self._calls is not None, "calls have a syntax"
        return _sequence(self._lark, self._calls.rules(self._lark, self._schemas), several)

    def _optional_calls(self, syntax: CallSyntax, schemas: Schemas) -> str:
        lark = self._lark
        if isinstance(syntax, Messages):
            final = f"{lark.text(syntax.final + syntax.body)} {lark.terminal(ANY_TEXT)}"
            return either([_sequence(lark, syntax.rules(lark, schemas), True), final])
        if isinstance(syntax, JsonCalls) and not syntax.begin:
            text = lark.terminal(f"{ANY_TEXT} & ~{_MAY_BE_A_CALL}")
            return either([_sequence(lark, syntax.rules(lark, schemas), True), text])
        begin, text = syntax.begins[0], without(ANY_TEXT, [quoted(each) for each in syntax.begins])
        until_call = lark.until(text, begin)
        lark.already_written = begin
        calls = f"{until_call} {_sequence(lark, syntax.rules(lark, schemas), False)}"
        return f"({calls})* {lark.terminal(text)}"

    def _after_reasoning(self, answer: str) -> str:
        reasoning, lark = self._reasoning, self._lark
        form = reasoning.format
        if isinstance(form, Messages):
            return f"{form.thoughts_rule(lark)} {answer}"
        if form is None:
            return answer
        if reasoning.is_over:
            return f"{_NEWLINES} ({answer})"
        thoughts = f"{lark.until(ANY_TEXT, form.end)} {_NEWLINES}"
        if reasoning.opened:
            return f"{thoughts} ({answer})"
        return f"({lark.text(form.begin)} {thoughts})? ({answer})"


def _sequence(lark: LarkWriter, rules: CallRules, several: bool) -> str:
    call = lark.rule(either(f"({each})" for each in rules.calls))
    more = f"({rules.between} {call})*" if several and rules.between is not None else ""
    return f"({rules.before} {call} {more} {rules.after})"
