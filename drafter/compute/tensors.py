"""Tensors of a checkpoint folder by name: safetensors files, read as they are asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...cluster.errors import CheckpointError
from ...cluster.inner_names import inner_name

_SAFETENSORS = re.compile(r".+\.safetensors")


class TensorSource(Protocol):
    """Tensors by their names in a checkpoint: a `TensorFolder`, or `RandomTensors`."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def get(self, name: str) -> Tensor: ...

    def slice(self, name: str, rows: slice, dim: int = 0) -> Tensor:
        """Part of a tensor along `dim`."""
        ...


class TensorHeaders:
    """What a checkpoint's files say of its tensors, wherever they are; holds none.

    Attributes:
        where: for messages.
        shapes: shape of every tensor by name.
        dtypes: likewise, in safetensors' words ("BF16").
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise CheckpointError unless the tensor is there in this shape, in a dtype that needs no scale."""
        self.check_shape(name, shape)
        if (dtype := self.dtypes[name]).startswith("F8"):
            raise CheckpointError(
                f"{self.where}: tensor {name} is in FP8 ({dtype}), without a scale beside it, or config.json"
                " names no quantization_config. Take config.json and weights from one revision.",
                param=name,
            )

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """The first half of `check`."""
        if name not in self.shapes:
            raise CheckpointError(
                f"{self.where}: tensor {name} is missing; config.json asks for shape {list(shape)}.",
                param=name,
            )
        if self.shapes[name] != shape:
            raise CheckpointError(
                f"{self.where}: tensor {name} has shape {list(self.shapes[name])}, but config.json and the"
                f" target ask for {list(shape)}.",
                param=name,
            )


class TensorFolder(TensorHeaders):
    """The tensors of a checkpoint folder: one safetensors file, or shards with an index.

    Attributes:
        folder: where they are.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(str(folder))
        self.folder = Path(folder)
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, safe_open] = {}
        for file in self._files():
            self._read_header(file)

    def _files(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            try:
                named = set(json.loads(index.read_text())["weight_map"].values())
                names = sorted(inner_name(name, _SAFETENSORS) for name in named)
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise CheckpointError(
                    f"{index} is not a safetensors index of files in this folder: {error}. Download again."
                ) from None
            return [self.folder / name for name in names]  # which may be links, as in the hub's cache
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(
                f"{self.folder} holds no .safetensors file; convert the checkpoint to safetensors."
            )
        return files

    def _read_header(self, file: Path) -> None:
        try:
            handle = safe_open(file, framework="pt")
            for name in handle.keys():  # noqa: SIM118  (not a dict)
                view = handle.get_slice(name)
                self.shapes[name], self.dtypes[name] = tuple(view.get_shape()), view.get_dtype()
                self._file_of[name] = file
        except FileNotFoundError:
            raise CheckpointError(f"{file} is missing although the index names it; download again.") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is corrupt or cut short ({error}); download again.") from None
        self._open[file] = handle

    def get(self, name: str) -> Tensor:
        """The tensor, on the CPU, in the file's dtype."""
        file = self._file_of[name]
        try:
            return self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: {name} cannot be read ({error}); download again.") from None

    def slice(self, name: str, rows: slice, dim: int = 0) -> Tensor:
        """Part of a tensor along `dim`; only these bytes are read."""
        view = self._open[self._file_of[name]].get_slice(name)
        return view[(*[slice(None)] * dim, rows)]
