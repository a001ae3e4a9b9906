"""`manta serve` of a config, as a side of a benchmark; and a config as a file that commands read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from manta.actors.files import write_json
from manta.actors.machine import free_port
from manta.cluster.config import EngineConfig
from manta.jobs.commands import manta, server


@contextmanager
def manta_serve(config: EngineConfig, scratch: Path, *flags: str) -> Iterator[str]:
    """Ready, at the URL that is given; its log is in `scratch`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    settings = str(write_settings(config, scratch))
    command = manta("serve", "--config", settings, "--port", str(port), *flags)
    with server(command, url, scratch / "serve.log"):
        yield url


def write_settings(config: EngineConfig, scratch: Path) -> Path:
    """For `--config`: all of the engine's settings."""
    path = scratch / "engine.json"  # JSON is YAML
    write_json(path, {name: value for name, value in asdict(config).items() if value is not None})
    return path
