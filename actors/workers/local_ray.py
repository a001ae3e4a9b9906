"""Starts a local Ray that listens on loopback only and requires its user's token.

By default Ray listens on all interfaces, and writes a new token with the process's umask. To get a Ray that
other machines can reach, a user starts it (`ray start`, `manta render ray-up`) and names it in RAY_ADDRESS.
RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1 leaves the choice of the address to Ray, and RAY_AUTH_MODE=disabled omits
the token.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, services
from ray._private.authentication import authentication_token_setup as token_setup
from ray._private.grpc_utils import init_grpc_channel
from ray._private.node import Node
from ray._raylet import AuthenticationTokenLoader  # pyright: ignore[reportAttributeAccessIssue]  # compiled
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from ...cluster.errors import ConfigError
from ..system.host_resources import free_port

AUTH_MODE = "RAY_AUTH_MODE"
TOKEN_TIMEOUT_S = 5.0
OTHER_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")  # take precedence over Ray's token file
# Of Ray's dashboard agent, whose 1 s of CPU time competes with the loading of models. It exports Ray's own
# metrics, and counters lose what they count before it runs: so it starts at once.
AGENT_NICENESS = 10
# Ray's memory monitor kills workers one after the other while 95 % of the memory is in use, also by other
# programs: the model, its controller and its directory, within seconds. Without it the kernel ends one
# process, the largest of Ray's workers, when there is no memory left.
MONITOR, MONITOR_OFF = "RAY_memory_monitor_refresh_ms", "0"
_PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)


def start_ray(worker_command: Sequence[str] = (), **settings: Any) -> None:  # Any: `ray.init`'s own
    """Start a Ray on this machine, or connect to the one that `ray.init` finds here.

    `worker_command` starts Ray's worker processes in place of Python (`ForkServer.worker_command`);
    `settings` are for `ray.init`. Raises ConfigError if the token cannot be written.
    """
    if os.environ.get(AUTH_MODE, "token").lower() == "token" and not any(map(os.environ.get, OTHER_TOKENS)):
        make_token(Path.home() / ".ray" / "auth_token")
    use_token()
    with on_loopback(), _without_memory_monitor(), contextlib.ExitStack() as stack:
        if settings.get("include_dashboard") is False:
            stack.enter_context(_without_head_services())
            stack.enter_context(_lean_raylet(worker_command))
        ray.init(**settings)


@contextlib.contextmanager
def _without_memory_monitor() -> Iterator[None]:
    """Turn the memory monitor of a Ray that is started within off, unless the user has set its interval."""
    if MONITOR in os.environ:
        yield
        return
    os.environ[MONITOR] = MONITOR_OFF
    try:
        yield
    finally:
        del os.environ[MONITOR]


@contextlib.contextmanager
def _without_head_services() -> Iterator[None]:
    """Keep a Ray that is started within from running its dashboard's server and its cluster autoscaler.

    Ray starts both even with `include_dashboard=False`, and they take 3 s of CPU time while models could
    load. On a single machine the autoscaler has nothing to do.
    """
    originals = services.start_api_server, Node.start_monitor
    services.start_api_server = lambda *_, **__: (None, None)  # the result of a server that did not come up
    Node.start_monitor = lambda self: None
    try:
        yield
    finally:
        services.start_api_server, Node.start_monitor = originals


@contextlib.contextmanager
def _lean_raylet(worker_command: Sequence[str]) -> Iterator[None]:
    """Have a Ray started within use `worker_command`, and less priority for its dashboard agent.

    The agents' ports are chosen here: a raylet that does not know them waits until its agents have started.
    """
    before = services.start_raylet, services.start_ray_process

    def start_raylet(*arguments: Any, **named: Any) -> Any:  # Any: Ray's own
        named.update({name: named.get(name) or free_port() for name in _PORTS})
        started_ports.append(named["dashboard_agent_listen_port"])
        return before[0](*arguments, **named)

    def start_process(command: list[str], process_type: str, *arguments: Any, **named: Any) -> Any:
        if process_type == ray_constants.PROCESS_TYPE_RAYLET:
            command = [_lean(each, worker_command) for each in command]
            command.append(f"--dashboard_agent_listen_port={started_ports[-1]}")
        return before[1](command, process_type, *arguments, **named)

    started_ports: list[int] = []
    services.start_raylet, services.start_ray_process = start_raylet, start_process
    try:
        yield
    finally:
        services.start_raylet, services.start_ray_process = before


def _lean(flag: str, worker_command: Sequence[str]) -> str:
    """Change a flag of the raylet that is the command of an agent or of workers."""
    name, _, value = flag.partition("=")
    if name == "--dashboard_agent_command":
        nice = f"import os, sys; os.nice({AGENT_NICENESS}); os.execv(sys.argv[1], sys.argv[1:])"
        return f"{name}={subprocess.list2cmdline([sys.executable, '-IS', '-c', nice])} {value}"
    python = subprocess.list2cmdline([sys.executable]) + " "
    if name == "--python_worker_command" and worker_command:
        assert value.startswith(python), "this version of Ray is not supported"
        return f"{name}={subprocess.list2cmdline(worker_command)} {value.removeprefix(python)}"
    return flag


def use_token() -> None:
    """Enable token authentication if there is a token, unless RAY_AUTH_MODE is set.

    With an address, `ray.init` does not look for a token.
    """
    if AUTH_MODE not in os.environ and AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        token_setup._enable_token_auth()  # Ray no longer reads the environment variable at this point


def check_address(address: str) -> None:
    """Raise ConfigError if no Ray answers at host:port, or it refuses the token; `ray.init` would retry both
    for minutes, with warnings.
    """
    if not re.fullmatch(r"[^/]+:\d+", address):
        return
    channel = init_grpc_channel(address)
    try:
        stub: Any = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)  # Any: generated
        generated: Any = gcs_service_pb2
        stub.GetClusterId(generated.GetClusterIdRequest(), timeout=TOKEN_TIMEOUT_S)
    except Exception as error:  # gRPC's; the others are left to `ray.init`
        code: Any = getattr(error, "code", lambda: None)  # Any: gRPC's
        status = getattr(code(), "name", "")
        if status == "UNAVAILABLE":
            raise ConfigError(
                f"RAY_ADDRESS={address}: nothing answers there as Ray does. Start Ray (ray start --head), "
                "set its address, or leave RAY_ADDRESS out for a Ray of its own.",
                param="RAY_ADDRESS",
            ) from None
        if status == "UNAUTHENTICATED":
            raise ConfigError(
                f"RAY_ADDRESS={address}: that Ray refuses this user's token. Copy the token of the user who "
                "started it to ~/.ray/auth_token, or name a file with it in RAY_AUTH_TOKEN_PATH.",
                param="RAY_AUTH_TOKEN_PATH",
            ) from None
    finally:
        channel.close()


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Use 127.0.0.1 as this node's address, so that all servers of a Ray started within listen only there.

    Ray does so itself on macOS and Windows. On Linux it replaces a loopback address by another one of the
    machine, so a Ray that listens on loopback must also be joined within this context.
    """
    original = ray_constants.ENABLE_RAY_CLUSTER
    if ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR not in os.environ:
        ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = original


def make_token(path: Path) -> None:
    """Write a token if there is none; make an existing one private to its owner."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
            handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)  # appears complete, and never replaces another process's
            temporary.unlink()
        status = path.stat()
        if status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) & 0o077:
            path.chmod(0o600)
    except OSError as error:
        raise ConfigError(
            f"RAY_AUTH_TOKEN_PATH: the token of the local Ray cannot be stored in {path} "
            f"({error.strerror}). Name a file with a token there, or set {AUTH_MODE}=disabled.",
            param="RAY_AUTH_TOKEN_PATH",
        ) from None
