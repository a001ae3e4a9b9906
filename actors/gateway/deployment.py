"""The ingress deployment of Ray Serve, which starts, watches, scales and stops gateways and engines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from ..http.config.settings import ServerSettings
from ..http.middleware.request_gate import Traffic
from ..serve.replica_lifecycle import POLL_S
from ..serve.serve_hooks import RayServeHost, listen_as_ray_does, proxy_listens, restore_print
from ..system.event_loop import tune_gc
from ..system.log_setup import LogSettings, log_to_stderr
from ..system.orphan_watch import end_with_raylet
from ..workers.base.ray_resources import may_grow
from .replica_registry import DirectoryClient
from .replica_set import Fleet, ServedModel

if TYPE_CHECKING:
    from fastapi import FastAPI


class Gateway:
    """`engines`: the models' deployments, in order. Passing them makes them part of the Serve application."""

    async def __init__(
        self, models: Sequence[ServedModel], settings: ServerSettings, engines: Sequence[DeploymentHandle]
    ) -> None:
        replica = serve.get_replica_context().replica_id.unique_id
        restore_print()
        listen_as_ray_does()
        log_to_stderr(LogSettings(settings.log_format).of(process="gateway", replica=replica))
        self._settings = settings
        self._traffic = Traffic()
        end_with_raylet(lambda: not self._traffic.open)
        self._engines = dict(zip(models, engines, strict=True))
        directory = DirectoryClient(serve.get_replica_context().app_name)
        self._fleet = Fleet(models, directory, self._wake)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Build the application; called by Serve after `__init__`."""
        from .app import create_gateway

        self._watching = asyncio.create_task(self._watch(RayServeHost()))
        app = create_gateway(
            self._fleet,
            self._settings,
            gateway=serve.get_replica_context().replica_id.unique_id,
            traffic=self._traffic,
            echo_request_id=proxy_listens(),
        )
        tune_gc()
        return app

    async def _watch(self, host: RayServeHost) -> None:
        """Mark the gateway as draining when Serve or a SIGTERM stops this process."""
        loop = asyncio.get_running_loop()
        host.on_sigterm(lambda: asyncio.run_coroutine_threadsafe(_deregister(host), loop))
        while not host.is_stopping:
            await asyncio.sleep(POLL_S)
        self._traffic.draining = True

    async def _wake(self, model: ServedModel) -> None:
        await self._engines[model].wake.remote()


async def _deregister(host: RayServeHost) -> None:
    await host.exit()
    os._exit(0)


def listen_host() -> str:
    """Return loopback if this machine stays the only node, else the node's address.

    Called when the models are loaded, so Ray's monitor has reported by then, if it does at all.
    """
    address = ray.util.get_node_ip_address()
    elsewhere = any(node["Alive"] and node["NodeManagerAddress"] != address for node in ray.nodes())
    return address if elsewhere or may_grow(wait_s=0.0) else "127.0.0.1"
