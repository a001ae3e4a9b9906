"""Structural tags as llguidance's Lark: free text, in which a trigger opens one of some structures.

    {"structures": [{"begin": "<fn=f>", "schema": {..}, "end": "</fn>"}], "triggers": ["<fn="]}

The form of OpenAI-compatible servers. A structure belongs to the first trigger that its `begin` starts with.
Called by `grammars.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..cluster.errors import RequestError
from .json_schemas import written_schema

MAX_STRUCTURES = 256
_FREE_TEXT = r"/(.|\n)*/"


# Any below: JSON.
def lark_of_tags(tags: Mapping[str, Any], field: str) -> str:
    """Raises RequestError, naming a part of `field`."""
    if "format" in tags:
        raise RequestError(
            f"{field}.format is not supported by this server yet. Send structures and triggers.",
            param=f"{field}.format",
        )
    structures = _list(tags, "structures", field, dict)
    triggers = _list(tags, "triggers", field, str)
    rules = [_rules(i, each, triggers, f"{field}.structures.{i}") for i, each in enumerate(structures)]
    options = " | ".join(f"tag_{i}" for i in range(len(rules)))
    free = ["free_text: FREE_TEXT", f"FREE_TEXT: {_FREE_TEXT}"]
    return "\n".join([f"start: ({options})* free_text", *free, *rules])


def _rules(number: int, structure: Mapping[str, Any], triggers: list[str], field: str) -> str:
    """What opens a structure, and what it holds then."""
    begin, end = structure.get("begin"), structure.get("end")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise RequestError(
            f"{field}: a structure holds begin and end (texts) and schema (a JSON schema).", param=field
        )
    trigger = next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
    if trigger is None:
        raise RequestError(
            f"{field}.begin={json.dumps(begin)} starts with none of the triggers.", param=f"{field}.begin"
        )
    schema = written_schema(structure.get("schema", {}), f"{field}.schema")
    body = f"{_quoted(begin[len(trigger) :])} %json {schema} {_quoted(end)}"
    opening = f"tag_{number}_opening[lazy]: FREE_TEXT {_quoted(trigger)}"
    return f"{opening}\ntag_{number}: tag_{number}_opening {body}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _list(tags: Mapping[str, Any], name: str, field: str, kind: type) -> list[Any]:
    value = tags.get(name)
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_STRUCTURES:
        raise RequestError(
            f"{field}.{name} is needed: a list of 1 to {MAX_STRUCTURES}.", param=f"{field}.{name}"
        )
    if not all(isinstance(each, kind) for each in value):
        raise RequestError(
            f"{field}.{name} holds {'objects' if kind is dict else 'texts'} alone.", param=f"{field}.{name}"
        )
    return value
