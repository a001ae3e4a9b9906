"""Reads tensors of a checkpoint folder by name from safetensors files, on demand."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ....cluster.errors import CheckpointError
from ....cluster.json_text import parse_json
from ....cluster.safe_file_names import inner_name

_SAFETENSORS = re.compile(r".+\.safetensors")

# Dtypes used as stored; dtypes of a drafter's token map; bytes of packed codes.
FLOATS, INTEGERS = ("F32", "BF16", "F16", "F64"), ("I64", "I32")
BYTES = ("U8",)
_CODES = ("qweight", "weight_packed")  # names of packed matrices
# Suffixes that quantizers append to a matrix's name without ".weight".
_OF_QUANTISED = re.compile(
    r"(?P<matrix>.+?)(?:\.weight)?[._]"
    r"(?:(?:weight|input|global)_?)*(?:scales?(?:_\w+)?|zero_points?|q?zeros|absmax|amax|SCB|g_idx)"
)


class TensorSource(Protocol):
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def get(self, name: str) -> Tensor: ...

    def slice(self, name: str, rows: slice, dim: int = 0) -> Tensor: ...


class TensorHeaders:
    """Names, shapes and dtypes ("BF16") of a checkpoint's tensors; `where` is for messages."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.file_of: dict[str, str] = {}

    def add(self, name: str, shape: tuple[int, ...], dtype: str, file: str) -> None:
        if name in self.shapes:
            raise CheckpointError(
                f"{self.where}: tensor {name} is in {self.file_of[name]} and in {file}. Keep only the"
                " files of one revision in this folder.",
                param=name,
            )
        self.shapes[name], self.dtypes[name], self.file_of[name] = shape, dtype, file

    def check(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS) -> None:
        """Raise CheckpointError unless the tensor exists with this shape and one of these dtypes."""
        if name not in self.shapes:
            module = name.removesuffix(".weight")
            packed = next((code for suffix in _CODES if (code := f"{module}.{suffix}") in self.shapes), None)
            hint = "" if packed is None else f" {packed} is quantized, which config.json does not say."
            raise CheckpointError(
                f"{self.where}: tensor {name} is missing; config.json requires shape {list(shape)}.{hint}",
                param=name,
            )
        if self.shapes[name] != shape:
            raise CheckpointError(
                f"{self.where}: tensor {name} has shape {list(self.shapes[name])}, but config.json and the"
                f" target ask for {list(shape)}.",
                param=name,
            )
        if (dtype := self.dtypes[name]) not in dtypes:
            raise CheckpointError(
                f"{self.where}: tensor {name} is stored as {dtype}; it must be {' or '.join(dtypes)}. This"
                " checkpoint is quantized in a way that config.json does not name or that is not supported:"
                " use the unquantized checkpoint.",
                param=name,
            )

    def refuse_stray_scales(self, read: Collection[str]) -> None:
        """Raise CheckpointError if a matrix that is read has a scale that is not: it is quantized."""
        for name in sorted(self.shapes.keys() - set(read)):
            found = _OF_QUANTISED.fullmatch(name)
            of = "" if found is None else found["matrix"]
            if f"{of}.weight" in read or of in read:
                raise CheckpointError(
                    f"{self.where}: {name} is stored with a matrix, but config.json names no quantization"
                    " that uses it. Take config.json and weights from one revision, or use the unquantized"
                    " checkpoint.",
                    param=name,
                )


class TensorFolder(TensorHeaders):
    """The tensors of a folder: of model.safetensors, else an index's shards, else all safetensors files."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(str(folder))
        self.folder = Path(folder)
        self._open: dict[str, safe_open] = {}
        for file in self._files():
            self._read_header(file)

    def _files(self) -> list[Path]:
        if (single := self.folder / "model.safetensors").exists():
            return [single]
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            try:
                named = set(parse_json(index.read_text())["weight_map"].values())
                names = sorted(inner_name(name, _SAFETENSORS) for name in named)
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise CheckpointError(
                    f"{index} is not a safetensors index of files in this folder: {error}. Download again."
                ) from None
            return [self.folder / name for name in names]  # may be links, as in the hub's cache
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
                self.add(name, tuple(view.get_shape()), view.get_dtype(), file.name)
        except FileNotFoundError:
            raise CheckpointError(f"{file} is missing although the index names it; download again.") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is corrupt or cut short ({error}); download again.") from None
        self._open[file.name] = handle

    def get(self, name: str) -> Tensor:
        file = self.file_of[name]
        try:
            return self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.folder / file}: {name} cannot be read ({error}); download again."
            ) from None

    def slice(self, name: str, rows: slice, dim: int = 0) -> Tensor:
        return self.part(name, *[slice(None)] * dim, rows)

    def part(self, name: str, *ranges: slice) -> Tensor:
        """Return a part of a tensor, a range per leading dimension, reading only its bytes."""
        return self._open[self.file_of[name]].get_slice(name)[ranges]
