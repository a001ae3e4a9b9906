"""Choosing tokens: X_t = argmax(log p_t + Gumbel noise(seed, t, token)), for target and drafter alike.

Stateless: the noise is a function of (seed, absolute position, token id) by an integer hash, so it is the
same on every device, in every batch, and after any restart; nothing is drawn or stored. A drafter that uses
the same noise proposes what the target is likely to choose. Greedy is the limit of temperature 0. Called by
`dflash/propose.py` and `actors/targets/runners/host.py`.

Filters have vLLM's meaning and order: temperature, then min-p, top-k, top-p, on probabilities after
temperature; tokens exactly as likely as the last one kept are kept too.

Legend: N rows to sample, M rows with temperature > 0, V vocabulary, F forbidden (row, token) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..compute.loops.elements import LIKE
from .loops import choice
from .noise import negative_gumbel, noise_keys

_NUCLEUS_FIRST_LOOK = 256


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How to choose one token for each of N rows.

    Attributes:
        num_rows: N.
        noisy_M: the rows that have temperature > 0 and keep more than one token; None if there are none.
        temperature_M1, top_k_M, top_p_M1, min_p_M1: of these rows; the last three None where no row needs
            them, and neutral (0, 1, 0) for rows that do not.
        key_2M1: two 32-bit noise keys per row, int64.
        forbidden_F: rows and token ids that must not be chosen (int64 [2, F]); None if there are none.
        max_top_k: the largest top-k in use.
    """

    num_rows: int
    noisy_M: Tensor | None = None
    temperature_M1: Tensor | None = None
    top_k_M: Tensor | None = None
    top_p_M1: Tensor | None = None
    min_p_M1: Tensor | None = None
    key_2M1: Tensor | None = None
    forbidden_F: Tensor | None = None
    max_top_k: int = 0

    @classmethod
    def greedy(
        cls, num_rows: int, forbidden: NDArray[np.int64] | None, device: torch.device | str
    ) -> SamplingBatch:
        """Rows that all take the likeliest token; see `build`."""
        return cls(num_rows, forbidden_F=_put(forbidden, device) if forbidden is not None else None)

    @classmethod
    def build(
        cls,
        *,
        temperature: NDArray[np.float32],
        top_k: NDArray[np.int64],
        top_p: NDArray[np.float32],
        min_p: NDArray[np.float32],
        seed: NDArray[np.int64],
        position: NDArray[np.int64],
        forbidden: NDArray[np.int64] | None = None,
        device: torch.device | str = "cpu",
    ) -> SamplingBatch:
        """From host arrays [N], one entry per row.

        Args:
            top_k: 0 or less keeps all.
            position: absolute position of the token to be chosen (of the row + 1).
            forbidden: [2, F] rows and token ids.
        """

        def put(values: np.ndarray) -> Tensor:
            return _put(values, device)

        noisy = np.flatnonzero((temperature > 0) & (top_k != 1))
        plain = cls.greedy(len(temperature), forbidden, device)
        if noisy.size == 0:
            return plain
        top_k, top_p, min_p = top_k[noisy], top_p[noisy], min_p[noisy]
        limits_k = top_k > 0
        return cls(
            num_rows=len(temperature),
            noisy_M=put(noisy),
            temperature_M1=put(temperature[noisy, None]),
            top_k_M=put(np.where(limits_k, top_k, 0)) if limits_k.any() else None,
            top_p_M1=put(top_p[:, None]) if (top_p < 1).any() else None,
            min_p_M1=put(min_p[:, None]) if (min_p > 0).any() else None,
            key_2M1=put(noise_keys(seed[noisy], position[noisy])[:, :, None]),
            forbidden_F=plain.forbidden_F,
            max_top_k=int(top_k.max(initial=0)),
        )


def _put(values: np.ndarray, device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


def sample_rows(logits_NV: Tensor, batch: SamplingBatch) -> Tensor:
    """Token ids [N] (int64), ties to the lowest id. `logits` may be edited in place.

    Args:
        logits_NV: any float dtype; -inf where a token cannot be.
    """
    if batch.forbidden_F is not None:
        logits_NV[batch.forbidden_F[0], batch.forbidden_F[1]] = float("-inf")
    if batch.noisy_M is None:
        return _argmax(logits_NV)
    if len(batch.noisy_M) == batch.num_rows:
        return _noisy_argmax(logits_NV, batch)
    ids_N = _argmax(logits_NV)
    chosen_M = _noisy_argmax(logits_NV.index_select(0, batch.noisy_M), batch)
    return ids_N.index_copy_(0, batch.noisy_M, chosen_M)


def _has_loops(logits: Tensor) -> bool:
    return logits.device.type == "cpu" and logits.dtype in LIKE


def _argmax(logits_NV: Tensor) -> Tensor:
    return choice.argmax(logits_NV.contiguous()) if _has_loops(logits_NV) else logits_NV.argmax(dim=-1)


def _noisy_argmax(logits_MV: Tensor, batch: SamplingBatch) -> Tensor:
    """argmax of z + T g over what the filters keep: that of z / T + g, and sound for T -> 0."""
    kept_MV = filter_logits(logits_MV, batch)
    assert batch.temperature_M1 is not None and batch.key_2M1 is not None, "made together by `build`"
    if _has_loops(kept_MV):
        return choice.noisy_argmax(kept_MV.contiguous(), batch.temperature_M1, batch.key_2M1)
    negative_g_MV = negative_gumbel(batch.key_2M1, kept_MV.shape[-1])
    return torch.addcmul(kept_MV.float(), batch.temperature_M1, negative_g_MV, value=-1).argmax(dim=-1)


def filter_logits(logits_MV: Tensor, batch: SamplingBatch) -> Tensor:
    """Logits before temperature, -inf where min-p, top-k or top-p cut. Log p = log_softmax(this / T)."""
    if batch.min_p_M1 is None and batch.top_k_M is None and batch.top_p_M1 is None:
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
    """Keep what is at least the k-th largest; k = 0 keeps all."""
    largest_Mk = scaled_MV.topk(min(max_top_k, scaled_MV.shape[-1]), dim=-1).values
    last_M1 = (top_k_M - 1).clamp_(0, largest_Mk.shape[-1] - 1).unsqueeze(-1)
    floor_M1 = largest_Mk.gather(-1, last_M1).masked_fill_((top_k_M <= 0).unsqueeze(-1), float("-inf"))
    return scaled_MV.masked_fill(scaled_MV < floor_M1, float("-inf"))


def _keep_top_p(scaled_MV: Tensor, top_p_M1: Tensor) -> Tensor:
    """Keep the likeliest tokens up to the one with which their sum reaches p (the first one always)."""
    probs_MV = scaled_MV.softmax(dim=-1)
    vocab_size = probs_MV.shape[-1]
    sorted_Mk = probs_MV.topk(min(_NUCLEUS_FIRST_LOOK, vocab_size), dim=-1).values
    floor_M1 = _nucleus_floor(sorted_Mk, top_p_M1)
    if sorted_Mk.shape[-1] < vocab_size:
        short_M = sorted_Mk.double().sum(dim=-1) < top_p_M1[:, 0]
        wide = (short_M & (top_p_M1[:, 0] < 1)).nonzero()[:, 0]  # few rows: sorting all tokens is dear
        if len(wide):
            all_sorted = probs_MV[wide].sort(dim=-1, descending=True).values
            floor_M1[wide] = _nucleus_floor(all_sorted, top_p_M1[wide])
    return scaled_MV.masked_fill(probs_MV < floor_M1, float("-inf"))


def _nucleus_floor(sorted_Mk: Tensor, top_p_M1: Tensor) -> Tensor:
    """The least probability in the nucleus, from the largest ones; 0 where p = 1 keeps all."""
    before_Mk = sorted_Mk.double().cumsum(dim=-1) - sorted_Mk
    last_M1 = (before_Mk < top_p_M1).sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0)
    return sorted_Mk.gather(-1, last_M1).masked_fill_(top_p_M1 >= 1, 0.0)
