"""A model in GGUF: one file, or all parts of a split one, with metadata and tensors under llama.cpp's names.

Nothing is copied: tensors are views of the mapped files. `header.py` reads one file; names of Hugging Face
are in `architectures.py`, types of tensors in `block_formats.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .....cluster.errors import CheckpointError, brief_name
from .header import Header, TensorInfo, Value, read_header
from .split_files import parts_of

_NUMBER, _COUNT, _NUM_TENSORS = "split.no", "split.count", "split.tensors.count"
_ONE_RELEASE = "Take all parts of one release."


class GgufFile:
    """Metadata and tensors of a file; those of all parts if it is a part of a split one.

    Attributes:
        paths: the parts in order, absolute; `path` is the first one.
        metadata: keys and values of the first part. Arrays are read-only numpy arrays or lists of strings.
        tensors: by name, in the order of the files.
        alignment: of the first part's tensors, in bytes.
    """

    def __init__(self, path: str | Path) -> None:
        """Read the headers. Raises CheckpointError for a broken or missing file or part."""
        self.paths = parts_of(Path(path).absolute())
        self.path = self.paths[0]
        self._headers = [read_header(each, part) for part, each in enumerate(self.paths)]
        self.metadata: Mapping[str, Value] = self._headers[0].metadata
        self.alignment = self._headers[0].alignment
        self.tensors: Mapping[str, TensorInfo] = self._joined()

    def _joined(self) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for part, (path, header) in enumerate(zip(self.paths, self._headers, strict=True)):
            _check_part(path, header, part, len(self.paths))
            for name, info in header.tensors.items():
                if name in tensors:
                    of = self.paths[tensors[name].part].name
                    raise CheckpointError(
                        f"{path} has the tensor {brief_name(name)}, as {of} has. {_ONE_RELEASE}"
                    )
                tensors[name] = info
        expected = self.metadata.get(_NUM_TENSORS, len(tensors))
        if expected != len(tensors):
            raise CheckpointError(
                f"{self.path} says {_NUM_TENSORS} {expected}, but its parts have {len(tensors)} tensors."
                f" {_ONE_RELEASE}"
            )
        return tensors

    def blocks(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor's bytes, uint8 [rows, bytes of a row], as a view of the file."""
        info = self.tensors[name]
        mapped = self._headers[info.part].mapped
        flat = np.frombuffer(mapped, np.uint8, info.bytes, info.offset)
        return flat.reshape(-1, info.row_bytes)


def _check_part(path: Path, header: Header, part: int, num_parts: int) -> None:
    number, count = header.metadata.get(_NUMBER, part), header.metadata.get(_COUNT, num_parts)
    if count in (0, 1) and num_parts == 1:
        return
    if count != num_parts and num_parts == 1:
        raise CheckpointError(
            f"{path} is part of a model of {count} files; give all of them the names"
            " NAME-00001-of-0000N.gguf with which they were published."
        )
    if (number, count) != (part, num_parts):
        raise CheckpointError(
            f"{path} is named as part {part + 1} of {num_parts}, but says {_NUMBER} {number} and {_COUNT}"
            f" {count}. {_ONE_RELEASE}"
        )
