"""The candidates of a row: the few tokens that a selector (`selector_walk.py`) is to choose one of.

What will be chosen is argmax of z + T g, with the noise g of `drafter/step/inputs/gumbel_noise.py`. So where
there is temperature the candidates are the largest of z + T g: at temperature 1 the token that wins is often
none of the likeliest few. What a filter would cut is no better for its noise; it has the least that there is,
and so stands behind all that is kept, by its logit. Where filters keep no more than there are candidates,
these are the likeliest.

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
    """Logits (fp32) and ids (int64) of the candidates, [X, K], ids ascending: later ties go to the lowest.

    Args:
        logits_XV: any float dtype; -inf where a token cannot be.
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
