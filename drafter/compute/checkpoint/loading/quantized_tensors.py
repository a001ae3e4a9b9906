"""The matrices of a quantized checkpoint by name, read as if they were stored as plain numbers.

    config.json ─▶ CheckpointQuantization ─▶ table: "MODULE.weight" -> Scheme ─▶ values in the computing dtype

A rank reads the codes and scales of its slice alone. Codes that config.json does not declare, and declared
ones without their scales, are refused before a weight is read. A matrix of plain numbers is used as it is
even if config.json would quantize it: publishers leave routers and heads out of their lists.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor

from .....cluster.errors import CheckpointError
from ...memory.kv_cache import UNSCALED, KVScales
from ..gguf.gguf_folder import open_gguf_folder
from ..quantization.checkpoint_quantization import KEY, CheckpointQuantization
from ..quantization.kv_scales import find_kv_scales, read_kv_scales
from ..quantization.scheme import Scheme, check_parts, require_finite
from ..quantized_matrix import QuantizedMatrix
from ..safetensors_reader import FLOATS, TensorFolder, TensorHeaders

_WEIGHT = "weight"
_CODES = ("weight", "weight_packed", "qweight")  # last components of names of codes
# Scales of activations, which are not used, and of K and V, which may be (`kv_scales.py`).
_OF_ACTIVATIONS = re.compile(
    r"(?P<module>.+)\.(?:(?:in|out)put_(?:global_)?(?:scale|zero_point)|input_scale_ub|activation_scale)"
)
_OF_KV_CACHE = re.compile(r".+\.(?:[qkv]|kv|prob)_(?:scale|zero_point)")
_UNUSED = (_OF_ACTIVATIONS, _OF_KV_CACHE)
_OF_EXPERTS = ("_scale", "_scales")  # ends of the names of scales that are read as they are stored
_MAX_VALUES = 2**24  # of a part that is dequantized at once; bounds the memory of intermediates


class QuantizedTensors(TensorHeaders):
    """Headers of a checkpoint, with quantized matrices under plain names and shapes; `stored`: the files'."""

    def __init__(self, stored: TensorHeaders, quantization: CheckpointQuantization) -> None:
        super().__init__(stored.where)
        self.stored, self._quantization = stored, quantization
        self._schemes: dict[str, Scheme] = dict(self._quantized(stored, quantization))
        self.shapes, self.dtypes = dict(stored.shapes), dict(stored.dtypes)
        self.file_of = dict(stored.file_of)
        for name, scheme in self._schemes.items():
            self._replace_parts(name, scheme)
        self._unused = dict(self._unused_scales())
        for name in self._unused:
            del self.shapes[name]

    @staticmethod
    def _quantized(
        stored: TensorHeaders, quantization: CheckpointQuantization
    ) -> Iterator[tuple[str, Scheme]]:
        for name in stored.shapes:
            module, _, last = name.rpartition(".")
            if last not in _CODES or (last == _WEIGHT and stored.dtypes[name] in FLOATS):
                continue
            scheme = quantization.scheme_of(module)
            if scheme is not None and name == scheme.codes_name(module) and scheme.is_stored(stored, module):
                yield f"{module}.{_WEIGHT}", scheme

    def _replace_parts(self, name: str, scheme: Scheme) -> None:
        module = name.removesuffix(f".{_WEIGHT}")
        shape = scheme.shape(self.stored, module)
        file = self.stored.file_of[scheme.codes_name(module)]
        try:
            parts = scheme.parts(self.stored, module, shape)
        except CheckpointError:  # reported by `check`, if the matrix is used
            parts = {}
        for part in parts:
            self.shapes.pop(part, None)
        self.shapes[name], self.dtypes[name], self.file_of[name] = shape, scheme.dtype, file

    def _unused_scales(self) -> Iterator[tuple[str, re.Pattern[str]]]:
        for name in self.shapes:
            found = _OF_ACTIVATIONS.fullmatch(name)
            if found is not None and f"{found['module']}.{_WEIGHT}" in self._schemes:
                yield name, _OF_ACTIVATIONS
            elif _OF_KV_CACHE.fullmatch(name):
                yield name, _OF_KV_CACHE

    def check(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS) -> None:
        scheme = self._schemes.get(name)
        if scheme is None:
            self._refuse_undeclared(name)
            return super().check(name, shape, dtypes)
        if len(shape) != 2:
            raise CheckpointError(
                f"{self.where}: {name} is stored as {scheme}, but config.json requires shape {list(shape)}, "
                "which is no matrix.",
                param=name,
            )
        rows, columns = shape
        parts = scheme.parts(self.stored, name.removesuffix(f".{_WEIGHT}"), (rows, columns))
        check_parts(parts, self.stored)

    def _refuse_undeclared(self, name: str) -> None:
        module = name.removesuffix(f".{_WEIGHT}")
        names = [f"{module}.{last}" for last in _CODES if last != _WEIGHT]
        codes = next((each for each in names if each in self.stored.shapes), None)
        if codes is None or name in self.stored.shapes:
            return
        declared = self._quantization.scheme_of(module)
        says = "that it is not quantized" if declared is None else f"that it is {declared}"
        raise CheckpointError(
            f"{self.where}: {codes} is stored as {self.stored.dtypes[codes]}, but {KEY} says {says}. Take "
            "config.json and weights from one revision.",
            param=name,
        )

    def refuse_stray_scales(self, read: Collection[str]) -> None:
        """Raise CheckpointError if a matrix has a scale that is not used, or if no matrix is quantized.

        One that is quantized may be another model's, such as the target's of a layer for multi-token
        prediction in 16 bits.
        """
        used = set(read)
        for name in read:
            if (scheme := self._schemes.get(name)) is not None:
                module, shape = name.removesuffix(f".{_WEIGHT}"), self.shapes[name]
                used.update(scheme.parts(self.stored, module, (shape[0], shape[1])))
        self.stored.refuse_stray_scales(used.union(self._unused))
        if self._quantization.targets and not self._schemes:
            raise CheckpointError(
                f"{self.where}: {KEY} says {self._quantization}, but no matrix is stored so. Take config.json"
                f" and weights from one revision; if the weights are plain, override {KEY} with null.",
                param=KEY,
            )

    def kv_scale_names(self, attention: str) -> tuple[str, str] | None:
        """Return the names of a module's scales for K and V in FP8; raises as `find_kv_scales`."""
        return find_kv_scales(self.stored, attention) if self._quantization.has_fp8_kv_scales else None

    def notes(self, used: Collection[str] = ()) -> tuple[str, ...]:
        """Return sentences about what the publisher's engine quantizes and this one does not.

        `used` are names of scales of K and V that are applied.
        """
        unused = [kind for name, kind in self._unused.items() if name not in used]
        activations, kv_cache = (sum(kind is each for kind in unused) for each in _UNUSED)
        declared, found = self._quantization, list[str]()
        for count, is_declared, said in (
            (activations, declared.quantizes_activations, "activations are not quantized here"),
            (
                kv_cache,
                declared.quantizes_kv_cache and not used,
                "K and V are quantized by kv_cache_dtype alone",
            ),
        ):
            if count or is_declared:
                unused = f"; {count} stored scales are not used" if count else ""
                found.append(f"{self.where}: {said}{unused}.")
        return tuple(found)


class QuantizedFolder(QuantizedTensors):
    """Tensors of a quantized checkpoint; matrices are dequantized, and rounded once from fp32 to `dtype`."""

    def __init__(self, folder: str | Path, quantization: CheckpointQuantization, dtype: torch.dtype) -> None:
        files = quantization.gguf_files
        self._files = open_gguf_folder(folder, files) if files else TensorFolder(folder)
        self._dtype = dtype
        super().__init__(self._files, quantization)
        self.folder = self._files.folder

    def get(self, name: str) -> Tensor:
        if name not in self._schemes:
            return self._as_stored(name, self._files.get(name))
        return self._dequantized(name, *(slice(0, size) for size in self.shapes[name]))

    def slice(self, name: str, rows: slice, dim: int = 0) -> Tensor:
        if name not in self._schemes:
            return self._as_stored(name, self._files.slice(name, rows, dim))
        whole = [slice(0, size) for size in self.shapes[name]]
        return self._dequantized(name, *(rows if at == dim else part for at, part in enumerate(whole)))

    def _as_stored(self, name: str, tensor: Tensor) -> Tensor:
        return require_finite(tensor, self._files, name) if name.endswith(_OF_EXPERTS) else tensor

    def codes(self, name: str, part: slice | None = None, dim: int = 0) -> QuantizedMatrix | None:
        """Return a matrix, or some rows or columns, as codes; None where compiled products do not take it."""
        if name not in self._schemes:
            return None
        whole = [slice(0, size) for size in self.shapes[name]]
        rows, columns = (part if part is not None and at == dim else all_ for at, all_ in enumerate(whole))
        module = name.removesuffix(f".{_WEIGHT}")
        matrix = self._schemes[name].read_codes(self._files, module, rows, columns)
        return matrix if matrix is not None and matrix.can_stay_packed() else None

    def kv_scales(self, attention: str) -> KVScales:
        """Return a module's scales for K and V in FP8, 1 if it has none."""
        names = self.kv_scale_names(attention)
        return UNSCALED if names is None else read_kv_scales(self._files, names)

    def _dequantized(self, name: str, rows: slice, columns: slice) -> Tensor:
        scheme, module = self._schemes[name], name.removesuffix(f".{_WEIGHT}")
        width = columns.stop - columns.start
        values = torch.empty(rows.stop - rows.start, width, dtype=self._dtype)
        step = max(_MAX_VALUES // max(width, 1), 1)
        for start in range(rows.start, rows.stop, step):
            part = slice(start, min(start + step, rows.stop))
            values[part.start - rows.start : part.stop - rows.start] = scheme.read(
                self._files, module, part, columns
            )
        return values


def open_folder(
    folder: str | Path, quantization: CheckpointQuantization | None, dtype: torch.dtype = torch.float32
) -> TensorFolder | QuantizedFolder:
    """Open a checkpoint's files; `dtype` is that of dequantized matrices."""
    return TensorFolder(folder) if quantization is None else QuantizedFolder(folder, quantization, dtype)
