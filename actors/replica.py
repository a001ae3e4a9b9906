"""One Serve replica = one engine: its HTTP front, its life and its place in the cluster.

`build_app` is what `ray_config.yaml` names; Serve calls it once, wherever it likes, with the file's `args`.
The class is plain: everything heavy (torch, FastAPI, the engine) is imported and made inside the replica's
process, and nothing of it is pickled. Models live in worker actors, also where there is only one: HTTP and
scheduling then never wait for a model's Python, and a worker that dies takes no connection with it. The
replica answers requests only when the models are loaded and warm.
A dead engine fails the health check, and Serve replaces the replica together with its workers.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from ..cluster.config import EngineConfig
from ..cluster.placement import Topology
from ..cluster.replica_figures import FiguresMeter
from .autoscaling import scaling_options
from .http.settings import ServerSettings, parse_replicas, split_settings
from .workers.room import check_room, machine_resources, warn_of_this_machine

if TYPE_CHECKING:
    from fastapi import FastAPI

DEPLOYMENT = "manta"
REPLICA_CPUS = 1.0
RESERVED_REQUESTS = 16
# A replica that is to go ends its streams first; only longer generations are cut.
GRACEFUL_SHUTDOWN_S = 900.0
HEALTH_CHECK_PERIOD_S = 2.0
HEALTH_CHECK_TIMEOUT_S = 15.0
RETRY_AFTER_S = 1


class Replica:
    """The class behind the deployment; made by Serve from what `build_app` binds."""

    async def __init__(self, config: EngineConfig, settings: ServerSettings) -> None:
        from .engine import AsyncEngine
        from .workers.ray_executor import RayExecutor

        _log_to_stderr()
        self._config = config
        self._settings = settings
        self._engine = AsyncEngine(config, RayExecutor)
        self._meter = FiguresMeter(config.max_num_seqs)
        await self._engine.start()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve in the replica once `__init__` is through: the application it serves."""
        from .http.app import create_app
        from .ray_metrics import RayMetrics

        name = self._settings.model_names(self._config.model)[0]
        replica = serve.get_replica_context().replica_id.unique_id
        return create_app(
            self._engine,
            self._settings,
            replica=replica,
            mirror=RayMetrics(name, replica),
            echo_request_id=False,  # Serve's own middleware does
        )

    async def check_health(self) -> None:
        """Called by Serve every few seconds; raises when the engine or a worker is gone."""
        self._engine.check_health()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve every second where the number of replicas follows the load (`autoscaling.py`)."""
        return self._meter.figures(self._engine.stats()).as_dict()

    def __del__(self) -> None:
        """Called by Serve when the replica has drained."""
        if engine := getattr(self, "_engine", None):
            engine.close()


def build_app(args: Mapping[str, Any]) -> serve.Application:  # Any: values come from YAML.
    """The Serve application of one engine.

    Args:
        args: fields of `EngineConfig` and of `ServerSettings` in one mapping; see `ray_config.yaml`.

    Raises:
        ConfigError: a setting is unknown or wrong; nothing has been started.
        PlacementError: one replica has no room in the Ray that runs. (How many there are to be is Serve's.)
    """
    config, settings = split_settings(args)
    topology = Topology.of(config, _largest_node())
    _check_place(topology)
    wrap = serve.deployment(
        name=DEPLOYMENT,
        max_ongoing_requests=max_ongoing_requests(config),
        max_queued_requests=4 * config.max_num_seqs,
        backpressure_config={"status_code": 503, "retry_after_s": RETRY_AFTER_S},
        graceful_shutdown_timeout_s=GRACEFUL_SHUTDOWN_S,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        max_constructor_retry_count=2,
        **placement_options(topology),
        **scaling_options(*parse_replicas(settings.replicas), settings.scaling),
    )
    return wrap(serve.ingress()(Replica)).bind(config, settings)


def max_ongoing_requests(config: EngineConfig) -> int:
    """Requests that Serve lets into a replica: a full engine and as many waiting.

    Where the engine has a limit of its own it must be met first: it answers in OpenAI's shape, Serve (beyond
    `max_queued_requests`) in plain text. Health checks and scrapes come through the same gate: some are
    reserved for them.
    """
    waiting = max(config.max_num_seqs, config.max_num_queued_reqs or 0)
    return config.max_num_seqs + waiting + RESERVED_REQUESTS


def placement_options(topology: Topology) -> dict[str, Any]:  # Any: Serve's options.
    """The replica lives beside its workers, in one placement group on one node."""
    return {
        "ray_actor_options": {"num_cpus": REPLICA_CPUS},
        "placement_group_bundles": topology.replica_bundles(REPLICA_CPUS),
        "placement_group_strategy": "STRICT_PACK",
    }


def _check_place(topology: Topology) -> None:
    """A driver may build the application before it connects: where it will run is not known then."""
    bundles = topology.replica_bundles(REPLICA_CPUS)
    if ray.is_initialized():
        check_room(topology, bundles, DEPLOYMENT)
    else:
        warn_of_this_machine(topology, bundles)


def _largest_node() -> Mapping[str, float]:
    """Resources of the living node with most GPUs; of this machine when Ray is not running yet."""
    if not ray.is_initialized():
        return machine_resources()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return max(nodes, key=lambda resources: resources.get("GPU", 0.0), default={})


def _log_to_stderr() -> None:
    """Ray keeps a replica's stderr; without a handler our lines would be dropped."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("manta")
    ours.handlers = [handler]
    ours.setLevel(logging.INFO)
    ours.propagate = False
