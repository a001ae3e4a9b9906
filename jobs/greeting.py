"""What `manta serve` tells a newcomer: what is loaded and from where, how long it will take, and how to ask.

The models are checked on the way: what checkpoints and settings show to be wrong is an error here, before
anything starts, and not a line in a replica's log.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ..actors.checkpoints import drafter_folder, target_folder
from ..actors.http.settings import ServerSettings
from ..cluster.config import EngineConfig

# Rough, and called so: processes, imports and warm-up; then bytes at the rate of a common disk.
START_S = {"cpu": 8.0, "cuda": 60.0}
BYTES_PER_S = 1e9
UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def find_checkpoints(config: EngineConfig) -> None:
    """Find the folders of a model, or download them, without importing torch.

    Raises:
        CheckpointError: there is no such folder, and no such model on the hub.
    """
    target_folder(config)
    spec = config.speculative_config
    if spec is not None and spec.model is not None:
        drafter_folder(config, spec.model)


def models_told(config: EngineConfig, settings: ServerSettings) -> Iterator[str]:
    """Lines about one model before it is loaded.

    Raises:
        ConfigError, CheckpointError: it cannot be, or not so.
    """
    from ..actors.targets.loading.plan import plan_load

    plan = plan_load(config)
    size = weight_bytes(plan.target_folder)
    yield f"model {', '.join(settings.model_names(config.model))}: {plan.target_folder} ({as_size(size)})"
    if plan.drafter_folder is None:
        yield "no drafter: every token is decoded plainly"
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
    yield f"on {where} in {dtype}; it will take about {round(seconds, -1) or 10:.0f} s"


def try_it(url: str, config: EngineConfig, settings: ServerSettings) -> str:
    """A line for a shell that asks the server at `url` something."""
    from ..actors.tokenizer_config import read_chat_templates

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
    """Of the checkpoint's tensors on this disk."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def as_size(count: float) -> str:
    """In the largest unit that leaves a whole number before the point."""
    for unit, size in UNITS:
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
