"""What a checkpoint is, wherever it lies: what answers depend on is named by this, not by paths."""

from __future__ import annotations

import hashlib
from pathlib import Path

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
