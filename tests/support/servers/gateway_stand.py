"""A gateway and its replicas in one process, with real sockets and engines; without Ray."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import uvicorn
from manta.actors.engine.async_engine import AsyncEngine
from manta.actors.engine.uniproc_executor import make_executor
from manta.actors.gateway.app import create_gateway
from manta.actors.gateway.replica_endpoint import ReplicaEndpoint
from manta.actors.gateway.replica_registry import Directory, DirectoryClient, ReplicaRecord, state_of
from manta.actors.gateway.replica_set import Fleet, ServedModel
from manta.actors.http.app import create_app
from manta.actors.http.config.settings import ServerSettings
from manta.actors.http.middleware.api_keys import without_gateway_settings
from manta.cluster.config import EngineConfig
from manta.cluster.engine.step_watchdog import StepWatchdog
from manta.cluster.errors import EngineDeadError
from manta.cluster.step.executor import Executor
from manta.cluster.step.scheduler_output import SchedulerOutput

from support.engines.passing_executor import PassingExecutor
from support.servers.server_probes import http_client


class LocalDirectory(DirectoryClient):
    """The registry without its actor."""

    def __init__(self) -> None:
        self.directory = Directory()

    async def heartbeat(self, record: ReplicaRecord) -> None:
        self.directory.heartbeat(record)

    async def deregister(self, replica: str) -> None:
        self.directory.deregister(replica)

    async def replicas(self) -> list[ReplicaRecord]:
        return self.directory.replicas()


class StandReplica:
    """An engine with a replica's endpoint."""

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        settings: ServerSettings,
        directory: LocalDirectory,
        max_requests: int,
        make: Callable[[EngineConfig], Executor] | None,
        watch: StepWatchdog | None,
    ) -> None:
        self.name = name
        self.engine = AsyncEngine(config, make or make_executor, watch)
        self._names = settings.model_names(config.model)
        self._settings = without_gateway_settings(settings)
        self._directory = directory
        self._max_requests = max_requests

    async def open(self) -> None:
        await self.engine.start()
        app = create_app(self.engine, self._settings, replica=self.name)
        self.door = ReplicaEndpoint(app, "127.0.0.1", self._describe, self._directory)
        await self.door.open()

    def _describe(self, url: str, token: str, beat: int) -> ReplicaRecord:
        stats = self.engine.stats()
        return ReplicaRecord(
            replica=self.name,
            names=self._names,
            url=url,
            token=token,
            beat=beat,
            state=state_of(self.engine),
            running=stats.running,
            waiting=stats.waiting,
            max_requests=self._max_requests,
            max_model_len=self.engine.info.max_model_len,
            created_s=1,
            kv_tier=None if (folder := self.engine.page_folder) is None else str(folder),
        )


class GatewayStand:
    """Replicas of the given models behind a gateway, on an event loop in a thread.

    Args:
        models: a replica for each; entries of one name are replicas of one model.
        makers: executors of the replicas instead of real ones.
        watches: watchdogs of the replicas' steps instead of real ones.
    """

    def __init__(
        self,
        models: Sequence[tuple[EngineConfig, ServerSettings]],
        *,
        makers: Sequence[Callable[[EngineConfig], Executor] | None] | None = None,
        max_requests: int = 64,
        watches: Sequence[StepWatchdog | None] | None = None,
    ) -> None:
        self.directory = LocalDirectory()
        self.replicas = [
            StandReplica(f"r{i}", config, settings, self.directory, max_requests, make, watch)
            for i, ((config, settings), make, watch) in enumerate(
                zip(models, makers or [None] * len(models), watches or [None] * len(models), strict=True)
            )
        ]
        names = dict.fromkeys(settings.model_names(config.model) for config, settings in models)
        self.fleet = Fleet([ServedModel(each) for each in names], self.directory)
        self._settings = models[0][1]
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.http = http_client(self.url)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Start a task on the stand's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a task there to its end."""
        return self.start(work).result(240)

    def __enter__(self) -> GatewayStand:
        self._thread.start()
        self.run(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(600)

    async def _open(self) -> None:
        await asyncio.gather(*(replica.open() for replica in self.replicas))
        app = create_gateway(self.fleet, self._settings)
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None))
        self._serving = asyncio.create_task(self._server._serve([self._socket]))
        while len(list(self.fleet.members)) < len(self.replicas):
            await asyncio.sleep(0.01)

    async def _close(self) -> None:
        self._server.should_exit = True
        await self._serving
        await asyncio.gather(*(replica.door.close() for replica in self.replicas))
        for replica in self.replicas:
            replica.engine.close()


class DyingExecutor(PassingExecutor):
    """A real executor that dies at its nth step."""

    def __init__(self, config: EngineConfig, num_steps: int) -> None:
        super().__init__(make_executor(config))
        self._left = num_steps

    def submit(self, plan: SchedulerOutput) -> None:
        self._left -= 1
        if self._left < 0:
            raise EngineDeadError("worker 1 (pid 4711) was killed by signal 9")
        super().submit(plan)


def dying_stand(config: EngineConfig, *num_steps: int) -> GatewayStand:
    """Start replicas that die one after the other, and one that does not; they are tried in this order."""
    models = [(config, ServerSettings(served_model_name="tiny"))] * (len(num_steps) + 1)
    makers = [partial(DyingExecutor, num_steps=count) for count in num_steps]
    return GatewayStand(models, makers=[*makers, None])


def replica_record(replica: str, beat: int, **more: Any) -> ReplicaRecord:  # Any: its fields
    facts: dict[str, Any] = {
        "names": ("m",),
        "url": "http://127.0.0.1:1",
        "token": "",
        "state": "ready",
        "running": 0,
        "waiting": 0,
        "max_requests": 2,
        "max_model_len": 1,
        "created_s": 1,
    }
    return ReplicaRecord(replica=replica, beat=beat, **{**facts, **more})
