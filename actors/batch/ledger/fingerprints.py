"""Identity of a model, independent of paths: digests of checkpoints, and settings that change results."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ....cluster.config import EngineConfig
from ...tokenization.checkpoint_paths import target_folder, tokenizer_folder

SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".txt")
PROBE_BYTES = 65536  # read at the beginning, middle and end of a file of weights


def model_identity(config: EngineConfig) -> dict[str, Any]:  # Any: JSON
    """Return what identifies the model of an engine. The drafter is left out: it does not change results."""
    target, tokenizer = target_folder(config), tokenizer_folder(config)
    return {
        "model": checkpoint_identity(target),
        "tokenizer": None if tokenizer == target else checkpoint_identity(tokenizer),
        **settings_identity(config),
    }


def checkpoint_identity(folder: Path) -> str:
    """Return a digest of a checkpoint: of its small files, and of sizes and probes of its weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in SUFFIXES or not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            if path.suffix != ".safetensors":
                digest.update(file.read())
                continue
            for begin in sorted({0, size // 2, max(size - PROBE_BYTES, 0)}):
                file.seek(begin)
                digest.update(file.read(PROBE_BYTES))
    return digest.hexdigest()


def settings_identity(config: EngineConfig) -> dict[str, Any]:  # Any: JSON
    """Return the settings that change the chat template, the config.json or the weights, if they are set."""
    found: dict[str, Any] = {}
    if config.chat_template is not None:
        found["chat_template"] = hashlib.sha256(Path(config.chat_template).read_bytes()).hexdigest()
    if config.default_chat_template_kwargs:
        found["default_chat_template_kwargs"] = dict(config.default_chat_template_kwargs)
    if config.split_special_tokens:
        found["split_special_tokens"] = True
    if config.hf_overrides:
        found["hf_overrides"] = dict(config.hf_overrides)
    if config.load_format != "auto":
        found["load_format"] = config.load_format
    return found
