"""Random matrices of codes, one of each kind that products decode.

Legend: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from manta.drafter.compute.checkpoint.quantized_matrix import BlockedValues, QuantizedMatrix, quantize
from torch import Tensor


def scales(outputs: int, groups: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (0.01 * torch.rand(outputs, groups) + 0.001).to(dtype)


def bytes_of(outputs: int, inputs: int, most: int = 256) -> Tensor:
    return torch.randint(0, most, (outputs, inputs), dtype=torch.uint8)


def e4m3(outputs: int, inputs: int) -> Tensor:
    codes = bytes_of(outputs, inputs)
    return codes.masked_fill_((codes & 0x7F) == 0x7F, 0)  # no NaN


def random(outputs: int, inputs: int) -> Tensor:
    return 0.05 * torch.randn(outputs, inputs)


def in_blocks(outputs: int, groups: int, dtype: torch.dtype = torch.uint8) -> BlockedValues:
    blocks = scales(outputs, groups // 2) * torch.randint(-1, 2, (outputs, groups // 2)).sign()
    return BlockedValues(bytes_of(outputs, groups).view(dtype), (0.02 * blocks).half())


MATRICES: dict[str, Callable[[int, int], QuantizedMatrix]] = {
    "int8 at load": lambda o, i: quantize(random(o, i), "int8"),
    "int4 at load": lambda o, i: quantize(random(o, i), "int4"),
    "int8 by channel": lambda o, i: QuantizedMatrix("int8", bytes_of(o, i).view(torch.int8), scales(o, 1)),
    "int8 in groups": lambda o, i: QuantizedMatrix(
        "int8", bytes_of(o, i).view(torch.int8), scales(o, i // 64, torch.bfloat16)
    ),
    "int4": lambda o, i: QuantizedMatrix("int4", bytes_of(o, i, 16), scales(o, i // 32, torch.float16)),
    "int4 with zeros": lambda o, i: QuantizedMatrix(
        "int4", bytes_of(o, i, 16), scales(o, i // 64, torch.float16), bytes_of(o, i // 64, 17)
    ),
    "e4m3": lambda o, i: QuantizedMatrix("e4m3", e4m3(o, i), scales(o, i // 64)),
    "e2m1": lambda o, i: QuantizedMatrix("e2m1", bytes_of(o, i, 16), scales(o, i // 16)),
    "int8 with tiny scales": lambda o, i: QuantizedMatrix(  # half of them are subnormal in fp16
        "int8",
        bytes_of(o, i).view(torch.int8),
        (scales(o, i // 32) * torch.tensor([1.0, 1e-3])[bytes_of(o, i // 32, 2).int()]).half(),
    ),
    "int8 in blocks": lambda o, i: QuantizedMatrix(
        "int8", bytes_of(o, i).view(torch.int8), in_blocks(o, i // 16, torch.int8)
    ),
    "uint4": lambda o, i: QuantizedMatrix(
        "uint4", bytes_of(o, i, 16), scales(o, i // 32, torch.float16), None, -scales(o, i // 32).half()
    ),
    "int5": lambda o, i: QuantizedMatrix("int5", bytes_of(o, i, 32), scales(o, i // 32, torch.float16)),
    "int6 in blocks": lambda o, i: QuantizedMatrix(
        "int6", bytes_of(o, i, 64), in_blocks(o, i // 16, torch.int8)
    ),
    "uint5 in blocks": lambda o, i: QuantizedMatrix(
        "uint5", bytes_of(o, i, 32), in_blocks(o, i // 32), None, in_blocks(o, i // 32)
    ),
    "uint4 in blocks": lambda o, i: QuantizedMatrix(
        "uint4", bytes_of(o, i, 16), in_blocks(o, i // 32), None, in_blocks(o, i // 32)
    ),
    "uint8 in blocks": lambda o, i: QuantizedMatrix(
        "uint8", bytes_of(o, i), in_blocks(o, i // 16), None, in_blocks(o, i // 16)
    ),
}
