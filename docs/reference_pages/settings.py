"""Reference pages of the settings: all fields with flag, type, default and description; and vLLM's."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from manta.actors.http.config.settings import ServerSettings
from manta.cluster.config import EngineConfig, SpeculativeConfig
from manta.cluster.fleet.autoscaling import ScalingRules
from manta.cluster.vllm_settings import RENAMED, RENAMED_SPECULATION, SETTINGS, SPECULATION
from manta.jobs.common.engine_flags import described

from .commands import server_flags
from .markdown import cell, code, summary, table

# Any in this module: fields and types of dataclasses.
_INTRODUCTION = """# Settings

Keys of `args:` in a [Serve config](../how-to/serve.md), arguments of `manta.LLM(...)` and flags of commands
have the same names and meanings. An unknown key is an error that suggests the nearest known one.
"""
_OF_VLLM = """# vLLM's settings

Settings with another name here, or none. A value that changes nothing (`pipeline_parallel_size: 1`) is
accepted silently; one without effect is logged; an unsupported one is rejected."""
_SECTIONS: tuple[tuple[str, type, str], ...] = (
    ("The engine", EngineConfig, ""),
    ("Speculation", SpeculativeConfig, "speculative_config."),
    ("The server", ServerSettings, ""),
    ("Scaling", ScalingRules, "scaling."),
)


def settings_page() -> str:
    flags = server_flags()
    sections = (_section(title, kind, prefix, flags) for title, kind, prefix in _SECTIONS)
    return "\n".join([_INTRODUCTION, *sections])


def vllm_page() -> str:
    renamed = {**RENAMED, **{f"speculative_config.{name}": to for name, to in RENAMED_SPECULATION.items()}}
    rows = [(code(name), cell(f"is {code(own)} here")) for name, (own, _) in renamed.items()]
    for prefix, answers in (("", SETTINGS), ("speculative_config.", SPECULATION)):
        for answer in answers:
            names = ", ".join(code(prefix + name) for name in answer.kinds())
            rows.append((names, cell(answer.message)))
    return f"{_OF_VLLM}\n\n{table(('settings of vLLM', 'here'), rows)}"


def _section(title: str, settings: type, prefix: str, flags: dict[str, list[str]]) -> str:
    said, types = described(settings.__doc__, "Attributes:"), get_type_hints(settings)
    rows = [
        (
            code(f"{prefix}{field.name}"),
            " ".join(code(flag) for flag in ([] if prefix else flags.get(field.name, []))),
            cell(shown_type(types[field.name])),
            cell(_default(field)),
            cell(said.get(field.name, "")),
        )
        for field in fields(settings)
    ]
    head = ("setting", "flag", "type", "default", "effect and cost")
    return f"## {title}\n\n{summary(settings.__doc__)}\n\n{table(head, rows)}"


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return "" if field.default is None else code(str(field.default)) if field.default != () else "none"
    return "required" if field.default_factory is MISSING else "its fields' defaults"


def shown_type(hint: Any) -> str:
    """Return a type as text, without None."""
    if get_origin(hint) is Literal:
        return ", ".join(code(str(value)) for value in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(shown_type(kind) for kind in get_args(hint) if kind is not NoneType)
    if get_origin(hint) is tuple:
        return f"list of {shown_type(get_args(hint)[0])}"
    if get_origin(hint) is not None:
        return "mapping"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}.get(
        hint.__name__, "mapping"
    )
