"""Options of `manta serve` besides the engine's and the server's settings. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ...cluster.flag import NO_FLAG, Flag


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of `manta serve`.

    Attributes:
        host: address to listen on; 0.0.0.0 for all interfaces; by default the file's, or 127.0.0.1.
        port: TCP port, which must be free; by default the file's, or 8000.
        plain_proxy: use Serve's own proxy instead of HAProxy, at several times the cost per token.
        probe_port: separate TCP port for probes and /metrics, which works when clients use all connections.
        verbose: also show Ray's own log lines.
        name: name of the Serve application.
        num_cpus: CPUs of a Ray that is started here; None uses all of the machine.
        ready_timeout_s: timeout of loading in seconds.
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
