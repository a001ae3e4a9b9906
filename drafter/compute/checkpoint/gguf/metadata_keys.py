"""Typed values of a GGUF file's metadata; a missing or wrong one is refused by its key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from .....cluster.errors import CheckpointError
from ..hf_config import wrong
from .gguf_file import GgufFile
from .header import Value

ARCHITECTURE = "general.architecture"


class _Required:
    """Marks a key without a default."""


REQUIRED: Final = _Required()


class MetadataKeys:
    """The keys of a file's architecture, such as "block_count" for "llama.block_count"."""

    def __init__(self, file: GgufFile) -> None:
        """Raises CheckpointError if the file names no architecture."""
        self.file, self.where = file, str(file.path)
        name = file.metadata.get(ARCHITECTURE)
        if not isinstance(name, str):
            raise wrong(self.where, ARCHITECTURE, name, "the name of a model's architecture")
        self.architecture = name

    def full(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def has(self, key: str) -> bool:
        return self.full(key) in self.file.metadata

    def count(self, key: str, default: int | _Required = REQUIRED) -> int:
        """Return a positive integer; a value per layer must be the same for all of them."""
        value = self._value(key, default)
        if isinstance(value, np.ndarray) and len(value) and bool((value == value[0]).all()):
            value = value[0].item()
        return self._positive(key, value)

    def counts(self, key: str, num_layers: int) -> Sequence[int]:
        """Return a positive integer per layer, which the file may state once for all."""
        value = self._value(key, REQUIRED)
        if not isinstance(value, np.ndarray):
            return (self._positive(key, value),) * num_layers
        if len(value) != num_layers:
            raise self.wrong(key, value.tolist(), f"a list of {num_layers} integers, one per layer")
        return tuple(self._positive(key, each) for each in value.tolist())

    def integers(self, key: str) -> Sequence[int]:
        """Return a list of integers, which is not empty."""
        value = self._value(key, REQUIRED)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or not len(value):
            raise self.wrong(key, value, "a list of integers")
        return [int(each) for each in value.tolist()]

    def flags(self, key: str, num_layers: int) -> Sequence[bool] | None:
        """Return true or false per layer; None if the file does not state it."""
        value = self._value(key, None)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or len(value) != num_layers:
            raise self.wrong(key, value, f"a list of {num_layers} values, one per layer")
        return tuple(bool(each) for each in value.tolist())

    def integer(self, key: str, default: int) -> int:
        """Return an integer that is not negative."""
        value = self._value(key, default)
        if type(value) is not int or value < 0:
            raise self.wrong(key, value, "an integer that is not negative")
        return value

    def number(self, key: str, default: float | _Required = REQUIRED) -> float:
        """Return the shortest decimal number of an fp32 value, which is what its writer was given."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise self.wrong(key, value, "a number")
        return value if isinstance(value, int) else float(str(np.float32(value)))

    def flag(self, key: str, default: bool | _Required = REQUIRED) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def wrong(self, key: str, value: object, wanted: str) -> CheckpointError:
        return wrong(self.where, self.full(key), value, wanted)

    def _value(self, key: str, default: Value | _Required | None) -> Value | None:
        value = self.file.metadata.get(self.full(key), default)
        return None if isinstance(value, _Required) else value

    def _positive(self, key: str, value: object) -> int:
        if type(value) is not int or value <= 0:
            raise self.wrong(key, value, "a positive integer")
        return value
