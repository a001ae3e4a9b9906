"""The drafter as a process of its own. Wrapped by `ray_executor.py`; the work is `split_drafter.py`'s."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..cluster.plan import SchedulerOutput
from .worker import Worker

if TYPE_CHECKING:
    from .split_drafter import DrafterRunner


class DrafterWorker(Worker):
    """Holds the whole drafter, and copies of the target's embedding and head."""

    _runner: DrafterRunner

    def _load(self) -> None:
        from .split_drafter import DrafterRunner

        self._runner = DrafterRunner(self.setting.config, self.groups)

    def execute(self, plan: SchedulerOutput) -> None:
        """Draft; the result comes from the target."""
        self._runner.execute(plan)
