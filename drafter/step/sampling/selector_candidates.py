"""Candidates of a row: the few tokens among which a selector (`selector_walk.py`) chooses.

The choice will be argmax of z + T g, with the noise g of `drafter/step/inputs/gumbel_noise.py`. So with
temperature the candidates are the largest of z + T g: at temperature 1 the winner is often not among the
likeliest few. Tokens that a filter would cut get the least possible g, so they rank after kept tokens, by
their logit. If filters keep no more tokens than there are candidates, the candidates are the likeliest.

The definition, in PyTorch, on any device; `step/cpu_numba/selector_candidates.py` is the same in compiled
loops, and `step/gpu_triton/sampling/selector_candidates.py` in a kernel. Called by `selector.py`.

Legend: V vocabulary, X rows, K candidates of a row; M rows with temperature > 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..inputs.gumbel_noise import GREATEST_NEGATIVE, negative_gumbel
from ..inputs.sampling_metadata import SamplingMetadata
from .top_k_top_p import floors


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
