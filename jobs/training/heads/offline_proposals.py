"""Drafts of a model in training at given positions of a text, sampled as the engine samples.

For a whole block by row or along the selector's path. All positions are drafted in one pass, without pages
or steps.

Shapes: T tokens, F tapped features, A anchors, S block size, N drafts of an anchor, D width, V vocabulary.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional as F

from ....drafter.step.inputs.row_layout import StepRows
from ....drafter.step.inputs.sampling_metadata import SamplingMetadata
from ....drafter.step.sampling.sampler import sample_rows, select_paths
from ....drafter.step.sampling.selector import SelectorCodebooks
from ..loop.continuations import ContinuationRequest
from ..loop.precision import autocast
from .dflash_module import TrainableDrafter
from .frozen_target import FrozenTarget

# (features [T, F], question, tokens [T], anchors [A]) -> drafts [A, N] for the positions after each anchor,
# sampled like the question.
OfflineProposals = Callable[[torch.Tensor, ContinuationRequest, torch.Tensor, torch.Tensor], torch.Tensor]


class BlockProposals:
    def __init__(self, target: FrozenTarget, drafter: TrainableDrafter) -> None:
        self._target, self._drafter = target, drafter

    @torch.no_grad()
    def __call__(
        self,
        features_TF: torch.Tensor,
        question: ContinuationRequest,
        tokens_T: torch.Tensor,
        anchors_A: torch.Tensor,
    ) -> torch.Tensor:
        drafter, device = self._drafter, tokens_T.device
        num_slots = drafter.config.max_drafts
        blocks_AS = torch.full((len(anchors_A), num_slots + 1), drafter.config.mask_token_id, device=device)
        blocks_AS[:, 0] = tokens_T[anchors_A]
        with autocast(device):
            hidden_ASD = drafter(features_TF[None], self._target.embed(blocks_AS[None]), anchors_A[None])[0]
        hidden_RD = hidden_ASD[:, 1:].flatten(0, 1).to(self._target.dtype)
        positions_AN = anchors_A[:, None] + torch.arange(1, num_slots + 1, device=device)
        batch = sampling(question, positions_AN.flatten())
        logits_RV = drafter.logits(self._target.head, hidden_RD).float()
        if (selector := drafter.candidate_selector) is None:
            return sample_rows(logits_RV, batch).view_as(positions_AN)
        rows_AS = torch.arange(blocks_AS.numel(), device=blocks_AS.device).view_as(blocks_AS)
        block = StepRows(
            positions_N=rows_AS.flatten(),  # not used by the selection
            kv_slots=(),
            batches=(),
            token_ids_N=blocks_AS.flatten(),
            sampled_X=rows_AS[:, 1:].flatten(),
            counts_R=torch.full_like(rows_AS[:, 0], num_slots),
            max_count=num_slots,
            sampling=batch,
            num_rows_R=np.full(len(blocks_AS), num_slots + 1),
        )
        gates_RE = F.linear(hidden_RD, selector.hidden_projection.weight.to(hidden_RD.dtype))
        codebooks = SelectorCodebooks(
            selector.predecessor_codebook.to(hidden_RD.dtype),
            selector.successor_codebook.to(hidden_RD.dtype),
            selector.size.top_k,
        )
        return select_paths(logits_RV, gates_RE, block, codebooks).drafts_RK


def accepted_at(
    proposals: OfflineProposals,
    features_TF: torch.Tensor,
    question: ContinuationRequest,
    tokens_T: torch.Tensor,
    anchors_A: torch.Tensor,
) -> list[int]:
    device = tokens_T.device
    drafts_AN = proposals(features_TF, question, tokens_T, anchors_A)
    num_drafts = drafts_AN.shape[1]
    past_end = torch.full((num_drafts,), -1, device=device)
    truth_AN = torch.cat([tokens_T, past_end])[
        anchors_A[:, None] + torch.arange(1, num_drafts + 1, device=device)
    ]
    return (drafts_AN == truth_AN).long().cumprod(dim=-1).sum(dim=-1).tolist()


def sampling(question: ContinuationRequest, positions: torch.Tensor) -> SamplingMetadata:
    count = len(positions)
    return SamplingMetadata.build(
        temperature=np.full(count, question.temperature, dtype=np.float32),
        top_k=np.zeros(count, dtype=np.int64),
        top_p=np.ones(count, dtype=np.float32),
        min_p=np.zeros(count, dtype=np.float32),
        seed=np.full(count, question.seed, dtype=np.int64),
        position=positions.cpu().numpy().astype(np.int64),
        device=positions.device,
    )
