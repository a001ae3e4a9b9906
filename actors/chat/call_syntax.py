"""The protocol of the syntaxes of tool calls, which read calls and write the grammar of what they read.

One class per kind of syntax holds its marks, its reader and its grammar. A reader begins after the mark that
begins a call and reads up to the mark that ends it. Before it has opened the call it raises NotACallError for
unexpected text, which `Splitter` then shows as content. Afterwards all text is arguments; their consumer
checks them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .argument_schema import ArgumentSchema
from .lark_writer import LarkWriter
from .text_stream import TextSource, Waiting

Schemas = Mapping[str, ArgumentSchema]  # of the callable tools, by name


class OpenCalls(Protocol):
    """Receives the parts of an answer as they are read."""

    @property
    def schemas(self) -> Schemas: ...

    def open(
        self, name: str, id: str | None = None, *, id_chars: int | None = None, closed: bool = False
    ) -> None:
        """Begin a call. Raises NotACallError for what can be no tool's name.

        `id`: the call's id, if the text has one. `id_chars`: letters and digits of an id, where templates
        allow no other. `closed`: marks enclose the name alone, so this is a call, if of no tool: an agent
        can answer it, while text would end its turn.
        """
        ...

    def add(self, arguments: str) -> None: ...

    def end_section(self) -> None:
        """Begin a stretch of its own with the next text, even if it is of the same kind."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """Lark of calls: `before call (between call)* after`, with alternatives of `calls`.

    `between`: None if an answer ends with its first call.
    """

    calls: Sequence[str]
    before: str = ""
    between: str | None = ""
    after: str = ""


class CallSyntax(Protocol):
    @property
    def begins(self) -> tuple[str, ...]:
        """Marks that begin a call, or a section of calls."""
        ...

    def read(self, source: TextSource, calls: OpenCalls, mark: str) -> Waiting[None]:
        """Read what follows one of the `begins`."""
        ...

    def rules(self, lark: LarkWriter, schemas: Schemas) -> CallRules: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingFormat:
    """Reasoning between two marks, at the start of a response or after a call."""

    begin: str
    end: str
    heading: str = ""  # text that follows `begin` and is not shown
    # a response begins within reasoning, whether or not the prompt ends with `begin`
    always_open: bool = False
    anywhere: bool = False  # `begin` begins reasoning within content, too

    @property
    def begins(self) -> tuple[str, ...]:
        """Texts that begin reasoning: some models omit the mark before the heading."""
        return (self.begin, self.heading + "\n") if self.heading else (self.begin,)
