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
        from .split_drafter import start_drafter

        self._runner = start_drafter(self.setting.config, self.groups)
        self.max_in_flight = self._runner.max_in_flight

    def submit(self, plan: SchedulerOutput) -> None:
        """Draft, and learn what became of it."""
        self._runner.submit(plan)

    def is_ready(self) -> bool:
        return self._runner.is_ready()

    def collect(self) -> None:
        """The result comes from the target."""
        self._runner.collect()
