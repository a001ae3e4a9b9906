"""The parts of an opened engine that tests read, replace or drive: its scheduler, its core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.scheduler.scheduler import Scheduler

if TYPE_CHECKING:  # tests of the cluster floor import no torch
    from manta import LLM
    from manta.actors.engine.async_engine import AsyncEngine


def scheduler_of(engine: EngineCore) -> Scheduler:
    return engine._scheduler


def core_of(engine: LLM | AsyncEngine) -> EngineCore:
    """Return the engine core that a started engine runs in this process."""
    core = engine._engine
    assert core is not None, "it was not started"
    return core
