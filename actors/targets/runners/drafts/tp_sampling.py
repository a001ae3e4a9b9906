"""Choices of tokens on a device, equal on all ranks: of a split head the best local choice wins.

Called by `step_passes.py` for the target's rows, and for drafts, which have margins, by `drafts/`.

Legend: N rows, X rows that sample a token, K candidates of a row, U vocabulary of a rank, V of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .....drafter.step.gpu_triton.sampling.grammar_masks import DeviceMasks
from .....drafter.step.gpu_triton.sampling.sampler import margins_between, sample_rows
from .....drafter.step.gpu_triton.sampling.selector import Candidates
from ...model.tensor_parallel import Communicator

if TYPE_CHECKING:
    from .draft_source import StepMemory


class Head(Protocol):
    """Computes logits of hidden states, for the target or the drafter."""

    @property
    def is_split(self) -> bool:
        """Whether each rank has a part of it."""
        ...

    def logits(self, hidden_XH: Tensor, /) -> Tensor: ...

    def local_logits(self, hidden_XH: Tensor, /) -> tuple[Tensor, int]: ...


def choose(
    memory: StepMemory,
    head: Head,
    hidden_XH: Tensor,
    slots_X: Tensor,
    positions_X: Tensor,
    *,
    filters: bool,
    masks: DeviceMasks | None,
    paths_ND: Tensor | None = None,
) -> Tensor:
    """Return the target's token of each row, int64, equal on all ranks.

    With a split head each rank chooses within its part of the vocabulary, and the best choice wins. Filters
    and masks need all logits on every rank.

    Args:
        positions_X: of the rows, before those of the tokens.
        paths_ND: see `apply_rules`.
    """
    state, workspace, communicator = memory.states.sampling, memory.workspace, memory.communicator
    sampling_inputs = (slots_X, positions_X, state)
    if filters or masks is not None or not head.is_split:
        logits_XV = head.logits(hidden_XH)
        chosen_X, _ = sample_rows(
            logits_XV,
            *sampling_inputs,
            filters=filters,
            workspace=workspace,
            ahead=1,
            masks=masks,
            paths_ND=paths_ND,
            checks=True,
        )
        return chosen_X if communicator.world_size == 1 else communicator.broadcast(chosen_X)
    logits_XU, first_id = head.local_logits(hidden_XH)
    ids_X, scores_X = sample_rows(
        logits_XU,
        *sampling_inputs,
        filters=False,
        workspace=workspace,
        vocab_start=first_id,
        ahead=1,
        checks=True,
    )
    return best_of_ranks(ids_X, scores_X, communicator)


def choose_drafts(
    memory: StepMemory,
    head: Head,
    hidden_NH: Tensor,
    slots_N: Tensor,
    positions_N: Tensor,
    *,
    filters: bool,
    margins_N: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return a draft (int64) and its margin (fp32) for each row, chosen like the target's tokens.

    Args:
        positions_N: of the tokens.
        margins_N: memory of the margins; on one rank the result.
    """
    state, workspace, communicator = memory.states.sampling, memory.workspace, memory.communicator
    is_split, first_id = head.is_split and not filters, 0
    seconds_N = torch.empty_like(margins_N) if is_split else None
    if is_split:
        logits, first_id = head.local_logits(hidden_NH)
    else:
        logits = head.logits(hidden_NH)
    ids_N, scores_N = sample_rows(
        logits,
        slots_N,
        positions_N,
        state,
        filters=filters,
        workspace=workspace,
        vocab_start=first_id,
        drafts=True,
        seconds_N=seconds_N,
        margins_N=None if is_split else margins_N,
    )
    if seconds_N is not None:
        return surest_of_ranks(ids_N, scores_N, seconds_N, communicator)
    if communicator.world_size == 1:
        return ids_N, margins_N
    return first_rank_s(ids_N, margins_N, communicator)


def first_rank_s(ids_N: Tensor, margins_N: Tensor, communicator: Communicator) -> tuple[Tensor, Tensor]:
    """Return rank 0's drafts and margins, by one collective."""
    ids_N, margins_N = communicator.broadcast(torch.stack((ids_N.int(), margins_N.view(torch.int32))))
    return ids_N.long(), margins_N.view(torch.float32)


def best_of_ranks(ids_X: Tensor, scores_X: Tensor, communicator: Communicator) -> Tensor:
    """Return the ids of the highest scores over ranks, by one collective; ties go to the lowest id."""
    mine_12X = torch.stack((scores_X.view(torch.int32), ids_X.int())).unsqueeze(0)
    all_scores, all_ids = communicator.all_gather(mine_12X, dim=0).unbind(1)
    best_1X = all_scores.view(torch.float32).argmax(dim=0, keepdim=True)
    return all_ids.gather(0, best_1X).squeeze(0).long()


def surest_of_ranks(
    ids_N: Tensor, scores_N: Tensor, seconds_N: Tensor, communicator: Communicator
) -> tuple[Tensor, Tensor]:
    """Return the ids of the highest scores over ranks, and their margins to the second best, by one
    collective.

    Args:
        seconds_N: the second best score within each rank's part.
    """
    mine_13N = torch.stack((scores_N.view(torch.int32), seconds_N.view(torch.int32), ids_N.int()))
    scores_PN, seconds_PN, ids_PN = communicator.all_gather(mine_13N.unsqueeze(0), dim=0).unbind(1)
    scores_PN, seconds_PN = (bits_PN.view(torch.float32) for bits_PN in (scores_PN, seconds_PN))
    highest_1N, best_1N = scores_PN.max(dim=0, keepdim=True)
    others_PN = scores_PN.scatter(0, best_1N, seconds_PN.gather(0, best_1N))
    margins_N = margins_between(highest_1N[0], others_PN.amax(dim=0))
    return ids_PN.gather(0, best_1N)[0].long(), margins_N


def candidates_of_ranks(found: Candidates, top_k: int, communicator: Communicator) -> Candidates:
    """Return the best candidates over all ranks, by one collective.

    Ties go to the lowest ids, as in a single vocabulary: ranks are in id order, and so are a rank's
    candidates.
    """
    mine_13NK = torch.stack(
        (*(x.view(torch.int32) for x in (found.scores_NK, found.z_NK)), found.ids_NK.int())
    )
    all_3NC = communicator.all_gather(mine_13NK.unsqueeze(0), dim=0).permute(1, 2, 0, 3).flatten(2)
    scores_NC = all_3NC[0].contiguous().view(torch.float32)
    places_NC = scores_NC.sort(dim=-1, descending=True, stable=True).indices
    places_NK = places_NC[:, :top_k].sort(dim=-1).values
    scores_NK, z_NK, ids_NK = all_3NC.gather(-1, places_NK.expand(3, -1, -1)).unbind(0)
    return Candidates(scores_NK.view(torch.float32), z_NK.view(torch.float32), ids_NK.long())
