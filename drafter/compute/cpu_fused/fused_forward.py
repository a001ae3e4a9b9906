"""A model's blocks in one compiled call on all of the process's threads: the bf16 pass on a CPU.

Driven from Python, a small model's pass is a few hundred calls, each with more overhead than work. Here a
pass is one task of the thread team (`threads/thread_team.py`); threads share each phase's columns, rows or
contexts, with a barrier after it:

    x ─▶ norm ─▶ q,k,v ─▶ norm, rotate, write ─▶ attend ─▶ o + x ─▶ norm ─▶ gate,up,silu ─▶ down + x ─▶ ..

Where a block norms what attention and MLP add (Gemma 3), they are two more phases: a product, and x += norm
of it. Norms' weights are in fp32, whatever the checkpoint's dtype.

Rounds to bf16 where PyTorch's operators would store a tensor, and sums in fp32. A row's result depends
neither on other rows nor on the number of threads. Made by `backend.py`.

Legend: L layers, N rows, H hidden, I inner size, J = Q + 2 K heads of a row, D head dim, m taps.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import carray
from torch import Tensor

from ..backend import PlacedRows
from ..block_weights import AttentionShape, BlockWeights, DenseMLP, Projection
from ..cpu_numba.element_ops import Task, elements, pointer, record_dtype, records
from ..layers.linear import RMSNorm
from ..memory.kv_cache import PagedKVCache
from .attention import attend, scratch_bytes
from .gemm_epilogues import GELU, PLAIN, SILU
from .operators import PackedLinear, PagedContexts
from .packed_gemm import decoded_offset, project, project_together
from .packed_gemm import scratch_bytes as product_scratch_bytes
from .packed_weight import PackedWeight
from .qkv_heads import BLOCK, norm_rotate_heads, write_slot
from .threads.thread_team import barrier, first_phase, run, team_address
from .tiles.amx_tiles import COLUMNS, begin_products, end_products
from .tiles.simd_vectors import add_norm, norm

_BF16, _INT64 = np.uint16(0), np.int64(0)
_ROOM = 16  # rows per tile
_OWN_ROWS = 24  # per thread: minimum for requests per thread instead of shared phases
_OWN_NORMS = 32  # rows up to which every thread norms all of them


# A task's arguments (`slots` and `pages`: arrays of addresses by page group; `work`: memory for one pass),
# each thread's share, and a layer.
_PASS = record_dtype(
    """
    team task threads work shares layers num_layers hidden num_heads num_kv head_dim inner first_norm
    num_taps x normed taps positions slots kv plane_bytes page_size num_requests first rows pages num_pages
    paths depth qkv attended gated added scratch scratch_bytes
    """,
    "eps",
    "out_eps",
    "scale",
)
_SHARE = record_dtype(
    """
    thread num_threads phase first_head last_head part parts own_norms first_request first_row num_requests
    num_rows room first rows paths positions x normed qkv attended gated added taps scratch
    """
)
_LAYER = record_dtype(
    """
    qkv qkv_bias head_norm cos sin causal window o o_bias attention_out_norm mlp_norm gate_up gate_up_bias
    activation down down_bias mlp_out_norm next_norm tap group plane
    """
)
_EPS, _OUT_EPS = _PASS.itemsize - 12, _PASS.itemsize - 8  # offsets of `eps`, `out_eps`: passed by address
_ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU}


def fits_pages(page_size: int) -> bool:
    return page_size % BLOCK == 0


def can_compile(*sizes: int) -> bool:
    """Return whether rows of these sizes can be computed: in whole vectors of 32 bf16 values."""
    return all(size % 32 == 0 for size in sizes)


class FusedForward:
    """`BlockStack` in one call, for a single rank."""

    def __init__(
        self,
        blocks: Sequence[tuple[AttentionShape, BlockWeights]],
        final_norm: RMSNorm,
        tap_ids: Sequence[int],
        num_threads: int,
    ) -> None:
        shape = blocks[0][0]
        assert len({_of_all_layers(layer_shape) for layer_shape, _ in blocks}) == 1, "refused by `why_not`"
        self._num_threads = num_threads
        self._shape = shape
        self._num_taps = len(tap_ids)
        self._held: list[object] = []  # keeps alive what stored addresses point to
        self._product_bytes = 0  # of scratch memory per thread
        self._layers = np.zeros(len(blocks), dtype=_LAYER)
        norms = [*(parts.attention_norm for _, parts in blocks), final_norm]
        for i, (layer_shape, parts) in enumerate(blocks):
            tap = tap_ids.index(i) if i in tap_ids else -1
            self._layers[i] = self._layer(layer_shape, parts, norms[i + 1], tap)
        self._cache: PagedKVCache | None = None  # the cache whose places are stored in the layers
        self._inner = _packed(_dense(blocks[0][1]).gate_up).out_features // 2  # gate and up are one weight
        heads = 2 * (shape.num_heads + shape.num_kv_heads)  # q, k, v; and attention's output
        hidden = len(final_norm.weight_H)
        # Scratch memory of a row in bf16: heads, the MLP's inner values, and a norm's result.
        self._row_bytes = 2 * (heads * shape.head_dim + self._inner + hidden)
        self._work_1 = torch.empty(0, dtype=torch.uint8)
        self._most_rows = self._most_keys = 0  # for which there is memory
        self._pass = np.zeros(1, dtype=_PASS)
        self._shares = np.zeros(num_threads, dtype=_SHARE)
        self._set_constants(norms[0], _out_eps([parts for _, parts in blocks]))

    def _layer(
        self, shape: AttentionShape, parts: BlockWeights, next_norm: RMSNorm, tap: int
    ) -> tuple[int, ...]:
        mlp, rope = _dense(parts), shape.rope
        assert rope is not None, "a model without rotation is refused"
        gate_up = _packed(mlp.gate_up)
        gate_up_bias = gate_up.bias_O
        if gate_up_bias is not None:
            gate_up_bias = gate_up_bias.view(2, -1, 16).transpose(0, 1).contiguous()
        return (
            *self._linear(parts.qkv),
            self._norm(shape.head_norm()),
            self._address(rope.cos_TD),
            self._address(rope.sin_TD),
            int(shape.causal),
            -1 if shape.window is None else shape.window,
            *self._linear(parts.o),
            self._norm(_weight(parts.attention_out_norm)),
            self._norm(parts.mlp_norm.weight_H),
            self._weight(gate_up.weight.interleaved()),
            self._address(gate_up_bias),
            _ACTIVATIONS[mlp.activation],
            *self._linear(mlp.down),
            self._norm(_weight(parts.mlp_out_norm)),
            self._norm(next_norm.weight_H),
            tap,
            0,
            0,
        )

    def _linear(self, projection: Projection) -> tuple[int, int]:
        linear = _packed(projection)
        return self._weight(linear.weight), self._address(linear.bias_O)

    def _weight(self, weight: PackedWeight) -> int:
        """Return the address of a WEIGHT."""
        record_1 = weight.record(decoded_offset(weight.in_features))
        self._held.append((weight, record_1))
        self._product_bytes = max(
            self._product_bytes, product_scratch_bytes(weight.in_features, weight.num_groups)
        )
        return record_1.ctypes.data

    def _norm(self, weight: Tensor | None) -> int:
        return self._address(None if weight is None else weight.float())

    def _address(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        assert tensor.is_contiguous()
        self._held.append(tensor)
        return tensor.data_ptr()

    def _set_constants(self, first_norm: RMSNorm, out_eps: float) -> None:
        p, shape = self._pass[0], self._shape
        p["threads"], p["shares"] = self._num_threads, self._shares.ctypes.data
        p["layers"], p["num_layers"] = self._layers.ctypes.data, len(self._layers)
        p["hidden"], p["inner"], p["num_taps"] = len(first_norm.weight_H), self._inner, self._num_taps
        p["num_heads"], p["num_kv"], p["head_dim"] = shape.num_heads, shape.num_kv_heads, shape.head_dim
        p["first_norm"], p["eps"] = self._norm(first_norm.weight_H), first_norm.eps
        p["out_eps"], p["scale"] = out_eps, shape.scale

    def __call__(self, x_NH: Tensor, rows: PlacedRows, cache: PagedKVCache) -> tuple[Tensor, Tensor | None]:
        """Run a pass; see `BlockStack`. `x` is overwritten, `rows.batches` are `PagedContexts`."""
        if cache is not self._cache:
            self._take_places(cache)
        for group in self._groups:
            self._slots_G[group] = rows.kv_slots[group].data_ptr()
            self._pages_G[group] = rows.batches[group].pages_address
        contexts: PagedContexts = rows.batches[self._groups[0]]
        num_rows, hidden = x_NH.shape
        if num_rows > self._most_rows or contexts.longest > self._most_keys:
            self._grow_work(max(num_rows, self._most_rows), max(contexts.longest, self._most_keys))
        paths_ND = contexts.paths_ND
        paths, depth = (0, 0) if paths_ND is None else (paths_ND.ctypes.data, paths_ND.shape[1])
        normed_NH = x_NH.new_empty(_room(num_rows), hidden)
        taps_NmH = x_NH.new_empty(num_rows, self._num_taps, hidden) if self._num_taps else None
        _run_pass(
            team_address(self._num_threads), self._pass, len(normed_NH), x_NH.data_ptr(),
            normed_NH.data_ptr(), 0 if taps_NmH is None else taps_NmH.data_ptr(), rows.positions_N.data_ptr(),
            contexts.first_R, contexts.rows_R, contexts.pages_RP.shape[1], paths, depth,
        )  # fmt: skip
        return normed_NH[:num_rows], taps_NmH

    def _take_places(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self._layers["group"] = [place.group for place in cache.places]
        self._layers["plane"] = [place.plane for place in cache.places]
        self._groups = sorted({place.group for place in cache.places})
        self._slots_G, self._pages_G = (np.zeros(self._groups[-1] + 1, dtype=np.int64) for _ in range(2))
        p = self._pass[0]
        p["task"] = _TASK.address
        p["slots"], p["pages"] = self._slots_G.ctypes.data, self._pages_G.ctypes.data
        p["kv"], p["plane_bytes"], p["page_size"] = cache.kv.data_ptr(), cache.plane_bytes, cache.page_size

    def _grow_work(self, num_rows: int, num_keys: int) -> None:
        """Allocate memory for passes of so many rows, with contexts of so many keys or somewhat more."""
        self._most_rows, self._most_keys = num_rows, 1 << (num_keys - 1).bit_length()
        p = self._pass[0]
        scratch = max(scratch_bytes(self._most_keys, self._shape.head_dim), self._product_bytes)
        scratch += 2 * _OWN_NORMS * int(p["hidden"])
        num_bytes = _room(num_rows) * self._row_bytes + scratch * self._num_threads
        self._work_1 = torch.empty(num_bytes, dtype=torch.uint8)
        p["work"], p["scratch_bytes"] = self._work_1.data_ptr(), scratch


def _room(num_rows: int) -> int:
    """Return the rows of a pass's memory: one more tile, as a thread's own rows may begin anywhere."""
    return (-(-num_rows // _ROOM) + 1) * _ROOM


def _of_all_layers(shape: AttentionShape) -> tuple[object, ...]:
    """Return what must be equal in all layers."""
    sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    return *sizes, shape.eps, shape.scale


def _out_eps(blocks: Sequence[BlockWeights]) -> float:
    """Return the epsilon of the norms of what blocks add; 0 if there are none."""
    norms = [norm for parts in blocks for norm in (parts.attention_out_norm, parts.mlp_out_norm) if norm]
    assert len({norm.eps for norm in norms}) <= 1, "a model has one"
    return norms[0].eps if norms else 0.0


def _weight(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight_H


def _dense(parts: BlockWeights) -> DenseMLP:
    assert isinstance(parts.mlp, DenseMLP), "refused by `why_not`"
    return parts.mlp


def _packed(projection: Projection) -> PackedLinear:
    assert isinstance(projection, PackedLinear), "made by the same backend"
    return projection


@elements
def _run_pass(team, pass_1, room, x, normed, taps, positions, first_R, rows_R, num_pages, paths, depth):
    p = pass_1[0]
    p.team, p.x, p.normed, p.taps, p.positions = team, x, normed, taps, positions
    p.num_requests, p.num_pages = len(first_R), num_pages
    p.paths, p.depth = paths, depth
    p.first, p.rows = first_R.ctypes.data, rows_R.ctypes.data
    p.qkv = p.work
    p.attended = p.qkv + 2 * room * (p.num_heads + 2 * p.num_kv) * p.head_dim
    p.gated = p.attended + 2 * room * p.num_heads * p.head_dim
    p.added = p.gated + 2 * room * p.inner
    p.scratch = p.added + 2 * room * p.hidden
    run(team, p.task, pass_1.ctypes.data, p.threads)


def _decoder_pass(args, thread, num_threads):
    p = records(args, 1, _PASS)[0]
    s = records(p.shares, num_threads, _SHARE)[thread]
    layers = records(p.layers, p.num_layers, _LAYER)
    eps, out_eps = args + _EPS, args + _OUT_EPS
    _take_share(p, s, thread, num_threads)
    begin_products(_ROOM)
    _norm_rows(p, s, p.first_norm, eps)
    for i in range(p.num_layers):
        _attention_part(p, s, layers[i], p.kv + layers[i].plane * p.plane_bytes, eps, out_eps)
        _norm_rows(p, s, layers[i].mlp_norm, eps)
        _mlp_part(p, s, layers[i], out_eps)
        if layers[i].tap >= 0:
            _tap_rows(p, s, layers[i].tap)
        _norm_rows(p, s, layers[i].next_norm, eps)
    end_products()


@elements
def _attention_part(p, s, layer, kv, eps, out_eps):
    """Project q, k, v; write K and V to pages; attend; x += [norm] o(attended)."""
    heads, dim, shared = p.num_heads + 2 * p.num_kv, p.head_dim, p.num_heads // p.num_kv
    if s.parts > 1:
        s.phase = project_together(
            p.team, s.thread, s.num_threads, s.phase, s.normed, layer.qkv, layer.qkv_bias, 0, s.qkv,
            s.num_rows, s.room, p.hidden, heads * dim, PLAIN, s.scratch,
        )  # fmt: skip
    else:
        for kind in range(3):  # q, k, v
            begin = dim * (0 if kind == 0 else p.num_heads + (kind - 1) * p.num_kv)
            size = dim * (shared if kind == 0 else 1)
            project(
                s.normed, layer.qkv, layer.qkv_bias, 0, s.qkv, s.num_rows, s.room, p.hidden, heads * dim,
                PLAIN, s.scratch, 0, 0, (begin + s.first_head * size) // COLUMNS,
                (begin + s.last_head * size) // COLUMNS, 1,
            )  # fmt: skip
    positions_N = carray(pointer(s.positions, _INT64), (s.num_rows,))
    slots = carray(pointer(p.slots + 8 * layer.group, _INT64), (1,))[0] + 8 * s.first_row
    slots_N = carray(pointer(slots, _INT64), (s.num_rows,))
    pages = carray(pointer(p.pages + 8 * layer.group, _INT64), (1,))[0] + 8 * s.first_request * p.num_pages
    for n in range(s.part, s.num_rows, s.parts):
        q = s.qkv + 2 * n * heads * dim
        for at, count in ((0, shared), (p.num_heads, 1)):
            first, last = at + s.first_head * count, at + s.last_head * count
            norm_rotate_heads(q, layer.head_norm, layer.cos, layer.sin, positions_N[n], first, last, dim, eps)
        k = q + 2 * p.num_heads * dim
        write_slot(kv, slots_N[n], k, k + 2 * p.num_kv * dim, s.first_head, s.last_head, p.num_kv, dim)
    if s.parts > 1:
        s.phase = barrier(p.team, s.num_threads, s.phase)
    attend(
        s.qkv, s.attended, kv, s.first, s.rows, pages, s.num_requests, p.num_pages, p.page_size,
        p.num_heads, p.num_kv, dim, p.scale, layer.causal != 0, layer.window, s.paths, p.depth, s.scratch,
        s.first_head, s.last_head, s.part, s.parts,
    )  # fmt: skip
    begin_products(_ROOM)
    s.phase = barrier(p.team, s.num_threads, s.phase)
    _add_product(
        p, s, s.attended, p.num_heads * dim, layer.o, layer.o_bias, layer.attention_out_norm, out_eps
    )


@elements
def _mlp_part(p, s, layer, out_eps):
    """x += [norm] down(activation(gate) * up) of the normed x."""
    s.phase = project_together(
        p.team, s.thread, s.num_threads, s.phase, s.normed, layer.gate_up, layer.gate_up_bias, 0, s.gated,
        s.num_rows, s.room, p.hidden, 2 * p.inner, layer.activation, s.scratch,
    )  # fmt: skip
    _add_product(p, s, s.gated, p.inner, layer.down, layer.down_bias, layer.mlp_out_norm, out_eps)


@elements
def _add_product(p, s, rows, inputs, weight, bias, out_norm, out_eps):
    """x += W rows + bias; or with the weights of a norm, x += its norm."""
    residual, target = (s.x, s.x) if out_norm == 0 else (0, s.added)
    s.phase = project_together(
        p.team, s.thread, s.num_threads, s.phase, rows, weight, bias, residual, target, s.num_rows, s.room,
        inputs, p.hidden, PLAIN, s.scratch,
    )  # fmt: skip
    if out_norm != 0:
        for n in range(s.thread, s.num_rows, s.num_threads):
            at = 2 * n * p.hidden
            add_norm(s.added + at, out_norm, s.x + at, p.hidden // 16, out_eps)
        s.phase = barrier(p.team, s.num_threads, s.phase)


@elements
def _norm_rows(p, s, weight, eps):
    """Norm x. With few rows every thread norms all of them, which is faster than waiting for another core."""
    first, step = (0, 1) if s.own_norms else (s.thread, s.num_threads)
    for n in range(first, s.num_rows, step):
        norm(s.x + 2 * n * p.hidden, weight, s.normed + 2 * n * p.hidden, p.hidden // 16, eps)
    if not s.own_norms:
        s.phase = barrier(p.team, s.num_threads, s.phase)


@elements
def _tap_rows(p, s, tap):
    x_NH = carray(pointer(s.x, _BF16), (s.num_rows, p.hidden))
    taps_NmH = carray(pointer(s.taps, _BF16), (s.num_rows, p.num_taps, p.hidden))
    for n in range(s.thread, s.num_rows, s.num_threads):
        taps_NmH[n, tap] = x_NH[n]


@elements
def _take_share(p, s, thread, num_threads):
    """Set this thread's share: its own requests if that pays, else a part of every phase."""
    rows_R = carray(pointer(p.rows, _INT64), (p.num_requests,))
    begin, end = _own_requests(rows_R, thread, num_threads)
    s.thread, s.num_threads = (0, 1) if end >= 0 else (thread, num_threads)
    s.phase = first_phase(p.team)
    begin, end = (begin, end) if end >= 0 else (0, p.num_requests)
    row = rows_R[:begin].sum()
    s.num_requests, s.num_rows = end - begin, rows_R[begin:end].sum()
    s.room = (s.num_rows + _ROOM - 1) // _ROOM * _ROOM
    s.first_request, s.first_row = begin, row
    s.first, s.rows, s.positions = p.first + 8 * begin, p.rows + 8 * begin, p.positions + 8 * row
    s.paths = p.paths + 4 * row * p.depth
    s.x, s.normed = p.x + 2 * row * p.hidden, p.normed + 2 * row * p.hidden
    s.qkv = p.qkv + 2 * row * (p.num_heads + 2 * p.num_kv) * p.head_dim
    s.attended = p.attended + 2 * row * p.num_heads * p.head_dim
    s.gated, s.added = p.gated + 2 * row * p.inner, p.added + 2 * row * p.hidden
    s.taps = p.taps + 2 * row * p.num_taps * p.hidden
    s.scratch = p.scratch + thread * p.scratch_bytes
    s.own_norms = s.num_threads > 1 and s.num_rows <= _OWN_NORMS
    if s.own_norms and thread > 0:
        s.normed = s.scratch + p.scratch_bytes - 2 * _OWN_NORMS * p.hidden
    # A thread with whole K/V heads attends with the K/V that it projected itself.
    s.first_head, s.last_head, s.part, s.parts = 0, p.num_kv, s.thread, s.num_threads
    if p.num_kv % s.num_threads == 0:
        s.first_head = s.thread * p.num_kv // s.num_threads
        s.last_head = (s.thread + 1) * p.num_kv // s.num_threads
        s.part, s.parts = 0, 1


@elements
def _own_requests(rows_R, thread, num_threads):
    """Return a thread's own requests [begin, end); end is -1 if threads should share all requests.

    Threads with their own requests need neither barriers nor data just written by another core; but each
    reads all weights. So this pays with enough rows, evenly divided.
    """
    total, maximum = rows_R.sum(), 0
    begin, end = len(rows_R), 0
    before, part, size = 0, 0, 0
    for r in range(len(rows_R)):
        mine = min((2 * before + rows_R[r]) * num_threads // (2 * total), num_threads - 1)
        if mine != part:
            part, size = mine, 0
        size += rows_R[r]
        maximum = max(maximum, size)
        if mine == thread:
            begin, end = min(begin, r), r + 1
        before += rows_R[r]
    if num_threads == 1 or total < _OWN_ROWS * num_threads or maximum * num_threads * 4 > total * 5:
        return 0, -1
    return begin, max(begin, end)


_TASK = Task(_decoder_pass)
