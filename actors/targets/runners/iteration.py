"""One step on a device, in four parts: draft, verify, sample, inject. The host is asked nothing.

What `host.py` does with indices made on the host happens here from a few integers and the requests' state
on the device (`drafter/step/device/states.py`), so that the parts can be captured in CUDA graphs, and
launched before the last step's outcome is known. Called by `device.py`, eagerly or to be captured.

Legend: R requests, N rows, X sampled rows, U vocabulary of a rank, V of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ....drafter.compute.kv_cache import PagedKVCache
from ....drafter.dflash.model import DFlashDrafter
from ....drafter.step.device.rows import StepRequests, StepRows, lay_out_block, lay_out_rows, place_drafts
from ....drafter.step.device.sampling import SamplingWorkspace, sample_rows
from ....drafter.step.device.states import DeviceStates
from ....drafter.step.device.verification import accept_and_advance
from ..model.decoder import Decoder
from ..model.parallel import Communicator


@dataclass(frozen=True, slots=True)
class DeviceModels:
    """A loaded rank: models, their pages, the requests' state.

    Attributes:
        drafter, draft_cache: None decodes plainly.
        workspace: for choosing tokens over the whole vocabulary.
        local_workspace: for this rank's part of it.
    """

    target: Decoder
    cache: PagedKVCache
    drafter: DFlashDrafter | None
    draft_cache: PagedKVCache | None
    states: DeviceStates
    workspace: SamplingWorkspace
    local_workspace: SamplingWorkspace
    communicator: Communicator


class Iteration:
    """The parts of one step over given inputs; what one leaves, the next takes.

    Args:
        drafting: the requests that draft; None if nobody does.
        requests: all of the step.
        sampled_X: rows whose logits are needed (int64); None takes all.
        filters: whether any request narrows its distribution by top-k, top-p or min-p.
    """

    rows: StepRows
    hidden_NH: Tensor
    taps_NmH: Tensor | None
    outcome: Tensor

    def __init__(
        self,
        models: DeviceModels,
        drafting: StepRequests | None,
        requests: StepRequests,
        sampled_X: Tensor | None,
        filters: bool,
    ) -> None:
        self._models, self._drafting, self._requests = models, drafting, requests
        self._sampled_X, self._filters = sampled_X, filters

    @property
    def parts(self) -> tuple[Callable[[], None], ...]:
        """In order; as `StepTimings` has them."""
        return self.draft, self.verify, self.sample, self.inject

    def draft(self) -> None:
        """Propose, and put the proposals behind the known tokens."""
        models, requests = self._models, self._drafting
        drafter, cache, tables = models.drafter, models.draft_cache, models.states.tables
        if requests is None or drafter is None or cache is None:
            return
        rows = lay_out_block(requests, tables, drafter.config.mask_token_id)
        hidden_NH = drafter.forward(drafter.embed_block(rows.token_ids_N), rows, cache)
        chosen_N, _ = self._choose(drafter.logits(hidden_NH), rows.slots_N, rows.positions_N)
        place_drafts(models.communicator.broadcast(chosen_N), rows, tables)

    def verify(self) -> None:
        """The target's pass over known tokens and drafts."""
        models = self._models
        self.rows = lay_out_rows(self._requests, models.states.tables)
        self.hidden_NH, self.taps_NmH = models.target.forward(self.rows.token_ids_N, self.rows, models.cache)

    def sample(self) -> None:
        """The target's choices, and which drafts they leave standing: `outcome` [R, W + 1] int32, tokens
        and, in the last column, how many."""
        rows, hidden_XH = self.rows, self.hidden_NH
        slots_X, positions_X = rows.slots_N, rows.positions_N + 1
        if self._sampled_X is not None:
            index = self._sampled_X
            hidden_XH, slots_X, positions_X = hidden_XH[index], slots_X[index], positions_X[index]
        chosen_X = self._choose_over_ranks(hidden_XH, slots_X, positions_X)
        token_ids_RW, num_tokens_R = accept_and_advance(chosen_X, self._requests, self._models.states.tables)
        self.outcome = torch.cat((token_ids_RW, num_tokens_R.unsqueeze(1)), dim=1)

    def inject(self) -> None:
        """Make the drafter's context of what the target saw."""
        models = self._models
        if models.drafter is None or models.draft_cache is None:
            return
        assert self.taps_NmH is not None, "a target with a drafter taps"
        features_NH = models.drafter.context_features(self.taps_NmH)
        models.drafter.write_context(features_NH, self.rows, models.draft_cache)

    def _choose(self, logits_NV: Tensor, slots_N: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        models = self._models
        return sample_rows(
            logits_NV,
            slots_N,
            positions_N,
            models.states.sampling,
            filters=self._filters,
            workspace=models.workspace,
        )

    def _choose_over_ranks(self, hidden_XH: Tensor, slots_X: Tensor, positions_X: Tensor) -> Tensor:
        """A rank chooses within its part of the vocabulary, and the best choice wins. A filter needs all."""
        models, communicator = self._models, self._models.communicator
        if self._filters or communicator.world_size == 1:
            chosen_X, _ = self._choose(models.target.logits(hidden_XH), slots_X, positions_X)
            return communicator.broadcast(chosen_X)
        logits_XU, first_id = models.target.local_logits(hidden_XH)
        ids_X, scores_X = sample_rows(
            logits_XU,
            slots_X,
            positions_X,
            models.states.sampling,
            filters=False,
            workspace=models.local_workspace,
            vocab_start=first_id,
        )
        all_scores = communicator.all_gather(scores_X.unsqueeze(0), dim=0)
        all_ids = communicator.all_gather(ids_X.unsqueeze(0), dim=0)
        best_1X = all_scores.argmax(dim=0, keepdim=True)  # of equal scores the first: the lowest id
        return all_ids.gather(0, best_1X).squeeze(0)
