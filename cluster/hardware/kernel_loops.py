"""Instruction counts of the loops of the GPU kernels, which bound how fast they read their bytes.

A warp scheduler issues one instruction per cycle, and each of a program's four warps has a scheduler of its
own. So an iteration takes at least as many cycles of a multiprocessor as a warp has instructions, whatever
the memory does; kernels issue about `ISSUE_SHARE` of the cycles. `tests/drafter/gpu_triton/
test_kernels_compile.py` counts the instructions in the machine code for sm_90 and sm_100; docs/benchmarks/
gpu.md has the table. Products of more rows than ours take are the library's and have no count here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ISSUE_SHARE = 0.7  # an estimate
ROW_TILE = 64  # rows of attention's tile, and of a product's where no other is given
OWN_ROWS, PACKED_ROWS = 128, 256  # most rows of a product with plain weights, and with codes


@dataclass(frozen=True, slots=True)
class IssuedInstructions:
    """Instructions of a multiprocessor's schedulers, by architecture."""

    sm_90: float = 0.0
    sm_100: float = 0.0

    def __add__(self, other: IssuedInstructions) -> IssuedInstructions:
        return IssuedInstructions(self.sm_90 + other.sm_90, self.sm_100 + other.sm_100)

    def times(self, count: float) -> IssuedInstructions:
        return IssuedInstructions(count * self.sm_90, count * self.sm_100)


@dataclass(frozen=True, slots=True)
class KernelLoop:
    """A loop: the bytes and the instructions of an iteration."""

    num_bytes: int
    instructions: IssuedInstructions

    def read(self, num_bytes: float) -> IssuedInstructions:
        """Return the instructions for reading `num_bytes` once."""
        return self.instructions.times(num_bytes / self.num_bytes)


def _loop(num_bytes: int, sm_90: int, sm_100: int) -> KernelLoop:
    return KernelLoop(num_bytes, IssuedInstructions(sm_90, sm_100))


MXFP4_BYTES, INT4_BYTES = 17 / 32, 18 / 32  # of a weight, with a scale per 32 weights
NVFP4_BYTES, INT8_BYTES = 24 / 32, 33 / 32  # with an fp32 scale per 16, and an exponent per 32 weights
# By bytes of a weight: 16-bit, INT8, e4m3, NVFP4 and INT4.
PRODUCTS: Mapping[float, KernelLoop] = {
    2: _loop(16384, 189, 185),
    INT8_BYTES: _loop(8448, 473, 548),
    1: _loop(8192, 330, 298),
    NVFP4_BYTES: _loop(6144, 529, 512),
    INT4_BYTES: _loop(4608, 268, 308),
}
# Of the largest tile of rows of dense products; programs have eight warps, two for a scheduler.
WIDE_PRODUCTS: Mapping[float, KernelLoop] = {
    2: _loop(16384, 2 * 246, 2 * 221),
    INT8_BYTES: _loop(8448, 2 * 392, 2 * 409),
    1: _loop(8192, 2 * 324, 2 * 271),
    NVFP4_BYTES: _loop(6144, 2 * 437, 2 * 448),
    INT4_BYTES: _loop(4224, 2 * 198, 2 * 246),
}
# MXFP4 by rows of a tile; programs of the largest have eight warps, two for a scheduler.
MXFP4: Mapping[int, KernelLoop] = {
    16: _loop(17408, 2 * 403, 667),
    32: _loop(17408, 2 * 425, 1046),
    64: _loop(8704, 430, 2 * 390),
    128: _loop(4352, 2 * 155, 2 * 241),
}
PRODUCT_TILES = EXPERT_TILES = (16, 32, 64, 128)
# A tile of 64 rows over K and V with heads of 128, by bytes of their elements.
ATTENTION: Mapping[int, KernelLoop] = {2: _loop(32768, 697, 802), 1: _loop(16384, 847, 887)}
# Over latents of 512 values with keys of 64, by bytes of their elements; and the rows of a tile. With 16 bits
# programs have eight warps, two for a scheduler, but for tiles of up to 16 rows.
LATENTS: Mapping[int, KernelLoop] = {2: _loop(36864, 2 * 867, 2 * 760), 1: _loop(18432, 1036, 1039)}
LATENT_ROWS = {2: 64, 1: 16}
SHORT_LATENTS = _loop(36864, 980, 996)


def max_own_rows(weight_bytes: float, itemsize: int) -> int:
    """Return the most rows of Manta's dense products; for more, weights of codes are dequantized."""
    return PACKED_ROWS if weight_bytes < itemsize else OWN_ROWS


def tile_rows(rows: float, heights: Sequence[int]) -> int:
    """Return the smallest of ascending heights that holds so many rows, or the largest."""
    return next((height for height in heights if rows <= height), heights[-1])


def dense_instructions(weight_bytes: float, num_bytes: float, rows: float) -> IssuedInstructions:
    """Return the instructions of a dense product, which has the smallest tiles that hold its rows."""
    tile, nearest = tile_rows(rows, PRODUCT_TILES), _nearest_format(weight_bytes)
    wide = None if nearest is None else WIDE_PRODUCTS.get(nearest)
    if wide is not None and tile == PRODUCT_TILES[-1]:
        return wide.read(num_bytes).times(_tiles(rows, tile))
    return product_instructions(weight_bytes, num_bytes, rows, tile)


def product_instructions(weight_bytes: float, num_bytes: float, rows: float, tile: int) -> IssuedInstructions:
    """Return the instructions of a product of `rows` rows, of which a tile reads the weights once.

    Weights of other formats, and means over several, count as those of the nearest size.

    Args:
        tile: rows of MXFP4's; those of other formats have 64.
    """
    nearest = _nearest_format(weight_bytes)
    if nearest is None:
        return IssuedInstructions()
    if nearest == MXFP4_BYTES:
        return MXFP4[tile].read(num_bytes).times(_tiles(rows, tile))
    return PRODUCTS[nearest].read(num_bytes).times(_tiles(rows))


def _nearest_format(weight_bytes: float) -> float | None:
    """Return the bytes of a weight of the nearest format with a count; None beyond 16 bits."""
    if weight_bytes > max(PRODUCTS):
        return None
    return min((*PRODUCTS, MXFP4_BYTES), key=lambda size: abs(size - weight_bytes))


def attention_instructions(element_bytes: int, num_bytes: float, rows: float) -> IssuedInstructions:
    """Return the instructions of attention, of which a tile of 64 rows reads the keys and values once."""
    loop = ATTENTION.get(element_bytes)
    return IssuedInstructions() if loop is None else loop.read(num_bytes).times(_tiles(rows))


def latent_instructions(element_bytes: int, num_bytes: float, rows: float) -> IssuedInstructions:
    """Return the instructions of attention over latents, which a tile of all heads' rows reads once."""
    if element_bytes not in LATENTS:
        return IssuedInstructions()
    if element_bytes == 2 and rows <= 16:
        return SHORT_LATENTS.read(num_bytes)
    return LATENTS[element_bytes].read(num_bytes).times(_tiles(rows, LATENT_ROWS[element_bytes]))


def _tiles(rows: float, height: int = ROW_TILE) -> int:
    return max(1, -int(-rows // height))
