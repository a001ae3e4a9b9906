"""Fills the templates of `manta render` (`templates/`) with the needs of a Serve config.

KubeRay gives Ray's containers /dev/shm, which step plans use, and probes of the raylet. The templates add
what it cannot know: GPUs, HAProxy's environment, and the readiness of a node's proxy. The Dockerfile's image
is Ray's, with Manta's requirements at the versions that are installed here.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from packaging.requirements import Requirement

from ...actors.http.config.settings import parse_replicas
from ...actors.http.config.settings_mapping import split_models
from ...actors.http.middleware.api_keys import refuse_written_keys
from ...cluster.config import EngineConfig
from ...cluster.errors import ConfigError, PlacementError
from ...cluster.fleet.placement import Bundle, Topology, format_resources, total
from ...cluster.hardware.gpu_specs import find_gpu
from ...version import DISTRIBUTION, __version__
from ..common.config_file import check_serve_config, read_yaml
from ..common.engine_flags import ENGINE_OPTIONS
from ..serve.ray_environment import OF_ALL, OF_HAPROXY

TEMPLATES = {
    "kuberay-service": "kuberay-service.yaml",
    "kuberay-job": "kuberay-job.yaml",
    "ray-up": "ray-up.yaml",
    "dockerfile": "Dockerfile",
    "systemd": "manta.service",
}
# Serve waits for streams up to `graceful_shutdown_timeout_s` (actors/replica.py); an engine of a job returns
# its rows and exits.
SERVICE_GRACE_S, JOB_GRACE_S = 900, 120
_FOLDER = Path(__file__).with_name("templates")
# Environment that every node's Ray must start with; `manta serve` sets it for its own cluster.
ENVIRONMENT: Mapping[str, str] = OF_ALL | OF_HAPROXY
CUDA = "cu130"  # tag of Ray's images
DEPLOYMENT = "manta"  # equal to that of `actors/replica.py`, which imports Ray
NODE_GPUS = 8
PORT = 8000
Json = Mapping[str, Any]  # Any: YAML values
_MEMORY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGT]i?)?")  # a quantity of Kubernetes


@dataclass(frozen=True, slots=True)
class PodOptions:
    """Resources of a Kubernetes pod with engines; those that are None are derived.

    Attributes:
        cpus: CPU cores; 8 for each GPU, or 8.
        memory: RAM, as `64Gi`; 64Gi for each GPU, or 32Gi.
        model_cache: PersistentVolumeClaim that keeps the hub's downloads; None downloads them in each pod.
    """

    cpus: float | None = None
    memory: str | None = None
    model_cache: str | None = None

    def __post_init__(self) -> None:
        if self.memory is not None and not _MEMORY.fullmatch(self.memory):
            raise ConfigError(
                f"memory={self.memory!r} must be a quantity of Kubernetes, as 64Gi.", param="memory"
            )


def render_document(
    kind: str,
    config: Path,
    gpus_per_node: int | None,
    image: str | None,
    batch_flags: Sequence[str],
    pod: PodOptions = PodOptions(),
    compile_for: str | None = None,
) -> str:
    """Return the text of a file; raises ConfigError or PlacementError for an invalid config.

    `compile_for`: the kind of GPU for which the kernels are compiled into the image.
    """
    if bool(batch_flags) != (kind == "kuberay-job"):
        raise ConfigError(
            "kuberay-job (and no other kind) needs flags of `manta batch` after --: manta render kuberay-job "
            "-- --input s3://bucket/in/*.parquet --output s3://bucket/out --prompt-column question",
            param="batch_flags",
        )
    if compile_for is not None and kind != "dockerfile":
        raise ConfigError(f"--compile is not for {kind}: only for dockerfile.", param="kind")
    deployment = read_deployment(config, gpus_per_node)
    gpus, serves = deployment.node_gpus, kind == "kuberay-service"
    if pod != PodOptions() and not kind.startswith("kuberay-"):
        raise ConfigError(
            f"--cpus, --memory and --model-cache are not for {kind}: only for kuberay-service "
            "and kuberay-job.",
            param="kind",
        )
    if pod.cpus is not None:
        deployment.check_cpus(pod.cpus)
    command = [str(Path(sys.executable).parent / "manta"), "serve", "--config", str(deployment.file)]
    command += ["--host", deployment.host, "--port", str(deployment.port)]
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quoted"] = shlex.quote  # for shells and Dockerfiles
    return environment.get_template(TEMPLATES[kind]).render(
        name=deployment.name,
        port=deployment.port,
        file=str(deployment.file),
        model=deployment.engines[0].config.model,
        gpus=gpus,
        cpus=f"{pod.cpus or 8 * max(gpus, 1):g}",
        memory=pod.memory or f"{64 * gpus if gpus else 32}Gi",
        model_cache=pod.model_cache,
        least_nodes=deployment.least_nodes,
        most_nodes=deployment.most_nodes,
        image=image or own_image(),
        version=__version__,
        wheel=f"{DISTRIBUTION.replace('-', '_')}-{__version__}-py3-none-any.whl",
        ray_version=ray_version(),
        ray_image=ray_image(gpu=gpus > 0),
        requirements=pinned_requirements(gpu=gpus > 0),
        environment=dict(ENVIRONMENT),
        serves=serves,
        grace_s=SERVICE_GRACE_S if serves else JOB_GRACE_S,
        serve_config=yaml.safe_dump(deployment.with_service(), sort_keys=False).rstrip("\n"),
        entrypoint=batch_command(deployment.engines[0], batch_flags),
        compile_commands=[] if compile_for is None else compile_commands(deployment.engines, compile_for),
        command=shlex.join(command),
    )


def batch_command(engines: Engines, batch_flags: Sequence[str]) -> str:
    """Return `manta batch` with the engine's settings as flags, since the file is not in the container."""
    minimum = max(engines.least, 1)
    count = str(minimum) if minimum == engines.most else f"{minimum}:{engines.most}"
    words = ["manta", "batch", *_engine_flags(engines), "--concurrency", count, *batch_flags]
    return shlex.join(words)


def compile_commands(engines: Sequence[Engines], gpu: str) -> list[str]:
    """Return `manta compile` for each engine on GPUs. Raises ConfigError for a GPU that is not known."""
    find_gpu(gpu)
    found = [["manta", "compile", "--gpu", gpu, *_engine_flags(each)] for each in engines if each.gpus]
    return [shlex.join(words) for words in found]


def _engine_flags(engines: Engines) -> list[str]:
    found = ((name, value) for name, value in engines.args.items() if name in ENGINE_OPTIONS)
    return [word for name, value in found if value is not None for word in _flag(name, value)]


def _flag(name: str, value: object) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]


def ray_version() -> str:
    return metadata.version("ray")


def ray_image(*, gpu: bool) -> str:
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return f"rayproject/ray:{ray_version()}-{python}-{CUDA if gpu else 'cpu'}"


def own_image() -> str:
    return f"manta:{__version__}"


def pinned_requirements(*, gpu: bool) -> list[str]:
    """Return Manta's requirements at the installed versions; others keep their range."""
    wanted = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or ()]
    extra = {"extra": "gpu" if gpu else ""}
    return [_pinned(each) for each in wanted if each.marker is None or each.marker.evaluate(extra)]


def _pinned(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    try:
        version = metadata.version(requirement.name).partition("+")[0]  # local builds are not on an index
    except metadata.PackageNotFoundError:
        return f"{requirement.name}{extras}{requirement.specifier}"
    return f"{requirement.name}{extras}=={version}"


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of one model: what Ray reserves for each (`bundle`), of that its GPUs (0: it runs on CPUs).

    `extra_gpus` are those of a drafter that all engines of a node share.
    """

    args: Json
    config: EngineConfig
    bundle: Bundle
    gpus: int
    extra_gpus: int
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Deployment:
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

    def check_cpus(self, cpus: float) -> None:
        """Raise PlacementError if a pod with so many cores holds fewer engines than its GPUs do."""
        for each in self.engines:
            engines = self.node_gpus // each.gpus if each.gpus else 1
            needs = math.ceil(engines * each.bundle["CPU"])
            if math.ceil(cpus) < needs:  # KubeRay rounds up
                raise PlacementError(
                    f"--cpus {cpus:g}: Ray reserves {format_resources(each.bundle)} for each engine of "
                    f"{each.config.model}, and {engines} in a pod. Set --cpus to at least {needs}.",
                    param="cpus",
                )

    def with_service(self) -> dict[str, Any]:
        """Return the config for use behind a service: a proxy on every node, listening on all interfaces."""
        http = {**(self.serve.get("http_options") or {}), "host": "0.0.0.0", "port": self.port}
        return {**self.serve, "proxy_location": "EveryNode", "http_options": http}


def read_deployment(file: Path, node_gpus: int | None) -> Deployment:
    """Read and check a Serve config; `node_gpus` None is what the engines need, at most 8."""
    serve = _read(file)
    engines = tuple(found for application in serve["applications"] for found in _engines(application))
    wanted = sum(each.extra_gpus + each.gpus * each.most for each in engines)
    size = node_gpus if node_gpus is not None else min(wanted, NODE_GPUS)
    for each in engines:
        needs = each.gpus + each.extra_gpus
        if needs > size:
            raise PlacementError(
                f"tensor_parallel_size={each.config.tensor_parallel_size}: an engine of {each.config.model} "
                f"needs {needs} GPUs on one node, which has {size}. Raise --gpus-per-node, or lower "
                "tensor_parallel_size.",
                param="tensor_parallel_size",
            )
    minimum, maximum = (_count_nodes(engines, size, maximum=maximum) for maximum in (False, True))
    return Deployment(file.absolute(), serve, engines, size, minimum, maximum)


def _count_nodes(engines: tuple[Engines, ...], size: int, *, maximum: bool) -> int:
    """Return the nodes for all engines, placed largest first; without GPUs each engine has a node."""
    if not size:
        return sum(each.most if maximum else each.least for each in engines)
    free: list[int] = []
    models: list[set[int]] = []  # models with engines on each node, which share a drafter
    for number, each in sorted(enumerate(engines), key=lambda item: -item[1].gpus):
        for _ in range(each.most if maximum else each.least):
            needs = [each.gpus + each.extra_gpus * (number not in there) for there in models]
            at = next((i for i, room in enumerate(free) if room >= needs[i]), len(free))
            if at == len(free):
                free.append(size)
                models.append(set())
                needs.append(each.gpus + each.extra_gpus)
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
        minimum, maximum = _replicas(overrides, parse_replicas(server.replicas))
        own = {**{key: value for key, value in args.items() if key != "models"}, **entry}
        bundle = total(topology.replica_bundles())
        gpus = round(bundle.get("GPU", 0.0))
        extra_gpus = int(topology.shared_drafter) if gpus else 0
        found.append(Engines(own, config, bundle, gpus, extra_gpus, minimum, maximum))
    return found


def _replicas(overrides: Json, stated: tuple[int, int]) -> tuple[int, int]:
    scaling = overrides.get("autoscaling_config")
    if isinstance(scaling, Mapping):
        return int(scaling.get("min_replicas", 1)), int(scaling.get("max_replicas", 1))
    count = overrides.get("num_replicas")
    return (count, count) if isinstance(count, int) else stated
