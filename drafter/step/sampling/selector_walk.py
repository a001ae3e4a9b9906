"""DFlash2's walk over the candidates of a block's rows; each is scored after the token chosen before it.

    S_k = the candidates of row k (`selector_candidates.py`), z_k their logits, h_k = H y_k, x_0 the anchor
    score_k(b | a) = z_k(b) + sum_r A[a]_r h_kr G[b]_r
    x_k = argmax over b in S_k of score_k(b | x_(k-1)), with filters and noise as in `sampler.py`

Source: DFlash2 (https://inco.ai/blog/dflash2/; `dflash/model.py` of z-lab/dflash). The definition, in
PyTorch, on any device: all pairs of adjacent rows' candidates are scored together, then each request follows
its own path. `step/cpu_numba/selector_walk.py` and `step/gpu_triton/sampling/selector_walk.py` walk row after
row. Called by `selector.py`.

Legend: V vocabulary, E rank, X mask rows, R requests, W drafts, K candidates of a row, P candidates of the
row before; M rows with temperature > 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..inputs.gumbel_noise import negative_gumbel_of
from ..inputs.proposals import Proposals
from ..inputs.row_layout import StepRows
from ..inputs.sampling_metadata import SamplingMetadata
from .gumbel_argmax import with_margin
from .top_k_top_p import filter_logits


@dataclass(frozen=True, slots=True)
class SelectorCodebooks:
    """The codebooks that score a pair of adjacent tokens.

    Attributes:
        predecessor_VE, successor_VE: A and G.
        top_k: candidates of a row.
    """

    predecessor_VE: Tensor
    successor_VE: Tensor
    top_k: int


def walk(
    z_XK: Tensor, ids_XK: Tensor, gates_XE: Tensor, block: StepRows, codebooks: SelectorCodebooks
) -> Proposals:
    """Return drafts and margins [R, W]; a margin is between scores after the token chosen before.

    Args:
        z_XK, ids_XK: result of `candidates`.
        gates_XE: h, of the same rows.
    """
    before_XP = _before(ids_XK, block)
    scores_XPK = z_XK.unsqueeze(1) + _pair_scores(before_XP, gates_XE, ids_XK, codebooks)
    best_XP, margins_XP = with_margin(scores_XPK)
    if (noisy_M := block.sampling.noisy_M) is not None:
        noisy = _noisy_best(scores_XPK[noisy_M], ids_XK[noisy_M], block.sampling)
        for values_XP, values_MP in zip((best_XP, margins_XP), noisy, strict=True):
            values_XP.index_copy_(0, noisy_M, values_MP)
    return _follow(best_XP, margins_XP, ids_XK, block)


def _before(ids_XK: Tensor, block: StepRows) -> Tensor:
    """Return the possible previous tokens [X, P]: the previous row's candidates, or the anchor."""
    row_before_X = block.sampled_X - 1
    is_first_X = torch.ones_like(row_before_X, dtype=torch.bool)
    is_first_X[1:] = row_before_X[1:] != block.sampled_X[:-1]
    anchors_X1 = block.token_ids_N[row_before_X].unsqueeze(1)
    return torch.where(is_first_X.unsqueeze(1), anchors_X1, ids_XK.roll(1, dims=0))


def _pair_scores(before_XP: Tensor, gates_XE: Tensor, ids_XK: Tensor, codebooks: SelectorCodebooks) -> Tensor:
    """Return the codebooks' pair scores [X, P, K], fp32."""
    gated_XPE = codebooks.predecessor_VE[before_XP].float() * gates_XE.float().unsqueeze(1)
    return gated_XPE @ codebooks.successor_VE[ids_XK].float().transpose(1, 2)


def _noisy_best(scores_MPK: Tensor, ids_MK: Tensor, batch: SamplingMetadata) -> tuple[Tensor, Tensor]:
    """Return the places [M, P] of the best candidates under filters and noise, and their margins.

    Filters apply to the candidates after one previous token as if they were a row.
    """
    assert batch.temperature_M1 is not None and batch.key_2M1 is not None, "made together by `build`"
    num_before = scores_MPK.shape[1]
    kept = filter_logits(scores_MPK.flatten(0, 1), _repeated(batch, num_before)).view_as(scores_MPK)
    negative_g_M1K = negative_gumbel_of(batch.key_2M1, ids_MK).unsqueeze(1)
    noised = torch.addcmul(kept, batch.temperature_M1.unsqueeze(-1), negative_g_M1K, value=-1)
    places_MP, margins_MP = with_margin(noised)
    if batch.narrows:  # as in `sampler.py`
        margins_MP = torch.where(margins_MP.isinf(), with_margin(scores_MPK)[1], margins_MP)
    return places_MP, margins_MP


def _repeated(batch: SamplingMetadata, times: int) -> SamplingMetadata:
    names = ("temperature_M1", "top_k_M", "top_p_M1", "min_p_M1")
    values = {name: getattr(batch, name) for name in names}
    return replace(
        batch, **{n: v.repeat_interleave(times, dim=0) for n, v in values.items() if v is not None}
    )


def _follow(best_XP: Tensor, margins_XP: Tensor, ids_XK: Tensor, block: StepRows) -> Proposals:
    counts_R, last = block.counts_R, len(best_XP) - 1
    first_R = counts_R.cumsum(0) - counts_R
    place_R = torch.zeros_like(first_R)
    drafts_RW = ids_XK.new_full((len(counts_R), block.max_count), -1)
    margins_RW = margins_XP.new_full(drafts_RW.shape, float("nan"))
    for w in range(block.max_count):
        rows_R = (first_R + w).clamp(max=last)
        margin_R, place_R = margins_XP[rows_R, place_R], best_XP[rows_R, place_R]
        drafts_RW[:, w] = torch.where(w < counts_R, ids_XK[rows_R, place_R], -1)
        margins_RW[:, w] = torch.where(w < counts_R, margin_R, torch.nan)
    return Proposals(drafts_RW, margins_RW)
