"""Executors that compute: in this process, or by workers under Ray.

`InProcessExecutor` needs no Ray: one target rank, the drafter beside it. `make_executor` picks by topology.
Called by `LLM` and `AsyncEngine`.
"""

from __future__ import annotations

from ..cluster.config import EngineConfig
from ..cluster.errors import EngineDeadError
from ..cluster.executor import Executor, ExecutorInfo
from ..cluster.plan import SchedulerOutput, StepResult


class InProcessExecutor:
    """Runs steps in the caller's thread. Sets the threads of the process's CPU products.

    Raises:
        CheckpointError, ConfigError: from loading.
    """

    def __init__(self, config: EngineConfig) -> None:
        import torch

        from .target.loading import load_runner
        from .target.memory import owned_cores
        from .target.runner import StepRunner

        assert not config.needs_ray, "tensor parallelism and a split drafter need processes of their own"
        torch.set_num_threads(config.num_threads or owned_cores())
        runner, self._info = load_runner(config)
        self._runner: StepRunner | None = runner

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def execute(self, plan: SchedulerOutput) -> StepResult:
        if self._runner is None:
            raise EngineDeadError("The engine was closed; start a new one.")
        return self._runner.execute(plan)

    def check_health(self) -> None:
        if self._runner is None:
            raise EngineDeadError("The engine was closed; start a new one.")

    def close(self) -> None:
        self._runner = None


def make_executor(config: EngineConfig) -> Executor:
    """Start what `config` describes; returns when it can run steps."""
    if config.needs_ray:
        from .ray_executor import RayExecutor

        return RayExecutor(config)
    return InProcessExecutor(config)
