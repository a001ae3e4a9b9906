"""The environment of a Ray that `manta serve` starts: which proxy, where its files are, what it says.

Serve reads all of it from environment variables, in processes that Ray starts: it must be there before Ray
is, and is put back when Ray has ended. What the user has set stays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..actors.haproxy.connections import MOST_CONNECTIONS, PROBE_PORT, Connections
from ..actors.haproxy.folder import HAProxyFolder
from ..actors.haproxy.front import RETRY_ON
from ..actors.machine import free_port, owned_cores

# Above the longest generation: a reload of HAProxy ends older streams after so long.
HAPROXY_HARD_STOP_S = 3600
# Threads of HAProxy, up to Serve's own number. Each is woken for its own streams, and takes a core from the
# model's threads; where cores are few, one is woken for what several streams got.
MOST_HAPROXY_THREADS, CORES_PER_HAPROXY_THREAD = 4, 4
# A request can be sent again to another replica if it fits.
BUFFER_BYTES = 65536
# Of every node of a cluster, before its Ray starts, whichever proxy stands in front.
OF_ALL = {
    # Around what listens: probes pass the queue, and Serve's own failures are in OpenAI's shape.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "manta.actors.serve_place:middlewares",
    # Serve's own lines are in its log files, for those who look for a fault there. Ours have no need of Ray's
    # "(ServeReplica pid=1)" in colours before them; they say which replica it is.
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_DISABLE_WORKER_LOG_PREFIX": "1",
    "RAY_COLOR_PREFIX": "0",
    "RAY_DEDUP_LOGS": "0",  # a request's line is nobody else's
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what Ray will do one day; else it warns
    # Ray's own 15 is for background work: whatever else runs on the machine, its clients included, would have
    # the model's cores first.
    "RAY_worker_niceness": "0",
    # A proxy that does not answer is replaced after three such periods.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # On a busy machine its process takes longer to start than Serve's 5 s, after which it would be killed,
    # and with it the call that waits for it.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}

# The same where HAProxy does.
OF_HAPROXY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",  # the engine has a thread of its own
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(HAPROXY_HARD_STOP_S),
    "RAY_SERVE_HAPROXY_RETRY_ON": RETRY_ON,
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(BUFFER_BYTES),
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",  # of replicas, by their own word
}


class ServeEnvironment:
    """Set until `restore`.

    Args:
        plain_proxy: Serve's own proxy instead of HAProxy.
        probe_port: of HAProxy's frontend for probes alone; None: it has none.

    Raises:
        ConfigError: a limit of HAProxy's connections in the environment is no number that can be.

    Attributes:
        haproxy: its files, if it is used.
    """

    def __init__(self, *, plain_proxy: bool, probe_port: int | None = None) -> None:
        if not plain_proxy:
            Connections.of(MOST_CONNECTIONS, os.environ)  # refuses what cannot be before Ray starts
        self.haproxy = None if plain_proxy else HAProxyFolder()
        wanted = OF_ALL | (
            _with_haproxy(self.haproxy) if self.haproxy else {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
        )
        if probe_port is not None:
            wanted[PROBE_PORT] = str(probe_port)
        wanted = {name: value for name, value in wanted.items() if name not in os.environ}
        self._before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)

    def restore(self) -> None:
        """Put back what was there, and remove HAProxy's files. Idempotent."""
        _restore(self._before)
        if self.haproxy:
            self.haproxy.remove()


def _with_haproxy(folder: HAProxyFolder) -> dict[str, str]:
    return {
        **OF_HAPROXY,
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # no other node's proxy must hear of it
        "RAY_SERVE_HAPROXY_NBTHREAD": str(_haproxy_threads()),
        **folder.environment,
        # Ports of their own, so that two clusters get along on one machine.
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
    }


def _haproxy_threads() -> int:
    return min(MOST_HAPROXY_THREADS, max(1, owned_cores() // CORES_PER_HAPROXY_THREAD))


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
