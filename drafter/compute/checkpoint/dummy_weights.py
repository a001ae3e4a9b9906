"""Random tensors with the shapes of a checkpoint, for `load_format="dummy"` and benchmarks.

Outputs are noise, but finite: matrices preserve the variance of their inputs. A name always gets the same
values on a kind of device, so ranks that slice one tensor get parts of the same one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from .packed_4bit import BLOCK

_CODES_STD = 2.9  # standard deviation of MXFP4's sixteen values
_INTEGERS_STD = 4.6  # standard deviation of INT4's


class RandomTensors:
    """A `TensorSource` of given shapes: vectors are 1, biases 0, matrices of variance 1 / columns.

    All have `dtype`, but a drafter's token map (`d2t`, int64) and packed weights (bytes, words).
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes = shapes
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
        if name.endswith("_packed"):  # words of eight codes (`drafter/compute/checkpoint/packed_4bit.py`)
            bits = torch.iinfo(torch.int32)
            return torch.randint(
                bits.min, bits.max, shape, generator=self._generator, dtype=torch.int32, device=self._device
            )
        if name.endswith("weight_scale"):
            scale = 1 / (_INTEGERS_STD * (shape[-1] * BLOCK) ** 0.5)
            return torch.full(shape, scale, dtype=self._dtype, device=self._device)
        if name.endswith("_scales"):
            exponent = 127 - round(math.log2(_CODES_STD * (shape[-1] * BLOCK) ** 0.5))
            return torch.full(shape, exponent, dtype=torch.uint8, device=self._device)
        tensor = torch.randn(shape, generator=self._generator, dtype=self._dtype, device=self._device)
        return tensor.mul_(shape[-1] ** -0.5)

    def slice(self, name: str, rows: slice, dim: int = 0) -> Tensor:
        return self.get(name).narrow(dim, rows.start, rows.stop - rows.start)
