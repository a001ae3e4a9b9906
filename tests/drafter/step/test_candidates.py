"""A selector's candidates: the best tokens of a row under the noise with which the target will choose.

The reference has the oracle's own noise, in fp64; `test_kernels_selection.py` tests the kernels.
"""

from __future__ import annotations

import math

import pytest
import torch
from manta.drafter.step.cpu_numba.step_ops import LOOPS
from manta.drafter.step.inputs.sampling_metadata import SamplingMetadata
from manta.drafter.step.sampling.step_ops import StepOperators
from support.oracles.oracle_dflash import gumbel
from support.oracles.sampling_rows import batch

SEEDS, POSITIONS = [11, -(2**40) - 3, 2**62, 5, 0, 77], [9, 10, 1_000_000, 0, 4, 5]


def rows(temperature: list[float], **filters: list[float]) -> SamplingMetadata:
    """Return the settings of six rows."""
    return batch(6, temperature=temperature, seed=SEEDS, position=POSITIONS, **filters)


def noised(logits_NV: torch.Tensor, temperature: list[float]) -> torch.Tensor:
    rows = zip(logits_NV.double(), temperature, SEEDS, POSITIONS, strict=True)
    return torch.stack([z + t * gumbel(seed, at, len(z)) if t else z for z, t, seed, at in rows])


def largest(scores_V: torch.Tensor, count: int) -> list[int]:
    return sorted(scores_V.argsort(descending=True, stable=True)[:count].tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "top_k"), [(16, 16), (40, 5), (333, 16), (2_000, 16), (2_000, 40)])
@pytest.mark.one_in(2)
def test_candidates_are_the_best_of_the_noised_row(
    vocab_size: int, top_k: int, dtype: torch.dtype, operators: StepOperators
):
    """Some rows have noise; greedy rows in fp32 have no ties."""
    temperature = [1.0, 0.7, 0.0 if dtype is torch.float32 else 0.2, 3.0, 1.0, 0.3]
    logits_NV = (3 * torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(1))).to(dtype)
    z_NK, ids_NK = operators.candidates(logits_NV, rows(temperature), top_k)
    scores_NV = noised(logits_NV, temperature)
    assert ids_NK.tolist() == [largest(scores_V, top_k) for scores_V in scores_NV]
    assert torch.equal(z_NK, logits_NV.gather(1, ids_NK).float())


def test_filtered_tokens_rank_after_all_kept_candidates(operators: StepOperators):
    temperature = [2.0, 2.0, 2.0, 2.0, 0.0, 2.0]
    keeps = {"top_k": [30, 3, 0, 0, 3, 0], "min_p": [0, 0, 0.2, 0, 0, 0], "top_p": [1, 1, 1, 0.6, 0.5, 1]}
    logits_NV = 3 * torch.randn(6, 400, generator=torch.Generator().manual_seed(2))
    _, ids_NK = operators.candidates(logits_NV, rows(temperature, **keeps), 16)
    plain_NV, noised_NV = noised(logits_NV, [0.0] * 6), noised(logits_NV, temperature)
    num_kept = []
    for row, ids_K in enumerate(ids_NK.tolist()):
        p = (plain_NV[row] / 2).softmax(-1)
        order = p.argsort(descending=True)
        before = p[order].cumsum(0) - p[order]
        kept = (before < keeps["top_p"][row]) & (p[order] >= keeps["min_p"][row] * p.max())
        kept &= torch.arange(400) < (keeps["top_k"][row] or 400)
        if temperature[row] == 0:
            kept[:] = True
        num_kept.append(int(kept.sum()))
        is_kept = torch.zeros(400, dtype=torch.bool).index_put((order,), kept)
        ranks_V = torch.where(is_kept, noised_NV[row] + 1e6, plain_NV[row])
        assert ids_K == largest(ranks_V, 16)
    assert min(num_kept) < 16 < sorted(num_kept)[3] < 400  # fewer than candidates, some more, all


def test_forbidden_tokens_are_candidates_only_if_there_are_no_others(operators: StepOperators):
    logits_NV = torch.full((6, 100), -math.inf)
    logits_NV[:, 40:47] = torch.randn(6, 7)
    logits_NV[5] = -math.inf
    _, ids_NK = operators.candidates(logits_NV, rows([0.0, 1.0, 1.0, 0.0, 2.0, 1.0]), 16)
    assert all(set(range(40, 47)) <= set(ids_K) for ids_K in ids_NK[:5].tolist())
    assert all(len(set(ids_K)) == 16 and ids_K == sorted(ids_K) for ids_K in ids_NK.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loops_take_the_lowest_ids_of_equal_candidates(dtype: torch.dtype):
    random = torch.Generator().manual_seed(3)
    logits_NV = torch.randint(0, 5, (6, 900), generator=random).to(dtype)
    found_NK = LOOPS.candidates(logits_NV, rows([0.0] * 6), 16)[1]
    assert found_NK.tolist() == [largest(z_V.float(), 16) for z_V in logits_NV]
    # So little noise is lost next to such logits.
    found_NK = LOOPS.candidates(1e6 + 1e6 * logits_NV.float(), rows([1e-3] * 6), 16)[1]
    assert found_NK.tolist() == [largest(z_V.float(), 16) for z_V in logits_NV]


def test_nan_logits_break_no_row(operators: StepOperators):
    logits_NV = torch.randn(6, 200)
    logits_NV[:, 100:] = math.nan
    _, ids_NK = operators.candidates(logits_NV, rows([0.0, 1.0] * 3), 16)
    assert ((ids_NK >= 0) & (ids_NK < 200)).all()
