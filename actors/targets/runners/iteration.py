"""One pass over some of a step's requests, in four parts: draft, verify, sample, inject.

What `host.py` does with indices made on the host happens here from a few integers and the requests' state
on the device (`drafter/step/device/states.py`). The host is asked nothing, so that the whole can be captured
in one CUDA graph, and launched before the last step's outcome is known. Called by `device.py` for prompts,
by `graphs.py` for requests that decode. A drafter that is split off has an iteration of its own
(`workers/device_drafter.py`), of which this one receives drafts, and which it sends choices and features.

Legend: R requests, N rows, X sampled rows, U vocabulary of a rank, V of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import torch
from torch import Tensor

from ....drafter.compute.kv_cache import PagedKVCache
from ....drafter.dflash.model import DFlashDrafter
from ....drafter.dflash.parts import Selector
from ....drafter.step.device.masks import DeviceMasks
from ....drafter.step.device.rows import StepRequests, StepRows, lay_out_block, lay_out_rows, place_drafts
from ....drafter.step.device.sampling import SamplingWorkspace, sample_rows
from ....drafter.step.device.selection import candidates, walk_paths
from ....drafter.step.device.stamps import stamp
from ....drafter.step.device.states import DeviceStates
from ....drafter.step.device.verification import accept_and_advance
from ..model.decoder import Decoder
from ..model.parallel import Communicator
from .outcome import Outcome
from .runner import RemoteDrafter

MakeMasks = Callable[[], DeviceMasks | None]


@dataclass(frozen=True, slots=True)
class DeviceModels:
    """A loaded rank: models, their pages, the requests' state.

    Attributes:
        drafter, draft_cache: None where there is none here.
        remote: the way to one in a process of its own; without either, a rank decodes plainly.
        workspace: for choosing tokens, over the whole vocabulary or this rank's part of it.
        hidden: [N, H], where steps that decode leave what log probabilities are made of.
    """

    target: Decoder
    cache: PagedKVCache
    drafter: DFlashDrafter | None
    draft_cache: PagedKVCache | None
    states: DeviceStates
    workspace: SamplingWorkspace
    communicator: Communicator
    hidden: Tensor
    remote: RemoteDrafter | None = None

    @property
    def device(self) -> torch.device:
        return self.target.device

    def iteration(
        self, requests: StepRequests, outcome: Outcome, *, filters: bool, masks: MakeMasks | None = None
    ) -> Iteration:
        return Iteration(self, requests, outcome, filters=filters, masks=masks)


class Pass(Protocol):
    """What runs over given inputs: `Iteration`, or the split drafter's."""

    @property
    def parts(self) -> tuple[str, ...]: ...

    def run(self) -> Tensor:
        """Returns the hidden states of all rows, for as long as no other pass runs."""
        ...


class StepModels(Protocol):
    """What steps are made with: a rank's `DeviceModels`, or a split drafter's."""

    @property
    def states(self) -> DeviceStates: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def target(self) -> Decoder: ...

    @property
    def hidden(self) -> Tensor: ...

    def iteration(
        self, requests: StepRequests, outcome: Outcome, *, filters: bool, masks: MakeMasks | None = None
    ) -> Pass: ...


class _Head(Protocol):
    """What turns hidden states into logits, the target's or the drafter's."""

    @property
    def is_split(self) -> bool:
        """Whether ranks have parts of it."""
        ...

    def logits(self, hidden_XH: Tensor, /) -> Tensor: ...

    def local_logits(self, hidden_XH: Tensor, /) -> tuple[Tensor, int]: ...


class Iteration:
    """A pass over given inputs.

    Args:
        requests: who takes part; whoever may draft in it drafts.
        outcome: written.
        filters: whether any request narrows its distribution by top-k, top-p or min-p, or has rules, or asks
            for log probabilities: then a step that decodes leaves its hidden states in `models`.
        masks: of requests that have grammars, made when drafts are placed: such a pass waits.
    """

    def __init__(
        self,
        models: DeviceModels,
        requests: StepRequests,
        outcome: Outcome,
        *,
        filters: bool,
        masks: MakeMasks | None = None,
    ) -> None:
        self._models, self._requests, self._outcome, self._filters = models, requests, outcome, filters
        self._make_masks = masks

    @property
    def parts(self) -> tuple[str, ...]:
        """Those it has, in order, by their names in `StepTimings`; their times follow each other."""
        draft = ("draft_s",) if self._requests.max_drafts else ()
        inject = ("inject_s",) if self._injects else ()
        return (*draft, "verify_s", "sample_s", *inject)

    def run(self) -> Tensor:
        """All parts. What one leaves to another is let go at the end: graphs share memory."""
        times, marks = self._outcome.times, count()
        stamp(times, next(marks))
        if self._requests.max_drafts:
            self._draft()
            stamp(times, next(marks))
        models = self._models
        masks = None if self._make_masks is None else self._make_masks()
        rows = lay_out_rows(self._requests, models.states.tables)
        hidden_NH, taps_NmH = models.target.forward(rows.token_ids_N, rows, models.cache)
        stamp(times, next(marks))
        chosen_X = self._sample(rows, hidden_NH, masks)
        stamp(times, next(marks))
        if self._injects:
            self._inject(rows, chosen_X, taps_NmH)
            stamp(times, next(marks))
        if self._filters and self._requests.sampled_X is None:
            models.hidden[: len(hidden_NH)].copy_(hidden_NH)
        return hidden_NH

    @property
    def _injects(self) -> bool:
        return self._models.drafter is not None or self._models.remote is not None

    def _draft(self) -> None:
        """Propose, and put the proposals behind the known tokens."""
        models = self._models
        drafter, cache, tables = models.drafter, models.draft_cache, models.states.tables
        if models.remote is not None:
            rows = lay_out_block(self._requests, tables, mask_id=0)
            return place_drafts(models.remote.receive(self._requests.num_rows), rows, tables)
        assert drafter is not None and cache is not None, "drafts were planned, but there is no drafter"
        rows = lay_out_block(self._requests, tables, drafter.config.mask_token_id)
        hidden_NH = drafter.forward(drafter.embed_block(rows.token_ids_N), rows, cache)
        if drafter.selector is not None:
            return place_drafts(self._select(drafter, drafter.selector, hidden_NH, rows), rows, tables)
        place_drafts(
            self._choose(drafter, hidden_NH, rows.slots_N, rows.positions_N, drafts=True), rows, tables
        )

    def _select(
        self, drafter: DFlashDrafter, selector: Selector, hidden_NH: Tensor, rows: StepRows
    ) -> Tensor:
        """A draft per row, along each request's path, the same on all ranks: of a split head each rank finds
        candidates within its part of the vocabulary."""
        models, communicator, first_id = self._models, self._models.communicator, 0
        state, is_split = models.states.sampling, drafter.is_split and not self._filters
        if is_split:
            logits, first_id = drafter.local_logits(hidden_NH)
        else:
            logits = drafter.logits(hidden_NH)
        found = candidates(
            logits, rows, state, selector.codebooks.top_k, filters=self._filters, vocab_start=first_id
        )
        if is_split:
            found = candidates_of_ranks(*found, selector.codebooks.top_k, communicator)
        gates_NE, cu_rows_R1 = selector.gates(hidden_NH), self._requests.cu_rows_R1
        chosen_N = walk_paths(
            *found, gates_NE, rows, cu_rows_R1, state, selector.codebooks, filters=self._filters
        )
        return communicator.broadcast(chosen_N)

    def _sample(self, rows: StepRows, hidden_NH: Tensor, masks: DeviceMasks | None) -> Tensor:
        """The target's choices, and which drafts they leave standing."""
        of_row, index_X = (hidden_NH, rows.slots_N, rows.positions_N + 1), self._requests.sampled_X
        if index_X is not None:
            of_row = [values_N.index_select(0, index_X) for values_N in of_row]
        chosen_X = rows.token_ids_N[:0]
        if len(of_row[0]):  # chunks of prompts may choose nothing
            chosen_X = self._choose(self._models.target, *of_row, masks=masks)
        tables = self._models.states.tables
        accept_and_advance(chosen_X, self._requests, tables, self._outcome.rows_RW1)
        return chosen_X

    def _inject(self, rows: StepRows, chosen_X: Tensor, taps_NmH: Tensor | None) -> None:
        """Make the drafter's context of what the target saw."""
        drafter, cache, remote = self._models.drafter, self._models.draft_cache, self._models.remote
        assert taps_NmH is not None, "a target that drafts taps"
        if remote is not None:
            return remote.send(chosen_X, taps_NmH)
        assert drafter is not None and cache is not None, "a drafter has pages"
        drafter.write_context(drafter.context_features(taps_NmH), rows, cache)

    def _choose(
        self,
        head: _Head,
        hidden_XH: Tensor,
        slots_X: Tensor,
        positions_X: Tensor,
        *,
        drafts: bool = False,
        masks: DeviceMasks | None = None,
    ) -> Tensor:
        """A token per row, the same on all ranks: of a split head each rank chooses within its part of the
        vocabulary, and the best choice wins. A filter or a mask needs all of it."""
        models, communicator = self._models, self._models.communicator
        if self._filters or masks is not None or not head.is_split:
            chosen_X, _ = sample_rows(
                head.logits(hidden_XH),
                slots_X,
                positions_X,
                models.states.sampling,
                filters=self._filters,
                workspace=models.workspace,
                drafts=drafts,
                masks=masks,
            )
            return communicator.broadcast(chosen_X)
        logits_XU, first_id = head.local_logits(hidden_XH)
        ids_X, scores_X = sample_rows(
            logits_XU,
            slots_X,
            positions_X,
            models.states.sampling,
            filters=False,
            workspace=models.workspace,
            vocab_start=first_id,
        )
        return best_of_ranks(ids_X, scores_X, communicator)


def best_of_ranks(ids_X: Tensor, scores_X: Tensor, communicator: Communicator) -> Tensor:
    """Ids of the highest scores; of equal ones the lowest id, which is the first rank's. One collective."""
    mine_12X = torch.stack((scores_X.view(torch.int32), ids_X.int())).unsqueeze(0)
    all_scores, all_ids = communicator.all_gather(mine_12X, dim=0).unbind(1)
    best_1X = all_scores.view(torch.float32).argmax(dim=0, keepdim=True)
    return all_ids.gather(0, best_1X).squeeze(0).long()


def candidates_of_ranks(
    z_NK: Tensor, ids_NK: Tensor, top_k: int, communicator: Communicator
) -> tuple[Tensor, Tensor]:
    """Logits and ids [N, K] of the likeliest of what all ranks have, ids ascending. One collective."""
    mine_12NK = torch.stack((z_NK.view(torch.int32), ids_NK.int())).unsqueeze(0)
    z_NC, ids_NC = communicator.all_gather(mine_12NK, dim=0).permute(1, 2, 0, 3).flatten(2).unbind(0)
    z_NK, places_NK = z_NC.contiguous().view(torch.float32).topk(top_k, dim=-1, sorted=False)
    ids_NK, order_NK = ids_NC.gather(-1, places_NK).long().sort(dim=-1)
    return z_NK.gather(-1, order_NK), ids_NK
