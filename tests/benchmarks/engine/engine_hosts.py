"""Engines for `benchmarks shared-drafter`, each in its own process, as in a replica.

`open_hosts` starts and stops them under Ray; `shared_drafter.py` uses them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from manta.actors.workers.ray_executor import RayExecutor
from manta.cluster.config import EngineConfig
from manta.cluster.errors import MantaError
from manta.cluster.step.scheduler_output import DrafterUse
from manta.jobs.bench.common.request_source import RequestSource
from manta.jobs.bench.sweep.engines import Driver
from ray.exceptions import RayTaskError

from .starts import hold

OPEN_TIMEOUT_S = 600.0
CLOSE_TIMEOUT_S = 30.0
SPARE_S = 60.0  # time for the last steps of a turn


@dataclass(frozen=True, slots=True)
class Turn:
    """Result of one engine's turn under constant load.

    Attributes:
        seconds: duration.
        tokens: tokens generated within it.
        blocks: number of (request, step) pairs with tokens.
        steps: steps of the engine.
        draft_s: time of these steps spent on drafting or waiting for drafts.
        drafter: use of a drafter in another process.
    """

    seconds: float
    tokens: int
    blocks: int
    steps: int
    draft_s: float
    drafter: DrafterUse


class EngineHost:
    """A Ray actor with an engine; call `open` first."""

    _driver: Driver
    _source: RequestSource

    def open(self, config: EngineConfig, source: RequestSource) -> None:
        """Load the engine. Raises PlacementError and the errors of loading."""
        self._driver, self._source = Driver(config, RayExecutor(config)), source

    def run(self, at_once: int, seconds: float) -> Turn:
        """Run a closed loop over the same requests as in every call."""
        before = self._driver.engine.stats()
        (done,) = hold(self._driver, self._source, (at_once,), seconds)
        after = self._driver.engine.stats()
        return Turn(
            seconds=done.seconds,
            tokens=done.tokens,
            blocks=done.sums().num_blocks,
            steps=after.steps - before.steps,
            draft_s=after.step_seconds["draft"] - before.step_seconds["draft"],
            drafter=_difference(before.drafter_use, after.drafter_use),
        )

    def close(self) -> None:
        self._driver.close()


class Hosts:
    """Engines of one kind; a call can use only the first ones."""

    def __init__(self, config: EngineConfig, source: RequestSource, count: int) -> None:
        actor = ray.remote(EngineHost).options(num_cpus=0)
        # Any: handles of dynamically wrapped classes have no static methods.
        self._actors: list[Any] = [actor.remote() for _ in range(count)]
        _results([host.open.remote(config, source) for host in self._actors], OPEN_TIMEOUT_S)

    def run(self, count: int, at_once: int, seconds: float) -> list[Turn]:
        """Run the first `count` engines at the same time."""
        turns = [host.run.remote(at_once, seconds) for host in self._actors[:count]]
        return _results(turns, seconds + SPARE_S)

    def close(self) -> None:
        ray.wait(
            [host.close.remote() for host in self._actors],
            num_returns=len(self._actors),
            timeout=CLOSE_TIMEOUT_S,
        )
        for host in self._actors:
            ray.kill(host)


@contextmanager
def open_hosts(config: EngineConfig, source: RequestSource, count: int) -> Iterator[Hosts]:
    """Open `count` engines for the `with` block. Raises PlacementError if they do not fit."""
    hosts = Hosts(config, source, count)
    try:
        yield hosts
    finally:
        hosts.close()


def _results(calls: Sequence[ray.ObjectRef], timeout_s: float) -> list[Any]:  # Any: what the calls return
    """Return the results; a MantaError is raised without Ray's wrapper."""
    try:
        return ray.get(list(calls), timeout=timeout_s)
    except RayTaskError as error:
        if isinstance(error.cause, MantaError):
            raise error.cause from None
        raise


def _difference(before: DrafterUse, after: DrafterUse) -> DrafterUse:
    return DrafterUse(
        after.steps - before.steps, after.queue_s - before.queue_s, after.served_s - before.served_s
    )
