"""A real server with its own Ray, whose processes tests kill: `manta serve` on one node or several.

Its processes are identified by a folder that all of them have in their environment. Their commands show their
roles, and Ray's tables what it still holds. Called by `serving_chaos.py` and tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from manta.actors.replica import DEPLOYMENT
from manta.actors.system.host_resources import free_port
from manta.jobs.common.http_client import ServerClient
from manta.jobs.serve.ray_environment import ServeEnvironment
from prometheus_client.parser import text_string_to_metric_families

from support.waiting import wait_until

START_S = 240.0
END_S = 90.0
# Of a command's beginning, as Ray and HAProxy name their processes.
ROLES = {
    "target worker": "ray::TargetWorker",
    "drafter": "ray::DrafterWorker",
    "replica": f"ray::ServeReplica:manta:{DEPLOYMENT}",
    "gateway": "ray::ServeReplica:manta:gateway",
    "controller": "ray::ServeController",
    "haproxy": "haproxy",
    "raylet": "raylet",
    "gcs": "gcs_server",
}


class Served:
    """A server that answers. Leave the `with` block to end it.

    Args:
        settings: as under `args:` in ray_config.yaml.
        replicas: of the engine.
        nodes: CPUs of each further node of the cluster; the head then has none.
        storage: the head's tables are on disk, so that a killed GCS can be restarted.
        cpus: declared to Ray, of a single node.
        key: the API key of requests, if the server needs one.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        log: Path,
        *,
        replicas: int = 1,
        nodes: tuple[int, ...] = (),
        storage: bool = False,
        cpus: int = 8,
        key: str | None = None,
    ) -> None:
        self._key = key
        self.folder = Path(tempfile.mkdtemp(prefix="md-"))  # short: Ray puts sockets below it
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.load_s = 0.0
        self.start_statuses: set[int] = set()  # of /health until the server answered
        self.cluster: Any = None  # ray.cluster_utils.Cluster
        self._of_nodes: ServeEnvironment | None = None
        self._shared_before = shared_memory()
        self._environment = {
            **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            "RAY_TMPDIR": str(self.folder),
            "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": cpus}),
        }
        self.process: subprocess.Popen[bytes] | None = None
        try:
            if nodes:
                self._start_nodes(nodes, storage=storage)
            command = self._command(settings if replicas == 1 else {**settings, "replicas": replicas})
            with log.open("wb") as output:
                self.process = subprocess.Popen(
                    command, stdout=output, stderr=output, env=self._environment, start_new_session=True
                )
            self._await_ready(self.process)
        except BaseException:
            self.close()
            raise

    def pids(self, role: str) -> list[int]:
        """Living processes of this server with a role, in the order of their start."""
        return sorted(pid for pid, command in self.processes() if plays(command, role))

    def processes(self) -> list[tuple[int, str]]:
        """All processes of this server, except those of the test itself."""
        return [(pid, command) for pid, command in processes(str(self.folder)) if pid != os.getpid()]

    def kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(pid, number)

    def restart_gcs(self) -> None:
        """Restart the head's GCS, as an operator would."""
        head = self.cluster.head_node
        with environment(self._environment):
            head.kill_gcs_server(check_alive=False)
            head.start_gcs_server()

    def groups(self) -> list[str]:
        """Names of the placement groups that Ray holds."""
        return [
            group["name"]
            for group in self._books().placement_group_table().values()
            if group["state"] != "REMOVED"
        ]

    def answers(self, timeout_s: float = 5.0) -> bool:
        with contextlib.suppress(Exception), ServerClient(self.url, timeout_s, api_key=self._key) as client:
            return client.request("/v1/completions", {"prompt": "x", "max_tokens": 1}).status == 200
        return False

    def health(self) -> int:
        """Return the status of /health, 0 if nothing listens."""
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0).status_code
        except httpx.HTTPError:
            return 0

    def replicas_up(self) -> int:
        """The replicas behind a gateway, from its registry."""
        with contextlib.suppress(Exception):
            reported = httpx.get(f"{self.url}/metrics", timeout=10).text
            (ups,) = (
                family
                for family in text_string_to_metric_families(reported)
                if family.name == "manta:gateway_replica_up"
            )
            return len({sample.labels["replica"] for sample in ups.samples if sample.value == 1.0})
        return 0

    def end(self) -> list[str]:
        """End it as a user would; return a description of what is left."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        ended = self.process.poll() is not None
        self._stop_nodes()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.processes(), 60.0)
        left = [] if ended else ["the command itself"]
        left += sorted({f"process {Path(command.split()[0]).name}" for _, command in self.processes()})
        left += [f"shared memory {name}" for name in sorted(forgotten_since(self._shared_before))]
        return left

    def close(self) -> None:
        """End all living processes, and remove the folder."""
        self._stop_nodes()
        for pid, _ in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait(END_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _command(self, settings: Mapping[str, Any]) -> list[str]:
        path = self.folder / "settings.json"
        path.write_text(json.dumps({"kv_tier_path": "none", **settings}))  # each prompt is computed once here
        return [
            *(sys.executable, "-m", "manta.jobs.cli", "serve"),
            *("--config", str(path), "--port", str(self.port)),
        ]

    def _start_nodes(self, nodes: tuple[int, ...], *, storage: bool) -> None:
        """A head without CPUs, and nodes for replicas."""
        from ray.cluster_utils import Cluster

        self._environment.pop("RAY_OVERRIDE_RESOURCES")
        (self.folder / "ray").mkdir()  # where Ray notes the address
        if storage:
            (self.folder / "gcs").mkdir()
            self._environment["RAY_gcs_storage"] = "rocksdb"
            self._environment["RAY_gcs_storage_path"] = str(self.folder / "gcs")
        common = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
        self._of_nodes = ServeEnvironment(plain_proxy=False)
        with environment(self._environment):
            self.cluster = Cluster(
                initialize_head=True,
                head_node_args={
                    "num_cpus": 0,
                    "temp_dir": str(self.folder),
                    "gcs_server_port": free_port(),
                    **common,
                },
            )
            for cpus in nodes:
                self.cluster.add_node(num_cpus=cpus, object_store_memory=100 * 2**20)
        self._environment["RAY_ADDRESS"] = self.cluster.address

    def _stop_nodes(self) -> None:
        if self.cluster is not None:
            self.cluster.shutdown()
            self.cluster = None
        if self._of_nodes is not None:
            self._of_nodes.restore()

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        begin_s = time.monotonic()
        loading_s = begin_s
        while not self.answers():
            self.start_statuses.add(self.health())
            said = self.log.read_text(errors="replace")
            assert process.poll() is None and time.monotonic() - begin_s < START_S, said
            if "loading the models" not in said:
                loading_s = time.monotonic()
            time.sleep(0.1)
        self.load_s = time.monotonic() - loading_s

    def _books(self) -> Any:
        from ray._private.state import GlobalState
        from ray._raylet import GcsClientOptions  # pyright: ignore[reportAttributeAccessIssue]: no stub

        books = GlobalState()
        books._initialize_global_state(GcsClientOptions.create(self._gcs_address(), None, True, False))
        return books

    def _gcs_address(self) -> str:
        commands = [command for _, command in self.processes() if plays(command, "raylet")]
        (address, *_) = {
            word.partition("=")[2]
            for command in commands
            for word in command.split()
            if word.startswith("--gcs-address=")
        }
        return address


def plays(command: str, role: str) -> bool:
    program = command.split(" ", 1)[0]
    return program.startswith(ROLES[role]) or Path(program).name == ROLES[role]


def processes(mark: str) -> list[tuple[int, str]]:
    """Living processes that name a path in their command or environment: number and command."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if command and mark.encode() in command + (folder / "environ").read_bytes():
                found.append((int(folder.name), command.replace(b"\0", b" ").decode(errors="replace")))
    return found


def shared_memory() -> set[str]:
    """Files in /dev/shm."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def forgotten_since(before: set[str]) -> set[str]:
    """New files in /dev/shm that no living process has mapped or open.

    Semaphores of Python's multiprocessing are others': no process of a server makes any.
    """
    new = {name for name in shared_memory() - before if not name.startswith("sem.mp-")}
    for folder in Path("/proc").glob("[0-9]*") if new else ():
        with contextlib.suppress(OSError):
            seen = (folder / "maps").read_text(errors="replace")
            seen += " ".join(str(link.readlink()) for link in (folder / "fd").iterdir())
            new = {name for name in new if f"/dev/shm/{name}" not in seen}
    return new


@contextlib.contextmanager
def environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """This process's environment, changed temporarily: processes that it starts inherit it."""
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
