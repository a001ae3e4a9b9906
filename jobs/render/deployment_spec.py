"""Derives the resources of a `ray_config.yaml`: engines, GPUs per engine, nodes.

The file is read with the code that serves it; all templates use these figures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...actors.http.config.settings import parse_replicas, split_models
from ...actors.http.middleware.api_keys import refuse_written_keys
from ...cluster.config import EngineConfig
from ...cluster.errors import PlacementError
from ...cluster.fleet.placement import Topology, total
from ..common.config_file import check_serve_config, read_yaml

DEPLOYMENT = "manta"  # equal to that of `actors/replica.py`, which imports Ray
NODE_GPUS = 8
PORT = 8000
Json = Mapping[str, Any]  # Any: YAML values


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of one model: GPUs of each (0: CPUs), and `beside` per node for a shared drafter."""

    args: Json
    config: EngineConfig
    gpus: int
    beside: int
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Deployment:
    """A Serve config and the nodes that it needs."""

    file: Path
    serve: Json
    engines: tuple[Engines, ...]
    node_gpus: int
    least_nodes: int
    most_nodes: int

    @property
    def name(self) -> str:
        name = str(self.serve["applications"][0].get("name") or DEPLOYMENT)
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or DEPLOYMENT

    @property
    def port(self) -> int:
        return int((self.serve.get("http_options") or {}).get("port", PORT))

    @property
    def host(self) -> str:
        return str((self.serve.get("http_options") or {}).get("host", "127.0.0.1"))

    def behind_a_service(self) -> dict[str, Any]:
        """Return the config for use behind a service: a proxy on every node, listening on all interfaces."""
        http = {**(self.serve.get("http_options") or {}), "host": "0.0.0.0", "port": self.port}
        return {**self.serve, "proxy_location": "EveryNode", "http_options": http}


def read_deployment(file: Path, node_gpus: int | None) -> Deployment:
    """Read and check a Serve config; `node_gpus` None is what the engines need, at most 8."""
    serve = _read(file)
    engines = tuple(found for application in serve["applications"] for found in _engines(application))
    wanted = sum(each.beside + each.gpus * each.most for each in engines)
    size = node_gpus if node_gpus is not None else min(wanted, NODE_GPUS)
    for each in engines:
        needs = each.gpus + each.beside
        if needs > size:
            raise PlacementError(
                f"tensor_parallel_size={each.config.tensor_parallel_size}: an engine of {each.config.model} "
                f"needs {needs} GPUs on one node, which has {size}. Raise --gpus-per-node, or lower "
                "tensor_parallel_size.",
                param="tensor_parallel_size",
            )
    least, most = (_count_nodes(engines, size, most=most) for most in (False, True))
    return Deployment(file.absolute(), serve, engines, size, least, most)


def _count_nodes(engines: tuple[Engines, ...], size: int, *, most: bool) -> int:
    """Return the nodes for all engines, placed largest first; without GPUs each engine has a node."""
    if not size:
        return sum(each.most if most else each.least for each in engines)
    free: list[int] = []
    models: list[set[int]] = []  # models with engines on each node, which share a drafter
    for number, each in sorted(enumerate(engines), key=lambda item: -item[1].gpus):
        for _ in range(each.most if most else each.least):
            needs = [each.gpus + each.beside * (number not in there) for there in models]
            at = next((i for i, room in enumerate(free) if room >= needs[i]), len(free))
            if at == len(free):
                free.append(size)
                models.append(set())
                needs.append(each.gpus + each.beside)
            free[at] -= needs[at]
            models[at].add(number)
    return len(free)


def _read(file: Path) -> Json:
    found = read_yaml(file)
    check_serve_config(found, file)
    return found


def _engines(application: Json) -> list[Engines]:
    """Return the engines of an application; `deployments:` overrides its settings, as in Serve."""
    args = application.get("args") or {}
    refuse_written_keys(args, "`args`")
    entries = args.get("models") or [{}]
    stated = application.get("deployments") or ()
    overrides = next((each for each in stated if each.get("name") == DEPLOYMENT), {})
    found: list[Engines] = []
    for entry, (config, server) in zip(entries, split_models(args), strict=True):
        topology = Topology.of(config, {"GPU": float(NODE_GPUS)})
        least, most = _replicas(overrides, parse_replicas(server.replicas))
        own = {**{key: value for key, value in args.items() if key != "models"}, **entry}
        gpus = round(total(topology.worker_bundles()).get("GPU", 0.0))
        beside = int(topology.shared_drafter) if gpus else 0
        found.append(Engines(own, config, gpus, beside, least, most))
    return found


def _replicas(overrides: Json, stated: tuple[int, int]) -> tuple[int, int]:
    scaling = overrides.get("autoscaling_config")
    if isinstance(scaling, Mapping):
        return int(scaling.get("min_replicas", 1)), int(scaling.get("max_replicas", 1))
    count = overrides.get("num_replicas")
    return (count, count) if isinstance(count, int) else stated
