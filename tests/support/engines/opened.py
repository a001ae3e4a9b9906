"""The parts of an opened engine that tests read, replace or drive: its executor, its scheduler, its core."""

from __future__ import annotations

from manta import LLM
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.scheduler.scheduler import Scheduler

from support.engines.cluster_checker import CheckingExecutor


def executor_of(engine: EngineCore) -> CheckingExecutor:
    """Return the executor of an engine that `cluster_checker.open_engine` made."""
    executor = engine._executor
    assert isinstance(executor, CheckingExecutor)
    return executor


def scheduler_of(engine: EngineCore) -> Scheduler:
    return engine._scheduler


def core_of(llm: LLM) -> EngineCore:
    """Return the engine core that an `LLM` runs in this process."""
    return llm._engine
