"""Starting and stopping Ray Serve with one Manta application: the work behind `manta serve` and the demo.

Everything that can be wrong is checked before anything starts. A Ray that is running already (RAY_ADDRESS) is
used and left running; else one is started here and ended with the server. HAProxy stands in front unless
`plain_proxy` asks for Serve's own proxy; that is chosen by environment variables before Ray starts, so on an
existing cluster it is what its nodes were started with.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from ..actors.http.settings import split_models
from ..cluster.config import EngineConfig
from ..cluster.errors import ConfigError, PlacementError
from .client import await_ready
from .ray_session import join_or_start_ray, ray_address
from .stop import StopSignals

if TYPE_CHECKING:
    from ray.serve import Application

# Above the longest generation: a reload of HAProxy ends older streams after so long.
HAPROXY_HARD_STOP_S = 3600
POLL_S = 0.2
TELL_S = 5.0
# A replica without room: somebody may be about to end; an autoscaler needs minutes to bring a node.
ROOM_TIMEOUT_S = 60.0
NEW_NODE_TIMEOUT_S = 900.0
# Serve's own lines are for those who look for a fault in Serve; requests have a line of ours.
QUIET = {"log_level": "WARNING", "enable_access_log": False}

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where and how to serve.

    Attributes:
        host: address to listen on; 0.0.0.0 for all.
        port: TCP port; it must be free.
        plain_proxy: Serve's own proxy instead of HAProxy (several times the cost per token).
        name: of the Serve application.
        num_cpus: that a Ray started here may give out; None counts the machine's.
        ready_timeout_s: loading longer than that is a failure.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    plain_proxy: bool = False
    name: str = "manta"
    num_cpus: int | None = None
    ready_timeout_s: float = 1800.0

    @property
    def url(self) -> str:
        return f"http://{'127.0.0.1' if self.host in ('0.0.0.0', '::') else self.host}:{self.port}"


class Server:
    """A running application. Leave the `with` block, or call `stop`, to end it.

    Attributes:
        url: where it answers, without a path.
    """

    def __init__(
        self, options: ServeOptions, *, owns_ray: bool, environment: Mapping[str, str | None]
    ) -> None:
        self.url = options.url
        self._name = options.name
        self._owns_ray = owns_ray
        self._environment = environment
        self._deployed = False
        self._stopped = False

    def wait(self) -> NoReturn:
        """Block until a signal's handler raises: `Stopped`, as a rule."""
        while True:
            signal.pause()

    def deploy(self, app: Application) -> None:
        """Hand the application to Serve. From now on it is ours to end, also where it replaced another."""
        from ray import serve

        self._deployed = True
        target = serve.RunTarget(app, name=self._name, route_prefix="/", logging_config=QUIET)
        serve.run_many(
            [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
        )

    def stop(self) -> None:
        """End the application, and Ray too if it was started here. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        import ray
        from ray import serve

        if self._owns_ray:
            serve.shutdown()
            ray.shutdown()
        elif self._deployed:
            serve.delete(self._name)
        restore_environment(self._environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_server(
    args: Mapping[str, Any],  # Any: settings come from YAML or flags.
    options: ServeOptions,
    report: Report | None = None,
    signals: StopSignals | None = None,
) -> Server:
    """Serve one engine; returns when it answers.

    Args:
        args: as under `args:` in ray_config.yaml.
        options: where.
        report: told about progress, a line at a time; stderr if absent.
        signals: whoever may end it, also while it starts; Ray's own handlers stand back.

    Raises:
        ConfigError: a setting is wrong, the port is taken, or the models cannot be loaded.
    """
    report = report or _to_stderr
    models = split_models(args)
    existing, environment = ray_address(), {}
    if not existing:
        check_port(options.host, options.port)
        for config, settings in models:
            _check_models(config)
            if settings.batch_storage is not None:
                _check_storage(settings.batch_storage)
        environment = set_proxy_environment(plain_proxy=options.plain_proxy)
    report(f"connecting to Ray at {existing}" if existing else "starting Ray on this machine")
    owns_ray = join_or_start_ray(num_cpus=options.num_cpus, namespace="serve")
    server = Server(options, owns_ray=owns_ray, environment=environment)
    try:
        if signals is not None:
            signals.take_back()
        _deploy(server, args, options, report)
    except BaseException:
        server.stop()
        raise
    report(f"serving on {server.url}")
    return server


def check_port(host: str, port: int) -> None:
    """Raise ConfigError unless host:port can be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"port={port} on {host} cannot be used ({error}). Stop what listens there, or choose another "
                "with --port.",
                param="port",
            ) from None


def _check_models(config: EngineConfig) -> None:
    """Report what checkpoints and settings show to be wrong now, not from a replica's log."""
    from ..actors.targets.loading.plan import plan_load

    plan_load(config)


def _check_storage(where: str) -> None:
    """A folder of this machine must be there to be written, or to be made."""
    from ..actors.batch.storage import Storage

    storage = Storage.open(where, field="batch_storage")
    if not storage.local:
        return
    try:
        Path(storage.root).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=storage.root).close()
    except OSError as error:
        raise ConfigError(
            f"batch_storage: {where} cannot be written ({error.strerror}). Choose another folder with "
            "--batch-storage.",
            param="batch_storage",
        ) from None


def set_proxy_environment(*, plain_proxy: bool) -> dict[str, str | None]:
    """Choose the proxy for a Ray that is started from this process. What is set already stays.

    Returns:
        what was changed, with the values before, for `restore_environment`.
    """
    if plain_proxy:
        wanted = {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
    else:
        wanted = {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",  # the engine has a thread of its own
            "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(HAPROXY_HARD_STOP_S),
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # no other node's proxy must hear of it
            # Ports of their own, so that two clusters get along on one machine.
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        }
        wanted = {name: value for name, value in wanted.items() if name not in os.environ}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    return before


def restore_environment(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _deploy(server: Server, args: Mapping[str, Any], options: ServeOptions, report: Report) -> None:
    from ray import serve

    from ..actors.replica import build_app

    app = build_app(args)
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": options.host, "port": options.port},
        logging_config=QUIET,
    )
    report("loading the models")
    server.deploy(app)
    deadline_s = time.monotonic() + options.ready_timeout_s
    _await_running(options, deadline_s, report)
    # The proxy learns of the replica a moment after Serve calls it running.
    await_ready(options.url, deadline_s - time.monotonic())


def _await_running(options: ServeOptions, deadline_s: float, report: Report) -> None:
    from ray import serve

    begin_s = told_s = time.monotonic()
    while True:
        application = serve.status().applications.get(options.name)
        state = str(application.status.value) if application else "NOT_STARTED"
        if state == "RUNNING":
            return
        if state in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise ConfigError(f"The engine did not start: {_cause(application)}", param="model")
        now_s = time.monotonic()
        if now_s > deadline_s:
            raise ConfigError(
                f"The engine was not ready after {options.ready_timeout_s:.0f} s (state {state}). "
                "`serve status` and the replica's log tell more.",
                param="ready_timeout_s",
            )
        if now_s - told_s >= TELL_S:
            told_s = now_s
            report(f"{_what_it_does(options, now_s - begin_s)} ({now_s - begin_s:.0f} s)")
        time.sleep(POLL_S)


def _what_it_does(options: ServeOptions, waited_s: float) -> str:
    """A replica waits for its place in the cluster, then it loads."""
    from ..actors.replica import DEPLOYMENT
    from ..actors.workers.room import may_grow, waiting_for_room

    lacking = waiting_for_room(options.name, DEPLOYMENT)
    if lacking is None:
        return "loading the models"
    if waited_s > NEW_NODE_TIMEOUT_S or (waited_s > ROOM_TIMEOUT_S and not may_grow()):
        raise PlacementError(
            f"The replica found no room within {waited_s:.0f} s: it needs {lacking}. End what runs there, "
            "add a node, or use a smaller topology.",
            param="tensor_parallel_size",
        )
    return f"waiting for room: the replica needs {lacking}"


def _cause(application: Any) -> str:  # Any: Serve's status object.
    """The last line of the replica's traceback says it best."""
    deployments = application.deployments.values()
    text = "\n".join([application.message, *(deployment.message for deployment in deployments)])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("manta.cluster.errors.")]
    return ours[-1].partition(": ")[2] if ours else (lines[-1] if lines else "no reason was given")


def _to_stderr(line: str) -> None:
    print(f"manta: {line}", file=sys.stderr, flush=True)
