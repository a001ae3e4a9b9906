"""Products of rows with bf16 weights in vector registers, for CPUs without AMX.

A tile is up to `most_rows()` rows by some groups of 16 columns, summed in fp32. Every sum is one chain over
the inputs in order, so a row's bits depend neither on other rows nor on how many columns are computed at
once. LLVM splits vectors of 16 lanes to the CPU's width. Two kinds of tiles:

- `FloatTile`: weights are read as bf16 and widened in registers with a shift or a mask; rows are widened once
  for all columns (`pack_rows`), so that a broadcast reads an fp32.
- `PairTile`, on CPUs whose dot products of bf16 pairs are fast (`Instructions.AVX512_BF16`): half of the
  instructions. Each adds a pair's products to a sum in fp32; subnormal numbers count as zeros. The weights of
  values are fp32, so these products use the other kind.

    rows, packed:  [K / 64] chunks of [rows, 64]      weights: per 16 columns [K / 2] pairs of [16, 2]

`simd_gemm.py` multiplies weights with them, `simd_attention.py` blocks of K and V in the layout of weights.
"""

# The signatures of intrinsics are Numba's, not Python's.
# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from ...cpu_numba.cpu_features import Instructions, bf16_instructions
from ...cpu_numba.llvm_intrinsics import (
    FLOATS,
    HALVES,
    INT32,
    INT64,
    PAIRS,
    Value,
    at,
    call,
    integer,
    lanes,
    load,
    prefetch,
    procedure,
    spread,
    store,
    widened,
)
from .simd_vectors import rounded_pairs

CHUNK = 64  # consecutive inputs of a packed row
ROW_BYTES = 4 * CHUNK  # in fp32
TILE_BYTES = 1024  # of weights: 16 columns, 32 inputs
_WIDE, _NARROW = (12, {1: 8, 2: 8, 3: 4, 4: 4, 5: 4, 6: 4}), (6, {1: 4, 2: 2, 3: 2})
_ODD = -65536  # mask of an int32's upper half
# How far ahead weights of a tile are read. The instructions that a core has in flight cover few bytes of
# codes, or of a weight for many rows, and its own prefetching begins anew in every page of every tile.
_AHEAD_BYTES = 2048


def _shape() -> tuple[int, dict[int, int]]:
    """Return the rows of the highest tile, and groups of 16 columns by rows of low tiles."""
    kind = bf16_instructions()
    return _WIDE if kind in (Instructions.AMX, Instructions.AVX512_BF16, Instructions.AVX512) else _NARROW


def _columns(rows: int) -> int:
    """Return the groups of 16 columns that are summed at once with this many rows."""
    maximum, of_low_ones = _shape()
    return of_low_ones.get(rows, 2 if maximum == _WIDE[0] else 1)


@intrinsic
def most_rows(context):
    """Return the rows of the highest tile."""

    def generate(context, builder, signature, args):
        return integer(_shape()[0])

    return types.int64(), generate


@intrinsic
def panels_at_once(context, rows):
    """Return the panels of 32 columns that a tile of this many rows spans: 1, 2 or 4."""

    def generate(context, builder, signature, args):
        result = integer(1)
        for count in range(1, _shape()[0] + 1):
            here = builder.icmp_signed("==", args[0], integer(count))
            result = builder.select(here, integer(max(_columns(count) // 2, 1)), result)
        return result

    return types.int64(types.int64), generate


class _RegisterTile:
    """[rows, 16 columns] of fp32 sums in registers."""

    element_bytes: int  # of a packed row
    rounds_weights: bool  # `add` rounds them to bf16

    def __init__(self, builder: Any, rows: int, columns: int) -> None:
        self._builder, self._rows, self._columns = builder, rows, columns
        self._slots = [cgutils.alloca_once(builder, FLOATS) for _ in range(rows * columns)]
        for slot in self._slots:
            builder.store(lanes(0.0), slot)

    def input_address(self, a: Value, chunk_bytes: Value, pair: Value) -> Value:
        """Return the address of a pair of inputs in a packed row."""
        builder = self._builder
        chunk = builder.lshr(pair, integer(5))
        inside = builder.and_(pair, integer(CHUNK // 2 - 1))
        begin = builder.add(a, builder.mul(chunk, chunk_bytes))
        return at(builder, begin, (inside, 2 * self.element_bytes))

    def store_sums(self, sums: Value, columns: Sequence[int]) -> None:
        """Store groups of 16 columns, by number, as panels of [rows, 32]."""
        rows = integer(self._rows * 128)
        self.store(sums, 128, [[(rows, j // 2), (integer(64), j % 2)] for j in columns])

    def store(
        self, target: Value, row_bytes: Value | int, places: Sequence[Sequence[tuple[Value, int]]]
    ) -> None:
        """Store rows `row_bytes` apart, and each group of 16 columns at its offset from `target`."""
        builder = self._builder
        for i in range(self._rows):
            begin = builder.add(target, builder.mul(_value(row_bytes), integer(i)))
            for j in range(self._columns):
                store(
                    builder, builder.load(self._slots[i * self._columns + j]), at(builder, begin, *places[j])
                )

    def _add(self, row: int, weights: Sequence[Value], add: Callable[[Value, Value], Value]) -> None:
        """Add to a row's sums: `add` takes a group's weights and its sums."""
        for j, weight in enumerate(weights):
            slot = self._slots[row * self._columns + j]
            self._builder.store(add(weight, self._builder.load(slot)), slot)


class FloatTile(_RegisterTile):
    """Sums of fp32 products of rows in fp32."""

    element_bytes, rounds_weights = 4, False

    def add(self, a: Value, weights: Callable[[int], Sequence[Value]]) -> None:
        """Add the products of two inputs of each row, at `a`, with those of each group of 16 columns.

        `weights` returns the fp32 weights of the first (0) or second (1) input.
        """
        builder = self._builder
        for half in (0, 1):
            widened = weights(half)
            for i in range(self._rows):
                value = load(builder, at(builder, a, (i, ROW_BYTES), (half, 4)), INT32)
                everywhere = builder.bitcast(spread(builder, value), FLOATS)
                self._add(
                    i,
                    widened,
                    lambda weight, total, value=everywhere: call(
                        builder, "llvm.fma.v16f32", FLOATS, [value, weight, total]
                    ),
                )

    def add_bf16(self, a: Value, lines: Sequence[Value]) -> None:
        """`add` of pairs of bf16 weights at `lines`."""
        pairs = [load(self._builder, address, PAIRS) for address in lines]
        self.add(a, lambda half: [self._builder.bitcast(self._half(pair, half), FLOATS) for pair in pairs])

    def _half(self, pair: Value, half: int) -> Value:
        if half:
            return self._builder.and_(pair, lanes(_ODD, INT32))
        return self._builder.shl(pair, lanes(16, INT32))


class PairTile(_RegisterTile):
    """Sums of dot products of bf16 pairs, of rows in bf16."""

    element_bytes, rounds_weights = 2, True

    def add(self, a: Value, weights: Callable[[int], Sequence[Value]]) -> None:
        """`FloatTile.add`; weights are rounded to bf16."""
        firsts, seconds = weights(0), weights(1)
        self._add_pairs(
            a, [rounded_pairs(self._builder, *both) for both in zip(firsts, seconds, strict=True)]
        )

    def add_bf16(self, a: Value, lines: Sequence[Value]) -> None:
        self._add_pairs(a, [load(self._builder, address, PAIRS) for address in lines])

    def _add_pairs(self, a: Value, pairs: Sequence[Value]) -> None:
        builder = self._builder
        for i in range(self._rows):
            everywhere = spread(builder, load(builder, at(builder, a, (i, 2 * CHUNK)), INT32))
            self._add(
                i,
                pairs,
                lambda pair, total, value=everywhere: call(
                    builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [total, value, pair]
                ),
            )


def _bf16_tile() -> type[FloatTile] | type[PairTile]:
    return PairTile if bf16_instructions() is Instructions.AVX512_BF16 else FloatTile


def packed_row_bytes() -> int:
    """Return the bytes of a chunk of a row packed by `pack_rows`."""
    return CHUNK * _bf16_tile().element_bytes


@overload(packed_row_bytes)
def _packed_row_bytes():
    row_bytes = packed_row_bytes()
    return lambda: row_bytes


def _value(number: Value | int) -> Value:
    return integer(number) if isinstance(number, int) else number


def _switch(builder: Any, number: Value, cases: dict[int, Callable[[], None]]) -> None:
    end = builder.append_basic_block("end")
    switch = builder.switch(number, end)
    for value, emit in cases.items():
        block = builder.append_basic_block(f"case_{value}")
        switch.add_case(integer(value), block)
        builder.position_at_end(block)
        emit()
        builder.branch(end)
    builder.position_at_end(end)


def switch_tiles(builder: Any, rows: Value, panels: Value, emit: Callable[[int, int], None]) -> None:
    """Emit a branch on rows and panels within `_shape`; `emit` is called for each possible pair of them."""
    maximum = _shape()[0]
    widths = {
        count: [p for p in (1, 2, 4) if 2 * p <= max(_columns(count), 2)] for count in range(1, maximum + 1)
    }
    cases = {
        8 * count + width: partial(emit, count, width) for count, some in widths.items() for width in some
    }
    _switch(builder, at(builder, panels, (rows, 8)), cases)


def tiles_of(builder: Any, rows: int, panels: int) -> Iterator[tuple[FloatTile | PairTile, Sequence[int]]]:
    """Yield the tiles of registers of a product, and the numbers of their groups of 16 columns."""
    columns = min(_columns(rows), 2 * panels)
    for begin in range(0, 2 * panels, columns):
        yield _bf16_tile()(builder, rows, columns), range(begin, begin + columns)


def _emit_product(builder, args):
    a, chunk_bytes, weight, tile_bytes, panel_bytes, sums, pairs, rows, panels = args

    def emit(num_rows: int, num_panels: int) -> None:
        for tile, columns in tiles_of(builder, num_rows, num_panels):
            with cgutils.for_range(builder, pairs) as loop:
                place = tile.input_address(a, chunk_bytes, loop.index)
                line = at(builder, weight, (loop.index, 64))
                places = [at(builder, line, (panel_bytes, j // 2), (tile_bytes, j % 2)) for j in columns]
                prefetch_lines(builder, places)
                tile.add_bf16(place, places)
            tile.store_sums(sums, columns)

    switch_tiles(builder, rows, panels, emit)


def prefetch_lines(builder: Any, lines: Sequence[Value]) -> None:
    """Start to read what follows each line of weights in its tile."""
    for address in lines:
        prefetch(builder, at(builder, address, (1, _AHEAD_BYTES)))


def _emit_scores(builder, args):
    queries, chunk_bytes, blocks, count, offset, scores, pairs, rows = args

    def of(num: int) -> Callable[[], None]:
        columns = min(_columns(num), 4)

        def emit() -> None:
            with cgutils.for_range(builder, count) as quad:
                target = at(builder, scores, (builder.mul(quad.index, integer(num)), ROW_BYTES))
                for begin in range(0, 4, columns):
                    mine = range(begin, begin + columns)
                    keys = [
                        builder.add(
                            offset, load(builder, at(builder, blocks, (quad.index, 32), (j, 8)), INT64)
                        )
                        for j in mine
                    ]
                    tile = _bf16_tile()(builder, num, columns)
                    with cgutils.for_range(builder, pairs) as loop:
                        place = tile.input_address(queries, chunk_bytes, loop.index)
                        tile.add_bf16(place, [at(builder, key, (loop.index, 64)) for key in keys])
                    tile.store(target, ROW_BYTES, [[(integer(64), j)] for j in mine])

        return emit

    _switch(builder, rows, {num: of(num) for num in range(1, _shape()[0] + 1)})


def _emit_combination(builder, args):
    weights, blocks, count, offset, result, head_dim, rows = args

    def of(num: int) -> Callable[[], None]:
        columns = min(_columns(num), 2)

        def emit() -> None:
            width = 16 * columns
            with cgutils.for_range(builder, builder.udiv(head_dim, integer(width))) as part:
                tile = FloatTile(builder, num, columns)
                begin = at(builder, offset, (part.index, width * 32))
                with cgutils.for_range(builder, count) as outer:
                    block = builder.add(begin, load(builder, at(builder, blocks, (outer.index, 8)), INT64))
                    chunk, inside = (
                        builder.lshr(outer.index, integer(2)),
                        builder.and_(outer.index, integer(3)),
                    )
                    place = at(builder, weights, (builder.mul(chunk, integer(num)), ROW_BYTES), (inside, 64))
                    with cgutils.for_range(builder, integer(8)) as loop:
                        line = at(builder, block, (loop.index, 64))
                        lines = [at(builder, line, (j, TILE_BYTES // 2)) for j in range(columns)]
                        tile.add_bf16(at(builder, place, (loop.index, 8)), lines)
                target = at(builder, result, (part.index, 4 * width))
                row_bytes = builder.mul(head_dim, integer(4))
                tile.store(target, row_bytes, [[(integer(64), j)] for j in range(columns)])

        return emit

    _switch(builder, rows, {num: of(num) for num in range(1, _shape()[0] + 1)})


def _emit_pack(builder, args):
    x, x_stride, target, chunk_bytes, rows, inputs = args
    size = _bf16_tile().element_bytes
    with cgutils.for_range(builder, rows) as row:
        source = builder.add(x, builder.mul(row.index, x_stride))
        to = at(builder, target, (row.index, CHUNK * size))
        with cgutils.for_range(builder, builder.udiv(inputs, integer(16))) as loop:
            chunk, inside = builder.lshr(loop.index, integer(2)), builder.and_(loop.index, integer(3))
            place = at(builder, builder.add(to, builder.mul(chunk, chunk_bytes)), (inside, 16 * size))
            halves = load(builder, at(builder, source, (loop.index, 32)), HALVES)
            store(builder, widened(builder, halves) if size == 4 else halves, place)


# (x, x_stride, target, chunk_bytes, rows, inputs): pack bf16 rows of a multiple of 32 inputs; chunks are
# `chunk_bytes` apart.
pack_rows = procedure(6, _emit_pack)
# (a, chunk_bytes, weight, tile_bytes, panel_bytes, sums, pairs, rows, panels): sums [panels, rows, 32] of
# packed rows, with chunks `chunk_bytes` apart, times panels of two groups of 16 columns (`tile_bytes` apart,
# panels `panel_bytes` apart); pairs = K / 2, panels 1, `panels_at_once`, or a power of two between.
multiply_rows = procedure(9, _emit_product)
# (queries, chunk_bytes, blocks, count, offset, scores, pairs, rows): scores, packed rows of 64 `count` keys.
# There are 4 `count` addresses of blocks of 16 keys; `offset` is added to each; pairs = D / 2.
score_rows = procedure(8, _emit_scores)
# (weights, blocks, count, offset, result, head_dim, rows): fp32 [rows, D] from packed rows of 16 `count`
# keys.
combine_rows = procedure(7, _emit_combination)
