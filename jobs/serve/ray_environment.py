"""Environment variables for a Ray that `manta serve` starts: proxy, files and logging of Ray Serve.

Serve reads them in processes that Ray starts, so they must be set before Ray starts; they are restored after
Ray has ended. Variables that the user has set are kept.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ...actors.haproxy.config_rewriter import RETRY_ON
from ...actors.haproxy.connections import MOST_CONNECTIONS, PROBE_PORT, Connections
from ...actors.haproxy.run_dir import HAProxyFolder
from ...actors.system.host_resources import free_port, owned_cores

# Longer than any generation: after a reload, HAProxy closes older streams after this time.
HAPROXY_HARD_STOP_S = 3600
# Threads of HAProxy, at most Serve's default. Each wakes up for its own streams and takes a core from the
# model's threads; with few cores, one thread handles several streams per wake-up.
MAX_HAPROXY_THREADS, CORES_PER_HAPROXY_THREAD = 4, 4
# A request that fits into the buffer can be retried on another replica.
BUFFER_BYTES = 65536
# Needed on every node of a cluster before its Ray starts, with either proxy.
OF_ALL = {
    # Middlewares of the proxy: probes bypass the queue, and Serve's own errors have OpenAI's format.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "manta.actors.serve.serve_hooks:middlewares",
    # Serve's own log lines are in its log files. Ours name the replica and do not need Ray's colored prefix
    # "(ServeReplica pid=1)".
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_DISABLE_WORKER_LOG_PREFIX": "1",
    "RAY_COLOR_PREFIX": "0",
    "RAY_DEDUP_LOGS": "0",  # lines about requests must not be merged
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default; avoids its warning
    # Ray's default of 15 is for background work: any other process on the machine, clients included, would
    # get the model's cores first.
    "RAY_worker_niceness": "0",
    # A proxy that does not answer is replaced after three periods.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # On a busy machine the proxy takes longer to start than Serve's default of 5 s, after which Serve would
    # kill it and the call that waits for it would fail.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}

# The same if the proxy is HAProxy.
OF_HAPROXY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",  # the engine has its own thread
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(HAPROXY_HARD_STOP_S),
    "RAY_SERVE_HAPROXY_RETRY_ON": RETRY_ON,
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(BUFFER_BYTES),
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",  # health checks of replicas
}


class ServeEnvironment:
    """Sets the variables until `restore` is called; `haproxy` has HAProxy's files, if it is used."""

    def __init__(self, *, plain_proxy: bool, probe_port: int | None = None) -> None:
        if not plain_proxy:
            Connections.of(MOST_CONNECTIONS, os.environ)  # validates the limits before Ray starts
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
        _restore(self._before)
        if self.haproxy:
            self.haproxy.remove()


def _with_haproxy(folder: HAProxyFolder) -> dict[str, str]:
    return {
        **OF_HAPROXY,
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # no other node's proxy has to be informed
        "RAY_SERVE_HAPROXY_NBTHREAD": str(_haproxy_threads()),
        **folder.environment,
        # Own ports, so that two clusters can run on one machine.
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
    }


def _haproxy_threads() -> int:
    return min(MAX_HAPROXY_THREADS, max(1, owned_cores() // CORES_PER_HAPROXY_THREAD))


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
