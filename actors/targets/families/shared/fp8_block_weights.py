"""`quantization_config` of checkpoints whose matrices are FP8 with a scale per block (`fp8_block_reader.py`).

`activation_scheme` is ignored: here matrices are dequantized and multiplied in the model's dtype, so outputs
are at least as exact as those with quantized activations, but not the same bits.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from .....drafter.compute.checkpoint.hf_config import Count, HfConfig


def _check_two_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if len(sizes) != 2:
        raise ValueError("must be a list of two positive integers: rows and columns of a block")
    return sizes


class Fp8Weights(HfConfig):
    """FP8 in blocks; any other `quant_method` is refused."""

    quant_method: Literal["fp8"]
    fmt: Literal["float8_e4m3fn", "e4m3"] = "e4m3"
    weight_block_size: Annotated[tuple[Count, ...], AfterValidator(_check_two_sizes)]

    @property
    def block(self) -> tuple[int, int]:
        rows, columns = self.weight_block_size
        return rows, columns
