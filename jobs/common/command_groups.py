"""Commands whose `--help` has panels and whose errors name the nearest flag, and groups of such commands.

A panel is the `rich_help_panel` of an option (`engine_flags.py`). rich would draw panels as tables that
cut long flags; here they are sections of text.
"""

from __future__ import annotations

import difflib
from typing import Any

import typer
from typer.core import TyperCommand

from .llama_cpp_flags import hint_for

MOST_USED, MODEL, SPECULATION, MEMORY = "Most used", "Model", "Speculation", "Memory"
SAMPLING, HTTP, KEYS, OPERATION = "Sampling", "HTTP", "Keys", "Operation"
_ORDER = (None, MOST_USED, MODEL, SPECULATION, MEMORY, SAMPLING, HTTP, KEYS, OPERATION)
_WIDTH = 100
_UsageError: Any = typer.BadParameter.__mro__[1]  # typer's own or click's, by the version of typer


class PaneledCommand(TyperCommand):
    # Any: typer's contexts and parameters, which are click's or its own by its version.
    def format_options(self, ctx: Any, formatter: Any) -> None:
        formatter.width = min(max(formatter.width, _WIDTH), ctx.terminal_width or _WIDTH)
        sections: dict[str, list[tuple[str, str]]] = {}
        options = {panel: list[tuple[str, str]]() for panel in _ORDER}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is None:
                continue
            if parameter.param_type_name == "argument":
                sections.setdefault("Arguments", []).append(record)
            else:
                options[getattr(parameter, "rich_help_panel", None)].append(record)
        if len(options[None]) == 1:  # --help alone comes last
            options[None] = options.pop(None)
        sections |= {panel or "Options": records for panel, records in options.items() if records}
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=34)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for each in self.get_params(ctx) for name in (*each.opts, *each.secondary_opts)}
        # Before they are parsed: -hf would be -h.
        if "--max-model-len" in known and (hint := hint_for(args, known)) is not None:
            raise _UsageError(hint, ctx)
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            error.message = error.message.removeprefix("Value error, ")  # of typer's versions over pydantic
            name, near = getattr(error, "option_name", None), getattr(error, "possibilities", None)
            if not name or not near:
                raise
            nearest = difflib.get_close_matches(name, near, n=1, cutoff=0.0)[0]
            raise _UsageError(f"No such option: {name}. Did you mean {nearest}?", ctx) from None


class CommandGroup(typer.Typer):
    """A group of commands without rich, which draws tables and tracebacks."""

    def __init__(self, **settings: Any) -> None:  # Any: typer's
        plain = {"rich_markup_mode": None, "pretty_exceptions_enable": False}
        super().__init__(**{"no_args_is_help": True, **plain, **settings})

    def command(self, name: str | None = None, **settings: Any) -> Any:
        return super().command(name, cls=PaneledCommand, **settings)
