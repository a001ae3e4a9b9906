"""Triton version of `drafter/step/sampling/selector.py`, by slots' state: a row's candidates, and the walk.

*Candidates*: two launches. Each program of the first finds the best of one chunk of one row, with noise; one
program per row then takes the best of all chunks. A token is an int64 key that orders by score, ties by
lowest id, so the order of programs does not matter, and ranks that share a vocabulary find what one rank
would. If requests have filters, `sampler.py` is launched first: it applies rules and finds the rows' floors.

*Walk*: one program walks one request, row after row, because each choice needs the previous one. A row reads
the codebook rows of its 16 candidates, some kilobytes.

The host reads nothing and grids follow from shapes, so all of it can be captured in a CUDA graph. Called by
`actors/targets/runners/step_passes.py` and `actors/workers/drafter/gpu_drafter_session.py`.

Legend: N rows of blocks, anchors and padding included, U vocabulary of a rank, C chunks, K candidates of a
row, E selector's rank, R requests.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...inputs.gumbel_noise import GREATEST_NEGATIVE
from ...sampling.selector import SelectorCodebooks
from ..inputs.row_layout import DeviceStepRows
from .sampler import SamplingWorkspace, sample_rows
from .sampling_metadata import (
    DeviceSamplingMetadata,
    has_filters,
    log,
    negative_gumbel,
    noise_keys,
    read_filters,
    read_logits,
    read_temperature,
)

_CUT = tl.constexpr(GREATEST_NEGATIVE)
_NOTHING = tl.constexpr(-(2**63))  # below every token
_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates of each row, [N, K], ids ascending.

    Attributes:
        scores_NK: z + T g, or z if greedy, fp32: the ranking score.
        z_NK: logits, fp32.
        ids_NK: int64.
    """

    scores_NK: Tensor
    z_NK: Tensor
    ids_NK: Tensor


def find_candidates(
    logits_NU: Tensor,
    rows: DeviceStepRows,
    state: DeviceSamplingMetadata,
    top_k: int,
    *,
    filters: bool,
    workspace: SamplingWorkspace,
    vocab_start: int = 0,
) -> Candidates:
    """Return the best tokens of each row under its noise; padding rows hold arbitrary ones.

    Args:
        logits_NU: any float dtype, columns contiguous; edited by rules.
        filters: whether any running request has rules or filters; needs the whole vocabulary.
        workspace: overwritten.
        vocab_start: the token id of column 0.
    """
    assert logits_NU.stride(1) == 1, "columns must be contiguous"
    if filters:
        where = (rows.slots_N, rows.positions_N, state)
        sample_rows(
            logits_NU, *where, filters=True, workspace=workspace, vocab_start=vocab_start, drafts=True
        )
    num_rows, vocab_size = logits_NU.shape
    top_k, chunks, device = min(top_k, vocab_size), triton.cdiv(vocab_size, _CHUNK), logits_NU.device
    keys_NCK = torch.empty(num_rows, chunks, top_k, dtype=torch.int64, device=device)
    scores_NK = torch.empty(num_rows, top_k, dtype=torch.float32, device=device)
    z_NK, ids_NK = torch.empty_like(scores_NK), torch.empty_like(scores_NK, dtype=torch.int64)
    _best_of_chunk[chunks, num_rows](
        logits_NU, logits_NU.stride(0), rows.positions_N, state.min_length, state.stop_ids, rows.slots_N,
        state.temperature, state.top_k, state.top_p, state.min_p, state.seed, workspace.filters.floor_N,
        keys_NCK, vocab_size, vocab_start,
        FILTERS=filters, TOP_K=top_k, NUM_STOP_IDS=state.stop_ids.shape[1], CHUNK=_CHUNK, num_warps=8,
    )  # fmt: skip
    _best_of_row[num_rows,](
        keys_NCK, logits_NU, logits_NU.stride(0), scores_NK, z_NK, ids_NK, vocab_start,
        TOP_K=top_k, PLACES=triton.next_power_of_2(top_k), KEYS=chunks * top_k,
        WIDTH=triton.next_power_of_2(chunks * top_k),
    )  # fmt: skip
    return Candidates(scores_NK, z_NK, ids_NK)


# Only the logits' address benefits from a 16-byte alignment specialization.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _best_of_chunk(
    logits, row_stride, positions, min_lengths, stop_ids, slots, temperatures, top_ks, top_ps, min_ps, seeds,
    floors, keys, vocab_size, vocab_start,
    FILTERS: tl.constexpr, TOP_K: tl.constexpr, NUM_STOP_IDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1)
    slot = tl.maximum(tl.load(slots + row), 0)  # padding: computed as a row of the first slot
    position = tl.load(positions + row).to(tl.int32)
    temperature = read_temperature(slot, temperatures, top_ks)
    logits_row = (
        logits + row.to(tl.int64) * row_stride,
        vocab_size,
        stop_ids + slot * NUM_STOP_IDS,
        position < tl.load(min_lengths + slot),
        temperature,
    )
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    score = read_logits(logits_row, columns, vocab_start, NUM_STOP_IDS)
    if temperature > 0:
        key_0, key_1 = noise_keys(tl.load(seeds + slot), position)
        negative_g = negative_gumbel(key_0, key_1, columns + vocab_start)
        if has_filters(read_filters(slot, temperature, top_ks, top_ps, min_ps)) & FILTERS:
            is_cut = tl.math.div_rn(score, temperature) < tl.load(floors + row)
            negative_g = tl.where(is_cut, _CUT, negative_g)
        score -= temperature * negative_g
    key = tl.where(columns < vocab_size, _key(score, columns), _NOTHING)
    keys += (row.to(tl.int64) * tl.num_programs(0) + chunk) * TOP_K
    for k in range(TOP_K):
        best = tl.max(key, 0)
        tl.store(keys + k, best)
        key = tl.where(key == best, _NOTHING, key)


@triton.jit(do_not_specialize=["vocab_start"])
def _best_of_row(
    keys, logits, row_stride, scores, z, ids, vocab_start,
    TOP_K: tl.constexpr, PLACES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Select the best of all chunks, in the order of their ids."""
    row, places, at = tl.program_id(0).to(tl.int64), tl.arange(0, PLACES), tl.arange(0, WIDTH)
    key = tl.load(keys + row * KEYS + at, mask=at < KEYS, other=_NOTHING)
    chosen = tl.full([PLACES], _NOTHING, tl.int64)
    for k in range(TOP_K):
        best = tl.max(key, 0)
        chosen = tl.where(places == k, best, chosen)
        key = tl.where(key == best, _NOTHING, key)
    is_place = places < TOP_K
    columns = _column(chosen)
    order = tl.sum(((columns[None, :] < columns[:, None]) & is_place[None, :]).to(tl.int32), 1)
    there = row * TOP_K + order
    score = _score(chosen)
    logit = tl.load(logits + row * row_stride + columns, mask=is_place, other=0.0).to(tl.float32)
    tl.store(scores + there, score, mask=is_place)
    tl.store(z + there, tl.where(score > -float("inf"), logit, score), mask=is_place)
    tl.store(ids + there, columns + vocab_start, mask=is_place)


@triton.jit
def _key(score, columns):
    """Return an int64 key that orders by score, ties by lowest column; -0 sorts below 0."""
    bits = score.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - columns).to(tl.int64)


@triton.jit
def _column(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def _score(key):
    order = (key >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


def walk_paths(
    found: Candidates,
    gates_NE: Tensor,
    rows: DeviceStepRows,
    cu_rows_R1: Tensor,
    state: DeviceSamplingMetadata,
    codebooks: SelectorCodebooks,
    *,
    filters: bool,
    margins_N: Tensor,
    anchor_distance: int = 1,
) -> Tensor:
    """Return a token id per row [N] (int64) for `write_drafts`; 0 for rows that sample none.

    Args:
        found: candidates of these rows.
        gates_NE: h, the projected hidden states of these rows.
        cu_rows_R1: int32, rows before each request.
        margins_N: fp32, written: each chosen score minus the second best.
        anchor_distance: rows from a request's anchor to the first that samples; `rows` have the positions
            of the tokens that they sample.
    """
    chosen_N = torch.zeros_like(rows.token_ids_N)
    z_NK, ids_NK = found.z_NK, found.ids_NK
    rank, top_k = gates_NE.shape[1], z_NK.shape[1]
    assert z_NK.is_contiguous() and ids_NK.is_contiguous() and gates_NE.is_contiguous(), "read as they lie"
    _walk[len(cu_rows_R1) - 1,](
        z_NK, ids_NK, gates_NE, codebooks.predecessor_VE, codebooks.successor_VE, rows.token_ids_N,
        rows.slots_N, rows.positions_N, cu_rows_R1, state.temperature, state.top_k, state.top_p, state.min_p,
        state.seed, chosen_N, margins_N,
        FILTERS=filters, FIRST=anchor_distance, RANK=rank, TOP_K=top_k, RANKS=triton.next_power_of_2(rank),
        PLACES=triton.next_power_of_2(top_k),
    )  # fmt: skip
    return chosen_N


@triton.jit
def _walk(
    z, ids, gates, predecessors, successors, token_ids, slots, positions, cu_rows, temperatures, top_ks,
    top_ps, min_ps, seeds, chosen, margins,
    FILTERS: tl.constexpr, FIRST: tl.constexpr, RANK: tl.constexpr, TOP_K: tl.constexpr, RANKS: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    begin, end = tl.load(cu_rows + request), tl.load(cu_rows + request + 1)
    if begin == end:
        return
    slot = tl.load(slots + begin)
    temperature = read_temperature(slot, temperatures, top_ks)
    filters = read_filters(slot, temperature, top_ks, top_ps, min_ps)
    seed = tl.load(seeds + slot)
    places = tl.arange(0, PLACES)
    before = tl.load(token_ids + begin)
    for after in range(FIRST, end - begin):
        row = begin.to(tl.int64) + after
        codebooks = (gates, predecessors, successors)
        tokens, plain = scores_after(before, row, ids, z, codebooks, RANK, TOP_K, RANKS, PLACES)
        position = tl.load(positions + row).to(tl.int32)
        score = with_noise(plain, tokens, position, temperature, filters, seed, FILTERS)
        best, margin = best_and_margin(score, plain, TOP_K, PLACES, FILTERS)
        tl.store(margins + row, margin)
        before = tl.sum(tl.where(places == best, tokens, 0), 0)
        tl.store(chosen + row, before)


@triton.jit
def scores_after(
    before, row, ids, z, codebooks,
    RANK: tl.constexpr, TOP_K: tl.constexpr, RANKS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Return a row's candidates and their scores after a token, without noise; -inf past the last.

    Args:
        codebooks: (gates, predecessors, successors).
    """
    gates, predecessors, successors = codebooks
    places, e = tl.arange(0, PLACES), tl.arange(0, RANKS)
    is_place, is_e = places < TOP_K, e < RANK
    tokens = tl.load(ids + row * TOP_K + places, mask=is_place, other=0)
    score = tl.load(z + row * TOP_K + places, mask=is_place, other=-float("inf"))
    gate = tl.load(gates + row * RANK + e, mask=is_e, other=0.0).to(tl.float32)
    gate *= tl.load(predecessors + before * RANK + e, mask=is_e, other=0.0).to(tl.float32)
    of_tokens = tl.load(
        successors + tokens[:, None] * RANK + e[None, :], mask=is_place[:, None] & is_e[None, :], other=0.0
    )
    return tokens, score + tl.sum(of_tokens.to(tl.float32) * gate[None, :], 1)


@triton.jit
def with_noise(score, tokens, position, temperature, filters, seed, FILTERS: tl.constexpr):
    """Return the scores after filters, as if the row held no other tokens, and with noise."""
    if temperature > 0:
        if FILTERS:
            score = _passes_filters(score, temperature, filters)
        key_0, key_1 = noise_keys(seed, position)
        score -= temperature * negative_gumbel(key_0, key_1, tokens)
    return tl.where(score == score, score, -float("inf"))


@triton.jit
def best_and_margin(score, plain, TOP_K: tl.constexpr, PLACES: tl.constexpr, FILTERS: tl.constexpr):
    """Return the place of the best score and its margin; `plain`: the scores without filters and noise."""
    places = tl.arange(0, PLACES)
    highest = tl.max(score, 0)
    best = tl.min(tl.where((score == highest) & (places < TOP_K), places, PLACES - 1), 0)
    next_best = tl.max(tl.where(places == best, -float("inf"), score), 0)
    if FILTERS & (next_best == -float("inf")):  # only one is kept: use the margin without filters
        highest = tl.max(plain, 0)
        next_best = tl.max(tl.where(places == best, -float("inf"), plain), 0)
    return best, tl.where(highest == next_best, 0.0, highest - next_best)


@triton.jit
def _passes_filters(score, temperature, filters):
    """Set scores that min-p, top-k or top-p cut to -inf, as if the row held no other tokens."""
    if has_filters(filters):
        top_k, top_p, min_p = filters
        scaled = tl.math.div_rn(score, temperature)
        largest = tl.max(scaled, 0)
        if min_p > 0:
            scaled = tl.where(scaled < largest + log(min_p), -float("inf"), scaled)
        if top_k > 0:
            is_ahead = (scaled[None, :] > scaled[:, None]).to(tl.int32)
            scaled = tl.where(tl.sum(is_ahead, 1) < top_k, scaled, -float("inf"))
        if top_p < 1:
            mass = tl.where(scaled > -float("inf"), tl.exp(scaled - largest), 0.0)
            ahead = tl.sum(tl.where(scaled[None, :] > scaled[:, None], mass[None, :], 0.0), 1)
            is_first = scaled == largest
            scaled = tl.where((ahead < top_p * tl.sum(mass, 0)) | is_first, scaled, -float("inf"))
        score = tl.where(scaled > -float("inf"), score, -float("inf"))
    return score
