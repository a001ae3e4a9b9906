"""What a checkpoint is, wherever it lies: what answers depend on is named by this, not by paths."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from ...cluster.config import EngineConfig

SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".txt")
PROBE_BYTES = 65536  # of the begin, the middle and the end of a file of weights


def checkpoint_identity(folder: Path) -> str:
    """A digest of a checkpoint: of its small files whole, of its weights by size and probes."""
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


def settings_identity(config: EngineConfig) -> Mapping[str, object]:
    """What settings make of the checkpoint: of its chat template, its config.json, its weights.

    Nothing of what they leave as it is.
    """
    found: dict[str, object] = {}
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
