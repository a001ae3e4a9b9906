"""The sides of a sweep: one engine for each decoding method of the same target, all in this process.

    plain        no drafter
    adaptive     the given configuration
    dflash-k     always k drafts, for each k of the ladder (named after the configured method)
    suffix, ..   other methods (`--method`), adaptive; "mixed" is the given configuration with `suffix_drafts`

A side that the engine refuses is reported with the reason, and the others run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ....actors.engine.uniproc_executor import make_executor
from ....cluster.config import EngineConfig, SpeculativeConfig, from_mapping
from ....cluster.errors import ConfigError, MantaError
from ....cluster.speculation.draft_length_policy import draft_lengths
from ..common.engine_passes import say
from .engine_driver import Driver

PLAIN, ADAPTIVE, MIXED = "plain", "adaptive", "mixed"


@dataclass(slots=True)
class Sides:
    """The open engines; `fixed` names the sides with a fixed number of drafts, ascending."""

    drivers: dict[str, Driver] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    fixed: list[str] = field(default_factory=list)

    def open(self, name: str, config: EngineConfig) -> Driver | None:
        say(f"opening {name}")
        try:
            driver = self.drivers[name] = Driver(config, make_executor(config))
        except MantaError as error:
            self.refused[name] = error.message
            say(f"{name} is refused: {error.message}")
            return None
        return driver

    def close(self) -> None:
        for driver in self.drivers.values():
            driver.close()


@contextmanager
def open_sides(
    config: EngineConfig, methods: Mapping[str, Mapping[str, Any]], *, methods_only: bool = False
) -> Iterator[Sides]:
    """Open all sides (without fixed lengths if `methods_only`).

    Each engine counts the GPU memory that the others use, so the nth may use n shares of
    `gpu_memory_utilization`. The first one reports the ladder and with it the number of sides, so it gets the
    smallest share.
    """
    spec = config.speculative_config
    assert spec is not None, "run_sweep checks that there is a speculative config"
    sides, count = Sides(), 2 + len(methods) + len(draft_lengths(spec.num_speculative_tokens or 64))

    def opened(name: str, of_side: SpeculativeConfig | None) -> Driver | None:
        share = config.gpu_memory_utilization * min(1.0, (1 + len(sides.drivers)) / count)
        changed = replace(config, speculative_config=of_side, gpu_memory_utilization=share)
        return sides.open(name, changed)

    try:
        adaptive = opened(ADAPTIVE, replace(spec, adaptive=True))
        if adaptive is None:
            raise ConfigError(sides.refused[ADAPTIVE], param="speculative_config")
        opened(PLAIN, None)
        lengths = draft_lengths(adaptive.info.num_speculative_tokens)[1:]
        for drafts in () if methods_only else lengths:
            name = f"{spec.method}-{drafts}"
            if opened(name, replace(spec, adaptive=False, num_speculative_tokens=drafts)):
                sides.fixed.append(name)
        for name, how in methods.items():
            _open_method(sides, name, how, spec, opened)
        yield sides
    finally:
        sides.close()


def _open_method(
    sides: Sides,
    name: str,
    how: Mapping[str, Any],
    given: SpeculativeConfig,
    opened: Any,  # Any: a closure
) -> None:
    try:
        if name == MIXED and not how:
            spec = replace(given, adaptive=True, suffix_drafts=True)
        else:
            spec = from_mapping(SpeculativeConfig, how, "speculative_config.")
    except ConfigError as error:
        sides.refused[name] = error.message
        return
    opened(name, spec)


def parse_methods(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read `mixed`, `suffix`, `eagle3=FOLDER` or a speculative config in JSON; return configs by name.

    The config of "mixed" is empty: it is the given one with `suffix_drafts`.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        if text.lstrip().startswith("{"):
            how = _json_object(text)
        else:
            method, equals, model = text.partition("=")
            how = {"method": method} | ({"model": model} if equals else {})
        name = f"{how['method']} mixed" if how.get("suffix_drafts") else str(how["method"])
        found[name] = {} if text == MIXED else how
    return found


def _json_object(text: str) -> dict[str, Any]:
    try:
        how = json.loads(text)
        if isinstance(how, dict) and how.get("method"):
            return how
    except ValueError:
        pass
    raise ConfigError(
        f"method={text!r} must be a JSON object with a `method`, a name such as suffix, or eagle3=FOLDER.",
        param="method",
    )
