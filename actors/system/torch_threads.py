"""Adapts PyTorch's number of CPU threads: fewer while other processes use the cores.

A parallel loop of PyTorch ends with its slowest thread, and a thread without a core is slow by a scheduler
quantum; a step has about a hundred such loops. So a process that is preempted often gives up threads; after a
pause, trial threads test whether there are cores for more. `cpu_fused/threads/thread_team_size.py` has the
same idea, but its threads measure their own waits; here the system counts involuntary context switches.

Only for fp32: there a product's bits do not depend on the number of threads (tested); in bf16, oneDNN's do.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from ...cluster.step.executor import ExecutorInfo

WINDOW_S = 0.1  # between two looks at the number of interruptions
_OFTEN, _OFTEN_PER_THREAD = 100, 10  # interruptions per second; an idle machine has up to 40 on two threads
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0


def thread_setter(info: ExecutorInfo) -> Callable[[], object]:
    """Return what sets the present number of threads again before each step of this executor.

    Another engine or the user may have set another number since.
    """
    num_threads = torch.get_num_threads()
    if info.device == "cpu" and info.dtype == "float32" and num_threads > 1:
        return TorchThreads().use
    return partial(torch.set_num_threads, num_threads)


class TorchThreads:
    """Sets PyTorch's number of threads to at most that at construction, which is more than one."""

    def __init__(self) -> None:
        self._most = self.size = torch.get_num_threads()
        self._seen_s, self._seen = time.monotonic(), _interruptions()
        self._pause_s = _MIN_PAUSE_S
        self._trial_s = 0.0  # time of the next trial
        self._trial: _Trial | None = None

    def use(self) -> None:
        """Set the number of threads before a step, fewer if cores are scarce."""
        self._adapt(time.monotonic())
        if torch.get_num_threads() != self.size:
            torch.set_num_threads(self.size)

    def _adapt(self, now_s: float) -> None:
        if self.size < self._most and now_s > self._trial_s:
            self._try_more(now_s)
        spent_s = now_s - self._seen_s
        if spent_s < WINDOW_S:
            return
        seen = _interruptions()
        often = (seen - self._seen) / spent_s > _OFTEN + _OFTEN_PER_THREAD * self.size
        self._seen_s, self._seen = now_s, seen
        if self.size > 1 and often:
            self.size -= _step(self.size - 1)
            self._extend_pause(now_s)
        elif self.size == self._most:
            self._pause_s = max(self._pause_s / 2, _MIN_PAUSE_S)

    def _try_more(self, now_s: float) -> None:
        step = min(_step(self.size), self._most - self.size)
        self._trial = self._trial or _Trial(step)
        passed = self._trial.passed()
        if passed is None:
            return
        self._trial = None
        if passed:
            self.size += step
            self._seen_s, self._seen = now_s, _interruptions()
        else:
            self._extend_pause(now_s)

    def _extend_pause(self, now_s: float) -> None:
        self._trial_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)


class _Trial:
    """Threads that test in parallel with the work whether there are cores for them."""

    def __init__(self, count: int) -> None:
        self._found: list[bool] = []
        self._threads = [threading.Thread(target=self._poll, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _poll(self) -> None:
        from ...drafter.compute.cpu_numba.thread_clock import finds_a_core

        self._found.append(finds_a_core())

    def passed(self) -> bool | None:
        """Return whether all found a core; None while running. A failed thread has not passed."""
        if any(thread.is_alive() for thread in self._threads):
            return None
        return len(self._found) == len(self._threads) and all(self._found)


def _step(size: int) -> int:
    return max(1, size // 8)


def _interruptions() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
