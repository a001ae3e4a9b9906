"""What the text of an answer must be: as users ask for it, and as it is held to.

Values alone. They are read and checked at the door (`actors/grammars.py`), and held to where tokens are
chosen (`drafter/grammars/`): both know llguidance, nothing here does. Carried by `SamplingParams` and, to
workers, by `plan.SlotSampling`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from .errors import RequestError, shown

GrammarKind = Literal["json_schema", "regex", "lark"]
WAYS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language that an answer's text is a sentence of.

    Attributes:
        kind: how `text` is written, as llguidance takes it. What users write otherwise (choices, any JSON
            object, structural tags, EBNF) has become one of these.
        text: a JSON schema, a regular expression, or a grammar in llguidance's dialect of Lark.
        after_token_ids: it holds only behind the first place where these were generated, one after the other
            (the end of reasoning); before, anything can come. () is from the first token on.
        is_cheap: it compiles within milliseconds and little memory, as it was tried: a step may do it.
        forces: a step may ask which tokens it forces. Not where these are many: they cost a step time.
    """

    kind: GrammarKind
    text: str
    after_token_ids: tuple[int, ...] = ()
    is_cheap: bool = field(default=False, compare=False)
    forces: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True)
class SlotGrammar:
    """A grammar as workers need it: tokens from position `prompt_length` on were generated."""

    grammar: Grammar
    prompt_length: int


_SCHEMA = (str, Mapping, bool)
_FORMS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "json": (_SCHEMA, "a JSON schema: an object, true or false, or the text of one"),
    "regex": ((str,), "a string"),
    "choice": ((list, tuple), "a list of strings"),
    "grammar": ((str,), "a string"),
    "json_object": ((bool,), "true or false"),
    "structural_tag": ((str, Mapping), "an object, or the text of one"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What an answer must be, in vLLM's names; exactly one is set.

    Attributes:
        json: a JSON schema, as text or as what JSON makes of it.
        regex: a regular expression, in the syntax of Rust's `regex`.
        choice: the texts of which it is one.
        grammar: in Lark, or in the EBNF of llama.cpp (GBNF).
        json_object: any JSON object.
        structural_tag: {"structures": [{"begin", "schema", "end"}], "triggers": [..]}, as text or as what
            JSON makes of it: free text, in which what follows a trigger is one of the structures; or
            {"format": ..}, XGrammar's formats in formats.
        disable_any_whitespace: between the tokens of JSON; by default there may be some.
        after_token_ids: see `Grammar`.
        sent_as: the field that it came in, for messages; by default its name here.
    """

    json: str | Mapping[str, Any] | bool | None = None  # Any: JSON
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None  # Any: JSON
    disable_any_whitespace: bool = False
    after_token_ids: tuple[int, ...] = ()
    sent_as: str | None = None

    def __post_init__(self) -> None:
        for name, (types, wanted) in _FORMS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, types):
                raise RequestError(
                    f"structured_outputs.{name}={shown(value)} must be {wanted}.",
                    param=f"structured_outputs.{name}",
                )
        texts = cast(Iterable[object], self.choice or ())
        if not all(isinstance(text, str) for text in texts):
            raise RequestError(
                f"structured_outputs.choice={shown(self.choice)} must be a list of strings.",
                param="structured_outputs.choice",
            )
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(self.choice))
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        asked = [name for name in WAYS if getattr(self, name) is not None]
        if len(asked) != 1:
            raise RequestError(
                f"structured_outputs takes one of {', '.join(WAYS)}; "
                + (f"{' and '.join(asked)} were sent." if asked else "none was sent."),
                param="structured_outputs",
            )

    @property
    def way(self) -> str:
        """The name of what is set."""
        return next(name for name in WAYS if getattr(self, name) is not None)

    @property
    def field(self) -> str:
        """What messages call it."""
        return self.sent_as or f"structured_outputs.{self.way}"
