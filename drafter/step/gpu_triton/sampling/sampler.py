"""Triton version of `drafter/step/sampling/sampler.py`, with sampling parameters by slot.

Returns the same ids as the definition of the same name. The host reads nothing and grids follow from shapes,
so it can be captured in a CUDA graph. One launch, with or without filters: each program reads one chunk of
one row (16 rows of 152k columns make 608 programs). The row's last program to finish, found with an atomic
counter, reduces the results of all: the best chunk's best, or, if the row has filters, the best of what
`top_k_top_p.py` keeps. The result does not depend on which program is last, as it reads the same values in
column order. Called by the step's GPU path for target and drafter.

    chunk 0   chunk 1   chunk 2          chunk 1 done: counter 1
    ───┬───   ───┬───   ───┬───          chunk 0 done: counter 2
    maximum   maximum   maximum          chunk 2 done: counter 3 = all: reads three maxima, writes the id,
                                         resets the counter to 0

For drafts the second best score is returned too: the margin between the two says how certain a draft is. If
filters keep only one token, both are logits before filters, as in the definition.

Differences from PyTorch: the noise by a few units in the last place, so two scores within about 1e-6 may
swap; and tokens at a filter's threshold (`top_k_top_p.py`).

Legend: N rows, V columns of the logits, C chunks of a row.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .....cluster.step.scheduler_output import NOT_A_NUMBER
from .grammar_masks import DeviceMasks, force_end_tokens, mask_tokens
from .logits_processors import apply_rules
from .sampling_metadata import (
    DeviceSamplingMetadata,
    has_filters,
    negative_gumbel,
    noise_keys,
    read_filters,
    read_raw_logits,
    read_temperature,
)
from .top_k_top_p import FilterWorkspace, find_floor, num_places, read_candidates, survey_chunk

_PAST_END = tl.constexpr(2**31 - 1)
_TILE = tl.constexpr(1024)  # candidates scored per iteration
_BROKEN = tl.constexpr(2**16)  # counts chunks with NaN or +inf, above the number of chunks
_NOT_A_NUMBER = tl.constexpr(NOT_A_NUMBER)


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """Memory of a launch for logits of at most this many rows and columns; launches are sequential.

    Attributes:
        chunk_size: columns per program.
        num_done_N: finished programs of each row, int32; 0 between launches.
        score_NC, id_NC: the best of each chunk, fp32 and int32.
        second_NC: each chunk's second best score, fp32.
        margins_N: fp32, margins of a step's drafts by row of their blocks; written by the draft pass,
            read by `drafter/step/gpu_triton/verification.py`.
        filters: workspace of `top_k_top_p.py`.
    """

    chunk_size: int
    num_done_N: Tensor
    score_NC: Tensor
    id_NC: Tensor
    second_NC: Tensor
    margins_N: Tensor
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
        """Allocate. The candidates take most of it: 4 * num_rows * max_candidates bytes.

        Args:
            chunk_size: a power of two, at least 64.
            max_candidates: per row, for top-k and top-p; rows with more candidates are slow.
        """
        assert chunk_size & (chunk_size - 1) == 0, "a tile's side is a power of two"
        chunks = triton.cdiv(vocab_size, chunk_size)
        return cls(
            chunk_size=chunk_size,
            num_done_N=torch.zeros(num_rows, dtype=torch.int32, device=device),
            score_NC=torch.empty(num_rows, chunks, dtype=torch.float32, device=device),
            id_NC=torch.empty(num_rows, chunks, dtype=torch.int32, device=device),
            second_NC=torch.empty(num_rows, chunks, dtype=torch.float32, device=device),
            margins_N=torch.zeros(num_rows, dtype=torch.float32, device=device),
            filters=FilterWorkspace.build(num_rows, vocab_size, chunk_size, max_candidates, device),
        )


def sample_rows(
    logits_NV: Tensor,
    slots_N: Tensor,
    positions_N: Tensor,
    state: DeviceSamplingMetadata,
    *,
    filters: bool,
    workspace: SamplingWorkspace,
    vocab_start: int = 0,
    drafts: bool = False,
    masks: DeviceMasks | None = None,
    ahead: int = 0,
    seconds_N: Tensor | None = None,
    margins_N: Tensor | None = None,
    paths_ND: Tensor | None = None,
    checks: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return token ids [N] (int64), ties to the lowest id, and scores [N] (fp32): z + T g, or z if greedy.

    If the vocabulary is split over ranks, the token is that of the highest score, then of the lowest id.
    Padding rows get id 0 and score -inf.

    Args:
        logits_NV: any float dtype, columns contiguous; -inf for impossible tokens. Edited by rules and
            masks only.
        slots_N: each row's request slot, int32; -1 is padding.
        positions_N: absolute position of the token to sample, less `ahead`, int32 or int64.
        filters: whether any running request has top-k, top-p, min-p or rules; needs the whole vocabulary.
        workspace: overwritten.
        vocab_start: the token id of column 0.
        drafts, paths_ND: see `apply_rules`.
        masks: grammars' masks; they need the whole vocabulary.
        seconds_N: fp32, written if given: the best score of any other token that the filters keep. If they
            keep no other, this and the score are the two best logits before filters. -inf if no other
            token is possible.
        margins_N: fp32, written if given instead of `seconds_N`: see `margins_between`.
        checks: a row that holds NaN or +inf gets the id NOT_A_NUMBER and an infinite score.
    """
    num_rows, vocab_size = logits_NV.shape
    chunks = triton.cdiv(vocab_size, workspace.chunk_size)
    assert logits_NV.stride(1) == 1, "columns must be contiguous"
    assert workspace.score_NC.shape[0] >= num_rows and workspace.score_NC.shape[1] >= chunks, "too small"
    assert not (filters and vocab_start), "a filter sees the whole vocabulary: gather the logits first"
    assert seconds_N is None or margins_N is None, "one of the two"
    if filters and state.rules is not None and state.tables is not None:
        of_rules = (slots_N, positions_N, state.rules, state.tables)
        apply_rules(logits_NV, *of_rules, ahead=ahead, drafts=drafts, paths_ND=paths_ND)
    if masks is not None:
        mask_tokens(logits_NV, masks)
    ids_N = torch.empty(num_rows, dtype=torch.int64, device=logits_NV.device)
    scores_N = torch.empty(num_rows, dtype=torch.float32, device=logits_NV.device)
    memory, certainties_N = workspace.filters, seconds_N if margins_N is None else margins_N
    _choose[chunks, num_rows](  # a row's programs start together: its last one works while others read
        logits_NV, logits_NV.stride(0), positions_N, state.min_length, state.stop_ids, slots_N,
        state.temperature, state.top_k, state.top_p, state.min_p, state.seed, workspace.num_done_N,
        workspace.score_NC, workspace.id_NC, workspace.second_NC, memory.group_max_NG, memory.chunk_max_NC,
        memory.chunk_sum_NC, memory.groups_NG, memory.candidates_NQ, memory.floor_N, ids_N, scores_N,
        scores_N if certainties_N is None else certainties_N, vocab_size, vocab_start,
        CHUNKS=chunks, WIDTH=triton.next_power_of_2(chunks), FILTERS=filters,
        SECONDS=certainties_N is not None, MARGINS=margins_N is not None, AHEAD=ahead, CHECKS=checks,
        MAX_CANDIDATES=memory.candidates_NQ.shape[1], NUM_STOP_IDS=state.stop_ids.shape[1],
        CHUNK=workspace.chunk_size, num_warps=num_warps(logits_NV.dtype),
    )  # fmt: skip
    if masks is not None:
        force_end_tokens(ids_N, scores_N, masks)
    return ids_N, scores_N


def num_warps(dtype: torch.dtype) -> int:
    """Return the warps of a program; with eight, filters of fp32 logits would spill registers."""
    return 4 if dtype is torch.float32 else 8


def margins_between(scores_N: Tensor, seconds_N: Tensor) -> Tensor:
    """Return margins, fp32: inf if no other token is possible, 0 if none is."""
    return torch.where(scores_N == seconds_N, 0.0, scores_N - seconds_N)


# Only the logits' and the chunk results' addresses benefit from a 16-byte alignment specialization.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _choose(
    logits, row_stride, positions, min_lengths, stop_ids, slots, temperatures, top_ks, top_ps, min_ps, seeds,
    num_done, best_scores, best_ids, second_scores, group_maxima, chunk_maxima, chunk_sums, groups,
    candidates, floors, ids, scores, seconds, vocab_size, vocab_start,
    CHUNKS: tl.constexpr, WIDTH: tl.constexpr, FILTERS: tl.constexpr, SECONDS: tl.constexpr,
    MARGINS: tl.constexpr, AHEAD: tl.constexpr, CHECKS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
    NUM_STOP_IDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Process one chunk of one row; the row's last program also chooses its token."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        if chunk == 0:
            tl.store(ids + row, 0)
            tl.store(scores + row, -float("inf"))
            if SECONDS:
                tl.store(seconds + row, 0.0 if MARGINS else -float("inf"))
        return
    position = tl.load(positions + row).to(tl.int32) + AHEAD
    key_0, key_1 = noise_keys(tl.load(seeds + slot), position)
    temperature = read_temperature(slot, temperatures, top_ks)
    filters = read_filters(slot, temperature, top_ks, top_ps, min_ps)
    narrows = has_filters(filters) & FILTERS
    is_early = position < tl.load(min_lengths + slot)
    logits_row = (
        logits + row.to(tl.int64) * row_stride,
        vocab_size,
        stop_ids + slot * NUM_STOP_IDS,
        is_early,
        temperature,
    )
    row_candidates = candidates + row.to(tl.int64) * MAX_CANDIDATES
    memory = (group_maxima, chunk_maxima, chunk_sums, groups, row_candidates)

    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    z = read_raw_logits(logits_row, columns, vocab_start, NUM_STOP_IDS)
    done = 1
    if CHECKS:
        done += _BROKEN * tl.max(((z != z) | (z == float("inf"))).to(tl.int32), 0)
    z = tl.where(z == z, z, -float("inf"))
    if narrows:
        survey_chunk(z, temperature, filters, memory, row, chunk, CHUNKS, CHUNK)
    elif temperature > 0:
        z -= temperature * negative_gumbel(key_0, key_1, columns + vocab_start)
    if SECONDS | (not narrows):
        best = tl.max(z, 0)
        column = tl.min(tl.where(z == best, columns, _PAST_END), 0)
        tl.store(best_scores + row * CHUNKS + chunk, best)
        tl.store(best_ids + row * CHUNKS + chunk, column)
        if SECONDS:
            second = tl.max(tl.where(columns == column, -float("inf"), z), 0)
            tl.store(second_scores + row * CHUNKS + chunk, second)

    tl.debug_barrier()  # all threads' stores complete before the counter is incremented
    done += tl.atomic_add(num_done + row, done, sem="acq_rel", scope="gpu")
    if done % _BROKEN == CHUNKS:
        tl.store(num_done + row, 0)
        chunks = tl.arange(0, WIDTH)
        place, is_chunk = row * CHUNKS + chunks, chunks < CHUNKS
        best, column, second = -float("inf"), 0, -float("inf")
        if narrows:
            floor, count = find_floor(
                filters, logits_row, memory, row, CHUNKS, WIDTH, MAX_CANDIDATES, NUM_STOP_IDS, CHUNK
            )
            tl.store(floors + row, floor)
            best, column, second = _best_unfiltered(
                floor, count, key_0, key_1, logits_row, row_candidates, MAX_CANDIDATES, NUM_STOP_IDS
            )
        if (second == -float("inf")) & (SECONDS | (not narrows)):
            their_best = tl.load(best_scores + place, mask=is_chunk, other=-float("inf"))
            their_column = tl.load(best_ids + place, mask=is_chunk, other=_PAST_END)
            best = tl.max(their_best, 0)
            column = tl.min(tl.where(their_best == best, their_column, _PAST_END), 0)
            if SECONDS:  # another chunk's best, or the winning chunk's second
                second = tl.load(second_scores + place, mask=is_chunk, other=-float("inf"))
                second = tl.max(tl.where(their_column == column, second, their_best), 0)
        tl.store(ids + row, tl.where(done >= _BROKEN, _NOT_A_NUMBER, column + vocab_start).to(tl.int64))
        tl.store(scores + row, tl.where(done >= _BROKEN, float("inf"), best))
        if MARGINS:  # `margins_between`; infinities are not subtracted from themselves
            is_tie = best == second
            second = tl.where(is_tie, 0.0, best) - tl.where(is_tie, 0.0, second)
        if SECONDS:
            tl.store(seconds + row, second)


@triton.jit
def _best_unfiltered(
    floor,
    count,
    key_0,
    key_1,
    logits_row,
    candidates,
    MAX_CANDIDATES: tl.constexpr,
    NUM_STOP_IDS: tl.constexpr,
):
    """Return the best score among candidates at or above the floor, its column, and the second best score.

    Without candidates the column is 0.
    """
    best = tl.full([_TILE], -float("inf"), tl.float32)
    second = tl.full([_TILE], -float("inf"), tl.float32)
    column = tl.zeros([_TILE], tl.int32)
    _, _, _, _, temperature = logits_row
    for start in range(0, num_places(count, logits_row, MAX_CANDIDATES), _TILE):
        columns, z, scaled = read_candidates(
            start + tl.arange(0, _TILE), count, candidates, logits_row, MAX_CANDIDATES, NUM_STOP_IDS
        )
        score = z - temperature * negative_gumbel(key_0, key_1, columns)
        score = tl.where(scaled >= floor, score, -float("inf"))
        second = tl.maximum(second, tl.minimum(score, best))
        column = tl.where(score > best, columns, column)  # columns ascend: the first of equals stays
        best = tl.maximum(score, best)
    highest = tl.max(best, 0)
    chosen = tl.min(tl.where(best == highest, column, _PAST_END), 0)
    return highest, chosen, tl.max(tl.where((column == chosen) & (best == highest), second, best), 0)
