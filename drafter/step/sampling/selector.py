"""DFlash2's selector: the few candidates of each row of a block, and the walk over them.

*Candidates.* The choice will be argmax of z + T g, with the noise g of
`drafter/step/inputs/gumbel_noise.py`. So with temperature the candidates are the largest of z + T g: at
temperature 1 the winner is often not among the likeliest few. Tokens that a filter would cut get the least
possible g, so they rank after kept tokens, by their logit. If filters keep no more tokens than there are
candidates, the candidates are the likeliest.

*Walk.* Each row is scored after the token chosen before it:

    S_k = the candidates of row k, z_k their logits, h_k = H y_k, x_0 the anchor
    score_k(b | a) = z_k(b) + sum_r A[a]_r h_kr G[b]_r
    x_k = argmax over b in S_k of score_k(b | x_(k-1)), with filters and noise as in `sampler.py`

Source: DFlash2 (https://inco.ai/blog/dflash2/; `dflash/model.py` of z-lab/dflash). The definition, in
PyTorch, on any device: all pairs of adjacent rows' candidates are scored together, then each request follows
its own path. `step/cpu_numba/selector.py` and `step/gpu_triton/sampling/selector.py` walk row after row.
Called by `sampler.select_paths`.

Legend: V vocabulary, E rank, X mask rows, R requests, W drafts, K candidates of a row, P candidates of the
row before; M rows with temperature > 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..inputs.gumbel_noise import GREATEST_NEGATIVE, negative_gumbel, negative_gumbel_of
from ..inputs.proposals import Proposals
from ..inputs.row_layout import StepRows
from ..inputs.sampling_metadata import SamplingMetadata
from .gumbel_argmax import with_margin
from .top_k_top_p import filter_logits, floors


def candidates(logits_XV: Tensor, batch: SamplingMetadata, top_k: int) -> tuple[Tensor, Tensor]:
    """Return candidates' logits (fp32) and ids (int64), [X, K], ids ascending: ties go to the lowest.

    Args:
        logits_XV: any float dtype; -inf for impossible tokens.
    """
    scores_XV = logits_XV
    if batch.noisy_M is not None:
        noised_MV = _noised(logits_XV[batch.noisy_M], batch)
        scores_XV = logits_XV.float().index_copy(0, batch.noisy_M, noised_MV)
    _, ids_XK = scores_XV.topk(top_k, dim=-1, sorted=False)
    ids_XK = ids_XK.sort(dim=-1).values
    return logits_XV.gather(-1, ids_XK).float(), ids_XK


def _noised(logits_MV: Tensor, batch: SamplingMetadata) -> Tensor:
    assert batch.temperature_M1 is not None and batch.key_2M1 is not None, "made together by `build`"
    negative_g_MV = negative_gumbel(batch.key_2M1, logits_MV.shape[-1])
    if (floor_M1 := floors(logits_MV, batch)) is not None:
        negative_g_MV = torch.where(logits_MV < floor_M1, GREATEST_NEGATIVE, negative_g_MV)
    return torch.addcmul(logits_MV.float(), batch.temperature_M1, negative_g_MV, value=-1)


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
    scores_XPK = _path_scores(z_XK, ids_XK, gates_XE, block, codebooks)
    best_XP, margins_XP = with_margin(scores_XPK)
    if (noisy_M := block.sampling.noisy_M) is not None:
        noisy = _noisy_best(scores_XPK[noisy_M], ids_XK[noisy_M], block.sampling)
        for values_XP, values_MP in zip((best_XP, margins_XP), noisy, strict=True):
            values_XP.index_copy_(0, noisy_M, values_MP)
    return _follow(best_XP, margins_XP, ids_XK, block)


def scores_after_each(
    z_XK: Tensor, ids_XK: Tensor, gates_XE: Tensor, block: StepRows, codebooks: SelectorCodebooks
) -> Tensor:
    """Return the fp32 scores [X, P, K] of candidates after each of the row before, with filters and noise.

    All candidates before a request's first row are its anchor.
    """
    scores_XPK = _path_scores(z_XK, ids_XK, gates_XE, block, codebooks)
    if (noisy_M := block.sampling.noisy_M) is not None:
        scores_XPK[noisy_M] = _noised_pairs(scores_XPK[noisy_M], ids_XK[noisy_M], block.sampling)
    return scores_XPK


def _path_scores(
    z_XK: Tensor, ids_XK: Tensor, gates_XE: Tensor, block: StepRows, codebooks: SelectorCodebooks
) -> Tensor:
    return z_XK.unsqueeze(1) + _pair_scores(block.previous(ids_XK), gates_XE, ids_XK, codebooks)


def _pair_scores(before_XP: Tensor, gates_XE: Tensor, ids_XK: Tensor, codebooks: SelectorCodebooks) -> Tensor:
    """Return the codebooks' pair scores [X, P, K], fp32."""
    gated_XPE = codebooks.predecessor_VE[before_XP].float() * gates_XE.float().unsqueeze(1)
    return gated_XPE @ codebooks.successor_VE[ids_XK].float().transpose(1, 2)


def _noisy_best(scores_MPK: Tensor, ids_MK: Tensor, batch: SamplingMetadata) -> tuple[Tensor, Tensor]:
    """Return the places [M, P] of the best candidates under filters and noise, and their margins.

    Filters apply to the candidates after one previous token as if they were a row.
    """
    places_MP, margins_MP = with_margin(_noised_pairs(scores_MPK, ids_MK, batch))
    if batch.narrows:  # as in `sampler.py`
        margins_MP = torch.where(margins_MP.isinf(), with_margin(scores_MPK)[1], margins_MP)
    return places_MP, margins_MP


def _noised_pairs(scores_MPK: Tensor, ids_MK: Tensor, batch: SamplingMetadata) -> Tensor:
    assert batch.temperature_M1 is not None and batch.key_2M1 is not None, "made together by `build`"
    # Filters see a row per previous token; noise depends on the candidate alone, whatever came before it.
    num_before = scores_MPK.shape[1]
    kept = filter_logits(scores_MPK.flatten(0, 1), _repeated(batch, num_before)).view_as(scores_MPK)
    negative_g_M1K = negative_gumbel_of(batch.key_2M1, ids_MK).unsqueeze(1)
    return torch.addcmul(kept, batch.temperature_M1.unsqueeze(-1), negative_g_M1K, value=-1)


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
