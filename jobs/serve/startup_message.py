"""Messages of `manta serve` at its start: the models, the expected loading time, and an example request.

The models are validated here, so that errors in checkpoints and settings are reported before anything starts
and not in a replica's log.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ...actors.http.config.settings import ServerSettings
from ...actors.tokenization.checkpoint_paths import drafter_folder, target_folder
from ...cluster.config import EngineConfig

# Rough estimate of the start: processes, imports and warm-up, plus reading the weights from a typical disk.
START_S = {"cpu": 8.0, "cuda": 60.0}
BYTES_PER_S = 1e9
UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def find_checkpoints(config: EngineConfig) -> None:
    """Find or download the checkpoints of a config, without importing torch."""
    target_folder(config)
    spec = config.speculative_config
    if spec is not None and spec.model is not None:
        drafter_folder(config, spec.model)


def models_told(config: EngineConfig, settings: ServerSettings) -> Iterator[str]:
    """Validate a model and yield lines about it before it is loaded."""
    from ...actors.targets.loading.load_plan import plan_load

    plan = plan_load(config)
    size = weight_bytes(plan.target_folder)
    yield f"model {', '.join(settings.model_names(config.model))}: {plan.target_folder} ({as_size(size)})"
    if plan.drafter_folder is None:
        yield "no drafter: plain decoding"
    else:
        drafter_size = weight_bytes(plan.drafter_folder)
        size += drafter_size
        drafts = plan.num_speculative_tokens
        yield f"drafter: {plan.drafter_folder} ({as_size(drafter_size)}), up to {drafts} drafts a step"
    yield from plan.doubts
    kind = plan.device.type
    seconds = START_S.get(kind, START_S["cuda"]) + size / BYTES_PER_S
    dtype = str(plan.dtype).removeprefix("torch.")
    where = kind if config.tensor_parallel_size == 1 else f"{config.tensor_parallel_size} x {kind}"
    yield f"on {where} in {dtype}; loading takes about {round(seconds, -1) or 10:.0f} s"


def try_it(url: str, config: EngineConfig, settings: ServerSettings) -> str:
    from ...actors.tokenization.tokenizer_config import read_chat_templates

    folder = target_folder(config)
    body: dict[str, object] = {
        "model": settings.model_names(config.model)[0],
        "max_tokens": 64,
        "temperature": 0,
    }
    if read_chat_templates(folder):
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "Hello!"}]
    else:
        path, body["prompt"] = "completions", "def fibonacci(n):"
    key = "-H 'Authorization: Bearer <your key>' " if settings.keys("api_key") else ""
    return f"curl {url}/v1/{path} {key}-H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def as_size(count: float) -> str:
    """Return a size in the largest unit of which it has at least one."""
    for unit, size in UNITS:
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
