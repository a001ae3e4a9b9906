"""One Serve replica = one engine: its HTTP front, its life and its place in the cluster.

`build_app` is what `ray_config.yaml` names; Serve calls it once, wherever it likes, with the file's `args`.
The class is plain: everything heavy (torch, FastAPI, the engine) is imported and made inside the replica's
process, and nothing of it is pickled. Models live in worker actors, also where there is only one: HTTP and
scheduling then never wait for a model's Python, and a worker that dies takes no connection with it. The
replica answers requests only when the models are loaded and warm. How it ends is
`actors/serve/replica_lifecycle.py`'s: a dead engine ends the process, and Serve replaces the replica together
with its workers.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from ..cluster.config import EngineConfig
from ..cluster.fleet.placement import DeploymentDemand, Topology
from ..cluster.fleet.replica_stats import ReplicaStatsMeter
from .gateway.deployment import GATEWAY, Gateway, door_host
from .gateway.registry_records import ReplicaRecord, state_of
from .gateway.replica_registry import DirectoryClient
from .gateway.replica_set import ServedModel
from .http.config.settings import ServerSettings, parse_replicas, split_models, wants_gateway
from .http.generation.tracing import check_tracing
from .http.middleware.api_keys import behind_gateway, refuse_written_keys, with_keys
from .serve.autoscaling_policy import initial_replicas, scaling_options
from .serve.serve_hooks import door_is_there, listen_as_ray_does, restore_print
from .system.gc_tuning import spare_streams
from .system.log_setup import Event, LogSettings, log_to_stderr
from .workers.base.ray_resources import check_room, machine_resources, warn_of_this_machine

if TYPE_CHECKING:
    from fastapi import FastAPI

life_logger = logging.getLogger("manta.life")

DEPLOYMENT = "manta"
REPLICA_CPUS = 1.0
MAX_CONNECTIONS = 8192  # that HAProxy takes (haproxy/connections.py)
RESERVED_REQUESTS = 16  # beside those of an engine: what models there are, files, tokens
QUEUED_BATCHES = 5  # that may wait for a full engine, where it has no limit of its own
# A replica that is to go ends its streams within `shutdown_timeout`; Serve kills one that has not gone then.
SHUTDOWN_MARGIN_S = 15.0
SHUTDOWN_LOOK_S = 0.2
HEALTH_CHECK_PERIOD_S = 0.5  # a process that has died is seen at the next one
FIRST_TOKENS = 24  # more than a block
HEALTH_CHECK_TIMEOUT_S = 15.0
RETRY_AFTER_S = 1
# What is imported beside the loading of the models.
FRONT = (".http.app", ".http.warmup_request", ".observability.ray_metrics", ".serve.replica_lifecycle")


class Replica:
    """The class behind the deployment; made by Serve from what `build_app` binds."""

    async def __init__(self, config: EngineConfig, settings: ServerSettings) -> None:
        self._began_s = time.monotonic()
        from .engine.async_engine import AsyncEngine
        from .http.middleware.inflight_requests import Traffic
        from .serve.canary_store import CanaryStore
        from .serve.drafter_canary import DrafterCanary
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
        board = CanaryStore(context.app_name, context.deployment)
        self._desk = DrafterCanary(self._engine, board, replica)
        self._trying = asyncio.create_task(self._desk.work_forever())

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve in the replica once `__init__` is through: the application it serves.

        Raises:
            EngineDeadError: it does not answer a first request.
        """
        from .http.app import create_app, create_check_app
        from .http.warmup_request import ask_first
        from .observability.ray_metrics import RayMetrics

        name = self._settings.model_names(self._config.model)[0]
        replica = serve.get_replica_context().replica_id.unique_id
        app = create_app(
            self._engine,
            self._settings,
            replica=replica,
            mirror=RayMetrics(name, replica),
            traffic=self._traffic,
            echo_request_id=self._echoes_request_id,
            max_requests=most_requests(self._config) + RESERVED_REQUESTS,
        )
        info = self._engine.info
        max_tokens = min(FIRST_TOKENS, info.max_model_len - 1)
        await ask_first(create_check_app(self._engine, replica), max_tokens)
        await self._engine.end_warm_up()
        spare_streams()
        self._live()
        life_logger.info(
            Event(
                "ready",
                loading_s=round(self._loaded_s - self._began_s, 3),
                first_request_s=round(time.monotonic() - self._loaded_s, 3),
            )
        )
        return app

    @property
    def _echoes_request_id(self) -> bool:
        """Where our door is not around Serve's own, Serve does."""
        return door_is_there()

    def _live(self) -> None:
        """Watch for the end from now on."""
        from .serve.replica_lifecycle import ReplicaLifecycle
        from .serve.serve_hooks import RayServeHost

        loop, place = asyncio.get_running_loop(), RayServeHost()
        life = ReplicaLifecycle(self._engine, self._traffic, place, self._settings.shutdown_timeout)
        self._watching = asyncio.create_task(life.watch())
        place.on_sigterm(lambda: asyncio.run_coroutine_threadsafe(life.obey_sigterm(), loop))

    @property
    def lives(self) -> bool:
        """Whether the engine lives."""
        return self._engine.is_alive

    @property
    def serves(self) -> bool:
        """Whether requests should come here: the engine lives, and the replica is not to go."""
        return self._engine.is_alive and not self._traffic.draining

    async def check_health(self) -> None:
        """Called by Serve when all else is done, then twice a second; raises when the engine is dead."""
        self._engine.check_health()

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:  # Any: YAML
        """Called by Serve with the deployment's `user_config` at the start, and when it changes.

        Serve would end the replica for what this raises, and one that takes a dead one's place never came. So
        what is wrong is refused in the log, and all stays: at the start, what the replica was built with.
        """
        await self._desk.configure(user_config)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve every second where the number of replicas follows the load
        (`actors/serve/autoscaling_policy.py`)."""
        return self._meter.figures(self._engine.stats()).as_dict()

    def __del__(self) -> None:
        """Called by Serve when the replica has drained."""
        if engine := getattr(self, "_engine", None):
            engine.close()


class RoutedReplica(Replica):
    """A replica behind a gateway."""

    async def __init__(self, config: EngineConfig, settings: ServerSettings) -> None:
        from .gateway.replica_endpoint import ReplicaEndpoint

        host = asyncio.create_task(asyncio.to_thread(door_host))
        await super().__init__(config, behind_gateway(settings))
        self._started_s = int(time.time())
        directory = DirectoryClient(serve.get_replica_context().app_name)
        app = await self.__serve_build_asgi_app__()
        self._door = ReplicaEndpoint(app, await host, self._describe, directory)
        await self._door.open()

    @property
    def _echoes_request_id(self) -> bool:
        """For the gateway, which says it on."""
        return True

    async def wake(self) -> None:
        """Called by a gateway that has no replica: that a call waits is what makes Serve start one."""

    async def __del__(self) -> None:  # type: ignore[override]  # Serve awaits what is to be awaited
        """Called by Serve when the replica is to go; it knows nothing of requests that came by the door."""
        if door := getattr(self, "_door", None):
            await door.close()
        super().__del__()

    def _describe(self, url: str, token: str, beat: int) -> ReplicaRecord:
        stats = self._engine.stats()
        return ReplicaRecord(
            replica=serve.get_replica_context().replica_id.unique_id,
            names=self._settings.model_names(self._config.model),
            url=url,
            token=token,
            beat=beat,
            state="draining" if self._traffic.draining else state_of(self._engine),
            running=stats.running - stats.background_running,
            waiting=stats.waiting - stats.background_waiting,
            max_requests=most_requests(self._config),
            max_model_len=self._engine.info.max_model_len,
            created_s=self._started_s,
        )


def build_app(args: Mapping[str, Any]) -> serve.Application:  # Any: values come from YAML.
    """The Serve application of one endpoint: an engine; or several, or one that may sleep, behind a gateway.

    Args:
        args: fields of `EngineConfig` and of `ServerSettings` in one mapping; see `ray_config.yaml`.

    Raises:
        ConfigError: a setting is unknown or wrong; nothing has been started.
        PlacementError: the replicas that there are to be at first have no room in the Ray that runs.
    """
    refuse_written_keys(args, "what stands under `args`")
    return build_application(split_models(args))


def build_application(models: Sequence[tuple[EngineConfig, ServerSettings]]) -> serve.Application:
    """`build_app` of settings that were read, in code or from flags.

    Raises:
        ConfigError: a file of keys cannot be read.
        PlacementError: as `build_app`.
    """
    models = [(config, with_keys(settings)) for config, settings in models]
    for _, settings in models:
        check_tracing(settings)
    _check_place(models)
    if len(models) > 1 or any(wants_gateway(settings.replicas) for _, settings in models):
        return _gateway_app(models)
    ((config, settings),) = models
    wrap = serve.deployment(**deployment_options(config, settings))
    return wrap(serve.ingress()(Replica)).bind(config, settings)


def _gateway_app(models: Sequence[tuple[EngineConfig, ServerSettings]]) -> serve.Application:
    """The application of several replicas or models."""
    engines = [_engine(i, config, settings) for i, (config, settings) in enumerate(models)]
    served = [
        ServedModel(settings.model_names(config.model), sleeps=parse_replicas(settings.replicas)[0] == 0)
        for config, settings in models
    ]
    most = sum(most_requests(config) * parse_replicas(settings.replicas)[1] for config, settings in models)
    wrap = serve.deployment(
        name=GATEWAY,
        # A request too many is refused by the gateway, which knows its replicas.
        max_ongoing_requests=_fence(most),
        # Longer than its replicas have: it hands on their last words.
        graceful_shutdown_timeout_s=models[0][1].shutdown_timeout + 2 * SHUTDOWN_MARGIN_S,
        graceful_shutdown_wait_loop_s=SHUTDOWN_LOOK_S,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        ray_actor_options={"num_cpus": 0},  # also on a head that gives out no CPUs
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
    """How Serve is to keep the replicas of one engine."""
    return {
        "name": name,
        # A request too many is refused by the replica, in OpenAI's shape; Serve would in plain text, where
        # our door is not around it.
        "max_ongoing_requests": _fence(most_requests(config)),
        "max_queued_requests": most_requests(config),
        "backpressure_config": {"status_code": 503, "retry_after_s": RETRY_AFTER_S},
        "graceful_shutdown_timeout_s": settings.shutdown_timeout + SHUTDOWN_MARGIN_S,
        "graceful_shutdown_wait_loop_s": SHUTDOWN_LOOK_S,
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        "max_constructor_retry_count": 2,
        **placement_options(Topology.of(config, _largest_node())),
        **scaling_options(*parse_replicas(settings.replicas), settings.scaling),
    }


def _import_front() -> None:
    for name in FRONT:
        importlib.import_module(name, __package__)


def most_requests(config: EngineConfig) -> int:
    """Requests that a replica takes, those that wait among them."""
    waiting = config.max_num_queued_reqs
    return config.max_num_seqs + (QUEUED_BATCHES * config.max_num_seqs if waiting is None else waiting)


def _fence(most: int) -> int:
    """Requests that Serve lets in: more than are taken, and than there are bodies that never come."""
    return max(2 * most + RESERVED_REQUESTS, MAX_CONNECTIONS)


def placement_options(topology: Topology) -> dict[str, Any]:  # Any: Serve's options.
    """The replica lives beside its workers, in one placement group on one node."""
    return {
        "ray_actor_options": {"num_cpus": REPLICA_CPUS},
        "placement_group_bundles": topology.replica_bundles(REPLICA_CPUS),
        "placement_group_strategy": "STRICT_PACK",
    }


def _check_place(models: Sequence[tuple[EngineConfig, ServerSettings]]) -> None:
    """A driver may build the application before it connects: where it will run is not known then."""
    demands: list[DeploymentDemand] = []
    for i, (config, settings) in enumerate(models):
        topology = Topology.of(config, _largest_node())
        bundles = topology.replica_bundles(REPLICA_CPUS)
        first = initial_replicas(parse_replicas(settings.replicas)[0])
        demands.append(DeploymentDemand(_deployment_name(i), topology, bundles, first))
    if ray.is_initialized():
        check_room(demands)
    else:
        warn_of_this_machine(demands)


def _largest_node() -> Mapping[str, float]:
    """Resources of the living node with most GPUs; of this machine when Ray is not running yet."""
    if not ray.is_initialized():
        return machine_resources()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return max(nodes, key=lambda resources: resources.get("GPU", 0.0), default={})
