"""Top-k, top-p and min-p on the GPU: each row's floor, below which no scaled logit (z / temperature) is kept.

The meaning is `filter_logits`' of `drafter/step/sampling.py`; `sampling.py` applies the floors. Four
launches, of which rows without filters leave at once:

    survey    per chunk   the largest scaled logit of every group of columns, and the sum of exp
    bound     per row     what the floor cannot lie below: min-p's own; the k-th largest of groups' maxima;
                          for top-p alone, where even V tokens could not make up what p leaves out
    collect   per chunk   the few values above it
    settle    per row     bisection over the order of floats, by count for top-k and by mass for top-p

Where a row has more candidates than room (a flat distribution), `settle` reads its logits instead: slower,
with the same result. Mass is summed in integers of 2^-44 of the likeliest token's: no order of summation
matters.

What may differ from PyTorch: exp and log by a few units in the last place, and the rounding of softmax's sum.
A token that stands at a threshold to within about 1e-6 (of probability; for top-p of the sum up to it) may
fall on the other side of top-p or min-p. Top-k has no such freedom.

Legend: N rows, V columns of the logits, C chunks of a row, G groups of a row, Q candidates of a row.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .noise import log
from .sampling_state import SamplingState, read_filters, read_logits

NUM_GROUPS = 64  # of columns in a chunk; neighbouring columns fall into different groups
_GROUPS = tl.constexpr(NUM_GROUPS)
_MASS_UNIT = tl.constexpr(float(2**44))  # times the largest vocabulary, 2^18, still an int64


@dataclass(frozen=True, slots=True)
class FilterWorkspace:
    """Memory between the launches, for logits of this many columns and at most this many rows.

    Attributes:
        chunk_size: columns per program.
        group_max_NG, chunk_max_NC, chunk_sum_NC: what `survey` saw, fp32.
        max_N, sum_N: of the scaled logits and of exp(them - max), fp32.
        floor_N: the result, fp32; defined for rows that have filters.
        num_candidates_N: int32.
        candidates_NQ: scaled logits above the bound, in no order, fp32.
    """

    chunk_size: int
    group_max_NG: Tensor
    chunk_max_NC: Tensor
    chunk_sum_NC: Tensor
    max_N: Tensor
    sum_N: Tensor
    floor_N: Tensor
    num_candidates_N: Tensor
    candidates_NQ: Tensor

    @classmethod
    def build(
        cls, num_rows: int, vocab_size: int, chunk_size: int, max_candidates: int, device: torch.device | str
    ) -> FilterWorkspace:
        assert chunk_size % NUM_GROUPS == 0, "groups divide a chunk"
        chunks = -(-vocab_size // chunk_size)

        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        return cls(
            chunk_size=chunk_size,
            group_max_NG=floats(num_rows, chunks * NUM_GROUPS),
            chunk_max_NC=floats(num_rows, chunks),
            chunk_sum_NC=floats(num_rows, chunks),
            max_N=floats(num_rows),
            sum_N=floats(num_rows),
            floor_N=floats(num_rows),
            num_candidates_N=torch.empty(num_rows, dtype=torch.int32, device=device),
            candidates_NQ=floats(num_rows, min(max_candidates, vocab_size)),
        )


def find_floors(
    logits_NV: Tensor, slots_N: Tensor, positions_N: Tensor, state: SamplingState, workspace: FilterWorkspace
) -> None:
    """Fill `workspace.floor_N`; the arguments are those of `sample_rows`."""
    num_rows, vocab_size = logits_NV.shape
    chunks = -(-vocab_size // workspace.chunk_size)
    settings = (slots_N, state.temperature, state.top_k, state.top_p, state.min_p)
    inputs = (logits_NV, logits_NV.stride(0), positions_N, state.min_length, state.stop_ids, *settings)
    surveyed = (workspace.group_max_NG, workspace.chunk_max_NC, workspace.chunk_sum_NC)
    bounds = (workspace.max_N, workspace.sum_N, workspace.floor_N, workspace.num_candidates_N)
    found = (workspace.candidates_NQ, vocab_size, workspace.candidates_NQ.shape[1])
    tiles = {"NUM_STOP_IDS": state.stop_ids.shape[1], "CHUNK": workspace.chunk_size, "num_warps": 8}
    rows = {"CHUNKS": chunks, "WIDTH": triton.next_power_of_2(chunks), "num_warps": 8}
    _survey_chunks[num_rows, chunks](*inputs, *surveyed, vocab_size, chunks, **tiles)
    _bound_floors[num_rows,](*settings, *surveyed, *bounds, vocab_size, **rows)
    _collect_candidates[num_rows, chunks](*inputs, *bounds[2:], *found, **tiles)
    _settle_floors[num_rows,](*inputs, *bounds, *found, **tiles)


@triton.jit
def _survey_chunks(
    logits,
    row_stride,
    positions,
    min_lengths,
    stop_ids,
    slots,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    group_maxima,
    chunk_maxima,
    chunk_sums,
    vocab_size,
    CHUNKS: tl.constexpr,
    NUM_STOP_IDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Maxima of a chunk's groups; the chunk's own maximum and the sum of exp relative to it."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    top_k, top_p, min_p = read_filters(slot, temperatures, top_ks, top_ps, min_ps)
    if not ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        return
    is_early = tl.load(positions + row).to(tl.int32) < tl.load(min_lengths + slot)
    groups = tl.arange(0, _GROUPS)
    columns = chunk * CHUNK + tl.arange(0, CHUNK // _GROUPS)[:, None] * _GROUPS + groups[None, :]
    z = read_logits(
        logits + row.to(tl.int64) * row_stride,
        columns,
        vocab_size,
        0,
        stop_ids + slot * NUM_STOP_IDS,
        is_early,
        NUM_STOP_IDS,
    )
    scaled = tl.math.div_rn(z, tl.load(temperatures + slot))
    maxima = tl.max(scaled, 0)
    largest = tl.max(maxima, 0)
    relative = tl.where(scaled == -float("inf"), -float("inf"), scaled - largest)  # also where all are -inf
    place = row * CHUNKS + chunk
    tl.store(group_maxima + place * _GROUPS + groups, maxima)
    tl.store(chunk_maxima + place, largest)
    tl.store(chunk_sums + place, tl.sum(tl.sum(tl.exp(relative), 0), 0))


@triton.jit
def _bound_floors(
    slots,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    group_maxima,
    chunk_maxima,
    chunk_sums,
    row_maxima,
    row_sums,
    floors,
    candidate_counts,
    vocab_size,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A row's maximum, its sum of exp, and a floor that its final one does not lie below."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    top_k, top_p, min_p = read_filters(slot, temperatures, top_ks, top_ps, min_ps)
    if not ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        return
    chunks = tl.arange(0, WIDTH)
    there = chunks < CHUNKS
    maxima = tl.load(chunk_maxima + row * CHUNKS + chunks, mask=there, other=-float("inf"))
    sums = tl.load(chunk_sums + row * CHUNKS + chunks, mask=there, other=0.0)
    largest = tl.max(maxima, 0)
    total = tl.sum(sums * tl.exp(maxima - largest), 0)
    floor = -float("inf")
    if min_p > 0:
        floor = largest + log(min_p)  # the exact floor of min-p
    if top_k > 0:
        # k groups hold k tokens at least as large as the k-th largest of the groups' maxima.
        groups = tl.arange(0, WIDTH * _GROUPS)
        tops = tl.load(
            group_maxima + row * CHUNKS * _GROUPS + groups,
            mask=groups < CHUNKS * _GROUPS,
            other=-float("inf"),
        )
        low, high = _order(floor).to(tl.int64), _order(largest).to(tl.int64)
        while low < high:
            middle = (low + high + 1) >> 1
            if tl.sum((tops >= _from_order(middle)).to(tl.int32), 0) >= top_k:
                low = middle
            else:
                high = middle - 1
        floor = _from_order(low)
    elif min_p <= 0:
        # V tokens below this floor sum to half of what p leaves out at most; the other half is for rounding.
        floor = largest + log(0.5 * (1.0 - top_p) * total / vocab_size)
    tl.store(row_maxima + row, largest)
    tl.store(row_sums + row, total)
    tl.store(floors + row, floor)
    tl.store(candidate_counts + row, 0)


@triton.jit
def _collect_candidates(
    logits,
    row_stride,
    positions,
    min_lengths,
    stop_ids,
    slots,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    floors,
    candidate_counts,
    candidates,
    vocab_size,
    MAX_CANDIDATES: tl.constexpr,
    NUM_STOP_IDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Append a chunk's scaled logits above the bound to the row's candidates; all are counted, also what is
    beyond the room for them."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    top_k, top_p, _ = read_filters(slot, temperatures, top_ks, top_ps, min_ps)
    if not ((top_k > 0) | (top_p < 1)):
        return
    is_early = tl.load(positions + row).to(tl.int32) < tl.load(min_lengths + slot)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    z = read_logits(
        logits + row.to(tl.int64) * row_stride,
        columns,
        vocab_size,
        0,
        stop_ids + slot * NUM_STOP_IDS,
        is_early,
        NUM_STOP_IDS,
    )
    scaled = tl.math.div_rn(z, tl.load(temperatures + slot))
    wanted = ((scaled >= tl.load(floors + row)) & (columns < vocab_size)).to(tl.int32)
    found = tl.sum(wanted, 0)
    if found == 0:
        return
    places = tl.atomic_add(candidate_counts + row, found) + tl.cumsum(wanted, 0) - 1
    row_candidates = candidates + row.to(tl.int64) * MAX_CANDIDATES
    tl.store(row_candidates + places, scaled, mask=(wanted > 0) & (places < MAX_CANDIDATES))


@triton.jit
def _settle_floors(
    logits,
    row_stride,
    positions,
    min_lengths,
    stop_ids,
    slots,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    row_maxima,
    row_sums,
    floors,
    candidate_counts,
    candidates,
    vocab_size,
    MAX_CANDIDATES: tl.constexpr,
    NUM_STOP_IDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The floor of a row: the largest value such that those at least as large are k, or weigh p of what top-k
    and min-p keep."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    top_k, top_p, min_p = read_filters(slot, temperatures, top_ks, top_ps, min_ps)
    if not ((top_k > 0) | (top_p < 1)):
        return
    is_early = tl.load(positions + row).to(tl.int32) < tl.load(min_lengths + slot)
    source = (
        tl.load(row_maxima + row),
        tl.load(candidate_counts + row),
        candidates + row.to(tl.int64) * MAX_CANDIDATES,
        logits + row.to(tl.int64) * row_stride,
        vocab_size,
        tl.load(temperatures + slot),
        stop_ids + slot * NUM_STOP_IDS,
        is_early,
    )
    floor = tl.load(floors + row)
    if top_k > 0:
        floor = _highest_floor(floor, top_k.to(tl.int64), source, False, MAX_CANDIDATES, NUM_STOP_IDS, CHUNK)
    if top_p < 1:
        whole = (tl.load(row_sums + row) * _MASS_UNIT).to(tl.int64)
        if (top_k > 0) | (min_p > 0):
            whole = _weigh(floor, source, True, MAX_CANDIDATES, NUM_STOP_IDS, CHUNK)
        target = tl.maximum(tl.ceil(top_p.to(tl.float64) * whole.to(tl.float64)).to(tl.int64), 1)
        floor = _highest_floor(floor, target, source, True, MAX_CANDIDATES, NUM_STOP_IDS, CHUNK)
    tl.store(floors + row, floor)


@triton.jit
def _highest_floor(
    floor,
    target,
    source,
    BY_MASS: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    NUM_STOP_IDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The largest fp32 number, from `floor` up, above which the weight of a row reaches `target`."""
    low, high = _order(floor).to(tl.int64), _order(source[0]).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        weight = _weigh(_from_order(middle), source, BY_MASS, MAX_CANDIDATES, NUM_STOP_IDS, CHUNK)
        if weight >= target:
            low = middle
        else:
            high = middle - 1
    return _from_order(low)


@triton.jit
def _weigh(
    floor,
    source,
    BY_MASS: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    NUM_STOP_IDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """How many scaled logits of a row are at least `floor`, or their mass; int64.

    `source` is (their largest, number of candidates, candidates, and what the logits are read by: they are
    where there was no room for all candidates).
    """
    largest, count, candidates, logits, vocab_size, temperature, stop_ids, is_early = source
    weights = tl.zeros([CHUNK], tl.int64)
    has_all = count <= MAX_CANDIDATES
    for start in range(0, tl.where(has_all, count, vocab_size), CHUNK):
        places = start + tl.arange(0, CHUNK)
        if has_all:
            scaled = tl.load(candidates + places, mask=places < count, other=-float("inf"))
        else:
            z = read_logits(logits, places, vocab_size, 0, stop_ids, is_early, NUM_STOP_IDS)
            scaled = tl.math.div_rn(z, temperature)
        if BY_MASS:
            weights += tl.where(scaled >= floor, (tl.exp(scaled - largest) * _MASS_UNIT).to(tl.int64), 0)
        else:
            weights += (scaled >= floor).to(tl.int64)
    return tl.sum(weights, 0)


@triton.jit
def _order(x):
    """An int32 that orders as fp32 numbers do (-0 below 0)."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _from_order(order):
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
