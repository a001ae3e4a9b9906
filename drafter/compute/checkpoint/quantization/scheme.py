"""Interface of a quantization format: names, shapes, dtypes and values of a matrix's tensors.

A format implements `Scheme` in its own module; only `quantized_tensors.py` calls it. Matrices are [O, I].

Legend: O outputs, I inputs, G groups of a row that share a scale, W words of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import AfterValidator
from torch import Tensor

from .....cluster.errors import CheckpointError
from ..quantized_matrix import Code, PackedForm, QuantizedMatrix
from ..safetensors_reader import TensorFolder, TensorHeaders

Shape = tuple[int, ...]
# Shapes and dtypes (in safetensors' notation) that a tensor may have.
StoredForm = tuple[tuple[Shape, ...], tuple[str, ...]]

FLOAT_SCALES = ("F32", "BF16", "F16")
WHOLE_ROW = -1  # a `group_size`: all inputs share a scale
_E8M0_NAN = 255


def _check_group(size: int) -> int:
    if size != WHOLE_ROW and size <= 0:
        raise ValueError(f"must be a positive integer, or {WHOLE_ROW} for whole rows")
    return size


GroupSize = Annotated[int, AfterValidator(_check_group)]


@dataclass(frozen=True, slots=True)
class Scheme(ABC):
    """Form in which a module's matrix is stored; `CODES` ends the name of its tensor with the codes."""

    CODES: ClassVar[str] = "weight"

    def codes_name(self, module: str) -> str:
        """Return the name of the tensor with the codes."""
        return f"{module}.{self.CODES}"

    @property
    @abstractmethod
    def code_dtypes(self) -> tuple[str, ...]:
        """Dtypes of the codes; a tensor of this name with another dtype is not quantized by this scheme."""

    @property
    def packed_form(self) -> PackedForm | None:
        """Form of `read_codes`; None: matrices are dequantized at load."""
        return None

    @property
    @abstractmethod
    def dtype(self) -> str:
        """The name of an element's type, with its bits, such as "INT4"."""

    @abstractmethod
    def shape(self, stored: TensorHeaders, module: str) -> tuple[int, int]:
        """Return the matrix's shape [O, I] as far as the codes' header shows it."""

    @abstractmethod
    def parts(self, stored: TensorHeaders, module: str, shape: tuple[int, int]) -> Mapping[str, StoredForm]:
        """Return a matrix's tensors by name. Raises CheckpointError if the format cannot have this shape."""

    @abstractmethod
    def read(self, files: TensorFolder, module: str, rows: slice, columns: slice) -> Tensor:
        """Return the values of a part of the matrix, fp32 [rows, columns]."""

    def read_codes(
        self, files: TensorFolder, module: str, rows: slice, columns: slice
    ) -> QuantizedMatrix | None:
        """Return a part of the matrix as codes; None where `QuantizedMatrix` cannot have its form."""
        return None

    def is_stored(self, stored: TensorHeaders, module: str) -> bool:
        return stored.dtypes.get(self.codes_name(module)) in self.code_dtypes


def describe_scales(group: int | None, per: str = "channel") -> str:
    """Return how scales are shared: by `group` inputs, or (None) by a whole channel or tensor."""
    return f"with a scale per {per}" if group is None else f"in groups of {group}"


def check_parts(parts: Mapping[str, StoredForm], stored: TensorHeaders) -> None:
    """Raise CheckpointError unless all tensors are stored with one of their shapes and dtypes."""
    for name, (shapes, dtypes) in parts.items():
        found = stored.shapes.get(name)
        stored.check(name, found if found is not None and found in shapes else shapes[0], dtypes)


def read_scales(files: TensorFolder, name: str, *ranges: slice) -> Tensor:
    """Return a tensor of scales, or the part in `ranges`, as stored. Raises as `require_finite`."""
    return require_finite(files.part(name, *ranges) if ranges else files.get(name), files, name)


def require_finite(scales: Tensor, files: TensorFolder, name: str) -> Tensor:
    """Return the scales; bytes are exponents (E8M0). Raises CheckpointError if one is NaN or infinite."""
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        is_finite = scales.view(torch.uint8) != _E8M0_NAN
    else:
        is_finite = scales.float().isfinite()
    if not bool(is_finite.all()):
        raise CheckpointError(
            f"{files.where}: {name} holds scales that are no finite numbers; download again.", param=name
        )
    return scales


def require_multiple(stored: TensorHeaders, module: str, what: str, size: int, multiple: int) -> None:
    if size % multiple:
        raise CheckpointError(
            f"{stored.where}: {module} has {size} {what}, which are no multiple of {multiple}, as its "
            "quantization in config.json requires. Take config.json and weights from one revision.",
            param=module,
        )


def enclosing(part: slice, step: int) -> tuple[slice, int]:
    """Return the range of blocks of `step` elements that hold `part`, and its offset in the first one."""
    return slice(part.start // step, -(-part.stop // step)), part.start % step


def expand(scales: Tensor, part: slice, step: int, dim: int) -> Tensor:
    """Repeat scales of blocks along `dim` for each element of `part`; they begin with its first block."""
    return scales.repeat_interleave(step, dim).narrow(dim, part.start % step, part.stop - part.start)


def packed_form(
    code: Code, group: int | None, scales: torch.dtype, shift_bytes: int = 0
) -> PackedForm | None:
    """Return the form of codes; None if products cannot have the groups."""
    has_shift = group is None or (group > 1 and group.bit_count() == 1)
    return PackedForm(code, group, scales, shift_bytes) if has_shift else None


def aligned_groups(columns: slice, group: int | None) -> slice | None:
    """Return the groups that make up `columns`, or None if parts of some do; a `group` of None is a row."""
    if group is None:
        return slice(0, 1)
    if columns.start % group or columns.stop % group:
        return None
    return slice(columns.start // group, columns.stop // group)


def as_int8(codes_OI: Tensor, zeros_OG: Tensor) -> Tensor | None:
    """Return code - zero as int8; None if one does not fit."""
    codes_OGC = codes_OI.short().unflatten(1, (zeros_OG.shape[1], -1)) - zeros_OG.short().unsqueeze(2)
    fits = bool(((codes_OGC >= -128) & (codes_OGC <= 127)).all())
    return codes_OGC.flatten(1).to(torch.int8) if fits else None
