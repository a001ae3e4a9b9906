"""Triton version of `drafter/step/sampling/selector_walk.py`, DFlash2's walk over candidates.

One program walks one request, row after row, because each choice needs the previous one. A row reads the
codebook rows of its 16 candidates, some kilobytes. The host reads nothing and grids follow from shapes, so it
can be captured in a CUDA graph. Called by `actors/targets/runners/draft_pass.py` and
`actors/workers/drafter/gpu_drafter_session.py`.

Legend: N rows of blocks, anchors and padding included, E selector's rank, K candidates of a row, R requests.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...sampling.selector_walk import SelectorCodebooks
from ..inputs.row_layout import DeviceStepRows
from .gumbel_noise import log, negative_gumbel, noise_keys
from .sampling_metadata import DeviceSamplingMetadata, has_filters, read_filters, read_temperature
from .selector_candidates import Candidates


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
) -> Tensor:
    """Return a token id per row [N] (int64) for `place_drafts`; 0 for anchors and padding.

    Args:
        found: candidates of these rows.
        gates_NE: h, the projected hidden states of these rows.
        cu_rows_R1: int32, rows before each request.
        margins_N: fp32, written: each chosen score minus the second best.
    """
    chosen_N = torch.zeros_like(rows.token_ids_N)
    z_NK, ids_NK = found.z_NK, found.ids_NK
    rank, top_k = gates_NE.shape[1], z_NK.shape[1]
    assert z_NK.is_contiguous() and ids_NK.is_contiguous() and gates_NE.is_contiguous(), "read as they lie"
    _walk[len(cu_rows_R1) - 1,](
        z_NK,
        ids_NK,
        gates_NE,
        codebooks.predecessor_VE,
        codebooks.successor_VE,
        rows.token_ids_N,
        rows.slots_N,
        rows.positions_N,
        cu_rows_R1,
        state.temperature,
        state.top_k,
        state.top_p,
        state.min_p,
        state.seed,
        chosen_N,
        margins_N,
        FILTERS=filters,
        RANK=rank,
        TOP_K=top_k,
        RANKS=triton.next_power_of_2(rank),
        PLACES=triton.next_power_of_2(top_k),
    )
    return chosen_N


@triton.jit
def _walk(
    z,
    ids,
    gates,
    predecessors,
    successors,
    token_ids,
    slots,
    positions,
    cu_rows,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    chosen,
    margins,
    FILTERS: tl.constexpr,
    RANK: tl.constexpr,
    TOP_K: tl.constexpr,
    RANKS: tl.constexpr,
    PLACES: tl.constexpr,
):
    request = tl.program_id(0)
    begin, end = tl.load(cu_rows + request), tl.load(cu_rows + request + 1)
    if begin == end:
        return
    slot = tl.load(slots + begin)
    temperature = read_temperature(slot, temperatures, top_ks)
    filters = read_filters(slot, temperature, top_ks, top_ps, min_ps)
    seed = tl.load(seeds + slot)
    places, e = tl.arange(0, PLACES), tl.arange(0, RANKS)
    is_place, is_e = places < TOP_K, e < RANK
    before = tl.load(token_ids + begin)
    for behind in range(1, end - begin):
        row = begin.to(tl.int64) + behind
        there = row * TOP_K + places
        tokens = tl.load(ids + there, mask=is_place, other=0)
        score = tl.load(z + there, mask=is_place, other=-float("inf"))
        gate = tl.load(gates + row * RANK + e, mask=is_e, other=0.0).to(tl.float32)
        gate *= tl.load(predecessors + before * RANK + e, mask=is_e, other=0.0).to(tl.float32)
        of_tokens = tl.load(
            successors + tokens[:, None] * RANK + e[None, :],
            mask=is_place[:, None] & is_e[None, :],
            other=0.0,
        )
        score += tl.sum(of_tokens.to(tl.float32) * gate[None, :], 1)
        plain = score
        if temperature > 0:
            if FILTERS:
                score = _kept(score, temperature, filters)
            position = tl.load(positions + row).to(tl.int32)
            key_0, key_1 = noise_keys(seed, position)
            score -= temperature * negative_gumbel(key_0, key_1, tokens)
        score = tl.where(score == score, score, -float("inf"))
        highest = tl.max(score, 0)
        best = tl.min(tl.where((score == highest) & is_place, places, PLACES - 1), 0)
        next_best = tl.max(tl.where(places == best, -float("inf"), score), 0)
        if FILTERS & (next_best == -float("inf")):  # only one is kept: use the margin without filters
            highest = tl.max(plain, 0)
            next_best = tl.max(tl.where(places == best, -float("inf"), plain), 0)
        tl.store(margins + row, tl.where(highest == next_best, 0.0, highest - next_best))
        before = tl.sum(tl.where(places == best, tokens, 0), 0)
        tl.store(chosen + row, before)


@triton.jit
def _kept(score, temperature, filters):
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
