"""Executors that compute, in this process or in Ray workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...cluster.config import EngineConfig
from ...cluster.errors import EngineDeadError
from ...cluster.request.structured_outputs import Grammar
from ...cluster.step.clock import MACHINE_CLOCK, EngineClock
from ...cluster.step.executor import DrafterHealth, Executor, ExecutorInfo
from ...cluster.step.page_transfer import PagesMoved, PageTransfer
from ...cluster.step.scheduler_output import SchedulerOutput, StepResult

if TYPE_CHECKING:
    from ..targets.loading.drafter_swap import DrafterSwap
    from ..targets.loading.resolved_config import ResolvedConfig
    from ..targets.runners.page_mover import PageMover
    from ..targets.runners.runner_interface import Runner


class InProcessExecutor:
    """One target rank and the drafter in the caller's thread. Sets PyTorch's number of CPU threads."""

    clock: EngineClock = MACHINE_CLOCK

    def __init__(self, config: EngineConfig) -> None:
        import torch

        from ..system.host_resources import owned_cores
        from ..system.torch_threads import thread_setter
        from ..targets.loading.cpu_autotune import time_configs
        from ..targets.loading.drafter_swap import DrafterSwap

        assert not config.needs_ray, "tensor parallelism and a split drafter need processes of their own"
        self._users_threads = torch.get_num_threads()
        torch.set_num_threads(config.num_threads or owned_cores())
        if "auto" in (config.dtype, config.attention_backend) and not torch.cuda.is_available():
            time_configs(torch.get_num_threads())
        resolved, runner, self.info = self._load(config)
        self._runner: Runner | None = runner
        self._exchange: DrafterSwap | None = DrafterSwap(resolved, runner)
        self._num_swaps = 0
        self._set_threads = thread_setter(self.info)  # those that the backend leaves to PyTorch

    def _load(self, config: EngineConfig) -> tuple[ResolvedConfig, Runner, ExecutorInfo]:
        from ..targets.loading.rank_loader import Checkpoints, resolve_config, start_runner

        resolved = resolve_config(config)
        return resolved, *start_runner(resolved, Checkpoints())

    @property
    def drafter_health(self) -> DrafterHealth:
        return DrafterHealth(generation=self._num_swaps)

    def submit(self, plan: SchedulerOutput) -> None:
        self._set_threads()
        self._alive().submit(plan)

    def collect(self) -> StepResult:
        return self._alive().collect()

    def move_pages(self, transfer: PageTransfer) -> None:
        """Begin to move pages, after the steps so far."""
        self._mover.begin(transfer)

    def moved_pages(self, wait_s: float) -> list[PagesMoved]:
        return self._mover.take_ended(wait_s)

    @property
    def _mover(self) -> PageMover:
        mover = self._alive().mover
        assert mover is not None, "info.kv_tier says whether there is a tier"
        return mover

    def check_health(self) -> None:
        self._alive()

    def swap_drafter(self, model: str) -> None:
        """Draft with another checkpoint. Raises CheckpointError, ConfigError, and keeps the old one."""
        self._alive()
        assert self._exchange is not None, "it lives as long as the runner"
        self._exchange.load(model)
        self._exchange.use()
        self._num_swaps += 1

    def hold_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar alongside the steps and hold it. Raises GrammarError."""
        if (grammars := self._alive().grammars) is not None:
            grammars.compiler.hold(grammar)

    def release_grammar(self, grammar: Grammar) -> None:
        if self._runner is not None and (grammars := self._runner.grammars) is not None:
            grammars.compiler.release(grammar)

    def _alive(self) -> Runner:
        if self._runner is None:
            raise EngineDeadError("The engine was closed; start a new one.")
        return self._runner

    def close(self) -> None:
        import torch

        if self._runner is not None:
            if self._runner.mover is not None:
                self._runner.mover.close()
            self._runner = self._exchange = None
            torch.set_num_threads(self._users_threads)


def make_executor(config: EngineConfig) -> Executor:
    """Start the executor that `config` describes; returns when it can run steps."""
    if config.needs_ray:
        from ..workers.ray_executor import RayExecutor

        return RayExecutor(config)
    return InProcessExecutor(config)
