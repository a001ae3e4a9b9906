"""Choosing tokens on the GPU: the rule of `drafter/step/sampling.py`, with requests' settings read by slot.

Not the rule's definition: that is the function of the same name, whose ids come out here. The host reads
nothing and grids follow from shapes, so all of it can be captured in a CUDA graph. Two launches: each program
scores one chunk of one row (16 rows of 152k columns make 608 programs), then a program per row picks the
best. With filters `filters.py` first finds what each row keeps. Called by the step's GPU path for target and
drafter.

What may differ from PyTorch: the noise by a few units in the last place, so that two scores within about 1e-6
may change places; and what `filters.py` says of tokens at a threshold.

Legend: N rows, V columns of the logits, C chunks of a row.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .filters import FilterWorkspace, find_floors
from .noise import negative_gumbel, noise_keys
from .sampling_state import SamplingState, read_filters, read_logits

_BEHIND_ALL = tl.constexpr(2**31 - 1)


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """Memory between the launches, for logits of this many columns and at most this many rows.

    Attributes:
        chunk_size: columns per program.
        score_NC, id_NC: the best of each chunk, fp32 and int32.
        filters: what finding the floors needs.
    """

    chunk_size: int
    score_NC: Tensor
    id_NC: Tensor
    filters: FilterWorkspace

    @classmethod
    def build(
        cls,
        num_rows: int,
        vocab_size: int,
        device: torch.device | str,
        *,
        chunk_size: int = 4096,
        max_candidates: int = 16384,
    ) -> SamplingWorkspace:
        """Allocate; most of it are the candidates, 4 * num_rows * max_candidates bytes.

        Args:
            chunk_size: a power of two, at least 64.
            max_candidates: scaled logits of a row that are kept for top-k and top-p; beyond it they are slow.
        """
        assert chunk_size & (chunk_size - 1) == 0, "a tile's side is a power of two"
        chunks = -(-vocab_size // chunk_size)
        return cls(
            chunk_size=chunk_size,
            score_NC=torch.empty(num_rows, chunks, dtype=torch.float32, device=device),
            id_NC=torch.empty(num_rows, chunks, dtype=torch.int32, device=device),
            filters=FilterWorkspace.build(num_rows, vocab_size, chunk_size, max_candidates, device),
        )


def sample_rows(
    logits_NV: Tensor,
    slots_N: Tensor,
    positions_N: Tensor,
    state: SamplingState,
    *,
    filters: bool,
    workspace: SamplingWorkspace,
    vocab_start: int = 0,
) -> tuple[Tensor, Tensor]:
    """Token ids [N] (int64), ties to the lowest id, and their scores [N] (fp32): z + T g, or z where greedy.

    Over a vocabulary that is split between ranks, the token is that of the highest score, then of the lowest
    id. Rows that are padding get id 0 and score -inf.

    Args:
        logits_NV: any float dtype, columns contiguous; -inf where a token cannot be. Not changed.
        slots_N: each row's request slot, int32; -1 is padding.
        positions_N: absolute position of the token to be chosen (of the row + 1 for the target's rows),
            int32 or int64.
        filters: whether any running request has top-k, top-p or min-p; needs the whole vocabulary.
        workspace: its contents are overwritten.
        vocab_start: the token id of column 0.
    """
    num_rows, vocab_size = logits_NV.shape
    chunks = -(-vocab_size // workspace.chunk_size)
    assert logits_NV.stride(1) == 1, "columns must be contiguous"
    assert workspace.score_NC.shape[0] >= num_rows and workspace.score_NC.shape[1] == chunks, "other shapes"
    assert not (filters and vocab_start), "a filter sees the whole vocabulary: gather the logits first"
    if filters:
        find_floors(logits_NV, slots_N, positions_N, state, workspace.filters)
    best = (workspace.score_NC, workspace.id_NC)
    _score_chunks[num_rows, chunks](
        logits_NV,
        logits_NV.stride(0),
        positions_N,
        state.min_length,
        state.stop_ids,
        slots_N,
        state.temperature,
        state.top_k,
        state.top_p,
        state.min_p,
        state.seed,
        workspace.filters.floor_N,
        *best,
        vocab_size,
        vocab_start,
        CHUNKS=chunks,
        FILTERS=filters,
        NUM_STOP_IDS=state.stop_ids.shape[1],
        CHUNK=workspace.chunk_size,
        num_warps=8,
    )
    ids_N = torch.empty(num_rows, dtype=torch.int64, device=logits_NV.device)
    scores_N = torch.empty(num_rows, dtype=torch.float32, device=logits_NV.device)
    width = triton.next_power_of_2(chunks)
    _pick_best[num_rows,](slots_N, *best, ids_N, scores_N, CHUNKS=chunks, WIDTH=width, num_warps=1)
    return ids_N, scores_N


@triton.jit
def _score_chunks(
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
    seeds,
    floors,
    best_scores,
    best_ids,
    vocab_size,
    vocab_start,
    CHUNKS: tl.constexpr,
    FILTERS: tl.constexpr,
    NUM_STOP_IDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The best score of one chunk of one row, and its token id."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    position = tl.load(positions + row).to(tl.int32)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    is_early = position < tl.load(min_lengths + slot)
    z = read_logits(
        logits + row.to(tl.int64) * row_stride,
        columns,
        vocab_size,
        vocab_start,
        stop_ids + slot * NUM_STOP_IDS,
        is_early,
        NUM_STOP_IDS,
    )
    temperature = tl.load(temperatures + slot)
    if (temperature > 0) & (tl.load(top_ks + slot) != 1):
        if FILTERS:
            top_k, top_p, min_p = read_filters(slot, temperatures, top_ks, top_ps, min_ps)
            if (top_k > 0) | (top_p < 1) | (min_p > 0):
                z = tl.where(tl.math.div_rn(z, temperature) >= tl.load(floors + row), z, -float("inf"))
        key_0, key_1 = noise_keys(tl.load(seeds + slot), position)
        z -= temperature * negative_gumbel(key_0, key_1, columns + vocab_start)
    z = tl.where(z == z, z, -float("inf"))  # not a number never wins, so an id is always one of the row's
    best = tl.max(z, 0)
    token = tl.min(tl.where((z == best) & (columns < vocab_size), columns, _BEHIND_ALL), 0)
    tl.store(best_scores + row * CHUNKS + chunk, best)
    tl.store(best_ids + row * CHUNKS + chunk, token + vocab_start)


@triton.jit
def _pick_best(slots, best_scores, best_ids, ids, scores, CHUNKS: tl.constexpr, WIDTH: tl.constexpr):
    """The best of a row's chunks."""
    row = tl.program_id(0)
    if tl.load(slots + row) < 0:
        tl.store(ids + row, 0)
        tl.store(scores + row, -float("inf"))
        return
    chunks = tl.arange(0, WIDTH)
    score = tl.load(best_scores + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=-float("inf"))
    token = tl.load(best_ids + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=_BEHIND_ALL)
    best = tl.max(score, 0)
    tl.store(ids + row, tl.min(tl.where(score == best, token, _BEHIND_ALL), 0).to(tl.int64))
    tl.store(scores + row, best)
