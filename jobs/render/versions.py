"""Versions and environment of rendered containers and clusters: those installed here, and Serve's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import metadata

from packaging.requirements import Requirement

from ..serve.ray_environment import OF_ALL, OF_HAPROXY

# Environment that every node's Ray must start with; `manta serve` sets it for its own cluster.
ENVIRONMENT: Mapping[str, str] = OF_ALL | OF_HAPROXY
CUDA = "cu130"  # tag of Ray's images


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
