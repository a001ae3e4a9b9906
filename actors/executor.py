"""Executors that compute: in this process, or by workers under Ray.

`InProcessExecutor` needs no Ray: one target rank, the drafter beside it. `make_executor` picks by topology.
Called by `LLM` and `AsyncEngine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..cluster.config import EngineConfig
from ..cluster.errors import EngineDeadError
from ..cluster.executor import DrafterHealth, Executor, ExecutorInfo
from ..cluster.plan import SchedulerOutput, StepResult

if TYPE_CHECKING:
    from .targets.runners.runner import Runner


class InProcessExecutor:
    """Runs steps in the caller's thread. Sets the threads of the process's CPU products.

    Raises:
        CheckpointError, ConfigError: from loading.
    """

    def __init__(self, config: EngineConfig) -> None:
        import torch

        from .machine import owned_cores
        from .targets.loading.rank import load_runner
        from .torch_threads import TorchThreads

        assert not config.needs_ray, "tensor parallelism and a split drafter need processes of their own"
        self._users_threads = torch.get_num_threads()
        torch.set_num_threads(config.num_threads or owned_cores())
        runner, self._info = load_runner(config)
        self._runner: Runner | None = runner
        self._threads = TorchThreads.of(self._info)  # of those that the backend left to PyTorch

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    @property
    def drafter_health(self) -> DrafterHealth:
        """The drafter lives and dies with the target."""
        return DrafterHealth()

    def submit(self, plan: SchedulerOutput) -> None:
        self._threads.use()
        self._alive().submit(plan)

    def collect(self) -> StepResult:
        return self._alive().collect()

    def check_health(self) -> None:
        self._alive()

    def _alive(self) -> Runner:
        if self._runner is None:
            raise EngineDeadError("The engine was closed; start a new one.")
        return self._runner

    def close(self) -> None:
        import torch

        if self._runner is not None:
            self._runner = None
            torch.set_num_threads(self._users_threads)


def make_executor(config: EngineConfig) -> Executor:
    """Start what `config` describes; returns when it can run steps."""
    if config.needs_ray:
        from .workers.ray_executor import RayExecutor

        return RayExecutor(config)
    return InProcessExecutor(config)
