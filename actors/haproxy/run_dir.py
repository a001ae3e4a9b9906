"""The folder with the files of one server's HAProxies, and the command that makes them refuse new requests.

`manta serve` creates the folder before Ray starts and removes it at the end. If the server and all its
processes were killed, the next server removes it: a running owner holds a lock on its folder.
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
from .supervisor import find_haproxy, send_admin_command

_PARENT, _PREFIX, _LOCK = "/tmp", "manta-ha-", "owner.lock"
_PACKAGE, *_ = __name__.split(".")
_ABOVE = Path(__file__).parents[3]
_SCRIPT = """#!/bin/sh
export PYTHONPATH={path}
exec {python} -m {package}.actors.haproxy.supervisor \\
  --haproxy {haproxy} --folder {folder} --owner {owner} "$@"
"""


class HAProxyFolder:
    """Raises ConfigError without HAProxy. `path` is private, and short because it holds Unix sockets."""

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
        self._draining.write_text(f"{DRAINING_ENTRY}\n")  # for HAProxies that start later
        command = f"add acl {self._draining} {DRAINING_ENTRY}\n".encode()
        for admin in self.path.glob("*/admin.sock"):
            send_admin_command(admin, command)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _locked(folder: Path) -> int:
    """Return the held lock of a new folder. The lock is released when the process ends."""
    temporary = folder / f"{_LOCK}.new"
    lock = os.open(temporary, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    temporary.rename(folder / _LOCK)
    return lock


def _sweep() -> None:
    """Remove this user's folders of killed owners; other users share /tmp."""
    for lock in Path(_PARENT).glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            if lock.parent.lstat().st_uid != os.getuid():
                continue
            with os.fdopen(open_own(lock, os.O_RDONLY), "rb") as lock_file:
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:  # the owner still runs, or another process removes the folder
            continue
