"""Checks before `manta serve` starts anything: port, open files, folders for batches and captured traffic."""

from __future__ import annotations

import ipaddress
import resource
import socket
from pathlib import Path

from ...actors.http.config.settings import ServerSettings
from ...actors.system.atomic_files import check_writable
from ...cluster.config import EngineConfig
from ...cluster.errors import ConfigError

LEAST_FILES, MOST_FILES = 256, 1 << 16
_ESTABLISHED = "01"  # TCP state in /proc/net/tcp


def check_port(host: str, port: int, param: str = "port") -> None:
    """Raise ConfigError unless host:port can be listened on; `param` names the setting."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"{param}={port} on {host} cannot be used ({error}). Stop what listens there, or choose "
                f"another with --{param.replace('_', '-')}.",
                param=param,
            ) from None


def warning_of_exposure(host: str, settings: ServerSettings) -> str | None:
    """Return a warning if other machines can reach the address without an API key, else None."""
    if is_loopback(host) or settings.keys("api_key"):
        return None
    return (
        f"warning: the server on {host} accepts requests without a key. Give a file of keys with "
        "--api-key-file (or set MANTA_API_KEY), or listen only on this machine with --host 127.0.0.1"
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address; the only such name is localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_open_files() -> None:
    """Raise the limit of open files for this process and its children; ConfigError if it is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard or hard == resource.RLIM_INFINITY:
        most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        soft = max(soft, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < LEAST_FILES:
        raise ConfigError(
            f"open files: the limit is {soft}, and Ray needs {LEAST_FILES} or more. Raise the "
            "limit (ulimit -n 8192; LimitNOFILE= of a systemd unit).",
            param="ulimit",
        )


def check_storage(where: str) -> None:
    from ...actors.batch.dataset.storage import Storage

    storage = Storage.open(where, field="batch_storage")
    if storage.local:
        check_writable(Path(storage.root), "batch_storage")


def check_capture(config: EngineConfig, settings: ServerSettings) -> None:
    from ...actors.capture.collector import writer_settings
    from ...actors.capture.writer_process import Writer

    if (found := writer_settings(config, settings)) is not None:
        Writer(found).close()


def open_connections(port: int) -> int:
    """Return the number of established TCP connections to a local port; 0 on systems other than Linux."""
    count = 0
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if table.exists():
            rows = [line.split() for line in table.read_text().splitlines()[1:]]
            count += sum(
                row[3] == _ESTABLISHED and int(row[1].rpartition(":")[2], 16) == port for row in rows
            )
    return count
