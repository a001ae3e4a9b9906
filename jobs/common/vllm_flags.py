"""Removes vLLM's flags that Manta does not have from a command line, and answers them.

Called by `jobs/cli.py` before typer reads the arguments; the answers are in `cluster/vllm_settings.py`.
typer's contexts handle `--max_num_seqs` for `--max-num-seqs`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from ...cluster.vllm_settings import ANSWERS, VALUES, Kind, answer

_KINDS: dict[str, Kind] = {name: kind for found in ANSWERS.values() for name, kind in found.kinds().items()}
_NAMES = "served_model_name"  # vLLM allows several names after one flag, typer one
_SHORT = {
    "-O": "optimization_level",
    "-pp": "pipeline_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "-asc": "api_server_count",
    "-cc": "compilation_config",
    "-ep": "enable_expert_parallel",
}


def without_vllm_flags(arguments: Sequence[str]) -> list[str]:
    """Return the arguments for typer: without vLLM's flags, and with our names for its values."""
    kept: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*kept, argument, *rest]
        flag, equals, text = argument.partition("=")
        if flag[:2] == "-O" and flag[2:].isdigit():
            flag, equals, text = "-O", "=", flag[2:]
        name = _name(flag)
        if name is None:
            kept.append(argument)
        elif (setting := name.removeprefix("no_")) in _KINDS:
            kind = _KINDS[setting]
            value: Any = text if equals else _take(rest, kind)  # Any: JSON
            if kind == "switch":
                value = value is True and setting == name
            answer(setting, flag, _read(value))
        else:
            words = VALUES.get(name, {})
            if not equals and words and rest:
                rest[0] = words.get(rest[0], rest[0])
            kept.append(f"{flag}={words.get(text, text)}" if equals else argument)
            if name == _NAMES and not equals and _names_model(kept):
                names = list(takewhile(lambda word: not word.startswith("-"), rest))
                del rest[: len(names)]
                kept[-1:] = [f"{flag}={each}" for each in names] or [argument]
    return kept


def _names_model(arguments: Sequence[str]) -> bool:
    """Return whether the model follows the command, so that no later word without a flag is the model."""
    return len(arguments) > 2 and not arguments[1].startswith("-")


def _name(flag: str) -> str | None:
    """Return the setting of a flag; `--compilation-config.mode` sets a part of one."""
    if flag.startswith("--"):
        return flag[2:].partition(".")[0].replace("-", "_")
    return _SHORT.get(flag.partition(".")[0])


def _take(rest: list[str], kind: Kind) -> Any:  # Any: JSON
    if kind == "switch":
        return True
    taken: list[str] = []
    while rest and not rest[0].startswith("--") and (kind == "list" or not taken):
        taken.append(rest.pop(0))
    return " ".join(taken)


def _read(value: Any) -> Any:  # Any: JSON
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
