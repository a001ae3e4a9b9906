"""Top-k, top-p and min-p filters.

Meaning and order are vLLM's: temperature, then min-p, top-k, top-p, on probabilities after temperature;
tokens exactly as likely as the last one kept are kept too. So the kept tokens are always the likeliest, down
to a floor. Called by `sampler.py` and `selector.py`;
`step/gpu_triton/sampling/top_k_top_p.py` finds the floors in kernels.

Legend: M rows with temperature > 0, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from ..inputs.sampling_metadata import SamplingMetadata

_NUCLEUS_FIRST_LOOK = 256


def floors(logits_MV: Tensor, batch: SamplingMetadata) -> Tensor | None:
    """Return the least logit that each row keeps, fp32 [M, 1]; None if nothing is filtered."""
    if not batch.narrows:
        return None
    kept_MV = filter_logits(logits_MV, batch).float()
    return kept_MV.masked_fill_(kept_MV == float("-inf"), float("inf")).amin(dim=-1, keepdim=True)


def filter_logits(logits_MV: Tensor, batch: SamplingMetadata) -> Tensor:
    """Return logits, -inf where min-p, top-k or top-p cut; log p = log_softmax(result / T)."""
    if not batch.narrows:
        return logits_MV
    assert batch.temperature_M1 is not None, "made together by `build`"
    scaled_MV = logits_MV.float() / batch.temperature_M1
    if batch.min_p_M1 is not None:
        floor_M1 = scaled_MV.amax(dim=-1, keepdim=True) + batch.min_p_M1.log()
        scaled_MV = scaled_MV.masked_fill(scaled_MV < floor_M1, float("-inf"))
    if batch.top_k_M is not None:
        scaled_MV = _keep_top_k(scaled_MV, batch.top_k_M, batch.max_top_k)
    if batch.top_p_M1 is not None:
        scaled_MV = _keep_top_p(scaled_MV, batch.top_p_M1)
    return logits_MV.masked_fill(scaled_MV == float("-inf"), float("-inf"))


def _keep_top_k(scaled_MV: Tensor, top_k_M: Tensor, max_top_k: int) -> Tensor:
    """Keep values at least as large as the k-th largest; k = 0 keeps all."""
    largest_Mk = scaled_MV.topk(min(max_top_k, scaled_MV.shape[-1]), dim=-1).values
    last_M1 = (top_k_M - 1).clamp_(0, largest_Mk.shape[-1] - 1).unsqueeze(-1)
    floor_M1 = largest_Mk.gather(-1, last_M1).masked_fill_((top_k_M <= 0).unsqueeze(-1), float("-inf"))
    return scaled_MV.masked_fill(scaled_MV < floor_M1, float("-inf"))


def _keep_top_p(scaled_MV: Tensor, top_p_M1: Tensor) -> Tensor:
    """Keep the likeliest tokens up to the one with which their sum reaches p (at least one)."""
    probs_MV = scaled_MV.softmax(dim=-1)
    vocab_size = probs_MV.shape[-1]
    sorted_Mk = probs_MV.topk(min(_NUCLEUS_FIRST_LOOK, vocab_size), dim=-1).values
    floor_M1 = _nucleus_floor(sorted_Mk, top_p_M1)
    if sorted_Mk.shape[-1] < vocab_size:
        short_M = sorted_Mk.double().sum(dim=-1) < top_p_M1[:, 0]
        wide = (short_M & (top_p_M1[:, 0] < 1)).nonzero()[:, 0]  # few rows: sorting all tokens is expensive
        if len(wide):
            all_sorted = probs_MV[wide].sort(dim=-1, descending=True).values
            floor_M1[wide] = _nucleus_floor(all_sorted, top_p_M1[wide])
    return scaled_MV.masked_fill(probs_MV < floor_M1, float("-inf"))


def _nucleus_floor(sorted_Mk: Tensor, top_p_M1: Tensor) -> Tensor:
    """Return the least probability in the nucleus, from the largest ones; 0 where p = 1 keeps all."""
    before_Mk = sorted_Mk.double().cumsum(dim=-1) - sorted_Mk
    last_M1 = (before_Mk < top_p_M1).sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0)
    return sorted_Mk.gather(-1, last_M1).masked_fill_(top_p_M1 >= 1, 0.0)
