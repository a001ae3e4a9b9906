"""A batch job as a process that tests stop or kill, and the processes of its Ray."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from support.waiting import WAIT_S, wait_until


class JobProcess:
    """A command in its own session, with a temporary folder that identifies its Ray.

    Args:
        log: the file for its output.
        address: of a Ray that runs already.
    """

    def __init__(self, command: Sequence[str], log: Path, address: str | None = None) -> None:
        self._log = log.open("w+")
        self.ray_folder = tempfile.mkdtemp(prefix="mj-")  # short: Ray puts sockets below it
        environment = {**os.environ, "RAY_TMPDIR": self.ray_folder}
        environment.pop("RAY_ADDRESS", None)
        if address is not None:
            environment["RAY_ADDRESS"] = address
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, env=environment, start_new_session=True
        )

    @property
    def output(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait_for(self, pattern: str) -> None:
        """Wait until the output matches a regular expression."""
        wait_until(
            lambda: re.search(pattern, self.output), what=lambda: self.output, is_running=self.is_running
        )

    def stop(self, number: signal.Signals) -> int:
        """Send a signal, and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)

    def processes(self, name: str = "") -> list[int]:
        """Living processes of this job's Ray with the text in their command."""
        found: list[int] = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (folder / "cmdline").read_bytes()
                environment = (folder / "environ").read_bytes()
                if self.ray_folder.encode() in command + environment and name.encode() in command:
                    found.append(int(folder.name))
        return found

    def wait_until_all_ended(self) -> None:
        """Wait until no process of this job's Ray is left."""
        wait_until(lambda: not self.processes())

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()
        shutil.rmtree(self.ray_folder, ignore_errors=True)


StartJob: TypeAlias = Callable[..., JobProcess]  # the fixture's type
