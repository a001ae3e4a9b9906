"""What can be found wrong before `manta serve` starts anything: the port, places for batches and traffic."""

from __future__ import annotations

import ipaddress
import resource
import socket
from pathlib import Path

from ..actors.files import check_writable
from ..actors.http.settings import ServerSettings
from ..cluster.config import EngineConfig
from ..cluster.errors import ConfigError

LEAST_FILES, MOST_FILES = 256, 1 << 16
_ESTABLISHED = "01"  # in the kernel's tables


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
    """What to say of an address that other machines reach and that asks no key; None where all is well."""
    if is_loopback(host) or settings.keys("api_key"):
        return None
    return (
        f"warning: whoever reaches {host} is served, for no key is asked for: name a file of keys with "
        "--api-key-file (or set MANTA_API_KEY), or listen on this machine alone with --host 127.0.0.1"
    )


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone; of names only localhost is."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_open_files() -> None:
    """Let this process and those that it starts open as many files as they may. Raises ConfigError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard or hard == resource.RLIM_INFINITY:
        most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        soft = max(soft, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < LEAST_FILES:
        raise ConfigError(
            f"open files: a process may open {soft} here, and Ray needs {LEAST_FILES} or more. Raise the "
            "limit (ulimit -n 8192; LimitNOFILE= of a systemd unit).",
            param="ulimit",
        )


def check_storage(where: str) -> None:
    """A folder of this machine must be there to be written, or to be made. Raises ConfigError."""
    from ..actors.batch.storage import Storage

    storage = Storage.open(where, field="batch_storage")
    if storage.local:
        check_writable(Path(storage.root), "batch_storage")


def check_capture(config: EngineConfig, settings: ServerSettings) -> None:
    """Captured traffic has a folder of its own, and a hook that is there. Raises ConfigError."""
    from ..actors.capture.traffic import writer_settings
    from ..actors.capture.writer import Writer

    if (found := writer_settings(config, settings)) is not None:
        Writer(found).close()


def open_connections(port: int) -> int:
    """TCP connections that are open to a port of this machine, idle ones too; 0 where Linux does not tell."""
    count = 0
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if table.exists():
            rows = [line.split() for line in table.read_text().splitlines()[1:]]
            count += sum(
                row[3] == _ESTABLISHED and int(row[1].rpartition(":")[2], 16) == port for row in rows
            )
    return count
