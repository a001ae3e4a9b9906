"""The drafter as a process of its own. Wrapped by `ray_executor.py`; the work is `split_drafter.py`'s."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...cluster.plan import SchedulerOutput
from .worker import Worker

if TYPE_CHECKING:
    from .split_drafter import DrafterRunner


class DrafterWorker(Worker):
    """Holds the whole drafter, and copies of the target's embedding and head."""

    _runner: DrafterRunner

    def _load(self) -> None:
        from .split_drafter import DrafterRunner

        self._runner = DrafterRunner(self.setting.config, self.groups)

    def submit(self, plan: SchedulerOutput) -> None:
        """Draft, and learn what became of it."""
        self._runner.execute(plan)

    def is_ready(self) -> bool:
        return True

    def collect(self) -> None:
        """The result comes from the target."""
