"""How many connections an HAProxy takes, and for how long it keeps idle ones: from the machine's limits.

Pure but for `of_this_process`. `config_rewriter.py` writes the numbers into the configuration.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass

from ...cluster.errors import ConfigError

# Set by operators, on each node.
MOST = "RAY_SERVE_HAPROXY_MAXCONN"
PER_SOURCE = "MANTA_HAPROXY_MAX_PER_SOURCE"
PROBE_PORT = "MANTA_PROBE_PORT"

MOST_CONNECTIONS = 8192  # each may hold two buffers
PROBE_CONNECTIONS = 64
# Files of a connection: the client's socket, the replica's, and a pipe between each fourth pair of them.
FILES_PER_CONNECTION = 2.5
OTHER_FILES = 256


@dataclass(frozen=True, slots=True)
class Connections:
    """Limits of one HAProxy.

    Attributes:
        most: connections of clients.
        per_source: of one address; half of all where it is not set, so that no single client takes all.
        for_probes: further connections on which only probes are answered.
        probe_port: TCP port on which probes alone are answered; None: they have no port of their own.
    """

    most: int
    per_source: int
    for_probes: int
    probe_port: int | None = None

    @classmethod
    def of(cls, max_files: int, environment: Mapping[str, str]) -> Connections:
        """The limits of a process that may open `max_files` files.

        Raises:
            ConfigError: a variable of the environment is no number that can be.
        """
        files = max_files - min(OTHER_FILES, max_files // 4)
        for_probes = min(PROBE_CONNECTIONS, files // 16)
        possible = max(1, int(files / FILES_PER_CONNECTION) - 2 * for_probes - 1)
        most = min(_number(environment, MOST, 1) or MOST_CONNECTIONS, possible)
        per_source = _number(environment, PER_SOURCE, 1) or max(1, most // 2)
        port = _number(environment, PROBE_PORT, 1, 65535)
        return cls(most, min(per_source, most), for_probes, port)

    @classmethod
    def of_this_process(cls) -> Connections:
        """The same of this process, once its limit of files is as high as it may be."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = 1 << 20 if hard == resource.RLIM_INFINITY else hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        return cls.of(files, os.environ)

    @property
    def total(self) -> int:
        """Connections of all frontends together: statistics and metrics have few."""
        return self.most + 2 * self.for_probes + 1


def _number(environment: Mapping[str, str], name: str, least: int, most: int = 1 << 20) -> int | None:
    given = environment.get(name, "")
    if not given:
        return None
    if not given.isdecimal() or not least <= int(given) <= most:
        raise ConfigError(f"{name}={given!r} must be a number from {least} to {most}.", param=name)
    return int(given)
