"""An executor that a test pauses or kills between two steps, however fast the machine is."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from manta.actors.engine.uniproc_executor import make_executor
from manta.cluster.config import EngineConfig
from manta.cluster.errors import EngineDeadError
from manta.cluster.step.executor import Executor
from manta.cluster.step.scheduler_output import SchedulerOutput

from support.engines.passing_executor import PassingExecutor
from support.waiting import WAIT_S, wait_until


class PausableExecutor(PassingExecutor):
    """Forwards all calls; a step waits while the executor is paused."""

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner)
        self._turn = threading.Condition()
        self._num_steps_left = math.inf
        self._dies = False

    @contextmanager
    def paused_after(self, num_steps: int) -> Iterator[None]:
        """Run `num_steps` more steps, and the next one after the block."""
        self.allow_steps(num_steps)
        try:
            yield
        finally:
            self.allow_steps(math.inf)

    def allow_steps(self, num_steps: float) -> None:
        """Run `num_steps` more steps, and then none until this is called again."""
        with self._turn:
            self._num_steps_left = num_steps
            self._turn.notify_all()

    def step_until(self, condition: Callable[[], object]) -> None:
        """Run single steps until a condition holds that a few steps bring about."""
        wait_until(lambda: condition() or self.allow_steps(1))

    def die(self) -> None:
        """Die instead of the next step, or of the one that waits."""
        with self._turn:
            self._dies = True
            self._turn.notify_all()

    def submit(self, plan: SchedulerOutput) -> None:
        with self._turn:
            assert self._turn.wait_for(lambda: self._dies or self._num_steps_left > 0, WAIT_S)
            self._num_steps_left -= 1
            if self._dies:
                raise EngineDeadError("worker 1 (pid 4711) was killed by signal 9")
        super().submit(plan)


class PausableExecutors(list[PausableExecutor]):
    """The executors of the engines that are made with `make`, in the order of their start."""

    def make(self, config: EngineConfig) -> PausableExecutor:
        self.append(PausableExecutor(make_executor(config)))
        return self[-1]
