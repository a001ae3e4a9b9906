"""Samples tokens: X_t = argmax(log p_t + g(seed, t, token)), for target and drafter alike.

Gumbel-max sampling (arXiv 1411.0030) with noise g shared by target and drafter (arXiv 2408.07978). Stateless:
g is an integer hash of (seed, absolute position, token id), so it is the same on every device, in every
batch, and after any restart. A drafter that uses the same noise proposes what the target is likely to sample.
Temperature 0 is greedy. Called by `dflash/proposer.py` and `actors/targets/runners/cpu_runner.py`.

Order: requests' rules (`drafter/step/inputs/logits_processors.py`), their grammars' masks
(`grammar_masks.py`), then filters (`top_k_top_p.py`).

A draft also gets a margin (`drafter/step/inputs/proposals.py`) among what the filters keep. If they keep only
one token, noise has no effect, and the margin is that of temperature 0 among all tokens that rules and
grammars allow: what filters cut here they may keep with the other model's logits.

A selector (`selector.py`) chooses a block's drafts instead of `sample_with_margins`. Rules and noise come
before its candidates, because they decide which tokens can win; filters come after its scores, because these
are the drafter's distribution.

Legend: N rows to sample, M rows with temperature > 0, V vocabulary, X mask rows, E rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..inputs.gumbel_noise import negative_gumbel_of
from ..inputs.logits_processors import apply_rules
from ..inputs.proposals import BlockCandidates, Proposals
from ..inputs.row_layout import StepRows
from ..inputs.sampling_metadata import SamplingMetadata
from .selector import SelectorCodebooks, scores_after_each
from .step_ops import DEFINITION, StepOperators
from .top_k_top_p import filter_logits


def sample_rows(logits_NV: Tensor, batch: SamplingMetadata, operators: StepOperators = DEFINITION) -> Tensor:
    """Return token ids [N] (int64), ties to the lowest id. May edit the logits in place.

    Args:
        logits_NV: any float dtype; -inf for impossible tokens.
    """
    return sample_with_margins(logits_NV, batch, operators)[0]


def sample_with_margins(
    logits_NV: Tensor, batch: SamplingMetadata, operators: StepOperators = DEFINITION
) -> tuple[Tensor, Tensor]:
    """Return the ids of `sample_rows` and their margins [N] (fp32)."""
    logits_NV = edit_logits(logits_NV, batch, operators)
    if batch.noisy_M is None:
        return operators.argmax_margin(logits_NV)
    if len(batch.noisy_M) == batch.num_rows:
        return _sample_noisy(logits_NV, batch, operators)
    ids_N, margins_N = operators.argmax_margin(logits_NV)
    ids_M, margins_M = _sample_noisy(logits_NV.index_select(0, batch.noisy_M), batch, operators)
    return ids_N.index_copy_(0, batch.noisy_M, ids_M), margins_N.index_copy_(0, batch.noisy_M, margins_M)


def edit_logits(logits_NV: Tensor, batch: SamplingMetadata, operators: StepOperators) -> Tensor:
    """Apply stop-token limits, rules and grammar masks; may edit in place."""
    if batch.forbidden_F is not None:
        logits_NV[batch.forbidden_F[0], batch.forbidden_F[1]] = float("-inf")
    if batch.ruled:
        logits_NV = apply_rules(logits_NV, batch.ruled)
    return logits_NV if batch.masks is None else operators.mask_tokens(logits_NV, batch.masks)


def _sample_noisy(
    logits_MV: Tensor, batch: SamplingMetadata, operators: StepOperators
) -> tuple[Tensor, Tensor]:
    assert batch.temperature_M1 is not None and batch.key_2M1 is not None, "made together by `build`"
    kept_MV = filter_logits(logits_MV, batch)
    ids_M, margins_M = operators.noisy_argmax_margin(kept_MV, batch.temperature_M1, batch.key_2M1)
    if batch.narrows:
        margins_M = torch.where(margins_M.isinf(), operators.argmax_margin(logits_MV)[1], margins_M)
    return ids_M, margins_M


def select_paths(
    logits_XV: Tensor,
    gates_XE: Tensor,
    block: StepRows,
    codebooks: SelectorCodebooks,
    operators: StepOperators = DEFINITION,
    *,
    keeps_candidates: bool = False,
) -> Proposals:
    """Return drafts and margins [R, W]; a margin is between scores after the token chosen before.

    Args:
        logits_XV: any float dtype, of `block`'s mask rows; may be edited.
        gates_XE: h, of the same rows.
        keeps_candidates: whether candidates are returned as well.
    """
    logits_XV = edit_logits(logits_XV, block.sampling, operators)
    found = operators.candidates(logits_XV, block.sampling, codebooks.top_k)
    proposals = operators.walk(*found, gates_XE, block, codebooks)
    if not keeps_candidates:
        return proposals
    scores_XPK = scores_after_each(*found, gates_XE, block, codebooks)
    return replace(proposals, candidates=(BlockCandidates(found[1], scores_XPK, block.counts_R),))


def block_candidates(
    logits_XV: Tensor, block: StepRows, num_candidates: int, operators: StepOperators = DEFINITION
) -> BlockCandidates:
    """Return so many candidates of each row of a block; scores do not depend on the token before.

    Args:
        logits_XV: any float dtype, of `block`'s mask rows, after `edit_logits`; may be edited.
    """
    batch = block.sampling
    if batch.noisy_M is not None and batch.narrows:
        logits_XV[batch.noisy_M] = filter_logits(logits_XV[batch.noisy_M], batch)
        batch = replace(batch, top_k_M=None, top_p_M1=None, min_p_M1=None)
    scores_XC, ids_XC = operators.candidates(logits_XV, batch, num_candidates)
    if (noisy_M := batch.noisy_M) is not None:
        assert batch.temperature_M1 is not None and batch.key_2M1 is not None, "made together by `build`"
        negative_g_MC = negative_gumbel_of(batch.key_2M1, ids_XC[noisy_M])
        scores_XC[noisy_M] = torch.addcmul(scores_XC[noisy_M], batch.temperature_M1, negative_g_MC, value=-1)
    return BlockCandidates(ids_XC, scores_XC.unsqueeze(1), block.counts_R)
