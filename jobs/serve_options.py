"""Where and how `manta serve` listens, and which of that has flags. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ..cluster.flag import NO_FLAG, Flag


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where and how to serve.

    Attributes:
        host: address to listen on; 0.0.0.0 for all; by default the file's, or 127.0.0.1.
        port: TCP port; by default the file's, or 8000. It must be free.
        plain_proxy: Serve's own proxy in place of HAProxy (several times the cost per token).
        probe_port: TCP port for probes and /metrics alone, with connections that no client can take.
        verbose: show Ray's own log lines, too.
        name: name of the Serve application.
        num_cpus: CPUs that a Ray started here may use; None counts the machine's.
        ready_timeout_s: seconds of loading after which the start has failed.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Flag(least=0, most=65535)] = 8000
    plain_proxy: Annotated[bool, Flag("--plain-proxy")] = False
    probe_port: Annotated[int | None, Flag(least=1, most=65535)] = None
    verbose: Annotated[bool, Flag("--verbose -v")] = False
    name: Annotated[str, NO_FLAG] = "manta"
    num_cpus: Annotated[int | None, NO_FLAG] = None
    ready_timeout_s: Annotated[float, NO_FLAG] = 1800.0

    @property
    def url(self) -> str:
        return f"http://{'127.0.0.1' if self.host in ('0.0.0.0', '::') else self.host}:{self.port}"
