"""Choosing tokens: X_t = argmax(log p_t + Gumbel noise(seed, t, token)), for target and drafter alike.

Stateless: the noise is a function of (seed, absolute position, token id) by an integer hash, so it is the
same on every device, in every batch, and after any restart; nothing is drawn or stored. A drafter that uses
the same noise proposes what the target is likely to choose. Greedy is the limit of temperature 0. Called by
`dflash/proposer.py` and `actors/targets/runners/cpu_runner.py`.

Before anything else, what cannot be is taken out: requests' rules are applied
(`drafter/step/inputs/logits_processors.py`), then the masks of their grammars (`grammar_masks.py`); then
filters cut (`top_k_top_p.py`).

Of a proposal it is told too how sure it is (`drafter/step/inputs/proposals.py`): its margin among what the
filters keep. Where they keep one token alone, noise has no say, and the margin is that of temperature 0,
among all that rules and grammars allow: what filters cut here they may keep on the other model's logits.

Legend: N rows to sample, M rows with temperature > 0, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..inputs.logits_processors import apply_rules
from ..inputs.sampling_metadata import SamplingMetadata
from .step_ops import DEFINITION, StepOperators
from .top_k_top_p import filter_logits


def sample_rows(logits_NV: Tensor, batch: SamplingMetadata, operators: StepOperators = DEFINITION) -> Tensor:
    """Token ids [N] (int64), ties to the lowest id. `logits` may be edited in place.

    Args:
        logits_NV: any float dtype; -inf where a token cannot be.
    """
    return sample_with_margins(logits_NV, batch, operators)[0]


def sample_with_margins(
    logits_NV: Tensor, batch: SamplingMetadata, operators: StepOperators = DEFINITION
) -> tuple[Tensor, Tensor]:
    """The same ids, and each one's margin [N] (fp32)."""
    logits_NV = edit_logits(logits_NV, batch, operators)
    if batch.noisy_M is None:
        return operators.argmax_margin(logits_NV)
    if len(batch.noisy_M) == batch.num_rows:
        return _sample_noisy(logits_NV, batch, operators)
    ids_N, margins_N = operators.argmax_margin(logits_NV)
    ids_M, margins_M = _sample_noisy(logits_NV.index_select(0, batch.noisy_M), batch, operators)
    return ids_N.index_copy_(0, batch.noisy_M, ids_M), margins_N.index_copy_(0, batch.noisy_M, margins_M)


def edit_logits(logits_NV: Tensor, batch: SamplingMetadata, operators: StepOperators) -> Tensor:
    """The logits, perhaps in place, as requests' rules and grammars want them."""
    if batch.forbidden_F is not None:
        logits_NV[batch.forbidden_F[0], batch.forbidden_F[1]] = float("-inf")
    if batch.ruled:
        logits_NV = apply_rules(logits_NV, batch.ruled)
    return logits_NV if batch.masks is None else operators.mask_tokens(logits_NV, batch.masks)


def _sample_noisy(
    logits_MV: Tensor, batch: SamplingMetadata, operators: StepOperators
) -> tuple[Tensor, Tensor]:
    """Over what the filters keep; see the module's text."""
    assert batch.temperature_M1 is not None and batch.key_2M1 is not None, "made together by `build`"
    kept_MV = filter_logits(logits_MV, batch)
    ids_M, margins_M = operators.noisy_argmax_margin(kept_MV, batch.temperature_M1, batch.key_2M1)
    if batch.narrows:
        margins_M = torch.where(margins_M.isinf(), operators.argmax_margin(logits_MV)[1], margins_M)
    return ids_M, margins_M
