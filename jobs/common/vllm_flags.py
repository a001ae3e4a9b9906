"""Removes vLLM's flags that Manta does not have from a command line, and answers them.

Called by `jobs/cli.py` before typer reads the arguments; the answers are in `cluster/vllm_settings.py`.
typer's contexts handle `--max_num_seqs` for `--max-num-seqs`. Also here: JSON given by keys
(`--speculative-config.method suffix`, as in vLLM).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from itertools import takewhile
from typing import Any

from ...actors.http.config.settings import ServerSettings
from ...cluster.config import EngineConfig
from ...cluster.errors import ConfigError
from ...cluster.flag import parse_size
from ...cluster.json_text import parse_json
from ...cluster.vllm_settings import ANSWERS, VALUES, Kind, answer, check_method

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
    "-sc": "speculative_config",
}
# Flags that take JSON, and so keys of it.
_JSON = {
    "speculative_config",
    *(
        each.name
        for kind in (EngineConfig, ServerSettings)
        for each in fields(kind)
        if "Mapping" in str(each.type)
    ),
}


def without_vllm_flags(arguments: Sequence[str]) -> list[str]:
    """Return the arguments for typer: without vLLM's flags, and with our names for its values.

    Keys of JSON (`--flag.key VALUE`) become one object for their flag.
    """
    kept: list[str] = []
    objects: dict[str, dict[str, Any]] = {}  # given by keys, by setting
    whole: set[str] = set()  # settings of JSON that are given as one value
    rest = list(arguments)
    while rest and rest[0] != "--":
        argument = rest.pop(0)
        flag, equals, text = argument.partition("=")
        if flag[:2] == "-O" and flag[2:].isdigit():
            flag, equals, text = "-O", "=", flag[2:]
        name = _name(flag)
        if name is None:
            kept.append(argument)
            continue
        if name in _JSON and "." in flag:
            _set_key(objects.setdefault(name, {}), flag, text if equals else _take(rest, "value"))
            continue
        whole |= {name} & _JSON
        if (setting := name.removeprefix("no_")) in _KINDS:
            kind = _KINDS[setting]
            value: Any = text if equals else _take(rest, kind)  # Any: JSON
            if kind == "switch":
                value = value is True and setting == name
            answer(setting, flag, _read(value))
        else:
            kept += _in_our_words(argument, name, rest, follows_model=_names_model([*kept, argument]))
    for name, found in objects.items():
        if name in whole:
            raise ConfigError(f"{name} is given whole and by keys. Give it in one of both forms.", param=name)
        kept.append(f"--{name.replace('_', '-')}={json.dumps(found)}")
    return [*kept, *rest]


def _in_our_words(argument: str, name: str, rest: list[str], *, follows_model: bool) -> list[str]:
    """Return a flag that Manta has, with our name for its value, which may be the first word of `rest`.

    Several names after one flag, which are removed from `rest`, become a flag each.
    """
    flag, equals, text = argument.partition("=")
    ours = VALUES.get(name, {})
    if not equals and ours and rest:
        rest[0] = ours.get(rest[0], rest[0])
    if name == "spec_method":
        check_method(text if equals else next(iter(rest), None), flag)
    if equals:
        return [f"{flag}={ours.get(text, text)}"]
    names: list[str] = []
    if name == _NAMES and follows_model:
        names += takewhile(lambda word: not word.startswith("-"), rest)
        del rest[: len(names)]
    return [f"{flag}={each}" for each in names] or [argument]


def _set_key(found: dict[str, Any], flag: str, text: str) -> None:
    """Set a value in the object of `--setting.key.inner`; `key+` appends values that commas separate."""
    _, *outer, key = flag.split(".")
    try:
        for each in outer:
            found = found.setdefault(each, {})
        if key.endswith("+"):
            found.setdefault(key[:-1], []).extend(map(_read, text.split(",")))
        else:
            found[key] = _read(text)
    except (AttributeError, TypeError):
        raise ConfigError(f"{flag}: another flag gives a part of it another form.", param=flag) from None


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
    for parse in (parse_json, parse_size) if isinstance(value, str) else ():
        with suppress(ValueError, OverflowError):
            return parse(value)
    return value
