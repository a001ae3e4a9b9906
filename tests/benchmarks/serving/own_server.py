"""Runs `manta serve` with a config, as a side of a benchmark, and writes configs for `--config`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from manta.actors.system.atomic_files import write_json
from manta.actors.system.host_resources import free_port
from manta.cluster.config import EngineConfig
from manta.jobs.common.server_process import manta, server


@contextmanager
def manta_serve(config: EngineConfig, scratch: Path, *flags: str) -> Iterator[str]:
    """Run a server within the `with` block; yield its URL. Its log is in `scratch`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    settings = str(write_settings(config, scratch))
    command = manta("serve", "--config", settings, "--port", str(port), *flags)
    with server(command, url, scratch / "serve.log"):
        yield url


def write_settings(config: EngineConfig, scratch: Path) -> Path:
    """Write all of the engine's settings to a file for `--config`; return its path."""
    path = scratch / "engine.json"  # JSON is YAML
    given = {name: value for name, value in asdict(config).items() if value is not None}
    write_json(path, {"kv_tier_path": "none", **given})  # what earlier runs computed is not read
    return path
