"""The target's pass over some of a step's requests: trim the drafts, verify, sample, inject.

It does what `cpu_runner.py` does, but computes indices on the device from a few integers and the requests'
state there (`drafter/step/gpu_triton/request_states.py`). It never waits for the host, so it can be captured
in one CUDA graph and launched before the last step's outcome is known. Called by `gpu_runner.py` for prompts,
and by `cuda_graphs.py` for decoding requests, after the drafter's pass (`draft_pass.py`) if they draft. A
split drafter has an iteration of its own (`workers/drafter/gpu_drafter_session.py`), to which this one sends
choices and features.

Legend: R requests, N rows, X sampled rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

import torch
from torch import Tensor

from ....drafter.compute.memory.kv_cache import PagedKVCache
from ....drafter.dflash.model import DFlashDrafter
from ....drafter.step.gpu_triton.inputs.row_layout import DeviceStepRequests, DeviceStepRows, lay_out_rows
from ....drafter.step.gpu_triton.inputs.transfers import StepOutput, stamp
from ....drafter.step.gpu_triton.recurrent_states import DeviceRecurrent
from ....drafter.step.gpu_triton.request_states import DeviceStates
from ....drafter.step.gpu_triton.sampling.grammar_masks import DeviceMasks
from ....drafter.step.gpu_triton.sampling.sampler import SamplingWorkspace
from ....drafter.step.gpu_triton.verification import TrimLists, accept_and_advance, trim_drafts
from ..model.decoder import Decoder
from ..model.tensor_parallel import Communicator
from .draft_pass import DraftPass
from .eagle3_chains import Eagle3Chains
from .runner_interface import RemoteDrafter
from .tp_sampling import choose

MakeMasks = Callable[[DeviceStepRequests], DeviceMasks | None]  # takes the requests with the drafts to verify


@dataclass(frozen=True, slots=True)
class DeviceModels:
    """A loaded rank: models, their pages, and the requests' state.

    Attributes:
        drafter, draft_cache: a colocated DFlash drafter; else None.
        chains: a colocated EAGLE-3 drafter; else None.
        recurrent: the target's recurrent states; None if it has none.
        remote: the connection to a drafter in a process of its own.
        lookup_lengths: n-gram lengths of prompt lookup. Without this and any drafter a rank decodes plainly.
        workspace: for sampling, over the whole vocabulary or this rank's part of it.
        hidden: [N, H], where decoding steps leave hidden states for log probabilities.
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
    lookup_lengths: tuple[int, int] | None = None
    chains: Eagle3Chains | None = None
    recurrent: DeviceRecurrent | None = None

    @property
    def has_margins(self) -> bool:
        """Whether the source of drafts gives margins."""
        return self.lookup_lengths is None

    @property
    def device(self) -> torch.device:
        return self.target.device

    def drafting(self, requests: DeviceStepRequests, outcome: StepOutput, *, filters: bool) -> DraftPass:
        return DraftPass(self, requests, outcome.times, filters=filters)

    def iteration(
        self,
        requests: DeviceStepRequests,
        outcome: StepOutput,
        trim: TrimLists | None = None,
        *,
        filters: bool,
        writes_context: bool,
        masks: MakeMasks | None = None,
        saves: Tensor | None = None,
    ) -> TargetPass:
        has_drafter = any(each is not None for each in (self.drafter, self.remote, self.chains))
        injects = writes_context and has_drafter
        return TargetPass(
            self, requests, outcome, trim, filters=filters, injects=injects, masks=masks, saves=saves
        )


class TargetPass:
    """A target's pass over given inputs.

    Args:
        requests: the participating requests, with all their drafts.
        outcome: written by the pass.
        trim: values by which drafts are trimmed to the pass's rows; needed if any request drafts.
        filters: whether any request has top-k, top-p, min-p or logits rules, or requests log probabilities. A
            decoding step then leaves its hidden states in `models`.
        injects: whether the drafter's context is written.
        masks: makes the grammar masks once drafts are placed; such a pass waits for the host.
        saves: recurrent states that its rows save (`step/gpu_triton/recurrent_states.py`); then no request
            drafts.
    """

    def __init__(
        self,
        models: DeviceModels,
        requests: DeviceStepRequests,
        outcome: StepOutput,
        trim: TrimLists | None,
        *,
        filters: bool,
        injects: bool,
        masks: MakeMasks | None,
        saves: Tensor | None,
    ) -> None:
        self._models, self._requests, self._outcome, self._trim = models, requests, outcome, trim
        self._filters, self._injects, self._make_masks = filters, injects, masks
        self._saves = saves

    @property
    def parts(self) -> tuple[str, ...]:
        """The timed parts of the step, including the drafter's pass, in order, as named in `StepTimings`."""
        draft = ("draft_s",) if self._requests.max_drafts else ()
        inject = ("inject_s",) if self._injects else ()
        return (*draft, "verify_s", "sample_s", *inject)

    def run(self) -> Tensor:
        """Run all parts and return the hidden states of all rows, which are valid until another pass runs.

        References to everything else are dropped at the end, as graphs share memory.
        """
        models, times, requests = self._models, self._outcome.times, self._verified()
        marks = count(2 if requests.max_drafts else 1)
        if not requests.max_drafts:
            stamp(times, 0)
        masks = None if self._make_masks is None else self._make_masks(requests)
        rows = lay_out_rows(requests, models.states.tables)
        if models.recurrent is not None:
            rows = replace(rows, states=models.recurrent.build_rows(requests, self._saves))
        hidden_NH, taps_NmH = models.target.forward(rows.token_ids_N, rows, models.cache)
        stamp(times, next(marks))
        chosen_X = self._sample(requests, rows, hidden_NH, masks)
        stamp(times, next(marks))
        if self._injects:
            self._inject(requests, rows, chosen_X, taps_NmH)
            stamp(times, next(marks))
        if self._filters and requests.sampled_X is None:
            models.hidden[: len(hidden_NH)].copy_(hidden_NH)
        if (reads_1 := models.target.backend.expert_reads) is not None:
            self._outcome.reads_1.copy_(reads_1)
        return hidden_NH

    def _verified(self) -> DeviceStepRequests:
        """Return the requests with as many of their drafts as fit the pass."""
        requests, outcome = self._requests, self._outcome
        if not requests.max_drafts:
            return requests
        assert self._trim is not None, "a drafting pass needs values for trimming"
        margins_N = self._models.workspace.margins_N
        return trim_drafts(
            requests, margins_N, self._trim, requests.num_rows, outcome.num_drafts_R, outcome.margins_RD
        )

    def _sample(
        self, requests: DeviceStepRequests, rows: DeviceStepRows, hidden_NH: Tensor, masks: DeviceMasks | None
    ) -> Tensor:
        """Sample the target's tokens, accept drafts and advance the requests; returns the tokens."""
        models, index_X = self._models, requests.sampled_X
        row_inputs = (hidden_NH, rows.slots_N, rows.positions_N + 1)
        if index_X is not None:
            row_inputs = [values_N.index_select(0, index_X) for values_N in row_inputs]
        chosen_X = rows.token_ids_N[:0]
        if len(row_inputs[0]):  # chunks of prompts may sample nothing
            chosen_X = choose(models, models.target, *row_inputs, filters=self._filters, masks=masks)
        accept_and_advance(chosen_X, requests, models.states.tables, self._outcome.rows_RW1)
        return chosen_X

    def _inject(
        self, requests: DeviceStepRequests, rows: DeviceStepRows, chosen_X: Tensor, taps_NmH: Tensor | None
    ) -> None:
        """Write the drafter's context from the target's taps."""
        drafter, cache, remote = self._models.drafter, self._models.draft_cache, self._models.remote
        assert taps_NmH is not None, "a target with a drafter has taps"
        if self._models.chains is not None:
            num_tokens_R, tables = self._outcome.rows_RW1[:, -1], self._models.states.tables
            return self._models.chains.inject(requests, rows, taps_NmH, num_tokens_R, tables)
        if remote is not None:
            return remote.send(requests.num_drafts_R, chosen_X, taps_NmH)
        assert drafter is not None and cache is not None, "a colocated drafter has pages"
        drafter.write_context(drafter.context_features(taps_NmH), rows, cache)


class StepModels(Protocol):
    """The models that steps need, and the passes made of them."""

    @property
    def states(self) -> DeviceStates: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def target(self) -> Decoder: ...

    @property
    def hidden(self) -> Tensor: ...

    @property
    def recurrent(self) -> DeviceRecurrent | None: ...

    @property
    def has_margins(self) -> bool: ...

    def drafting(self, requests: DeviceStepRequests, outcome: StepOutput, *, filters: bool) -> DraftPass: ...

    def iteration(
        self,
        requests: DeviceStepRequests,
        outcome: StepOutput,
        trim: TrimLists | None = None,
        *,
        filters: bool,
        writes_context: bool,
        masks: MakeMasks | None = None,
        saves: Tensor | None = None,
    ) -> TargetPass: ...
