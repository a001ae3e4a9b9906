"""Names of GGUF: of the parts of a split file, NAME-00001-of-00003.gguf, and in config.json.

Imports no other module of GGUF, and not torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from .....cluster.errors import CheckpointError

METHOD = "gguf"  # `quant_method` of a config.json that names GGUF files
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.S)


def model_name(file_name: str) -> str:
    """Return the name of a file without its ending and its number as a part."""
    found = _PART.fullmatch(file_name)
    return file_name.removesuffix(".gguf") if found is None else found["stem"]


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return all parts of a split file in order, found by their names; `path` alone if it is no part."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return (path,)
    stem, count = found["stem"], int(found["count"])
    if not 1 <= int(found["number"]) <= count:
        raise CheckpointError(f"{path} is named as part {int(found['number'])} of {count}.")
    parts = tuple(path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1))
    missing = next((part for part in parts if not part.exists()), None)
    if missing is not None:
        raise CheckpointError(
            f"{missing} is missing: the model is split into {count} files; download all of them into one"
            " folder."
        )
    return parts
