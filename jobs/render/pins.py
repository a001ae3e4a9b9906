"""What a container or a cluster runs with: versions that are installed here, and Serve's environment."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib import metadata

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
    wanted = [_Requirement.parse(text) for text in metadata.requires("manta") or ()]
    return [each.pinned() for each in wanted if each.extra is None or (gpu and each.extra == "gpu")]


class _Requirement:
    """As much of a requirement as is pinned: `ray[serve]>=2.60; extra == "x"`."""

    _FORM = re.compile(
        r"(?P<name>[\w.-]+)(?P<extras>\[[^]]*])?(?P<range>[^;]*)(?:;.*extra == \"(?P<extra>[^\"]+)\")?"
    )

    def __init__(self, name: str, extras: str, range_: str, extra: str | None) -> None:
        self.name, self.extras, self.range, self.extra = name, extras, range_, extra

    @classmethod
    def parse(cls, text: str) -> _Requirement:
        found = cls._FORM.match(text)
        assert found is not None, f"the distribution's metadata holds {text!r}"
        return cls(found["name"], found["extras"] or "", found["range"].strip(), found["extra"])

    def pinned(self) -> str:
        try:
            version = metadata.version(self.name).partition("+")[0]  # a local build is on no index
        except metadata.PackageNotFoundError:
            return f"{self.name}{self.extras}{self.range}"
        return f"{self.name}{self.extras}=={version}"
