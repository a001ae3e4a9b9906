"""HAProxy under its supervisor, as the installed Serve configures it."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from manta.actors.haproxy.config_rewriter import RETRY_ON, UNFINISHED_HEADER
from manta.actors.haproxy.run_dir import HAProxyFolder
from manta.actors.haproxy.supervisor import send_admin_command
from manta.actors.system.host_resources import free_port

from support.waiting import WAIT_S, wait_until


class Replica(ThreadingHTTPServer):
    """A replica with scripted answers that contain its name.

    Attributes:
        reads: whether it reads bodies; else it answers immediately and closes.
    """

    daemon_threads = True

    def __init__(self, name: str) -> None:
        replica = self
        self.reads = True
        self.name, self.status, self.asked, self.key = name, 200, 0, ""

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                status, body = replica.status, replica.metrics if self.path == "/metrics" else replica.name
                if self.path == "/metrics" and replica.key and self.headers["Authorization"] != replica.key:
                    status, body = 401, "a key is missing"
                if self.path == "/-/healthz":
                    status = 200
                if not status:  # dies before it answers
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                if not replica.reads:
                    self.send_header(UNFINISHED_HEADER, "1")
                self.end_headers()
                self.wfile.write(body.encode())

            def do_POST(self) -> None:
                replica.asked += 1
                if replica.reads:
                    self.rfile.read(int(self.headers["Content-Length"]))
                self.close_connection = not replica.reads
                self.do_GET()

            def log_message(self, format: str, *args: object) -> None: ...

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def metrics(self) -> str:
        return f'# HELP x_total A.\n# TYPE x_total counter\nx_total{{replica="{self.name}"}} 1.0\n'


def serves_configuration(
    folder: Path, port: int, replicas: list[Replica], head_time_s: int | None = None
) -> Path:
    """The configuration that Serve's manager would write for `replicas`."""
    from ray.serve._private import haproxy
    from ray.serve.config import HTTPOptions

    folder.mkdir(exist_ok=True)
    backend = haproxy.BackendConfig(
        name="http-manta",
        path_prefix="/",
        app_name="manta",
        servers=[haproxy.ServerConfig(r.name, "127.0.0.1", r.server_address[1], r.name) for r in replicas],
        fallback_server=haproxy.ServerConfig("fallback", "127.0.0.1", 1),
        health_check_inter="100ms",
    )
    config = haproxy.HAProxyConfig(
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "server-state"),
        metrics_socket_path=str(folder / "metrics.sock"),
        metrics_port=free_port(),
        stats_port=free_port(),
        http_options=HTTPOptions(host="127.0.0.1", port=port),
        retry_on=RETRY_ON,
        nbthread=1,
        timeout_http_request_s=head_time_s,
    )
    path = folder / "haproxy.cfg"
    backends = {backend.name: backend} if replicas else {}
    haproxy.HAProxyApi(config, backends, str(path))._generate_config_file_internal()
    return path


class HAProxyFront:
    """A server's HAProxy, started as by Serve's manager."""

    def __init__(
        self, folder: HAProxyFolder, head_time_s: int | None = None, environment: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        self._environment = {**os.environ, **(environment or {})}
        self._head_time_s = head_time_s
        self.port = free_port()
        self._node = folder.path / "node"
        self._program = folder.environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, replicas: list[Replica]) -> None:
        config = serves_configuration(self._node, self.port, replicas, self._head_time_s)
        command = [self._program, "-db", "-f", str(config), "-dR"]
        if self.processes:
            command += ["-sf", str(self.processes[-1].pid), "-x", str(self._node / "admin.sock")]
        log = self.folder.path / "log"
        with log.open("ab") as stderr:
            started = subprocess.Popen(command, stderr=stderr, env=self._environment)
        self.processes.append(started)
        wait_until(
            lambda: self.reported_pid() == started.pid,
            what=log.read_text,
            is_running=lambda: started.poll() is None,
        )

    def serve(self, replicas: list[Replica]) -> None:
        """Start it, and return once a replica answers through it."""
        self.start(replicas)
        wait_until(lambda: self.ask("/v1/models")[0] == 200)

    def reported_pid(self) -> int:
        """What Serve's manager reads from the admin socket."""
        try:
            said = send_admin_command(self._node / "admin.sock", b"show info\n").decode()
        except OSError:
            return 0
        return next((int(line[4:]) for line in said.splitlines() if line.startswith("Pid:")), 0)

    def haproxy_pid(self) -> int:
        children = Path(f"/proc/{self.processes[-1].pid}/task/{self.processes[-1].pid}/children")
        return int(children.read_text().split()[0])

    def ask(
        self, path: str, method: str = "GET", port: int | None = None, headers: Mapping[str, str] = {}
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=10)
        try:
            connection.request(method, path, b"{}" if method == "POST" else None, headers=dict(headers))
            response = connection.getresponse()
            return response.status, response.read().decode()
        except (OSError, http.client.HTTPException):
            return 0, ""
        finally:
            connection.close()

    def send(self, request: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        connection.sendall(request)
        return connection

    def close(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
            process.wait(WAIT_S)
        self.folder.remove()
