"""The folder of one server's HAProxies: where their files are, and how they are told that the server stops.

Made by `manta serve` before Ray starts, for its eyes only, and removed at its end; or, if it was killed with
all its processes, by the next one that starts. Who made a folder holds its lock as long as he lives.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from pathlib import Path

from ..system.atomic_files import open_own
from .config_rewriter import DRAINING_ENTRY
from .supervisor import ask_haproxy, find_haproxy

_PARENT, _PREFIX, _LOCK = "/tmp", "manta-ha-", "owner.lock"
_PACKAGE, *_ = __name__.split(".")
_ABOVE = Path(__file__).parents[3]
_SCRIPT = """#!/bin/sh
export PYTHONPATH={path}
exec {python} -m {package}.actors.haproxy.supervisor \\
  --haproxy {haproxy} --folder {folder} --owner {owner} "$@"
"""


class HAProxyFolder:
    """Its files. Raises ConfigError when HAProxy is not installed.

    Attributes:
        path: readable by its owner alone; short, since sockets are below it.
    """

    def __init__(self) -> None:
        haproxy = find_haproxy()
        _sweep()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_PARENT))
        self._lock: int | None = _locked(self.path)
        self._script = self.path / "haproxy"
        self._draining = self.path / "draining.list"
        self._draining.touch()
        above = [str(_ABOVE), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._script.write_text(
            _SCRIPT.format(
                path=":".join(above),
                python=sys.executable,
                package=_PACKAGE,
                haproxy=haproxy,
                folder=self.path,
                owner=os.getpid(),
            )
        )
        self._script.chmod(0o700)

    @property
    def environment(self) -> dict[str, str]:
        """For the Ray whose Serve is to use it."""
        names = {
            "CONFIG_FILE_LOC": "haproxy.cfg",
            "SOCKET_PATH": "admin.sock",
            "METRICS_SOCKET_PATH": "metrics.sock",
            "SERVER_STATE_BASE": "",
            "SERVER_STATE_FILE": "server-state",
            "BINARY_PATH": "haproxy",
        }
        return {f"RAY_SERVE_HAPROXY_{name}": str(self.path / file) for name, file in names.items()}

    def refuse_requests(self) -> None:
        """From now on every new request gets a 503; those that run go on."""
        self._draining.write_text(f"{DRAINING_ENTRY}\n")  # for HAProxies that start from now on
        command = f"add acl {self._draining} {DRAINING_ENTRY}\n".encode()
        for admin in self.path.glob("*/admin.sock"):
            ask_haproxy(admin, command)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _locked(folder: Path) -> int:
    """The lock of a folder that is new, not to be seen before it is held. The process's end frees it."""
    beside = folder / f"{_LOCK}.new"
    lock = os.open(beside, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    beside.rename(folder / _LOCK)
    return lock


def _sweep() -> None:
    """Remove folders whose owners were killed, and no others': /tmp is everybody's."""
    for lock in Path(_PARENT).glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            if lock.parent.lstat().st_uid != os.getuid():
                continue
            with os.fdopen(open_own(lock, os.O_RDONLY), "rb") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:  # its owner lives, or another sweeps
            continue
