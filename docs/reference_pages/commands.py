"""Reference page of the commands, from their parsers.

Shared flags are listed once; flags of settings are on the page of the settings, with their defaults.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from inspect import cleandoc
from typing import Any

import typer
from manta.actors.http.config.settings import ServerSettings
from manta.cluster.config import EngineConfig
from manta.jobs.cli import app
from manta.jobs.common.command_groups import SAMPLING, SPECULATION
from manta.jobs.common.engine_flags import ENGINE_OPTIONS, SPECULATION_OPTIONS
from typer.main import get_command

from .markdown import cell, code, table

# Any in this module: typer's commands and parameters, which are click's or its own by its version.
ENGINE = "Engine"
SHARED = (ENGINE, SPECULATION, SAMPLING)  # groups of flags that several commands have
_OF_SETTINGS = {field.name for kind in (EngineConfig, ServerSettings) for field in fields(kind)}
_INTRODUCTION = """# Commands

`manta COMMAND --help` shows the same. Engine settings come from the YAML file of `--config`; flags take
precedence. Without `--config` and `--model`, `ray_config.yaml` in the working directory is read.

Flags that set [the engine](settings.md#the-engine) (all commands with engine flags) and [the
server](settings.md#the-server) (`manta serve`) are on the page of the settings.
"""


def commands_page() -> str:
    found = list(commands("manta", get_command(app)))
    sections = [_section(path, command) for path, command in found]
    return "\n".join([_INTRODUCTION, *sections, *_shared(found)])


def commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield a command and, for a group, its commands; hidden ones are aliases and are skipped."""
    if command.hidden:
        return
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(f"{path} {name}", inner)


def server_flags() -> dict[str, list[str]]:
    """Return the flags of each engine and server setting, as `manta serve` has them."""
    serve: Any = dict(commands("manta", get_command(app)))["manta serve"]
    return {each.name: [*each.opts, *each.secondary_opts] for each in serve.params}


def _section(path: str, command: Any) -> str:
    context: Any = typer.Context(command, info_name=path)
    own = [each for each in command.params if _group(each) not in SHARED]
    if path == "manta serve":
        own = [each for each in own if each.name not in _OF_SETTINGS]
    shares = [group for group in SHARED if any(_group(each) == group for each in command.params)]
    also = ", ".join(f"[{group.lower()}](#{group.lower()}-flags)" for group in shares)
    parts = [
        f"## `{path}`",
        cleandoc(command.help or ""),
        _table(own, context),
        f"Also the flags of: {also}." if also else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _shared(found: Sequence[tuple[str, Any]]) -> Iterator[str]:
    """Yield the shared groups of flags, from the command that has most of them."""
    for group in SHARED:
        path, command = max(found, key=lambda each: len(_of_group(each[1], group)))
        context = typer.Context(command, info_name=path)
        kept = _of_group(command, group)
        if group == ENGINE:
            kept = [each for each in kept if each.name not in _OF_SETTINGS]
        yield f"## {group} flags\n\n{_table(kept, context)}"


def _table(parameters: Sequence[Any], context: Any) -> str:
    records = [record for each in parameters if (record := each.get_help_record(context))]
    return table(("flag", "meaning"), [(code(flag), cell(said)) for flag, said in records]) if records else ""


def _of_group(command: Any, group: str) -> list[Any]:
    return [each for each in command.params if _group(each) == group]


def _group(parameter: Any) -> str | None:
    panel = getattr(parameter, "rich_help_panel", None)
    if panel is not None and parameter.name in ENGINE_OPTIONS:
        return SPECULATION if parameter.name in SPECULATION_OPTIONS else ENGINE
    return SAMPLING if panel == SAMPLING else None
