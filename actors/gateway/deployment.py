"""The Serve application of several engines: a gateway in front, and replicas that have a door of their own.

`gateway_app` is `build_app`'s part where one replica of one model is not all. Serve starts, watches, scales
and ends both kinds of deployments; requests it hands to gateways alone.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from ...cluster.config import EngineConfig
from ..http.settings import ServerSettings, parse_replicas
from ..http.traffic import Traffic
from ..replica import (
    DEPLOYMENT,
    HEALTH_CHECK_PERIOD_S,
    HEALTH_CHECK_TIMEOUT_S,
    RESERVED_REQUESTS,
    SHUTDOWN_LOOK_S,
    SHUTDOWN_MARGIN_S,
    Replica,
    deployment_options,
    log_to_stderr,
    max_ongoing_requests,
)
from ..replica_life import LOOK_S
from ..serve_place import ServePlace
from ..workers.room import may_grow
from .directory import DirectoryClient
from .fleet import Fleet, ServedModel
from .records import ReplicaRecord, state_of

if TYPE_CHECKING:
    from fastapi import FastAPI

GATEWAY = "gateway"


class RoutedReplica(Replica):
    """A replica behind a gateway."""

    async def __init__(self, config: EngineConfig, settings: ServerSettings) -> None:
        from .door import Door

        host = asyncio.create_task(asyncio.to_thread(_door_host))
        # The gateway asks for keys and answers browsers; its replicas need not do so again.
        await super().__init__(config, replace(settings, api_key=None, allowed_origins=()))
        self._started_s = int(time.time())
        directory = DirectoryClient(serve.get_replica_context().app_name)
        app = await self.__serve_build_asgi_app__()
        self._door = Door(app, await host, self._describe, directory)
        await self._door.open()

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
            max_requests=max_ongoing_requests(self._config) - RESERVED_REQUESTS,
            max_model_len=self._engine.info.max_model_len,
            created_s=self._started_s,
        )


class Gateway:
    """The class behind the ingress deployment.

    Args:
        models: behind it.
        settings: of the endpoint.
        engines: the models' deployments, in the same order. (That Serve is given them here is what makes them
            part of the application.)
    """

    async def __init__(
        self, models: Sequence[ServedModel], settings: ServerSettings, engines: Sequence[DeploymentHandle]
    ) -> None:
        log_to_stderr()
        self._settings = settings
        self._traffic = Traffic()
        self._engines = dict(zip(models, engines, strict=True))
        directory = DirectoryClient(serve.get_replica_context().app_name)
        self._fleet = Fleet(models, directory, self._wake)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve once `__init__` is through."""
        from .app import create_gateway

        self._watching = asyncio.create_task(self._watch(ServePlace()))
        return create_gateway(
            self._fleet,
            self._settings,
            gateway=serve.get_replica_context().replica_id.unique_id,
            traffic=self._traffic,
            echo_request_id=False,  # Serve does
        )

    async def _watch(self, place: ServePlace) -> None:
        """Until Serve, or a SIGTERM, asks it to go: then nothing is waited for that may not come."""
        loop = asyncio.get_running_loop()
        place.on_sigterm(lambda: asyncio.run_coroutine_threadsafe(_leave(place), loop))
        while not place.is_leaving:
            await asyncio.sleep(LOOK_S)
        self._traffic.draining = True

    async def _wake(self, model: ServedModel) -> None:
        await self._engines[model].wake.remote()


def gateway_app(models: Sequence[tuple[EngineConfig, ServerSettings]]) -> serve.Application:
    """The application of several replicas or models.

    Raises:
        PlacementError: a replica has no room in the Ray that runs.
    """
    engines = [_engine(i, config, settings) for i, (config, settings) in enumerate(models)]
    served = [
        ServedModel(settings.model_names(config.model), sleeps=parse_replicas(settings.replicas)[0] == 0)
        for config, settings in models
    ]
    wrap = serve.deployment(
        name=GATEWAY,
        # A request too many is refused by the gateway, which knows its replicas; this is only a fence.
        max_ongoing_requests=2 * sum(_most_requests(*model) for model in models) + RESERVED_REQUESTS,
        # Longer than its replicas have: it hands on their last words.
        graceful_shutdown_timeout_s=models[0][1].shutdown_timeout + 2 * SHUTDOWN_MARGIN_S,
        graceful_shutdown_wait_loop_s=SHUTDOWN_LOOK_S,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        ray_actor_options={"num_cpus": 0},  # also on a head that gives out no CPUs
    )
    return wrap(serve.ingress()(Gateway)).bind(served, models[0][1], engines)


async def _leave(place: ServePlace) -> None:
    await place.leave()
    os._exit(0)


def _engine(index: int, config: EngineConfig, settings: ServerSettings) -> serve.Application:
    name = DEPLOYMENT if index == 0 else f"{DEPLOYMENT}-{index + 1}"
    wrap = serve.deployment(**deployment_options(config, settings, name))
    return wrap(RoutedReplica).bind(config, settings)


def _most_requests(config: EngineConfig, settings: ServerSettings) -> int:
    return max_ongoing_requests(config) * parse_replicas(settings.replicas)[1]


def _door_host() -> str:
    """Loopback where all nodes are this machine and will be; else the node's address."""
    address = ray.util.get_node_ip_address()
    elsewhere = any(node["Alive"] and node["NodeManagerAddress"] != address for node in ray.nodes())
    return address if elsewhere or may_grow() else "127.0.0.1"
