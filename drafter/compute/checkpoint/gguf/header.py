"""Reads the header of one GGUF file: metadata, and names, shapes and places of tensors.

    magic "GGUF" | version u32 | tensors u64 | keys u64 | keys and values | tensor infos | padding | tensors

Numbers are little-endian, strings UTF-8 after a length of 64 bits. The values of versions 2 and 3 are the
same. `gguf`, llama.cpp's package, reads a header too, but makes an object of each element of an array: ten
seconds for Gemma's 262,144 tokens.

The file is mapped into memory, and each count is compared with the bytes that are left before anything is
allocated. Arrays of numbers are views of the map, so that no header takes more than a small multiple of its
size.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from .....cluster.errors import CheckpointError, brief_name

# A number, a string, or an array of them: a view of the file's bytes, or a list of strings.
Value = bool | int | float | str | NDArray[np.generic] | list[str]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT_KEY, _ALIGNMENT = "general.alignment", 32
_MAX_DIMENSIONS = 4
_MAX_HEADER_BYTES = 2**28  # Gemma's, with 262,144 tokens, has less than 2^23
_SMALLEST_KEY = 8 + 4 + 1  # bytes of an empty name, a type and a byte
_SMALLEST_TENSOR = 8 + 4 + 4 + 8  # bytes of an empty name, a number of dimensions, a type and an offset

_NUMBERS: Mapping[GGUFValueType, str] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Place of a tensor: `shape` in torch's order, `offset` in bytes from the start of file number `part`."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    part: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of the elements that differ in the last index alone."""
        block, size = GGML_QUANT_SIZES[self.type]
        return (self.shape[-1] if self.shape else 1) // block * size

    @property
    def bytes(self) -> int:
        return self.row_bytes * prod(self.shape[:-1])


@dataclass(frozen=True, slots=True)
class Header:
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]
    alignment: int
    mapped: mmap.mmap


def read_header(path: Path, part: int = 0) -> Header:
    """Map a file and read its header. Raises CheckpointError if it is no complete GGUF file."""
    try:
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise CheckpointError(f"{path} is no GGUF file: it does not begin with {_MAGIC.decode()}.")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
    return _HeaderReader(path, mapped, part).read()


class _HeaderReader:
    """Position in a mapped header; methods that read a value move it to the value's end."""

    def __init__(self, path: Path, mapped: mmap.mmap, part: int) -> None:
        self._path, self._mapped, self._part = path, mapped, part
        self._at = len(_MAGIC)
        self._end = min(len(mapped), _MAX_HEADER_BYTES)

    def read(self) -> Header:
        version = self._number("<I")
        if version & 0xFFFF == 0 and version:
            raise self._error("is big-endian", "convert the model for little-endian machines")
        if version not in _VERSIONS:
            raise self._error(f"has version {version} of GGUF", "convert it to version 2 or 3")
        num_tensors, num_keys = self._number("<Q"), self._number("<Q")
        self._require(num_keys, _SMALLEST_KEY, "keys")
        metadata = self._metadata(num_keys)
        alignment = self._alignment(metadata)
        self._require(num_tensors, _SMALLEST_TENSOR, "tensors")
        infos = [self._tensor() for _ in range(num_tensors)]
        start = -(-self._at // alignment) * alignment
        return Header(metadata, self._placed(infos, start, alignment), alignment, self._mapped)

    def _metadata(self, count: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for _ in range(count):
            key = self._string("a key")
            if key in metadata:
                raise self._error(f"has the key {brief_name(key)} twice")
            metadata[key] = self._value(key)
        return metadata

    def _alignment(self, metadata: Mapping[str, Value]) -> int:
        alignment = metadata.get(_ALIGNMENT_KEY, _ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment.bit_count() != 1:
            raise self._error(f"has {_ALIGNMENT_KEY} {alignment!r}, which is no power of two")
        return alignment

    def _value(self, key: str) -> Value:
        kind = self._kind(key)
        if kind is GGUFValueType.STRING:
            return self._string(key)
        if kind is not GGUFValueType.ARRAY:
            value = self._numbers(key, kind, 1)[0].item()
            assert isinstance(value, bool | int | float), "types of numbers"
            return value
        of, count = self._kind(key), self._number("<Q")
        if of is GGUFValueType.ARRAY:
            raise self._error(f"has an array of arrays for {brief_name(key)}")
        if of is not GGUFValueType.STRING:
            return self._numbers(key, of, count)
        self._require(count, 8, f"strings of {brief_name(key)}")
        return self._strings(key, count)

    def _kind(self, key: str) -> GGUFValueType:
        number = self._number("<I")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self._error(f"has a value of the unknown type {number} for {brief_name(key)}") from None

    def _numbers(self, key: str, kind: GGUFValueType, count: int) -> NDArray[np.generic]:
        dtype = np.dtype(_NUMBERS[kind])
        self._require(count, dtype.itemsize, f"values of {brief_name(key)}")
        stored = np.dtype("<u1") if kind is GGUFValueType.BOOL else dtype
        values = np.frombuffer(self._mapped, stored, count, self._at)
        if kind is GGUFValueType.BOOL and bool((values > 1).any()):
            raise self._error(f"has a value other than true and false for {brief_name(key)}")
        self._at += values.nbytes
        return values.view(dtype)

    def _strings(self, key: str, count: int) -> list[str]:
        mapped, at, end = self._mapped, self._at, self._end
        length_at = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                (length,) = length_at(mapped, at)
                at += 8 + length
                if at > end:
                    raise self._cut_short(f"strings of {brief_name(key)}")
                strings.append(str(mapped[at - length : at], "utf-8"))
        except struct.error:
            raise self._cut_short(f"strings of {brief_name(key)}") from None
        except UnicodeDecodeError:
            raise self._error(f"has a string that is no UTF-8 for {brief_name(key)}") from None
        self._at = at
        return strings

    def _string(self, what: str) -> str:
        (string,) = self._strings(what, 1)
        return string

    def _tensor(self) -> TensorInfo:
        name = self._string("a tensor's name")
        num_dimensions = self._number("<I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise self._error(f"has a tensor {brief_name(name)} of {num_dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(num_dimensions))[::-1]
        if 0 in shape:
            raise self._error(f"has a tensor {brief_name(name)} without elements")
        number, offset = self._number("<I"), self._number("<Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self._error(
                f"stores {brief_name(name)} in the unknown type {number}", "take another quantization"
            ) from None
        block, _ = GGML_QUANT_SIZES[kind]
        if (shape[-1] if shape else 1) % block:
            raise self._error(
                f"stores {brief_name(name)} of shape {list(shape)} as {kind.name}, whose blocks are {block}"
                " wide"
            )
        return TensorInfo(name, shape, kind, offset, self._part)

    def _placed(self, infos: list[TensorInfo], start: int, alignment: int) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for info in infos:
            if info.name in tensors:
                raise self._error(f"has the tensor {brief_name(info.name)} twice")
            if info.offset % alignment:
                raise self._error(
                    f"places {brief_name(info.name)} at {info.offset}, no multiple of {alignment}"
                )
            at = start + info.offset
            if at + info.bytes > len(self._mapped):
                missing = at + info.bytes - len(self._mapped)
                raise self._error(f"is {missing:,} bytes too short for {brief_name(info.name)}")
            tensors[info.name] = TensorInfo(info.name, info.shape, info.type, at, self._part)
        return tensors

    def _number(self, form: str) -> int:
        self._require(1, struct.calcsize(form), "bytes of its header")
        (number,) = struct.unpack_from(form, self._mapped, self._at)
        self._at += struct.calcsize(form)
        return number

    def _require(self, count: int, size: int, what: str) -> None:
        if count * size > self._end - self._at:
            raise self._cut_short(what)

    def _cut_short(self, what: str) -> CheckpointError:
        if self._end < len(self._mapped):
            return self._error(f"has a header of more than {_MAX_HEADER_BYTES:,} bytes")
        return self._error(f"ends before the {what}")

    def _error(self, says: str, remedy: str = "download it again") -> CheckpointError:
        return CheckpointError(f"{self._path} {says}; {remedy}.")
