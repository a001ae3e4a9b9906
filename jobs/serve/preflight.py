"""Checks and messages of `manta serve` before it starts anything: port, open files, folders, models.

The models are validated here, so that errors in checkpoints and settings are reported before anything starts
and not in a replica's log.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import resource
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

from ...actors.checkpoints.checkpoint_paths import drafter_folder, target_folder
from ...actors.checkpoints.gguf_files import gguf_files, weight_files
from ...actors.checkpoints.model_card import sample_prompt
from ...actors.checkpoints.published_drafters import speculation_advice
from ...actors.http.config.settings import ServerSettings
from ...actors.system.atomic_files import check_storage_folder
from ...cluster.config import EngineConfig
from ...cluster.errors import ConfigError

MIN_FILES, MAX_FILES = 256, 1 << 16
_ESTABLISHED = "01"  # TCP state in /proc/net/tcp
# Rough estimate of the start: processes, imports and warm-up, plus reading the weights from a typical disk.
START_S = {"cpu": 8.0, "cuda": 60.0}
BYTES_PER_S = 1e9
UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def check_port(host: str, port: int, param: str = "port") -> None:
    """Raise ConfigError unless host:port can be listened on; `param` names the setting."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            if isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
                raise ConfigError(
                    f"host={host} is no address of this machine ({error}). Use 127.0.0.1, or 0.0.0.0 for all "
                    "of its addresses.",
                    param="host",
                ) from None
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
        maximum = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
        soft = max(soft, maximum)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < MIN_FILES:
        raise ConfigError(
            f"open files: the limit is {soft}, and Ray needs {MIN_FILES} or more. Raise the "
            "limit (ulimit -n 8192; LimitNOFILE= of a systemd unit).",
            param="ulimit",
        )


def check_storage(where: str) -> None:
    from ...actors.batch.dataset.storage import Storage

    storage = Storage.open(where, field="batch_storage")
    if storage.local:
        check_storage_folder(Path(storage.root))


def check_capture(config: EngineConfig, settings: ServerSettings) -> None:
    from ...actors.capture.collector import writer_settings
    from ...actors.capture.writer_process import Writer

    if (found := writer_settings(config, settings)) is not None:
        Writer(found).close()


def open_connections(port: int) -> int:
    count = 0
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if table.exists():
            rows = [line.split() for line in table.read_text().splitlines()[1:]]
            count += sum(
                row[3] == _ESTABLISHED and int(row[1].rpartition(":")[2], 16) == port for row in rows
            )
    return count


def find_checkpoints(config: EngineConfig) -> None:
    """Find or download the checkpoints of a config, without importing torch."""
    target_folder(config)
    spec = config.speculative_config
    if spec is not None and spec.model is not None:
        drafter_folder(config, spec.model)


def describe_models(config: EngineConfig, settings: ServerSettings) -> Iterator[str]:
    """Validate a model and yield lines about it before it is loaded."""
    from ...actors.chat.chat_model import ChatModel
    from ...actors.targets.loading.backend_selection import COMPILES, compiles_loops
    from ...actors.targets.loading.kv_tier import describe_tier, with_tier
    from ...actors.targets.model.tensor_parallel import SingleRank
    from ..common.model_check import check_model

    model = check_model(config, generation_config=settings.generation_config)
    resolved = with_tier(model.resolved, SingleRank())
    ChatModel.of(
        model.tokenizer,
        tool_call_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
    )
    size = weight_bytes(resolved.target_folder)
    names = ", ".join(settings.model_names(config.model))
    yield f"model {names}: {_source(resolved.target_folder)} ({as_size(size)})"
    if resolved.drafter_folder is None:
        spec = config.speculative_config
        what = (
            f"plain decoding; {speculation_advice(config.model)}"
            if spec is None
            else f"drafts by {spec.method}"
        )
        yield f"no drafter: {what}"
    else:
        drafter_size = weight_bytes(resolved.drafter_folder)
        size += drafter_size
        drafts = resolved.num_speculative_tokens
        source = _source(resolved.drafter_folder)
        yield f"drafter: {source} ({as_size(drafter_size)}), up to {drafts} drafts a step"
    if resolved.config.kv_tier_path is not None:
        yield describe_tier(resolved)
    yield from resolved.doubts
    kind = resolved.device.type
    seconds = START_S.get(kind, START_S["cuda"]) + size / BYTES_PER_S
    dtype = str(resolved.dtype).removeprefix("torch.")
    where = kind if config.tensor_parallel_size == 1 else f"{config.tensor_parallel_size} x {kind}"
    loading = f"loading takes about {round(seconds, -1) or 10:.0f} s"
    yield f"on {where} in {dtype}; {COMPILES if compiles_loops(config) else loading}"


def example_request(url: str, config: EngineConfig, settings: ServerSettings) -> str:
    from ...actors.http.ui import USUAL_PROMPT
    from ...actors.tokenization.tokenizer_config import read_chat_templates

    folder = target_folder(config)
    body: dict[str, object] = {
        "model": settings.model_names(config.model)[0],
        "max_tokens": 64,
        "temperature": 0,
    }
    if read_chat_templates(folder):
        question = sample_prompt(folder) or USUAL_PROMPT
        path, body["messages"] = "chat/completions", [{"role": "user", "content": question}]
    else:
        path, body["prompt"] = "completions", "def fibonacci(n):"
    key = "-H 'Authorization: Bearer <your key>' " if settings.keys("api_key") else ""
    content = shlex.quote(json.dumps(body, ensure_ascii=False))
    return f"curl {url}/v1/{path} {key}-H 'Content-Type: application/json' -d {content}"


def _source(folder: Path) -> Path:
    return next(iter(gguf_files(folder)), folder)


def weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(folder))


def as_size(count: float) -> str:
    for unit, size in UNITS:
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
