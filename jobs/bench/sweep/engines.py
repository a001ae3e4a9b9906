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
from ....cluster.engine.engine_core import EngineCore
from ....cluster.errors import ConfigError, MantaError
from ....cluster.request.request import Request
from ....cluster.speculation.draft_length_policy import draft_lengths
from ....cluster.step.executor import Executor
from ..common.engine_passes import say
from ..common.request_source import RequestSource
from .load_records import AnswerRecord, DraftBlock, LoadPass

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
            try:
                if how:
                    of_method = from_mapping(SpeculativeConfig, how, "speculative_config.")
                else:  # MIXED
                    of_method = replace(spec, adaptive=True, suffix_drafts=True)
            except ConfigError as error:
                sides.refused[name] = error.message
            else:
                opened(name, of_method)
        yield sides
    finally:
        sides.close()


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


class Driver:
    """One engine that is put under load in passes; it closes its executor."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self.info = executor.info
        self.engine = EngineCore(config, executor)
        self.clock = executor.clock

    def closed(self, source: RequestSource, part: range, at_once: int) -> LoadPass:
        """Run the requests of `part` with `at_once` in flight; later ones keep the load and are aborted."""
        run, left = LoadRun(self), set(part)
        number = part.start
        while left:
            while len(run.open) < at_once:
                run.submit(source, number, self.clock())
                number += 1
            left -= run.step()
        return run.end()

    def close(self) -> None:
        self.engine.close()


class LoadRun:
    def __init__(self, driver: Driver) -> None:
        self._engine, self._clock = driver.engine, driver.clock
        self._before = self._engine.stats()
        self.answers: dict[str, AnswerRecord] = {}
        self.open: dict[str, AnswerRecord] = {}
        self.begin_s = self._clock()

    def submit(self, source: RequestSource, number: int, requested_s: float) -> None:
        request, name = source[number], str(number)
        self.answers[name] = self.open[name] = AnswerRecord(number, request.category, requested_s)
        self._engine.add_request(
            Request(
                request_id=name,
                prompt_token_ids=tuple(request.prompt),
                params=request.sampling,
                arrival_s=requested_s,
            )
        )

    def step(self) -> set[int]:
        ended: set[int] = set()
        updates = self._engine.step()
        now_s = self._clock()
        for update in updates:
            if (answer := self.open.get(update.request_id)) is None:
                continue  # aborted
            count = len(update.token_ids)
            answer.blocks.append(DraftBlock(now_s, count, update.num_drafted, update.num_accepted))
            answer.token_ids += update.token_ids
            if update.finish_reason is not None:
                answer.ended_s = now_s
                ended.add(answer.number)
                del self.open[update.request_id]
        return ended

    def end(self) -> LoadPass:
        end_s, before, after = self._clock(), self._before, self._engine.stats()
        for name in self.open:
            self._engine.abort(name)
        self.open = {}
        while self._engine.has_unfinished:
            self._engine.step()
        spent = {
            part: seconds - before.step_seconds.get(part, 0.0) for part, seconds in after.step_seconds.items()
        }
        counts = after.steps - before.steps, after.skipped_passes - before.skipped_passes
        return LoadPass(self.begin_s, end_s, list(self.answers.values()), spent, *counts)
