"""Constraints on the text of an answer: as users request them, and as grammars.

Values only. `actors/structured_outputs/grammar_frontend.py` parses and checks them; `drafter/grammars/`
applies them where tokens are sampled. Both use llguidance, this module does not. Carried by `SamplingParams`
and, to workers, by `scheduler_output.SlotSampling`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from ..errors import RequestError, brief

_MAX_MASKS_S = 0.05  # of a step: a quarter of the 0.2 s that another request's stream may pause
GrammarKind = Literal["json_schema", "regex", "lark"]
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language to which an answer's text must belong.

    Attributes:
        kind: the format of `text`, as llguidance takes it. Other formats (choices, any JSON object,
            structural tags, EBNF) have been converted to one of these.
        text: a JSON schema, a regular expression, or a grammar in llguidance's dialect of Lark.
        after_token_ids: the grammar applies only after the first occurrence of these consecutive tokens (the
            end of reasoning); text before is free. () applies from the first token on.
        is_cheap: a trial compiled it within milliseconds and little memory, so a step may compile it.
        forces: whether a step may query forced tokens; False if there are many, as each query takes time in a
            step.
        mask_s: CPU time of its most expensive mask in a trial, in seconds.
    """

    kind: GrammarKind
    text: str
    after_token_ids: tuple[int, ...] = ()
    is_cheap: bool = field(default=False, compare=False)
    forces: bool = field(default=True, compare=False)
    mask_s: float = field(default=0.0, compare=False)

    @property
    def max_drafts(self) -> int:
        """Most drafts per step for which its masks, one per draft and one more, take `_MAX_MASKS_S`."""
        return max(int(_MAX_MASKS_S / max(self.mask_s, 1e-6)) - 1, 0)


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
    """Constraints on an answer, with vLLM's names; exactly one is set, or `frame` alone.

    Attributes:
        json: a JSON schema, as text or parsed.
        regex: a regular expression, in the syntax of Rust's `regex`.
        choice: the allowed texts.
        grammar: a grammar in Lark, or in the EBNF of llama.cpp (GBNF).
        json_object: any JSON object.
        structural_tag: {"structures": [{"begin", "schema", "end"}], "triggers": [..]}, as text or parsed:
            free text in which a trigger is followed by one of the structures; or {"format": ..}, XGrammar's
            nested formats.
        disable_any_whitespace: forbid whitespace between the tokens of JSON. By default a space, or a newline
            and the indentation of the depth, are allowed.
        strict: refuse a JSON schema with a keyword that restricts answers and cannot be enforced, which is
            left out by default.
        after_token_ids: see `Grammar`.
        left_out: names of what was requested and is not enforced, besides what this constraint's own schema
            asks for.
        frame: Lark of the whole answer, in which the rule `answer` is what the constraint allows, if there is
            one; by default that is the whole answer.
        sent_as: the field in which it was sent, for messages; by default its name here.
    """

    json: str | Mapping[str, Any] | bool | None = None  # Any: JSON
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None  # Any: JSON
    disable_any_whitespace: bool = False
    strict: bool = False
    after_token_ids: tuple[int, ...] = ()
    left_out: tuple[str, ...] = ()
    frame: str | None = None
    sent_as: str | None = None

    def __post_init__(self) -> None:
        for name, (types, wanted) in _FORMS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, types):
                raise RequestError(
                    f"structured_outputs.{name}={brief(value)} must be {wanted}.",
                    param=f"structured_outputs.{name}",
                )
        texts = cast(Iterable[object], self.choice or ())
        if not all(isinstance(text, str) for text in texts):
            raise RequestError(
                f"structured_outputs.choice={brief(self.choice)} must be a list of strings.",
                param="structured_outputs.choice",
            )
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(self.choice))
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        set_names = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(set_names) != 1 and not (self.frame is not None and not set_names):
            raise RequestError(
                f"structured_outputs takes one of {', '.join(CONSTRAINTS)}; "
                + (f"{' and '.join(set_names)} were sent." if set_names else "none was sent."),
                param="structured_outputs",
            )

    @property
    def constraint(self) -> str:
        return next((name for name in CONSTRAINTS if getattr(self, name) is not None), "frame")

    @property
    def field(self) -> str:
        return self.sent_as or f"structured_outputs.{self.constraint}"
