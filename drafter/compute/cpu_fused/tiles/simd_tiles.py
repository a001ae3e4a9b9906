"""Products of rows with weights in vector registers, for CPUs without AMX.

A tile is up to `most_rows()` rows by some groups of 16 columns, summed in fp32. Every sum is one chain over
the inputs in order, so a row's bits depend neither on other rows nor on how many columns are computed at
once. LLVM splits vectors of 16 lanes to the CPU's width. Two kinds of tiles:

- `FloatTile`: weights are read as bf16 and widened in registers with a shift or a mask; rows are widened once
  for all columns (`pack_rows`), so that a broadcast reads an fp32.
- `PairTile`, on CPUs whose dot products of bf16 pairs are fast (`Instructions.AVX512_BF16`): half of the
  instructions. Each adds a pair's products to a sum in fp32; subnormal numbers count as zeros. The weights of
  values are fp32, so these products use the other kind.

    rows, packed:  [K / 64] chunks of [rows, 64]      weights: per 16 columns [K / 2] pairs of [16, 2]

Codes (`code_tiles.py`) are exact in bf16 and are multiplied as they are. Each group of inputs is a chain of
its own, which is multiplied by the group's scale and added to a total in memory. A total begins with what
the groups' offsets add: the sum over groups of offset times the sum of the row's inputs.

`simd_gemm.py` multiplies weights with them, `simd_attention.py` blocks of K and V in the layout of weights.

Legend: K inputs, G groups of inputs with a scale.
"""

# The signatures of intrinsics are Numba's, not Python's.
# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from ...cpu_numba.cpu_features import Instructions, bf16_instructions
from ...cpu_numba.element_ops import record_dtype
from ...cpu_numba.llvm_intrinsics import (
    FLOATS,
    HALVES,
    INT32,
    INT64,
    PAIRS,
    VOID,
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

CHUNK = 64  # consecutive inputs of a packed row
ROW_BYTES = 4 * CHUNK  # in fp32
TILE_BYTES = 1024  # of weights: 16 columns, 32 inputs
_WIDE, _NARROW = (12, {1: 8, 2: 8, 3: 4, 4: 4, 5: 4, 6: 4}), (6, {1: 4, 2: 2})
_MOST_SUMS = 4  # of a narrow tile that leaves registers for what both inputs of a pair are read from
_ODD = -65536  # mask of an int32's upper half
# How far ahead weights of a tile are read. The instructions that a core has in flight cover few bytes of
# codes, or of a weight for many rows, and its own prefetching begins anew in every page of every tile.
_AHEAD_BYTES = 2048
# A product's arguments: a record of int64. See `multiply_rows`; `target` is that of expanded codes alone.
_ARGUMENT_NAMES = (
    "a chunk_bytes weight tile_bytes panel_bytes scales shifts row_sums row_sums_bytes groups pairs sums rows"
    " panels target"
)
ARGUMENTS = record_dtype(_ARGUMENT_NAMES)


def argument_values(builder: Any, arguments: Value) -> dict[str, Value]:
    """Load the ARGUMENTS at an address, by name."""
    names = _ARGUMENT_NAMES.split()
    return {name: load(builder, at(builder, arguments, (i, 8)), INT64) for i, name in enumerate(names)}


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


class PairWeights(Protocol):
    """Weights of a pair of inputs, of some groups of 16 columns.

    Attributes:
        lines: addresses at which `floats` and `pairs` read them.
    """

    lines: Sequence[Value]

    def floats(self, half: int) -> Sequence[Value]:
        """Return those of the first (0) or second (1) input, fp32."""
        ...

    def pairs(self) -> Sequence[Value]:
        """Return both inputs' as pairs of bf16 in an int32, the first in its lower half."""
        ...


class Bf16Weights:
    """`PairWeights` in bf16, in lines of 64 bytes."""

    line_bytes = 64

    def __init__(self, builder: Any, lines: Sequence[Value]) -> None:
        self._builder, self.lines = builder, lines

    def floats(self, half: int) -> Sequence[Value]:
        return [self._builder.bitcast(self._half(pair, half), FLOATS) for pair in self.pairs()]

    def pairs(self) -> Sequence[Value]:
        return [load(self._builder, address, PAIRS) for address in self.lines]

    def _half(self, pair: Value, half: int) -> Value:
        if half:
            return self._builder.and_(pair, lanes(_ODD, INT32))
        return self._builder.shl(pair, lanes(16, INT32))


def exact_pairs(builder: Any, evens: Value, odds: Value) -> Value:
    """Return 16 pairs of numbers that are exact in bf16, fp32, as int32, the even one in the lower half."""
    low = builder.lshr(builder.bitcast(evens, PAIRS), lanes(16, INT32))
    return builder.or_(low, builder.and_(builder.bitcast(odds, PAIRS), lanes(_ODD, INT32)))


class _RegisterTile:
    """[rows, 16 columns] of fp32 sums in registers."""

    element_bytes: int  # of a packed row

    def __init__(self, builder: Any, rows: int, columns: int) -> None:
        self._builder, self._rows, self._columns = builder, rows, columns
        self._slots = [cgutils.alloca_once(builder, FLOATS) for _ in range(rows * columns)]
        self.clear()

    def clear(self) -> None:
        for slot in self._slots:
            self._builder.store(lanes(0.0), slot)

    def input_address(self, a: Value, chunk_bytes: Value, pair: Value) -> Value:
        """Return the address of a pair of inputs in a packed row."""
        builder = self._builder
        chunk = builder.lshr(pair, integer(5))
        inside = builder.and_(pair, integer(CHUNK // 2 - 1))
        begin = builder.add(a, builder.mul(chunk, chunk_bytes))
        return at(builder, begin, (inside, 2 * self.element_bytes))

    def add_floats(self, a: Value, row_bytes: int, weights: Sequence[Value]) -> None:
        """Add the products of an fp32 of each row, `row_bytes` apart from `a`, with weights of columns."""
        builder = self._builder
        for i in range(self._rows):
            value = spread(builder, load(builder, at(builder, a, (i, row_bytes)), INT32))
            self._add(i, weights, partial(_fma, builder, builder.bitcast(value, FLOATS)))

    def store_sums(self, sums: Value) -> None:
        """Store the sums as panels of [rows, 32]."""
        self.store(sums, 128, self._places())

    def add_scaled(self, sums: Value, scales: Sequence[Value]) -> None:
        """Add the sums times a scale per column to what `store_sums` stored."""
        builder = self._builder
        for i in range(self._rows):
            for j, place in enumerate(self._places()):
                address = at(builder, sums, (i, 128), *place)
                total = _fma(builder, self._sum(i, j), scales[j], load(builder, address, FLOATS))
                store(builder, total, address)

    def store(
        self, target: Value, row_bytes: Value | int, places: Sequence[Sequence[tuple[Value, int]]]
    ) -> None:
        """Store rows `row_bytes` apart, and each group of 16 columns at its offset from `target`."""
        builder = self._builder
        for i in range(self._rows):
            begin = builder.add(target, builder.mul(_value(row_bytes), integer(i)))
            for j in range(self._columns):
                store(builder, self._sum(i, j), at(builder, begin, *places[j]))

    def _places(self) -> Sequence[Sequence[tuple[Value, int]]]:
        rows = integer(self._rows * 128)
        return [[(rows, j // 2), (integer(64), j % 2)] for j in range(self._columns)]

    def _sum(self, row: int, column: int) -> Value:
        return self._builder.load(self._slots[row * self._columns + column])

    def _add(self, row: int, weights: Sequence[Value], add: Callable[[Value, Value], Value]) -> None:
        """Add to a row's sums: `add` takes a group's weights and its sums."""
        for j, weight in enumerate(weights):
            self._builder.store(add(weight, self._sum(row, j)), self._slots[row * self._columns + j])


class FloatTile(_RegisterTile):
    """Sums of fp32 products of rows in fp32."""

    element_bytes = 4

    def add(self, a: Value, weights: PairWeights) -> None:
        """Add the products of two inputs of each row, at `a`, with those of each group of 16 columns."""
        for half in (0, 1):
            if half and _shape() is _NARROW and self._rows * self._columns > _MOST_SUMS:
                weights.lines = [self._hidden(address) for address in weights.lines]
            self.add_floats(at(self._builder, a, (half, 4)), ROW_BYTES, weights.floats(half))

    def _hidden(self, address: Value) -> Value:
        """Return an address from which LLVM reads again what it has read already."""
        return self._builder.asm(ir.FunctionType(INT64, [INT64]), "", "=r,0", [address], False)


class PairTile(_RegisterTile):
    """Sums of dot products of bf16 pairs, of rows in bf16."""

    element_bytes = 2

    def add(self, a: Value, weights: PairWeights) -> None:
        """`FloatTile.add` of weights that are exact in bf16."""
        builder, pairs = self._builder, weights.pairs()
        for i in range(self._rows):
            everywhere = spread(builder, load(builder, at(builder, a, (i, 2 * CHUNK)), INT32))
            self._add(i, pairs, partial(_dot_pairs, builder, everywhere))


def _fma(builder: Any, value: Value, weight: Value, total: Value) -> Value:
    return call(builder, "llvm.fma.v16f32", FLOATS, [value, weight, total])


def _dot_pairs(builder: Any, value: Value, pair: Value, total: Value) -> Value:
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [total, value, pair])


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


@dataclass(frozen=True, slots=True)
class WeightKind:
    """How a product reads weights: lines of a pair of inputs and 16 columns, `line_bytes` long."""

    name: str
    line_bytes: int
    read: Callable[[Any, Sequence[Value]], PairWeights]  # of a builder and the lines' addresses


def emit_products(builder: Any, arguments: Value, kind: WeightKind) -> None:
    """Emit `multiply_rows` for a kind of weights.

    Each shape of tiles is a function of its own: LLVM allocates registers badly in one that has all.
    """

    def emit(rows: int, panels: int) -> None:
        name = builder.module.get_unique_name(f"multiply_{kind.name}_{rows}_{panels}")
        function = ir.Function(builder.module, ir.FunctionType(VOID, [INT64]), name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        function.attributes.add("nounwind")
        own_builder = ir.IRBuilder(function.append_basic_block())
        _emit_shape(own_builder, argument_values(own_builder, function.args[0]), rows, panels, kind)
        own_builder.ret_void()
        builder.call(function, [arguments])

    values = argument_values(builder, arguments)
    _switch_shapes(builder, values["rows"], values["panels"], emit)


def _switch_shapes(builder: Any, rows: Value, panels: Value, emit: Callable[[int, int], None]) -> None:
    """Emit a branch on rows and panels within `_shape`; `emit` is called for each possible pair of them."""
    maximum = _shape()[0]
    widths = {
        count: [p for p in (1, 2, 4) if 2 * p <= max(_columns(count), 2)] for count in range(1, maximum + 1)
    }
    cases = {
        8 * count + width: partial(emit, count, width) for count, some in widths.items() for width in some
    }
    _switch(builder, at(builder, panels, (rows, 8)), cases)


def _emit_shape(builder: Any, values: dict[str, Value], rows: int, panels: int, kind: WeightKind) -> None:
    has_scales, has_shifts = (
        builder.icmp_signed("!=", values[name], integer(0)) for name in ("scales", "shifts")
    )
    shift_groups = builder.select(has_shifts, values["groups"], integer(0))
    columns = min(_columns(rows), 2 * panels)
    if columns == 2 * panels:
        _emit_tile(builder, values, rows, columns, kind, has_scales, shift_groups)
        return
    group_bytes = builder.mul(values["groups"], integer(64))
    bytes_of_tile = {
        "weight": values["tile_bytes"],
        "sums": integer(64),
        "scales": group_bytes,
        "shifts": group_bytes,
    }
    with cgutils.for_range(builder, integer(2)) as loop:  # the halves of a panel
        moved = {
            name: builder.add(values[name], builder.mul(loop.index, size))
            for name, size in bytes_of_tile.items()
        }
        _emit_tile(builder, {**values, **moved}, rows, columns, kind, has_scales, shift_groups)


def _emit_tile(
    builder: Any,
    values: dict[str, Value],
    rows: int,
    columns: int,
    kind: WeightKind,
    has_scales: Value,
    shift_groups: Value,
) -> None:
    tile = _bf16_tile()(builder, rows, columns)
    group_bytes = builder.mul(values["groups"], integer(64))

    def shared(name: str, group: Value) -> list[Value]:
        """Load what a group of inputs shares, per column."""
        begin = at(builder, values[name], (group, 64))
        return [load(builder, at(builder, begin, (group_bytes, j)), FLOATS) for j in range(columns)]

    with cgutils.for_range(builder, shift_groups) as group:
        row_sums = builder.add(values["row_sums"], builder.mul(group.index, values["row_sums_bytes"]))
        tile.add_floats(row_sums, 4, shared("shifts", group.index))
    tile.store_sums(values["sums"])
    count = builder.udiv(values["pairs"], values["groups"])
    with cgutils.for_range(builder, values["groups"]) as group:
        tile.clear()
        with cgutils.for_range(builder, count) as loop:
            pair = builder.add(builder.mul(group.index, count), loop.index)
            line = at(builder, values["weight"], (pair, kind.line_bytes))
            lines = [
                at(builder, line, (values["panel_bytes"], j // 2), (values["tile_bytes"], j % 2))
                for j in range(columns)
            ]
            _prefetch_lines(builder, lines)
            place = tile.input_address(values["a"], values["chunk_bytes"], pair)
            tile.add(place, kind.read(builder, lines))
        with builder.if_else(has_scales) as (of_codes, plain):
            with of_codes:
                tile.add_scaled(values["sums"], shared("scales", group.index))
            with plain:
                tile.store_sums(values["sums"])


def _prefetch_lines(builder: Any, lines: Sequence[Value]) -> None:
    """Start to read what follows each line of weights in its tile."""
    for address in lines:
        prefetch(builder, at(builder, address, (1, _AHEAD_BYTES)))


_BF16 = WeightKind("bf16", Bf16Weights.line_bytes, Bf16Weights)


def _emit_scores(builder, args):
    """Emit `score_rows`: a version for each number of rows, which scores 64 keys of four blocks at a time."""
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
                        lines = [at(builder, key, (loop.index, 64)) for key in keys]
                        tile.add(place, Bf16Weights(builder, lines))
                    tile.store(target, ROW_BYTES, [[(integer(64), j)] for j in mine])

        return emit

    _switch(builder, rows, {num: of(num) for num in range(1, _shape()[0] + 1)})


def _emit_combination(builder, args):
    """Emit `combine_rows`: a version for each number of rows, which sums some columns over all blocks."""
    weights, blocks, count, offset, result, head_dim, rows = args

    def of(num: int) -> Callable[[], None]:
        columns = min(_columns(num), 2)  # groups of 16
        width = 16 * columns

        def emit() -> None:
            with cgutils.for_range(builder, builder.udiv(head_dim, integer(width))) as part:
                tile = FloatTile(builder, num, columns)
                # 32 bytes per column of a block: a bf16 of each of its 16 keys
                begin = at(builder, offset, (part.index, width * 32))
                with cgutils.for_range(builder, count) as outer:
                    block = builder.add(begin, load(builder, at(builder, blocks, (outer.index, 8)), INT64))
                    # A chunk has the weights of 64 keys, which are those of 4 blocks, in fp32.
                    chunk = builder.lshr(outer.index, integer(2))
                    quarter = builder.and_(outer.index, integer(3))
                    place = at(builder, weights, (builder.mul(chunk, integer(num)), ROW_BYTES), (quarter, 64))
                    with cgutils.for_range(builder, integer(8)) as loop:  # pairs of keys
                        line = at(builder, block, (loop.index, 64))
                        lines = [at(builder, line, (j, TILE_BYTES // 2)) for j in range(columns)]
                        tile.add(at(builder, place, (loop.index, 8)), Bf16Weights(builder, lines))
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
# (address of ARGUMENTS): sums [panels, rows, 32] of packed rows `a`, with chunks `chunk_bytes` apart, times
# panels of two groups of 16 columns (`tile_bytes` apart, panels `panel_bytes` apart) of bf16; pairs = K / 2,
# panels 1, `panels_at_once`, or a power of two between. For expanded codes, of G groups with scales and
# offsets, fp32 [tiles of 16 columns, G, 16] (offsets at `shifts`, 0 if there are none) and `row_sums`, fp32
# [G, rows], `row_sums_bytes` per group; for others scales and shifts are 0, and groups 1.
multiply_rows = procedure(1, lambda builder, args: emit_products(builder, args[0], _BF16))
# (queries, chunk_bytes, blocks, count, offset, scores, pairs, rows): scores, packed rows of 64 `count` keys.
# There are 4 `count` addresses of blocks of 16 keys; `offset` is added to each; pairs = D / 2.
score_rows = procedure(8, _emit_scores)
# (weights, blocks, count, offset, result, head_dim, rows): fp32 [rows, D] from packed rows of 16 `count`
# keys.
combine_rows = procedure(7, _emit_combination)
