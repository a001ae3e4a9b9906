"""An executor that forwards all calls to another; tests of deaths and counts extend it."""

from __future__ import annotations

from manta.cluster.step.clock import EngineClock
from manta.cluster.step.executor import DrafterHealth, Executor, ExecutorInfo
from manta.cluster.step.scheduler_output import SchedulerOutput, StepResult


class PassingExecutor:
    """Args: inner: the executor that gets all calls."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner

    @property
    def info(self) -> ExecutorInfo:
        return self._inner.info

    @property
    def clock(self) -> EngineClock:
        return self._inner.clock

    @property
    def drafter_health(self) -> DrafterHealth:
        return self._inner.drafter_health

    def submit(self, plan: SchedulerOutput) -> None:
        self._inner.submit(plan)

    def collect(self) -> StepResult:
        return self._inner.collect()

    def check_health(self) -> None:
        self._inner.check_health()

    def close(self) -> None:
        self._inner.close()
