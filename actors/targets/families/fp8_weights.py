"""`quantization_config` of checkpoints whose matrices are FP8 with a scale per block (`fp8_blocks.py`).

`activation_scheme` says how their publishers quantise activations, too. Here products are computed in the
model's dtype, on the numbers that the weights stand for: outputs are no worse, and not theirs bit by bit.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from ....drafter.compute.config_json import Count, HfConfig


def _two(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if len(sizes) != 2:
        raise ValueError("must be a list of two positive integers: rows and columns of a block")
    return sizes


class Fp8Weights(HfConfig):
    """See the module's text; any other `quant_method` is refused."""

    quant_method: Literal["fp8"]
    fmt: Literal["float8_e4m3fn", "e4m3"] = "e4m3"
    weight_block_size: Annotated[tuple[Count, ...], AfterValidator(_two)]

    @property
    def block(self) -> tuple[int, int]:
        rows, columns = self.weight_block_size
        return rows, columns
