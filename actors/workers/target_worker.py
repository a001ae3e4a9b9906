"""A rank of the target as a process of its own. Wrapped by `ray_executor.py`; runs `targets/runners`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...cluster.executor import ExecutorInfo
from ...cluster.plan import SchedulerOutput, StepResult
from .worker import Worker

if TYPE_CHECKING:
    from ..targets.runners.runner import Runner


class TargetWorker(Worker):
    """Holds one shard of the target, and the drafter beside it unless that is split off."""

    _runner: Runner

    def _load(self) -> ExecutorInfo:
        from ..targets.loading.plan import plan_load
        from ..targets.loading.rank import Checkpoints, start_runner
        from .split_drafter import RemoteDrafts, tell_num_pages

        groups, split = self.groups, self.setting.topology.split_drafter
        assert groups.target is not None, "a rank of the target"
        plan = plan_load(self.setting.config)
        groups.target.use_peer_memory(plan.dtype)
        self._runner, info = start_runner(
            plan,
            Checkpoints(),
            groups.target,
            remote_drafts=(lambda plan, backend: RemoteDrafts(plan, backend, groups)) if split else None,
        )
        tell_num_pages(info.num_pages, groups)
        self.max_in_flight = info.max_in_flight
        return info

    def submit(self, plan: SchedulerOutput) -> None:
        self._runner.submit(plan)

    def is_ready(self) -> bool:
        return self._runner.is_ready()

    def collect(self) -> StepResult | None:
        """Every rank computes; what rank 0 found is the result."""
        result = self._runner.collect()
        return result if self.setting.rank == 0 else None
