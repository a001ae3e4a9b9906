"""Writes grammars of calls in llguidance's Lark, in which marks are tokens where the model has them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from ...cluster.errors import RequestError
from ..structured_outputs.json_grammar import INTEGER, NUMBER, SPACED, json_rule
from ..structured_outputs.lark_text import ANY_TEXT, either, quoted, regex
from ..structured_outputs.mark_tokens import MarkTokens
from ..structured_outputs.schema_keywords import type_of
from .argument_schema import (
    BOOLEAN_WORDS,
    NULL_WORDS,
    NUMERIC_BOUNDS,
    ArgumentSchema,
    Branch,
    TooManyBranchesError,
)

BLANKS = r"[ \t\r\n]*"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DATE = (
    "[1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|"
    "02-(0[1-9]|1[0-9]|2[0-8]))"
)
_HOUR = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](\.[0-9]{{1,9}})?([Zz]|[+-]{_HOUR})"
# Of texts without quotes; no leap days.
_FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "duration": "^P([0-9]{1,4}[YMW]|[0-9]{1,4}D(T[0-9]{1,4}H([0-9]{1,4}M)?)?|T[0-9]{1,4}[HMS])$",
    "email": r"^[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63}){1,8}$",
    "hostname": rf"^{_LABEL}(\.{_LABEL}){{0,8}}$",
    "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$",
    "uuid": r"^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "uri": r"^[A-Za-z][A-Za-z0-9+.-]{0,31}:[!#-;=?-\[\]_a-z~%]{1,2048}$",
}
_UNWRITTEN_FORMATS = ("ipv6",)
_READ_AS_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?"


class LarkWriter:
    """Rules of one grammar. `mark_ids`: ids of added tokens by text."""

    def __init__(self, mark_ids: Mapping[str, int]) -> None:
        self._marks = MarkTokens(mark_ids)
        self._rules: dict[str, str] = {}
        self.already_written = ""  # a mark before what is written, so texts that begin with it omit it
        self.left_out: list[str] = []  # what of the schemas the grammar does not enforce

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *(f"{name}: {body}" for name, body in self._rules.items())])

    def rule(self, body: str, *, suffix: str = "") -> str:
        """Add a rule and return its name. `suffix`: its text ends with the first occurrence of this."""
        return self._named("part", body, suffix)

    def terminal(self, body: str) -> str:
        """Add a terminal, one lexeme, and return its name."""
        return self._named("TEXT", body, "")

    def reserve(self) -> str:
        """Return the name of a rule whose body, which may name it, is given to `define`."""
        return self._named("value", "", "")

    def define(self, name: str, body: str) -> None:
        self._rules[name] = body

    def has(self, mark: str) -> bool:
        return mark in self._marks

    def text(self, text: str) -> str:
        """Return the Lark of a text in which marks are tokens."""
        if self.already_written:
            text = text.removeprefix(self.already_written)
        return self._marks.lark(text) if text else ""

    def until(self, text: str, end: str) -> str:
        """Return the Lark of a text and of what ends it. `text`: the body of a terminal.

        Greedy lexemes cannot end at text that they may contain, so a text's end is part of its lexeme.
        """
        mark = self._marks.find(end)
        if mark is None:
            return self.rule(text, suffix=end)
        before = end[: mark[0]]
        lexeme = self.terminal(f"({text}) {quoted(before)}" if before else text)
        return f"{lexeme} {self.text(end[mark[0] :])}"

    def json(self, schema: ArgumentSchema, types: frozenset[str] | None = None) -> str:
        """Return the name of a rule for JSON that a schema allows."""
        return self.rule(json_rule(schema.enforced(types), SPACED))

    def _named(self, kind: str, body: str, suffix: str) -> str:
        name = f"{kind}_{len(self._rules)}"
        self._rules[name + (f"[suffix={quoted(suffix)}]" if suffix else "")] = body
        return name


def without(text: str, forbidden: Sequence[str]) -> str:
    """Return a terminal's body for those of its texts that contain none of these, as Lark."""
    if not forbidden:
        return text
    return f"{text} & ~({ANY_TEXT} {either(forbidden)} {ANY_TEXT})"


def branches_of(schema: ArgumentSchema, name: str) -> tuple[Branch, ...]:
    try:
        return schema.branches
    except TooManyBranchesError:
        raise RequestError(
            f"tools: the schema of {name} has too many alternatives, or its references are nested too deep. "
            "Make it simpler.",
            param="tools",
        ) from None


def strings(lark: LarkWriter, branches: Iterable[Branch], name: str) -> str | None:
    """Return the body of a terminal for the strings that branches allow; None if they allow none.

    What cannot be enforced is named in `left_out`. `name`: of the tool.
    """
    found = [_strings(lark, branch, name) for branch in branches if _has_strings(branch)]
    return either(f"({each})" for each in found) if found else None


def _has_strings(branch: Branch) -> bool:
    literals = branch.literals
    return branch.allows("string") and (literals is None or any(isinstance(each, str) for each in literals))


def _strings(lark: LarkWriter, branch: Branch, name: str) -> str:
    """Return the Lark of the texts that a branch allows; name in `left_out` what cannot be written."""
    factors: list[str] = []
    if (literals := branch.literals) is not None:
        factors.append(either(quoted(each) for each in literals if isinstance(each, str)))
    low = max([0, *(n for n in branch.given("minLength") if isinstance(n, int))])
    high = min([n for n in branch.given("maxLength") if isinstance(n, int)], default=None)
    if low or high is not None:
        factors.append(f"/(?s:.{{{low},{'' if high is None else high}}})/")
    formats = [each for each in branch.given("format") if isinstance(each, str)]
    lark.left_out += [f"tools.{name}.parameters.{each}" for each in formats if each in _UNWRITTEN_FORMATS]
    patterns = [_FORMATS[each] for each in formats if each in _FORMATS]
    for pattern in [*branch.given("pattern"), *patterns]:
        searched = search_pattern(pattern) if isinstance(pattern, str) else None
        if searched is None:
            lark.left_out.append(f"tools.{name}.parameters.pattern")
        else:
            factors.append(regex(searched))
    return " & ".join(factors) or ANY_TEXT


def search_pattern(pattern: str) -> str | None:
    """Return a pattern that matches a whole text where `pattern` matches a part of it; None if unknown.

    Anchors are understood at the ends of the pattern's alternatives alone.
    """
    found: list[str] = []
    for alternative in _alternatives(pattern):
        begin, end = alternative.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", alternative) is not None
        inner = alternative[begin : len(alternative) - end]
        if re.search(r"(?<!\\)(\\\\)*(\^|\$|\(\?[=!<]|\\[bB1-9])", re.sub(r"\[(\\.|[^\]\\])*\]", "", inner)):
            return None
        before, after = "" if begin else "(?s:.*)", "" if end else "(?s:.*)"
        found.append(f"{before}(?:{inner}){after}")
    return "|".join(found)


def _alternatives(pattern: str) -> list[str]:
    """Split a regular expression at the bars outside of its groups and classes."""
    found, depth, in_class, begin, at = list[str](), 0, False, 0, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            found.append(pattern[begin:at])
            begin = at + 1
        at += 1
    return [*found, pattern[begin:]]


def raw_value(lark: LarkWriter, schema: ArgumentSchema, name: str, end: str, forbidden: Sequence[str]) -> str:
    """Return the Lark of a value written without quotes and of its end, as `read_value` reads it.

    `name`: of the tool, for messages. `forbidden`: Lark of what a text must not contain.
    """
    branches, types = branches_of(schema, name), schema.types
    if types and "string" not in types:
        return f"{lark.json(schema)} {lark.text(end)}"
    others = types - {"string"}
    structured = others & {"array", "object"}
    numbers = others & {"integer", "number"}
    numeric = [b for b in branches if (b.types or frozenset()) & numbers]
    if any(b.given(keyword) for b in numeric for keyword in NUMERIC_BOUNDS):
        structured |= numbers
    # One lexeme for all but what its first character tells apart: lexers do not backtrack.
    words = list(_words(branches, others - structured))
    text = strings(lark, branches, name)
    if text is not None:
        taken = [regex(BLANKS + each + BLANKS) for each in _read_otherwise(others)]
        if structured:
            starts = r"\[\{" if others & {"array", "object"} else ""
            starts += r"0-9\-" if structured & numbers else ""
            taken.append(regex(f"{BLANKS}[{starts}](?s:.*)"))
        words.insert(0, without(text + "".join(f" & ~{each}" for each in taken), forbidden))
    found = [lark.until(either(f"({word})" for word in words), end)] if words else []
    if structured:
        found.append(f"{lark.json(schema, structured)} {lark.text(end)}")
    return either(found)


def _read_otherwise(types: frozenset[str]) -> Iterable[str]:
    """Yield regular expressions of texts that are read as values of these types."""
    if "null" in types:
        yield NULL_WORDS
    if "boolean" in types:
        yield BOOLEAN_WORDS
    if types & {"integer", "number"}:
        yield _READ_AS_NUMBER


def _words(branches: Iterable[Branch], types: frozenset[str]) -> Iterable[str]:
    for branch in branches:
        if (literals := branch.literals) is not None:
            yield from (quoted(json.dumps(each)) for each in literals if type_of(each) in types)
            continue
        if "null" in types and branch.allows("null"):
            yield '"null"'
        if "boolean" in types and branch.allows("boolean"):
            yield '"true" | "false"'
        if "number" in types and branch.allows("number"):
            yield regex(NUMBER)
        elif "integer" in types and branch.allows("integer"):
            yield regex(INTEGER)
