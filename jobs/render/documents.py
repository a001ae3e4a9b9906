"""Fills the templates of `manta render` (`templates/`) with the needs of a Serve config.

KubeRay gives Ray's containers /dev/shm, which step plans use, and probes of the raylet. The templates add
what it cannot know: GPUs, HAProxy's environment, and the readiness of a node's proxy. The Dockerfile's image
is Ray's, with Manta's requirements at the versions that are installed here.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import yaml
from minijinja import Environment
from packaging.requirements import Requirement

from ...cluster.errors import ConfigError
from ..common.engine_flags import ENGINE_OPTIONS
from ..serve.ray_environment import OF_ALL, OF_HAPROXY
from .deployment_spec import Engines, read_deployment

TEMPLATES = {
    "kuberay-service": "kuberay-service.yaml",
    "kuberay-job": "kuberay-job.yaml",
    "ray-up": "ray-up.yaml",
    "dockerfile": "Dockerfile",
    "systemd": "manta.service",
}
# Serve waits for streams up to `GRACEFUL_SHUTDOWN_S` of actors/replica.py; an engine of a job returns its
# rows and exits.
SERVICE_GRACE_S, JOB_GRACE_S = 900, 120
_FOLDER = Path(__file__).with_name("templates")
# Environment that every node's Ray must start with; `manta serve` sets it for its own cluster.
ENVIRONMENT: Mapping[str, str] = OF_ALL | OF_HAPROXY
CUDA = "cu130"  # tag of Ray's images


def render_document(
    kind: str, config: Path, gpus_per_node: int | None, image: str | None, batch_flags: Sequence[str]
) -> str:
    """Return the text of a file; raises ConfigError or PlacementError for an invalid config."""
    if bool(batch_flags) != (kind == "kuberay-job"):
        raise ConfigError(
            "kuberay-job (and no other kind) needs flags of `manta batch` after --: manta render kuberay-job "
            "-- --input s3://bucket/in/*.parquet --output s3://bucket/out --prompt-column question",
            param="batch_flags",
        )
    deployment = read_deployment(config, gpus_per_node)
    gpus, serves = deployment.node_gpus, kind == "kuberay-service"
    command = [str(Path(sys.executable).parent / "manta"), "serve", "--config", str(deployment.file)]
    command += ["--host", deployment.host, "--port", str(deployment.port)]
    return _environment().render_template(
        TEMPLATES[kind],
        name=deployment.name,
        port=deployment.port,
        file=str(deployment.file),
        model=deployment.engines[0].config.model,
        gpus=gpus,
        least_nodes=deployment.least_nodes,
        most_nodes=deployment.most_nodes,
        image=image or own_image(),
        version=metadata.version("manta"),
        ray_version=ray_version(),
        ray_image=ray_image(gpu=gpus > 0),
        requirements=pinned_requirements(gpu=gpus > 0),
        environment=dict(ENVIRONMENT),
        serves=serves,
        grace_s=SERVICE_GRACE_S if serves else JOB_GRACE_S,
        serve_config=yaml.safe_dump(deployment.behind_a_service(), sort_keys=False).rstrip("\n"),
        entrypoint=batch_command(deployment.engines[0], batch_flags),
        command=shlex.join(command),
    )


def batch_command(engines: Engines, batch_flags: Sequence[str]) -> str:
    """Return `manta batch` with the engine's settings as flags, since the file is not in the container."""
    words = ["manta", "batch"]
    for name, value in engines.args.items():
        if name in ENGINE_OPTIONS and value is not None:
            words += _flag(name, value)
    fewest = max(engines.least, 1)
    count = str(fewest) if fewest == engines.most else f"{fewest}:{engines.most}"
    return shlex.join([*words, "--concurrency", count, *batch_flags])


def _flag(name: str, value: object) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]


def _environment() -> Environment:
    return Environment(
        loader=lambda name: (_FOLDER / name).read_text(encoding="utf-8"),
        auto_escape_callback=lambda name: False,
        undefined_behavior="strict",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def ray_version() -> str:
    return metadata.version("ray")


def ray_image(*, gpu: bool) -> str:
    """Return the tag of Ray's image with this Python version."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return f"rayproject/ray:{ray_version()}-{python}-{CUDA if gpu else 'cpu'}"


def own_image() -> str:
    return f"manta:{metadata.version('manta')}"


def pinned_requirements(*, gpu: bool) -> list[str]:
    """Return Manta's requirements at the installed versions; others keep their range."""
    wanted = [Requirement(text) for text in metadata.requires("manta") or ()]
    extra = {"extra": "gpu" if gpu else ""}
    return [_pinned(each) for each in wanted if each.marker is None or each.marker.evaluate(extra)]


def _pinned(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    try:
        version = metadata.version(requirement.name).partition("+")[0]  # local builds are not on an index
    except metadata.PackageNotFoundError:
        return f"{requirement.name}{extras}{requirement.specifier}"
    return f"{requirement.name}{extras}=={version}"
