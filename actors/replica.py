"""One Serve replica = one engine with its HTTP server, its lifecycle and its placement in the cluster.

`build_app` is named in `ray_config.yaml`; Serve calls it once, on any node, with the file's `args`. The class
is plain: everything heavy (torch, FastAPI, the engine) is imported and created inside the replica's process,
and none of it is pickled. Models live in worker actors, even if there is only one: HTTP and scheduling then
never wait for a model's Python code, and a worker that dies takes no connection with it. The replica answers
requests only when the models are loaded and warm. A dead engine ends the process
(`actors/serve/replica_lifecycle.py`), and Serve replaces the replica together with its workers.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson
import ray
from ray import serve
from starlette.types import ASGIApp, Message, Scope

from ..cluster.config import EngineConfig
from ..cluster.errors import EngineDeadError
from ..cluster.fleet.autoscaling import ReplicaStatsMeter
from ..cluster.fleet.placement import REPLICA_CPUS, DeploymentDemand, NodeResources, Topology, check_feasible
from .gateway.deployment import Gateway, listen_host
from .gateway.replica_registry import DirectoryClient, ReplicaRecord, state_of
from .gateway.replica_set import ServedModel
from .haproxy.config_rewriter import GATEWAY
from .http.config.settings import ServerSettings, parse_replicas, wants_gateway
from .http.config.settings_mapping import split_models
from .http.generation.tracing import check_tracing
from .http.middleware.api_keys import refuse_written_keys, with_keys, without_gateway_settings
from .serve.autoscaling_policy import initial_replicas, scaling_options
from .serve.serve_hooks import listen_as_ray_does, proxy_listens, restore_print
from .system.event_loop import tune_gc
from .system.log_setup import Event, LogSettings, log_to_stderr
from .workers.base.ray_resources import check_resources, machine_resources, warn_of_this_machine

if TYPE_CHECKING:
    from fastapi import FastAPI

lifecycle_logger = logging.getLogger("manta.life")

DEPLOYMENT = "manta"
MAX_CONNECTIONS = 8192  # limit of HAProxy (haproxy/connections.py)
RESERVED_REQUESTS = 16  # besides those of an engine: model lists, files, tokenization
QUEUED_BATCHES = 5  # that may wait for a full engine if it has no limit of its own
# A stopping replica ends its streams within `shutdown_timeout`; Serve kills it after this margin.
SHUTDOWN_MARGIN_S = 15.0
SHUTDOWN_POLL_S = 0.2
HEALTH_CHECK_PERIOD_S = 0.5  # a dead process is noticed at the next one
FIRST_TOKENS = 24  # more than a block
HEALTH_CHECK_TIMEOUT_S = 15.0  # Serve replaces a process that fails three checks in a row
GATEWAY_CHECK_TIMEOUT_S = 5.0  # nothing blocks a gateway's event loop, unless it is stopped or hangs
RETRY_AFTER_S = 1
# Imported while the models load.
FRONT = (".http.app", ".observability.ray_metrics", ".serve.replica_lifecycle")


class Replica:
    """Constructed by Serve from the arguments that `build_app` binds."""

    async def __init__(self, config: EngineConfig, settings: ServerSettings) -> None:
        self._began_s = time.monotonic()
        from .engine.async_engine import AsyncEngine
        from .http.middleware.request_gate import Traffic
        from .serve.user_config import UserConfigFollower, UserConfigStore
        from .workers.ray_executor import RayExecutor

        replica = serve.get_replica_context().replica_id.unique_id
        name = settings.model_names(config.model)[0]
        restore_print()
        listen_as_ray_does()
        log_to_stderr(LogSettings(settings.log_format).of(process="replica", replica=replica, engine=name))
        self._config = config
        self._settings = settings
        self._traffic = Traffic()
        self._engine = AsyncEngine(config, RayExecutor)
        self._meter = ReplicaStatsMeter(config.max_num_seqs)
        await asyncio.gather(self._engine.start(), asyncio.to_thread(_import_front))
        self._loaded_s = time.monotonic()
        context = serve.get_replica_context()
        store = UserConfigStore(context.app_name, context.deployment)
        self._user_config = UserConfigFollower(self._engine, store)
        self._user_config_task = asyncio.create_task(
            self._user_config.work_until(lambda: self._traffic.draining)
        )

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after `__init__`. Raises EngineDeadError if a first request is not answered."""
        from .http.app import create_app, create_check_app
        from .observability.ray_metrics import RayMetrics

        name = self._settings.model_names(self._config.model)[0]
        replica = serve.get_replica_context().replica_id.unique_id
        app = create_app(
            self._engine,
            self._settings,
            replica=replica,
            mirror=RayMetrics(name, replica).update,
            traffic=self._traffic,
            echo_request_id=self._echoes_request_id,
            max_requests=max_ongoing_requests(self._config) + RESERVED_REQUESTS,
        )
        info = self._engine.info
        max_tokens = min(FIRST_TOKENS, info.max_model_len - 1)
        await self._engine.measure_steps()
        await run_first_request(create_check_app(self._engine, replica), max_tokens)
        await self._engine.end_warm_up()
        tune_gc()
        self._watch_for_end()
        lifecycle_logger.info(
            Event(
                "ready",
                {
                    "loading_s": round(self._loaded_s - self._began_s, 3),
                    "first_request_s": round(time.monotonic() - self._loaded_s, 3),
                },
            )
        )
        return app

    @property
    def _echoes_request_id(self) -> bool:
        """False where Serve's wrapped server returns request ids."""
        return proxy_listens()

    def _watch_for_end(self) -> None:
        from .serve.replica_lifecycle import ReplicaLifecycle
        from .serve.serve_hooks import RayServeHost

        loop, host = asyncio.get_running_loop(), RayServeHost()
        lifecycle = ReplicaLifecycle(self._engine, self._traffic, host, self._settings.shutdown_timeout)
        self._watching = asyncio.create_task(lifecycle.watch())
        host.on_sigterm(lambda: asyncio.run_coroutine_threadsafe(lifecycle.handle_sigterm(), loop))

    @property
    def is_alive(self) -> bool:
        return self._engine.is_alive

    @property
    def serves(self) -> bool:
        return self._engine.is_alive and not self._traffic.draining

    async def check_health(self) -> None:
        """Raise if the engine is dead; called by Serve after the start and then twice a second."""
        self._engine.check_health()

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:  # Any: YAML
        """Apply the deployment's `user_config`; called by Serve at the start and when it changes.

        Serve would end the replica on an exception, and a replacement would never start. So errors are logged
        and nothing changes.
        """
        await self._user_config.configure(user_config)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve every second if the number of replicas is automatic."""
        return self._meter.update(self._engine.stats()).as_dict()

    def __del__(self) -> None:
        """Called by Serve when the replica has drained."""
        if engine := getattr(self, "_engine", None):
            engine.close()


class RoutedReplica(Replica):
    """A replica that is reached through the gateway."""

    async def __init__(self, config: EngineConfig, settings: ServerSettings) -> None:
        from .gateway.replica_endpoint import ReplicaEndpoint

        await super().__init__(config, without_gateway_settings(settings))
        self._started_s = int(time.time())
        self._node = ray.get_runtime_context().get_node_id()
        directory = DirectoryClient(serve.get_replica_context().app_name)
        app = await self.__serve_build_asgi_app__()
        self._endpoint = ReplicaEndpoint(app, await asyncio.to_thread(listen_host), self._describe, directory)
        await self._endpoint.open()

    @property
    def _echoes_request_id(self) -> bool:
        """Always True: the gateway passes it on."""
        return True

    async def wake(self) -> None:
        """Do nothing: a gateway calls this, as a waiting call makes Serve start a replica."""

    async def __del__(self) -> None:  # type: ignore[override]  # Serve awaits what is to be awaited
        """Drain the direct endpoint, since Serve does not count its requests, then close."""
        if endpoint := getattr(self, "_endpoint", None):
            await endpoint.close()
        super().__del__()

    def _describe(self, url: str, token: str, beat: int) -> ReplicaRecord:
        stats, folder = self._engine.stats(), self._engine.page_folder
        return ReplicaRecord(
            replica=serve.get_replica_context().replica_id.unique_id,
            names=self._settings.model_names(self._config.model),
            url=url,
            token=token,
            beat=beat,
            state="draining" if self._traffic.draining else state_of(self._engine),
            running=stats.running - stats.background_running,
            waiting=stats.waiting - stats.background_waiting,
            max_requests=max_ongoing_requests(self._config),
            max_model_len=self._engine.info.max_model_len,
            created_s=self._started_s,
            kv_tier=None if folder is None else f"{self._node}:{folder.path}",
        )


def build_app(args: Mapping[str, Any]) -> serve.Application:  # Any: values come from YAML.
    """Return the Serve application of one endpoint: one engine, or a gateway for several or one that may
    sleep.

    `args`: fields of `EngineConfig` and of `ServerSettings` in one mapping; see `ray_config.yaml`. Raises
    ConfigError if a setting is unknown or wrong, PlacementError if the initial replicas do not fit into the
    running Ray cluster; nothing has been started.
    """
    refuse_written_keys(args, "everything under `args`")
    return build_application(split_models(args))


def build_application(
    models: Sequence[tuple[EngineConfig, ServerSettings]],
    machine: Mapping[str, float] | None = None,
    num_gateways: int = 1,
) -> serve.Application:
    """Return the application for parsed settings. Raises ConfigError, PlacementError.

    Args:
        machine: resources of a Ray that will be started; without it, and without Ray, only a warning says
            that the replicas do not fit here.
        num_gateways: started if there is a gateway. More than one need our HAProxy in front, which gives all
            requests to one of them.
    """
    models = [(config, with_keys(settings)) for config, settings in models]
    for _, settings in models:
        check_tracing(settings)
    _check_place(models, machine)
    if len(models) > 1 or any(wants_gateway(settings.replicas) for _, settings in models):
        return _gateway_app(models, num_gateways)
    ((config, settings),) = models
    wrap = serve.deployment(**deployment_options(config, settings))
    return wrap(serve.ingress()(Replica)).bind(config, settings)


def _gateway_app(
    models: Sequence[tuple[EngineConfig, ServerSettings]], num_gateways: int
) -> serve.Application:
    engines = [_engine(i, config, settings) for i, (config, settings) in enumerate(models)]
    served = [
        ServedModel(settings.model_names(config.model), sleeps=parse_replicas(settings.replicas)[0] == 0)
        for config, settings in models
    ]
    maximum = sum(
        max_ongoing_requests(config) * parse_replicas(settings.replicas)[1] for config, settings in models
    )
    wrap = serve.deployment(
        name=GATEWAY,
        num_replicas=num_gateways,
        # Excess requests are rejected by the gateway, which knows its replicas.
        max_ongoing_requests=_fence(maximum),
        # Longer than its replicas', because it forwards their last events.
        graceful_shutdown_timeout_s=models[0][1].shutdown_timeout + 2 * SHUTDOWN_MARGIN_S,
        graceful_shutdown_wait_loop_s=SHUTDOWN_POLL_S,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=GATEWAY_CHECK_TIMEOUT_S,
        ray_actor_options={"num_cpus": 0},  # also on a head node without CPUs for actors
    )
    return wrap(serve.ingress()(Gateway)).bind(served, models[0][1], engines)


def _engine(index: int, config: EngineConfig, settings: ServerSettings) -> serve.Application:
    wrap = serve.deployment(**deployment_options(config, settings, _deployment_name(index)))
    return wrap(RoutedReplica).bind(config, settings)


def _deployment_name(index: int) -> str:
    return DEPLOYMENT if index == 0 else f"{DEPLOYMENT}-{index + 1}"


def deployment_options(
    config: EngineConfig, settings: ServerSettings, name: str = DEPLOYMENT
) -> dict[str, Any]:  # Any: Serve's options.
    return {
        "name": name,
        # Excess requests are rejected by the replica in OpenAI's format; Serve would answer in plain text
        # where our wrapper is not installed.
        "max_ongoing_requests": _fence(max_ongoing_requests(config)),
        "max_queued_requests": max_ongoing_requests(config),
        "backpressure_config": {"status_code": 503, "retry_after_s": RETRY_AFTER_S},
        "graceful_shutdown_timeout_s": settings.shutdown_timeout + SHUTDOWN_MARGIN_S,
        "graceful_shutdown_wait_loop_s": SHUTDOWN_POLL_S,
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        "max_constructor_retry_count": 2,
        **placement_options(Topology.of(config, _largest_node())),
        **scaling_options(*parse_replicas(settings.replicas), settings.scaling),
    }


def _import_front() -> None:
    for name in FRONT:
        importlib.import_module(name, __package__)


def max_ongoing_requests(config: EngineConfig) -> int:
    """Return the maximum number of requests of a replica, including queued ones."""
    waiting = config.max_num_queued_reqs
    return config.max_num_seqs + (QUEUED_BATCHES * config.max_num_seqs if waiting is None else waiting)


def _fence(maximum: int) -> int:
    """Return Serve's limit, above accepted requests and those with unfinished bodies."""
    return max(2 * maximum + RESERVED_REQUESTS, MAX_CONNECTIONS)


def placement_options(topology: Topology) -> dict[str, Any]:  # Any: Serve's options.
    """Place the replica and its workers in one placement group on one node."""
    return {
        "ray_actor_options": {"num_cpus": REPLICA_CPUS},
        "placement_group_bundles": topology.replica_bundles(REPLICA_CPUS),
        "placement_group_strategy": "STRICT_PACK",
    }


def _check_place(
    models: Sequence[tuple[EngineConfig, ServerSettings]], machine: Mapping[str, float] | None
) -> None:
    """Check that the initial replicas fit."""
    demands: list[DeploymentDemand] = []
    for i, (config, settings) in enumerate(models):
        topology = Topology.of(config, _largest_node())
        bundles = topology.replica_bundles(REPLICA_CPUS)
        first = initial_replicas(parse_replicas(settings.replicas)[0])
        demands.append(DeploymentDemand(_deployment_name(i), topology, bundles, first))
    if ray.is_initialized():
        check_resources(demands)
    elif machine is not None:
        check_feasible(demands, [NodeResources(machine, machine)])
    else:
        warn_of_this_machine(demands)


def _largest_node() -> Mapping[str, float]:
    """Return the resources of the node with most GPUs; of this machine without Ray."""
    if not ray.is_initialized():
        return machine_resources()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return max(nodes, key=lambda resources: resources.get("GPU", 0.0), default={})


_READY_PATH = "/v1/completions"
_READY_NAME = "ready-check"


async def run_first_request(app: ASGIApp, max_tokens: int) -> None:
    """Stream one completion. Raises EngineDeadError if it does not complete."""
    body = {"prompt": [1], "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    body["store"] = False
    exchange = _Exchange(orjson.dumps(body))
    run = app(_scope(), exchange.receive, exchange.send)
    await asyncio.gather(run)  # in a task of its own: the caller's log lines do not get its request id
    if exchange.status != 200 or b'"error"' in exchange.answer or b"[DONE]" not in exchange.answer:
        start = exchange.answer[:500].decode(errors="replace")
        raise EngineDeadError(f"The first request failed with status {exchange.status}: {start}")


class _Exchange:
    def __init__(self, body: bytes) -> None:
        self._request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self.status = 0
        self.answer = b""

    async def receive(self) -> Message:
        if self._request:
            return self._request.pop()
        await asyncio.Event().wait()  # this client never disconnects
        raise AssertionError("it is never set")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.answer += message.get("body", b"")


def _scope() -> Scope:
    headers = [(b"content-type", b"application/json"), (b"x-request-id", _READY_NAME.encode())]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": _READY_PATH,
        "raw_path": _READY_PATH.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
    }
