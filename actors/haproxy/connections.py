"""Connection limits and idle time-outs of an HAProxy, derived from the limits of the machine."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass

from ...cluster.errors import ConfigError

# Environment variables that operators set on each node.
MOST = "RAY_SERVE_HAPROXY_MAXCONN"
PER_SOURCE = "MANTA_HAPROXY_MAX_PER_SOURCE"
PROBE_PORT = "MANTA_PROBE_PORT"

MOST_CONNECTIONS = 8192  # a connection may hold two buffers
PROBE_CONNECTIONS = 64
# Open files per connection: the client's socket, the replica's socket, and one pipe (two files) per four
# connections.
FILES_PER_CONNECTION = 2.5
OTHER_FILES = 256


@dataclass(frozen=True, slots=True)
class Connections:
    most: int  # connections of clients
    # connections of one address; half of `most` by default, so that no single client takes all
    per_source: int
    for_probes: int  # further connections on which only probes are answered
    # TCP port on which only probes are answered; None: probes have no port of their own
    probe_port: int | None = None

    @classmethod
    def of(cls, max_files: int, environment: Mapping[str, str]) -> Connections:
        """Return the limits for `max_files` open files. Raises ConfigError for a wrong variable.

        Few files (containers may allow 1024) are shared: at most a quarter is for other things, and at most a
        sixteenth of the rest for each kind of probes.
        """
        files = max_files - min(OTHER_FILES, max_files // 4)
        for_probes = min(PROBE_CONNECTIONS, files // 16)
        # So that `total` fits: clients, and what it adds for probes and statistics.
        possible = max(1, int(files / FILES_PER_CONNECTION) - 2 * for_probes - 1)
        maximum = min(_number(environment, MOST, 1) or MOST_CONNECTIONS, possible)
        per_source = _number(environment, PER_SOURCE, 1) or max(1, maximum // 2)
        port = _number(environment, PROBE_PORT, 1, 65535)
        return cls(maximum, min(per_source, maximum), for_probes, port)

    @classmethod
    def of_this_process(cls) -> Connections:
        """Raise this process's limit of open files to the hard limit, and return the limits."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = 1 << 20 if hard == resource.RLIM_INFINITY else hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        return cls.of(files, os.environ)

    @property
    def total(self) -> int:
        """Limit of all frontends together; statistics and metrics need few connections."""
        return self.most + 2 * self.for_probes + 1


def _number(environment: Mapping[str, str], name: str, minimum: int, maximum: int = 1 << 20) -> int | None:
    given = environment.get(name, "")
    if not given:
        return None
    if not given.isdecimal() or not minimum <= int(given) <= maximum:
        raise ConfigError(f"{name}={given!r} must be a number from {minimum} to {maximum}.", param=name)
    return int(given)
