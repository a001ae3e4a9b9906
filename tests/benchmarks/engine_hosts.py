"""Engines for `benchmarks shared-drafter`: each in a process of its own, as a replica is.

`open_hosts` starts them under Ray and ends them. What they are asked, and what is made of it, is
`shared_drafter.py`'s.
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
from manta.cluster.plan import DrafterUse
from manta.jobs.bench.load.asks import Asks
from manta.jobs.bench.sweep.driver import Driver
from ray.exceptions import RayTaskError

OPEN_TIMEOUT_S = 600.0
CLOSE_TIMEOUT_S = 30.0
SPARE_S = 60.0  # beyond the seconds of a turn, for the steps that end it


@dataclass(frozen=True, slots=True)
class Turn:
    """What one engine did while its load was held.

    Attributes:
        seconds: that it was held.
        tokens: that came out within them.
        blocks: of tokens, one for each request and step that brought it any.
        steps: of the engine.
        draft_s: of those steps, in which the target waited for drafts, or made them itself.
        drafter: what it had of a drafter in a process of its own.
    """

    seconds: float
    tokens: int
    blocks: int
    steps: int
    draft_s: float
    drafter: DrafterUse


class EngineHost:
    """Becomes a Ray actor; `open` first."""

    _driver: Driver
    _asks: Asks

    def open(self, config: EngineConfig, asks: Asks) -> None:
        """Raises PlacementError, and what loading raises."""
        self._driver, self._asks = Driver(config, RayExecutor(config)), asks

    def run(self, at_once: int, seconds: float) -> Turn:
        """A closed loop over the same requests each time."""
        before = self._driver.engine.stats()
        (done,) = self._driver.hold(self._asks, (at_once,), seconds)
        after = self._driver.engine.stats()
        return Turn(
            seconds=done.seconds,
            tokens=done.tokens,
            blocks=done.sums().num_blocks,
            steps=after.steps - before.steps,
            draft_s=after.step_seconds["draft"] - before.step_seconds["draft"],
            drafter=_grown(before.drafter_use, after.drafter_use),
        )

    def close(self) -> None:
        self._driver.close()


class Hosts:
    """Engines of one kind, the first ones of which may be asked alone."""

    def __init__(self, config: EngineConfig, asks: Asks, count: int) -> None:
        actor = ray.remote(EngineHost).options(num_cpus=0)
        # Any: handles of dynamically wrapped classes have no static methods.
        self._actors: list[Any] = [actor.remote() for _ in range(count)]
        _results([host.open.remote(config, asks) for host in self._actors], OPEN_TIMEOUT_S)

    def run(self, count: int, at_once: int, seconds: float) -> list[Turn]:
        """The first `count` of them at the same time."""
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
def open_hosts(config: EngineConfig, asks: Asks, count: int) -> Iterator[Hosts]:
    """So many engines, until the end of the block. Raises PlacementError where they have no room."""
    hosts = Hosts(config, asks, count)
    try:
        yield hosts
    finally:
        hosts.close()


def _results(calls: Sequence[ray.ObjectRef], timeout_s: float) -> list[Any]:  # Any: what the calls return
    """An error of ours as it was, not wrapped."""
    try:
        return ray.get(list(calls), timeout=timeout_s)
    except RayTaskError as error:
        if isinstance(error.cause, MantaError):
            raise error.cause from None
        raise


def _grown(before: DrafterUse, after: DrafterUse) -> DrafterUse:
    return DrafterUse(
        after.steps - before.steps, after.queue_s - before.queue_s, after.served_s - before.served_s
    )
