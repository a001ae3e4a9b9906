"""What a container or a cluster runs with: versions that are installed here, and Serve's environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import metadata

from packaging.requirements import Requirement

from ..serve_environment import OF_ALL, OF_HAPROXY

# What every node's Ray must have before it starts; `manta serve` sets it for its own.
ENVIRONMENT: Mapping[str, str] = OF_ALL | OF_HAPROXY
CUDA = "cu130"  # of Ray's images


def ray_version() -> str:
    return metadata.version("ray")


def ray_image(*, gpu: bool) -> str:
    """Ray's own image with the Python that runs here."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return f"rayproject/ray:{ray_version()}-{python}-{CUDA if gpu else 'cpu'}"


def own_image() -> str:
    """What the rendered Dockerfile is to be built as."""
    return f"manta:{metadata.version('manta')}"


def pinned_requirements(*, gpu: bool) -> list[str]:
    """Manta's requirements, each at the version that is installed here; one that is not keeps its range."""
    wanted = [Requirement(text) for text in metadata.requires("manta") or ()]
    extra = {"extra": "gpu" if gpu else ""}
    return [_pinned(each) for each in wanted if each.marker is None or each.marker.evaluate(extra)]


def _pinned(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    try:
        version = metadata.version(requirement.name).partition("+")[0]  # a local build is on no index
    except metadata.PackageNotFoundError:
        return f"{requirement.name}{extras}{requirement.specifier}"
    return f"{requirement.name}{extras}=={version}"
