"""Top-k, top-p and min-p on the GPU: finds a row's floor, the least z / temperature it keeps.

Implements `filter_logits` of `drafter/step/sampling/top_k_top_p.py`. Has no launch of its own: the kernel of
`sampler.py` calls `survey_chunk` where it reads a chunk of a row, and `find_floor` in the row's last program,
which rereads only little more than the tokens that may be kept:

    survey   per chunk   the largest scaled logit of every group of 64 columns
    bound    per row     a lower bound of the floor: min-p's own; the k-th largest group maximum; for
                         top-p alone, a value below which even V tokens sum to less than 1 - p
    collect  per row     the columns at or above the bound, from the groups with a maximum that is
    settle   per row     bisection over the order of floats, by count for top-k and by mass for top-p

If a row has more candidates than room (a flat distribution), all its columns are candidates: slower, with the
same result. Mass is summed in integers, in units of 2^-44 of the likeliest token's: the order of summation
does not matter.

Differences from PyTorch: exp and log by a few units in the last place, and the rounding of softmax's sum. A
token within about 1e-6 of a threshold (in probability; for top-p in the sum up to it) may fall on the other
side of top-p or min-p. Top-k is exact.

Legend: N rows, V columns of the logits, C chunks of a row, G groups of a row, Q candidates of a row.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sampling_metadata import log, read_logits

GROUP = 64  # adjacent columns that share a maximum
_GROUP = tl.constexpr(GROUP)
_TILE = tl.constexpr(1024)  # places per iteration
_TRIES = tl.constexpr(8)  # floors tried together: three bits of a float per pass
_MASS_UNIT = tl.constexpr(float(2**44))  # times the largest vocabulary, 2^18, still an int64
_GROUPS, _TOKENS, _MASS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@dataclass(frozen=True, slots=True)
class FilterWorkspace:
    """Intermediate results of a row's programs, and of the last of them.

    Attributes:
        group_max_NG, chunk_max_NC, chunk_sum_NC: results of `survey_chunk`, fp32.
        groups_NG: groups that hold candidates, int32.
        candidates_NQ: columns with scaled logits not below the bound, int32, ascending.
        floor_N: the floors, fp32; valid for rows with filters.
    """

    group_max_NG: Tensor
    chunk_max_NC: Tensor
    chunk_sum_NC: Tensor
    groups_NG: Tensor
    candidates_NQ: Tensor
    floor_N: Tensor

    @classmethod
    def build(
        cls, num_rows: int, vocab_size: int, chunk_size: int, max_candidates: int, device: torch.device | str
    ) -> FilterWorkspace:
        assert chunk_size % GROUP == 0, "groups divide a chunk"
        chunks = triton.cdiv(vocab_size, chunk_size)
        groups = chunks * (chunk_size // GROUP)

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            group_max_NG=empty(torch.float32, num_rows, groups),
            chunk_max_NC=empty(torch.float32, num_rows, chunks),
            chunk_sum_NC=empty(torch.float32, num_rows, chunks),
            groups_NG=empty(torch.int32, num_rows, groups),
            candidates_NQ=empty(torch.int32, num_rows, min(max_candidates, vocab_size)),
            floor_N=empty(torch.float32, num_rows),
        )


@triton.jit
def survey_chunk(z, temperature, filters, memory, row, chunk, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """Store the maxima of a chunk and its groups and, if needed, the sum of exp relative to the chunk's.

    Args:
        z: the chunk's logits, [CHUNK].
        filters: (top-k, top-p, min-p) of the row.
        memory: (groups' maxima, chunks' maxima, chunks' sums, ...) of all rows.
    """
    group_maxima, chunk_maxima, chunk_sums, _, _ = memory
    place = row * CHUNKS + chunk
    scaled = tl.math.div_rn(z, temperature)
    maxima = tl.max(tl.reshape(scaled, [CHUNK // _GROUP, _GROUP]), 1)
    largest = tl.max(maxima, 0)
    tl.store(group_maxima + place * (CHUNK // _GROUP) + tl.arange(0, CHUNK // _GROUP), maxima)
    tl.store(chunk_maxima + place, largest)
    if _weighs_whole_row(filters):
        relative = tl.where(scaled == -float("inf"), -float("inf"), scaled - largest)  # no nan if all are
        tl.store(chunk_sums + place, tl.sum(tl.exp(relative), 0))


@triton.jit
def find_floor(
    filters, logits_row, memory, row,
    CHUNKS: tl.constexpr, WIDTH: tl.constexpr, MAX_CANDIDATES: tl.constexpr, NUM_STOP_IDS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Return a row's floor and its number of candidates (those kept, and some more).

    The floor is the largest value such that k tokens are at least as large, or that those at least as large
    weigh p of what top-k and min-p keep.

    Args:
        filters, memory: see `survey_chunk`; candidates are the row's.
        logits_row: see `read_logits`.
        WIDTH: a power of two, at least CHUNKS.
    """
    top_k, top_p, min_p = filters
    group_maxima, chunk_maxima, chunk_sums, groups, candidates = memory
    _, vocab_size, _, _, _ = logits_row
    NUM_GROUPS: tl.constexpr = CHUNKS * (CHUNK // _GROUP)
    group_maxima += row * NUM_GROUPS
    chunks = row * CHUNKS + tl.arange(0, WIDTH)
    is_chunk = tl.arange(0, WIDTH) < CHUNKS
    maxima = tl.load(chunk_maxima + chunks, mask=is_chunk, other=-float("inf"))
    largest = tl.max(maxima, 0)
    total = 0.0
    if _weighs_whole_row(filters):
        sums = tl.load(chunk_sums + chunks, mask=is_chunk, other=0.0)
        total = tl.sum(sums * tl.exp(maxima - largest), 0)

    floor = -float("inf")
    if min_p > 0:
        floor = largest + log(min_p)  # the exact floor of min-p
    if top_k > 0:
        # k groups hold at least k tokens not below the k-th largest group maximum.
        source = (logits_row, largest, group_maxima, NUM_GROUPS)
        floor = _search(floor, top_k, source, _GROUPS, MAX_CANDIDATES, NUM_STOP_IDS)
    elif min_p <= 0:
        # V tokens below this bound sum to at most half of 1 - p; the other half is for rounding.
        floor = largest + log(0.5 * (1.0 - top_p) * total / vocab_size)

    memory = (group_maxima, groups + row * NUM_GROUPS, candidates)
    count = _collect(floor, logits_row, memory, NUM_GROUPS, MAX_CANDIDATES, NUM_STOP_IDS)
    source = (logits_row, largest, candidates, count)
    if top_k > 0:
        floor = _search(floor, top_k, source, _TOKENS, MAX_CANDIDATES, NUM_STOP_IDS)
    if top_p < 1:
        whole = (total * _MASS_UNIT).to(tl.int64)
        if (top_k > 0) | (min_p > 0):
            same = tl.full([_TRIES], 0.0, tl.float32) + floor
            whole = tl.max(_weigh(same, source, _MASS, MAX_CANDIDATES, NUM_STOP_IDS), 0)
        target = tl.maximum(tl.ceil(top_p.to(tl.float64) * whole.to(tl.float64)).to(tl.int64), 1)
        floor = _search(floor, target, source, _MASS, MAX_CANDIDATES, NUM_STOP_IDS)
    return floor, count


@triton.jit
def num_places(count, logits_row, MAX_CANDIDATES: tl.constexpr):
    """Return the number of places for `read_candidates` to read."""
    _, vocab_size, _, _, _ = logits_row
    return tl.where(count <= MAX_CANDIDATES, count, vocab_size)


@triton.jit
def read_candidates(
    places, count, candidates, logits_row, MAX_CANDIDATES: tl.constexpr, NUM_STOP_IDS: tl.constexpr
):
    """Return columns (ascending), logits and scaled logits of candidates.

    Reads the whole row if there are more candidates than room. Past the last place logits are -inf.
    """
    _, vocab_size, _, _, temperature = logits_row
    has_all = count <= MAX_CANDIDATES
    columns = tl.load(candidates + places, mask=has_all & (places < count), other=vocab_size)
    columns = tl.where(has_all, columns, places)
    z = read_logits(logits_row, columns, 0, NUM_STOP_IDS)
    return columns, z, tl.math.div_rn(z, temperature)


@triton.jit
def _weighs_whole_row(filters):
    """Return whether top-p is the only filter, so that its mass is that of the whole row."""
    top_k, top_p, min_p = filters
    return (top_p < 1) & (top_k <= 0) & (min_p <= 0)


@triton.jit
def _collect(
    floor,
    logits_row,
    memory,
    NUM_GROUPS: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    NUM_STOP_IDS: tl.constexpr,
):
    """List the columns with scaled logits of at least `floor` and not -inf.

    Returns their number, including those beyond the room.
    """
    group_maxima, groups, candidates = memory
    _, _, _, _, temperature = logits_row
    num_columns = 0
    for start in range(0, NUM_GROUPS, _TILE):
        group = start + tl.arange(0, _TILE)
        largest = tl.load(group_maxima + group, mask=group < NUM_GROUPS, other=-float("inf"))
        wanted = ((largest >= floor) & (largest > -float("inf"))).to(tl.int32)
        places = num_columns // _GROUP + tl.cumsum(wanted, 0) - 1
        tl.store(groups + places, group, mask=wanted > 0)
        num_columns += tl.sum(wanted, 0) * _GROUP
    tl.debug_barrier()  # all threads' stores before any thread's loads

    count = 0
    for start in range(0, num_columns, _TILE):
        place = start + tl.arange(0, _TILE)
        group = tl.load(groups + place // _GROUP, mask=place < num_columns, other=NUM_GROUPS)
        columns = group * _GROUP + place % _GROUP
        z = read_logits(logits_row, columns, 0, NUM_STOP_IDS)
        wanted = ((tl.math.div_rn(z, temperature) >= floor) & (z > -float("inf"))).to(tl.int32)
        places = count + tl.cumsum(wanted, 0) - 1
        tl.store(candidates + places, columns, mask=(wanted > 0) & (places < MAX_CANDIDATES))
        count += tl.sum(wanted, 0)
    tl.debug_barrier()
    return count


@triton.jit
def _search(
    floor, target, source, OF: tl.constexpr, MAX_CANDIDATES: tl.constexpr, NUM_STOP_IDS: tl.constexpr
):
    """Return the largest fp32 value, from `floor` up, at which the weight of a row still reaches `target`.

    A bisection over the int32 that order as fp32 do (`_order`), in _TRIES parts at once: weights fall as
    floors rise, so the result lies between the last try that reaches the target and the next one. `source`
    and `OF`: see `_weigh`.
    """
    _, largest, _, _ = source
    low, high = _order(floor).to(tl.int64), _order(largest).to(tl.int64)
    parts = tl.arange(0, _TRIES).to(tl.int64) + 1
    while low < high:
        tries = low + ((high - low) * parts + _TRIES - 1) // _TRIES  # above low; the last is high
        reaches = _weigh(_from_order(tries), source, OF, MAX_CANDIDATES, NUM_STOP_IDS) >= target
        low = tl.max(tl.where(reaches, tries, low), 0)
        high = tl.min(tl.where(reaches, high, tries - 1), 0)
    return _from_order(low)


@triton.jit
def _weigh(floors, source, OF: tl.constexpr, MAX_CANDIDATES: tl.constexpr, NUM_STOP_IDS: tl.constexpr):
    """Return the weight of a row's values at or above each of `floors`; int64 [_TRIES].

    Args:
        source: (logits_row, largest scaled logit, a list, its length): of group maxima or candidates.
        OF: what is counted: _GROUPS, _TOKENS, or _MASS, the mass of tokens.
    """
    logits_row, largest, listed, count = source
    end = count
    if OF != _GROUPS:
        end = num_places(count, logits_row, MAX_CANDIDATES)
    weights = tl.zeros([_TRIES], tl.int64)
    for start in range(0, end, _TILE):
        places = start + tl.arange(0, _TILE)
        if OF == _GROUPS:
            scaled = tl.load(listed + places, mask=places < count, other=-float("inf"))
        else:
            _, _, scaled = read_candidates(places, count, listed, logits_row, MAX_CANDIDATES, NUM_STOP_IDS)
        reaches = scaled[:, None] >= floors[None, :]
        if OF == _MASS:
            mass = (tl.exp(scaled - largest) * _MASS_UNIT).to(tl.int64)
            weights += tl.sum(tl.where(reaches, mass[:, None], 0), 0)
        else:
            weights += tl.sum(reaches.to(tl.int32), 0)
    return weights


@triton.jit
def _order(x):
    """Return an int32 that orders as fp32 does (-0 below 0)."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _from_order(order):
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
