"""Starts and stops Ray Serve with one Manta application, for `manta serve` and the demo.

Settings are checked before anything starts. A running Ray (RAY_ADDRESS) is used and left running; otherwise
one is started here and ended with the server. HAProxy is in front unless `plain_proxy` selects Serve's own
proxy; that is chosen by environment variables before Ray starts (`ray_environment.py`), so an existing
cluster keeps what its nodes were started with. `drain` lets running requests end and refuses new ones; `stop`
ends the application.
"""

from __future__ import annotations

import importlib
import logging
import resource
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from ...actors.http.config.settings import ServerSettings
from ...actors.http.config.settings_mapping import split_models
from ...actors.http.middleware.api_keys import metrics_key, with_keys
from ...actors.system.wait_messages import Report, StderrReport, Wait, counting
from ...cluster.errors import ConfigError, MantaError, PlacementError, brief_name
from ..common.http_client import ServerClient, await_ready, num_requests
from ..common.options import ServeOptions
from ..common.progress import in_thread
from ..common.ray_session import dead_ray_process, join_or_start_ray, ray_address
from ..common.server_process import OWN_LINE
from ..common.stop_signals import Stopped, StopSignals
from .preflight import (
    check_open_files,
    check_port,
    check_storage,
    example_request,
    find_checkpoints,
    open_connections,
    warning_of_exposure,
)
from .preloaded_imports import Models, ServeWithoutPandas, check_models, fork_server
from .ray_environment import ServeEnvironment

if TYPE_CHECKING:
    from ray.serve import Application

    from ...actors.workers.base.fork_server import ForkServer

_T = TypeVar("_T")
POLL_S = 0.1
STATUS_POLL_S = 1.0
RESOURCES_POLL_S = 2.0
ANSWER_TIMEOUT_S = 5.0
PROXY_RETRY_S = 5.0
RAY_POLL_S = 0.5  # of Ray's processes
# Serve removes a replica shortly after its last request has ended.
DRAIN_MARGIN_S = 20.0
# For a replica that does not fit: other work may be ending; an autoscaler needs minutes to add a node.
ROOM_TIMEOUT_S = 60.0
NEW_NODE_TIMEOUT_S = 900.0
# Serve's own log lines only help to debug Serve; Manta logs each request.
QUIET = {"log_level": "WARNING", "enable_access_log": False}


NUM_GATEWAYS = 2  # the second one takes over at once if the first dies; it costs its memory


class _RayLostError(Exception):
    pass


class Server:
    """A running application. Leave the `with` block, or call `stop`, to end it."""

    def __init__(
        self,
        options: ServeOptions,
        settings: ServerSettings,
        environment: ServeEnvironment | None,
        forks: ForkServer | None,
        *,
        report: Report,
    ) -> None:
        self.url = options.url
        self._forks = forks
        self._port = options.port
        self._name = options.name
        self._settings = settings
        self._environment = environment
        self.owns_ray = False
        self._report = report
        self._deployed = False
        self._stopped = False
        self._ray_is_lost = False

    def serve_until_stopped(self) -> None:
        try:
            self._wait()
        except Stopped as stopped:
            self.drain(str(stopped))

    def _wait(self) -> NoReturn:
        while True:
            time.sleep(RAY_POLL_S)
            if self.owns_ray and (lost := dead_ray_process()) is not None:
                self._ray_is_lost = True
                raise MantaError(
                    f"Ray's {lost} has ended, and with it this server. Start it again; the system's log may "
                    "name the cause (out of memory?)."
                )

    def drain(self, why: str) -> None:
        """Refuse new requests. Running ones have `shutdown_timeout`, and then get an error event."""
        try:
            self._drain(why)
        except _RayLostError as lost:
            self._report(f"{lost}: running requests have ended with it")

    def _drain(self, why: str) -> None:
        from ray import serve

        began_s = time.monotonic()
        allowed_s = self._settings.shutdown_timeout
        running = num_requests(self.url, metrics_key(self._settings))
        self._report(
            f"{why}: no new requests; {running} running may continue for {allowed_s:g} s "
            "(a second signal ends everything immediately)"
        )
        if self._environment is not None and self._environment.haproxy is not None:
            self._environment.haproxy.refuse_requests()
        self._ask(lambda: serve.delete(self._name, _blocking=False))
        deadline_s = began_s + allowed_s + DRAIN_MARGIN_S
        with counting("draining", self._report, begin=False):
            while self._name in self._ask(serve.status).applications and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
        if time.monotonic() - began_s >= allowed_s:
            self._await_proxy_retries()
        self._deployed = False
        self._report(f"drained in {time.monotonic() - began_s:.1f} s")

    def _ask(self, call: Callable[[], _T]) -> _T:
        """Return what Serve answers. Raises _RayLostError, which Serve itself would notice after a minute.

        A signal to a process group, as `timeout` sends it, ends Ray's processes at the same time.
        """
        answer = in_thread(call)
        while not answer.done():
            if self.owns_ray and (lost := dead_ray_process()) is not None:
                self._ray_is_lost = True
                raise _RayLostError(f"Ray's {lost} has ended")
            time.sleep(POLL_S)
        return answer.result()

    def _await_proxy_retries(self) -> None:
        """Wait while HAProxy retries, on other servers, requests that were refused before they began."""
        deadline_s = time.monotonic() + PROXY_RETRY_S
        while open_connections(self._port) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)

    def deploy(self, app: Application) -> None:
        """Hand the application to Serve. From now on `stop` ends it, also where it replaced another."""
        from ray import serve

        self._deployed = True
        target = serve.RunTarget(app, name=self._name, route_prefix="/", logging_config=QUIET)
        serve.run_many(
            [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
        )

    def stop(self, *, at_once: bool = False) -> None:
        """End the application, and Ray too if it was started here. Idempotent.

        `at_once`: nothing is served yet, and Ray does not wait for replicas that still load.
        """
        if self._stopped:
            return
        self._stopped = True
        if self.owns_ray or self._deployed:
            self._stop_serving(at_once)
        if self._forks is not None:
            self._forks.close()
        if self._environment is not None:
            self._environment.restore()

    def _stop_serving(self, at_once: bool) -> None:
        import ray
        from ray import serve
        from ray._private import worker

        if not self.owns_ray:
            serve.delete(self._name)
            return
        worker._worker_logs_enabled = False  # Ray would report that Serve's controller has ended
        if at_once:  # threads that wait for Serve would log tracebacks; the next `ray.init` undoes it
            logging.getLogger("ray").setLevel(logging.CRITICAL)
        elif not self._ray_is_lost:
            serve.shutdown()
        ray.shutdown()
        worker._worker_logs_enabled = True

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
    """Serve one engine; returns when it answers. Wrong settings raise ConfigError before anything starts.

    `args` are as under `args:` in ray_config.yaml, with keys. `signals` are reinstalled after Ray's handlers.
    """
    report = report or StderrReport(OWN_LINE)
    models = [(config, with_keys(settings)) for config, settings in split_models(args)]
    config, settings = models[0]
    existing, environment, forks = ray_address(), None, None
    if not existing:
        _check_this_machine(options, models)
        environment = ServeEnvironment(plain_proxy=options.plain_proxy, probe_port=options.probe_port)
        forks = fork_server(models)
    if (warning := warning_of_exposure(options.host, settings)) is not None:
        report(warning)
    server = Server(options, settings, environment, forks, report=report)
    try:
        imported = in_thread(_import)  # takes seconds, during which Ray or the checkpoints are waited for
        if existing:
            with counting(f"connecting to Ray at {existing}", report):
                _connect_to_ray(options, forks)
            imported.result()  # two threads that import ray.serve at once may see parts of it
            _check_address(options)
            app = _application(models)
        else:
            with counting("checking the checkpoints", report, begin=False):
                check_models(models, report, forks)
            app = _application(models, options)
            with counting("starting Ray on this machine", report):
                server.owns_ray = _connect_to_ray(options, forks)
        if signals is not None:
            signals.reinstall()
        _deploy(server, app, options, report)
    except BaseException:
        server.stop(at_once=True)
        raise
    report(f"serving on {server.url}" + (f"; live page: {server.url}/ui" if settings.ui else ""))
    if not existing:
        report(f"try it: {example_request(server.url, config, settings)}")
    return server


def _check_this_machine(options: ServeOptions, models: Models) -> None:
    """Raise ConfigError or CheckpointError for what would fail only after Ray was started here."""
    check_open_files()
    check_port(options.host, options.port)
    _check_probe_port(options)
    for config, _ in models:
        find_checkpoints(config)
    _, settings = models[0]
    if settings.batch_storage is not None:
        check_storage(settings.batch_storage)


def _import() -> None:
    ServeWithoutPandas.install()
    importlib.import_module("...actors.replica", __package__)


def _application(models: Models, options: ServeOptions | None = None) -> Application:
    """Return the application, for the Ray that is connected, or for one that `options` will start here."""
    from ...actors.replica import build_application, machine_resources

    if options is None:  # HAProxy is not known there, and there may be several
        return build_application(models)
    num_gateways = 1 if options.plain_proxy else NUM_GATEWAYS
    return build_application(models, machine_resources(options.num_cpus), num_gateways)


def _connect_to_ray(options: ServeOptions, forks: ForkServer | None) -> bool:
    """Join the Ray that runs, or start one here; return whether it was started. `forks` makes its workers."""
    return join_or_start_ray(
        num_cpus=options.num_cpus,
        worker_command=() if forks is None else forks.worker_command(),
        namespace="serve",
        logging_level=logging.INFO if options.verbose else logging.ERROR,
    )


def _check_probe_port(options: ServeOptions) -> None:
    if options.probe_port is None:
        return
    if options.plain_proxy or options.probe_port == options.port:
        raise ConfigError(
            f"probe_port={options.probe_port} must differ from --port, and needs HAProxy: choose another "
            "number, and leave out --plain-proxy.",
            param="probe_port",
        )
    check_port(options.host, options.probe_port, "probe_port")


def _deploy(server: Server, app: Application, options: ServeOptions, report: Report) -> None:
    from ray import serve

    logging.getLogger(serve.__name__).setLevel(logging.WARNING)
    # Returns when the proxies are up; the replicas load meanwhile.
    proxies = in_thread(
        lambda: serve.start(
            proxy_location="HeadOnly",
            http_options={"host": options.host, "port": options.port},
            logging_config=QUIET,
        )
    )
    with counting("starting Ray Serve", report):
        _await_controller(proxies)
    server.deploy(app)
    deadline_s = time.monotonic() + options.ready_timeout_s
    with counting("loading the models", report) as wait:
        _await_running(options, deadline_s, wait, proxies, replaces=not server.owns_ray)
        _check_proxies(proxies)
    # The proxy knows the replica shortly after Serve reports it as running.
    await_ready(options.url, deadline_s - time.monotonic())


def _check_address(options: ServeOptions) -> None:
    """Raise ConfigError if this Ray serves at another address: it has one, which cannot be changed."""
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return
    host, port = client.http_config.host, client.http_config.port
    if (host, port) != (options.host, options.port):
        raise ConfigError(
            f"port={options.port}: this Ray serves at {host}:{port} already, and has one address. Use --host "
            f"{host} --port {port} (the model there is replaced), shut down its Serve (serve shutdown), or "
            "leave RAY_ADDRESS out for a Ray of its own.",
            param="port",
        )


def _await_controller(start: Future[None]) -> None:
    """Wait for Serve's controller, which takes applications before any proxy is up."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    while not start.done():
        try:
            ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        except ValueError:
            time.sleep(POLL_S)
        else:
            return
    _check_proxies(start)


def _check_proxies(start: Future[None]) -> None:
    from ray.exceptions import RayError

    try:
        start.result()
    except RayError as error:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise ConfigError(
            f"Ray Serve's proxy did not start ({_last_line(error)}). Its log is in Ray's session folder. "
            f"It may open {files} files (ulimit -n): if that is too few for HAProxy, raise the limit, or "
            "use --plain-proxy.",
            param="plain_proxy",
        ) from error


def _await_running(
    options: ServeOptions, deadline_s: float, wait: Wait, proxies: Future[None], *, replaces: bool
) -> None:
    """Wait until all replicas serve, or raise what the proxies raised; `wait` shows the replicas' state.

    A status request takes CPU time of Serve's controller, which starts the replicas. So there are few until
    something answers at the address, which an earlier application may do if `replaces`.
    """
    begin_s = looked_s = requested_s = time.monotonic()
    answers, state = replaces, "NOT_STARTED"
    with ServerClient(options.url, ANSWER_TIMEOUT_S) as client:
        while True:
            now_s = time.monotonic()
            answers = answers or client.is_ready()
            if answers or now_s - requested_s >= STATUS_POLL_S:
                requested_s = now_s
                state = _state(options)
                if state == "RUNNING":
                    return
            if now_s > deadline_s:
                raise ConfigError(
                    f"The engine was not ready after {options.ready_timeout_s:.0f} s (state {state}). "
                    "See `serve status` and the replica's log.",
                    param="ready_timeout_s",
                )
            if proxies.done():
                _check_proxies(proxies)
            if now_s - looked_s >= RESOURCES_POLL_S:
                looked_s = now_s
                if (what := _loading_state(options, now_s - begin_s)) != wait.what:
                    wait.set_stage(what)
            time.sleep(POLL_S)


def _state(options: ServeOptions) -> str:
    from ray import serve

    application = serve.status().applications.get(options.name)
    state = str(application.status.value) if application else "NOT_STARTED"
    if state in ("DEPLOY_FAILED", "UNHEALTHY"):
        raise ConfigError(f"The engine did not start: {_cause(application)}", param="model")
    return state


def _loading_state(options: ServeOptions, waited_s: float) -> str:
    """Return the replica's state; PlacementError if it has waited too long for resources."""
    from ...actors.replica import DEPLOYMENT
    from ...actors.workers.base.ray_resources import describe_missing_resources, may_grow

    lacking = describe_missing_resources(options.name, DEPLOYMENT)
    if lacking is None:
        return "loading the models"
    if waited_s > NEW_NODE_TIMEOUT_S or (waited_s > ROOM_TIMEOUT_S and not may_grow()):
        raise PlacementError(
            f"The replica did not fit within {waited_s:.0f} s: it needs {lacking}. Stop other work there, "
            "add a node, or use a smaller topology.",
            param="tensor_parallel_size",
        )
    return f"waiting for resources: the replica needs {lacking}"


def _cause(application: Any) -> str:  # Any: Serve's status object.
    deployments = application.deployments.values()
    text = "\n".join([application.message, *(deployment.message for deployment in deployments)])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("manta.cluster.errors.")]
    return ours[-1].partition(": ")[2] if ours else (lines[-1] if lines else "no reason was given")


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return brief_name(lines[-1] if lines else type(error).__name__).rstrip(".")
