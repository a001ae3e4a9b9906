"""What drafting alone asks of kernels: margins, cuts, DFlash2's choices and convolutions; heads of odd sizes.

Margins against fp64; cuts, paths and convolutions against the host's definitions on the same device. Imports
Triton: `run.py` imports this file where Triton's backend runs.

Legend: N rows, R requests, K most drafts, V vocabulary, E selector's rank, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ...cluster.plan import SlotSampling, Trim
from ...cluster.speculation.draft_trimming import trimmed
from ...drafter.compute.eager.convolution import convolve as exact_convolution
from ...drafter.compute.gpu.convolution import convolve
from ...drafter.step.device.candidates import find_candidates
from ...drafter.step.device.paths import walk_paths
from ...drafter.step.device.rows import StepRequests, lay_out_block, pack
from ...drafter.step.device.sampling import SamplingWorkspace
from ...drafter.step.device.trimming import TrimLists, trim_drafts
from ...drafter.step.paths import Codebooks
from ...drafter.step.selection import select_paths
from ..bench.random_pair import PairShape
from .findings import Check, Outcome, none_differ, off_by, within
from .operators import REMEDY, attention
from .step_kernels import SAMPLINGS, Twins, choose_surely, exact_scores
from .subject import Candidate, Place, Subject

_HEAD_DIMS = (80, 96, 192)  # none is a power of two: tiles are wider than heads
_NEAR = 1e-4  # margins: two scores' noise in fp32, and what logits of this size are rounded by
_RANK, _TOP_K = 256, 16  # of published selectors


def draft_checks(place: Place) -> Iterator[Check]:
    """All of them."""
    for name in ("greedy", "temperature 1", "Qwen3's"):
        yield Check("drafts", f"margins, {name}", partial(_margins, place, SAMPLINGS[name]), REMEDY)
        yield Check("drafts", f"DFlash2's paths, {name}", partial(_paths, place, SAMPLINGS[name]), REMEDY)
    yield Check("drafts", "cuts", partial(_cuts, place), REMEDY)
    yield Check("drafts", "DFlash2's convolutions", partial(_convolutions, place), REMEDY)
    for head_dim in _HEAD_DIMS:
        yield Check("drafts", f"attention, heads of {head_dim}", partial(_heads, place, head_dim), REMEDY)


def _margins(place: Place, sampling: SlotSampling) -> Outcome:
    """How much the best score is above the next one that filters keep; the best logit, where one is kept."""
    num_rows = 6 if place.interpreted else 32
    random = torch.Generator(place.device).manual_seed(1)
    logits_NV = torch.randn(num_rows, place.vocab_size, generator=random, device=place.device).mul_(3)
    seeds_N, positions_N = np.arange(num_rows) * 10**12, np.arange(num_rows) * 7 + 1
    logits_NV[0, 7] += 40.0  # the only one that a filter keeps
    _, floor_N, margins_N = choose_surely(logits_NV, sampling, seeds_N, positions_N)
    scores_NV = exact_scores(logits_NV, sampling, seeds_N, positions_N)
    if floor_N is not None:
        kept_NV = logits_NV / sampling.temperature >= floor_N[:, None]
        alone_N1 = kept_NV.sum(-1, keepdim=True) == 1
        kept_scores_NV = scores_NV.masked_fill(~kept_NV, -torch.inf)
        scores_NV = torch.where(alone_N1, logits_NV.double(), kept_scores_NV)
    best_N2 = scores_NV.topk(2).values
    off = float((margins_N - (best_N2[:, 0] - best_N2[:, 1])).abs().max())
    return Outcome(f"off by {off:.1e}", f"{_NEAR:.0e}", off <= _NEAR)


def _cuts(place: Place) -> Outcome:
    """As many drafts of each request as the host would verify; margins are few, so that worths are equal."""
    rng = np.random.default_rng(2)
    count, most = (9, 7) if place.interpreted else (256, 15)
    drafts_R = rng.integers(0, most + 1, count).astype(np.int32)
    margins_RK = rng.choice(np.array([0.1, 1.0, 7.5], np.float32), (count, most))
    made_RK = np.arange(most) < drafts_R[:, None]
    num_rows = count + int(drafts_R.sum()) // 2
    flat_K, ones_R = np.full(most, 0.5, np.float32), np.ones(count, np.float32)
    trim = Trim(flat_K, flat_K, 0 * ones_R, ones_R, np.empty(0, np.float32), num_rows)
    expected_R = trimmed(np.where(made_RK, margins_RK, np.float32(np.nan)), drafts_R, count, trim)
    room, slots_R = StepRequests.room(count), np.arange(count, dtype=np.int32)
    lists = torch.from_numpy(pack(slots_R, 1 + drafts_R, drafts_R, ones_R > 0, room)).to(place.device)
    values = torch.from_numpy(TrimLists.pack(trim, slots_R.astype(np.intp), room, most)).to(place.device)
    of_rows = np.concatenate([np.insert(m[:n], 0, 0.0) for m, n in zip(margins_RK, drafts_R, strict=True)])
    found = trim_drafts(
        StepRequests.decoding(lists, count, most + 1, num_rows),
        torch.from_numpy(of_rows).to(place.device),
        TrimLists.over(values, room),
        num_rows,
        torch.empty(count, dtype=torch.int32, device=place.device),
        torch.empty(count, most, device=place.device),
    )
    found_R = found.num_drafts_R.cpu().numpy()
    if found_R.sum() != expected_R.sum():
        return Outcome(f"{found_R.sum()} drafts stay", f"{expected_R.sum()}", passed=False)
    return none_differ(int((found_R != expected_R).sum()), count, "requests")


def _paths(place: Place, sampling: SlotSampling) -> Outcome:
    """Drafts along DFlash2's paths, of ragged blocks with padding behind."""
    twins, filters = Twins(place, sampling), sampling.top_k > 0
    block = lay_out_block(twins.requests, twins.device.tables, 0)
    expected = twins.host.lay_out_block(twins.step, 0)
    assert expected is not None, "somebody drafts"
    random = torch.Generator(place.device).manual_seed(3)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=place.device)

    num_rows = len(block.slots_N)
    logits_NV, gates_NE = randn(num_rows, place.vocab_size), randn(num_rows, _RANK)
    predecessor_VE, successor_VE = (0.1 * randn(place.vocab_size, _RANK) for _ in range(2))
    books = Codebooks(predecessor_VE, successor_VE, _TOP_K)
    drafting_N = torch.from_numpy(np.flatnonzero(np.repeat(twins.step.num_drafts > 0, twins.step.num_rows)))
    mine_X = drafting_N.to(place.device)[expected.sampled_X]
    theirs = select_paths(logits_NV[mine_X], gates_NE[mine_X], expected, books)
    state = twins.device.sampling
    workspace = SamplingWorkspace.build(num_rows, place.vocab_size, place.device)
    found = find_candidates(logits_NV, block, state, _TOP_K, filters=filters, workspace=workspace)
    margins_N = torch.zeros(num_rows, device=place.device)
    cu_rows_R1 = twins.requests.cu_rows_R1
    chosen_N = walk_paths(
        found, gates_NE, block, cu_rows_R1, state, books, filters=filters, margins_N=margins_N
    )
    assert theirs.margins_RK is not None, "a path says how sure it is"
    of_drafts = theirs.drafts_RK >= 0
    differing = int((chosen_N[mine_X] != theirs.drafts_RK[of_drafts]).sum())
    off = float((margins_N[mine_X] - theirs.margins_RK[of_drafts]).abs().max())
    measured = f"{differing} of {len(mine_X)} drafts differ, margins by {off:.1e}"
    return Outcome(measured, f"0, {_NEAR:.0e}", not differing and off <= _NEAR)


def _convolutions(place: Place) -> Outcome:
    """Before and behind a sublayer."""
    hidden, rows, taps, groups = place.shape.target.hidden_size, 40, 4, 16
    random = torch.Generator(place.device).manual_seed(4)
    x_NH, residual_NH, base_TH, dynamic_NTC = (
        torch.randn(*shape, generator=random, device=place.device)
        for shape in ((rows, hidden), (rows, hidden), (taps, hidden), (rows, taps, groups))
    )
    owners_N = torch.arange(rows, device=place.device) // 7
    errors = [
        off_by(
            convolve(x_NH, dynamic_NTC, base_TH, owners_N, residual),
            exact_convolution(x_NH, dynamic_NTC, base_TH, owners_N, residual).double(),
        )
        for residual in (None, residual_NH)
    ]
    return within(max(errors), 16)


def _heads(place: Place, head_dim: int) -> Outcome:
    """Norm, rotation, K/V write and attention of blocks."""
    shape = PairShape.of("odd heads", {**place.shape.target_json, "head_dim": head_dim})
    dtype = torch.float32 if place.interpreted else torch.bfloat16
    subject = Subject(replace(place, shape=shape), Candidate("triton", "triton", (dtype,)), dtype)
    with torch.inference_mode():
        error = attention(subject, place.requests["blocks"])
    return within(error, 8 if dtype.itemsize == 2 else 128)
