"""Random tensors with the shapes of a checkpoint, for `load_format="dummy"` and benchmarks.

Outputs are noise, but finite: matrices preserve the variance of their inputs. A name always gets the same
values on a kind of device, so ranks that slice one tensor get parts of the same one. Matrices that are
published as codes are random codes where products take these.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .packed_codes import BLOCK
from .quantized_matrix import WITH_OFFSETS, Code, PackedForm, QuantizedMatrix

# Standard deviations of the values of equally frequent codes.
_STD: Mapping[Code, float] = {
    "int8": 74.0,
    "int4": 4.6,
    "e4m3": 100.0,
    "e2m1": 2.9,
    "int5": 9.2,
    "int6": 18.5,
    "uint4": 4.6,
    "uint5": 9.2,
    "uint8": 74.0,
}
_E4M3_NAN = 0x7F


class RandomTensors:
    """A `TensorSource` of given shapes: vectors are 1, biases 0, matrices of variance 1 / columns.

    All have `dtype`, but a drafter's token map (`d2t`, int64) and packed weights (bytes). `packed_form`
    returns the form of a module's `codes`.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        packed_form: Callable[[str], PackedForm | None] | None = None,
    ) -> None:
        self.shapes, self._packed_form = shapes, packed_form
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device)

    def get(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if name == "d2t":
            return torch.zeros(shape, dtype=torch.int64, device=self._device)  # the identity map
        if len(shape) == 1:
            fill = 0.0 if name.endswith("bias") else 1.0
            return torch.full(shape, fill, dtype=self._dtype, device=self._device)
        self._generator.manual_seed(zlib.crc32(name.encode()))
        if name.endswith("_blocks"):
            return torch.randint(
                256, shape, generator=self._generator, dtype=torch.uint8, device=self._device
            )
        if name.endswith("_scales"):
            scale = 1 / (_STD["e2m1"] * (shape[-1] * BLOCK) ** 0.5)
            return _equal_scales(shape, scale, torch.uint8, self._device)
        tensor = torch.randn(shape, generator=self._generator, dtype=self._dtype, device=self._device)
        return tensor.mul_(shape[-1] ** -0.5)

    def slice(self, name: str, rows: slice, dim: int = 0) -> Tensor:
        return self.get(name).narrow(dim, rows.start, rows.stop - rows.start).contiguous()

    def codes(self, name: str, part: slice | None = None, dim: int = 0) -> QuantizedMatrix | None:
        """Return a matrix, or some rows or columns, as codes; None if products do not take its form."""
        rows, columns = self.shapes[name]
        form = None if self._packed_form is None else self._packed_form(name.removesuffix(".weight"))
        group = columns if form is None or form.group is None else form.group
        whole = slice(0, columns) if part is None or dim == 0 else part
        if form is None or columns % BLOCK or columns % group or whole.start % group or whole.stop % group:
            return None
        self._generator.manual_seed(zlib.crc32(name.encode()))
        codes = torch.randint(
            form.num_codes, (rows, columns), generator=self._generator, dtype=torch.uint8, device=self._device
        )
        if form.code == "e4m3":
            codes.masked_fill_((codes & _E4M3_NAN) == _E4M3_NAN, 0)
        codes = codes.view(torch.int8) if form.code == "int8" else codes
        scale = 1 / (_STD[form.code] * columns**0.5)
        scales = _equal_scales((rows, columns // group), scale, form.scales, self._device)
        groups = slice(whole.start // group, whole.stop // group)
        of_rows = slice(0, rows) if part is None or dim == 1 else part
        scales = scales[of_rows, groups]
        offsets = -scales * ((form.num_codes - 1) / 2) if form.code in WITH_OFFSETS else None
        return QuantizedMatrix(form.code, codes[of_rows, whole], scales, None, offsets)


def _equal_scales(shape: tuple[int, ...], scale: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return equal scales; of dtype uint8 exponents of the nearest power of two."""
    if dtype is torch.uint8:
        return torch.full(shape, 127 + round(math.log2(scale)), dtype=dtype, device=device)
    return torch.full(shape, scale, dtype=dtype, device=device)
