"""One decoding step on one target rank, driven by the host: draft, verify, accept, inject.

The plan makes all decisions. The runner only holds its model, pages, request states and source of drafts.
Ranks run the same steps on the same plans; their choices are rank 0's, by broadcast. Called by
`uniproc_executor.InProcessExecutor` and `workers/target_worker.py`.

    plan ─▶ apply ─▶ drafts [R, K] ─▶ trim ─▶ rows [N] ─▶ target ─┬─▶ hidden [X] ─▶ equal-noise choice ─▶ ..
                         ▲                                        └─▶ taps [N, m] ─▶ inject ─┐
                         └────────────────── drafter's context K/V, in pages ◀───────────────┘

Legend: N rows, X sampled rows, R requests, K most drafts, W = K + 1, m taps, H hidden.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ....cluster.request.logprobs import StepLogprobs
from ....cluster.step.scheduler_output import NOT_A_NUMBER, SchedulerOutput, StepResult, StepTimings
from ....drafter.compute.memory.kv_cache import PagedKVCache
from ....drafter.step.inputs.proposals import Proposals
from ....drafter.step.inputs.row_layout import Ints, StepRows
from ....drafter.step.request_states import RequestStates
from ....drafter.step.sampling.logprobs import (
    LogprobRows,
    pack_logprobs,
    pack_logprobs_in_chunks,
    raw_logprobs,
    unpack_logprobs,
)
from ....drafter.step.sampling.sampler import sample_rows
from ....drafter.step.sampling.step_ops import StepOperators
from ....drafter.step.sampling.verification import take_out
from ....drafter.suffix.mixing import SuffixMixer
from ..model.decoder import Decoder
from ..model.tensor_parallel import Communicator
from .runner_interface import Drafter, ReadsMeter

if TYPE_CHECKING:
    from ....drafter.grammars.matchers import GrammarStates


class DraftSource(Protocol):
    """Provides drafts and receives the target's features, on every rank."""

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        """Return drafts, equal on all ranks; K = 0 if no request drafts."""
        ...

    def inject(
        self, taps_NmH: Tensor | None, rows: StepRows, token_ids_RW: Tensor, num_tokens_R: Tensor
    ) -> None:
        """Write the drafter's context from taps and committed tokens; called if the plan writes context."""
        ...


class CpuModelRunner:
    """A loaded rank with host-driven steps.

    Args:
        states: this rank's copy of the running requests' state.
        drafts: None decodes plainly, without taps.
        operators: operators that sample and accept.
    """

    def __init__(
        self,
        model: Decoder,
        cache: PagedKVCache,
        states: RequestStates,
        drafts: DraftSource | None,
        communicator: Communicator,
        operators: StepOperators,
    ) -> None:
        self.model = model
        self.cache = cache
        self.states = states
        self.drafts = drafts
        self._communicator = communicator
        self._is_sharded = communicator.world_size > 1
        self._operators = operators
        self._results: deque[StepResult] = deque()
        self._expert_reads = ReadsMeter(model)

    @property
    def grammars(self) -> GrammarStates | None:
        return self.states.grammars

    def prepare(self) -> None:
        """Do nothing: there are no graphs to capture."""

    def profile_run(self, largest: SchedulerOutput, used_bytes: Callable[[], int]) -> int:
        """Run this step; there are no graphs."""
        used_before = used_bytes()
        self.execute(largest)
        return used_bytes() - used_before

    def swap_drafter(self, drafter: Drafter) -> None:
        assert isinstance(self.drafts, ColocatedDrafter), "the drafter is colocated"
        self.drafts.swap_drafter(drafter)

    def begin_trial(self, candidate: Drafter) -> None:
        assert isinstance(self.drafts, ColocatedDrafter), "the drafter is colocated"
        self.drafts.begin_trial(candidate)

    def end_trial(self, *, promoted: bool) -> None:
        assert isinstance(self.drafts, ColocatedDrafter), "the drafter is colocated"
        self.drafts.end_trial(promoted=promoted)

    def submit(self, plan: SchedulerOutput) -> None:
        """Run one step and keep its result for `collect`."""
        self._results.append(self.execute(plan))

    def is_ready(self) -> bool:
        return bool(self._results)

    def collect(self) -> StepResult:
        return self._results.popleft()

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> StepResult:
        clock = Clock(self.model.device)
        self.states.apply(plan)
        proposals = self._propose(plan)
        clock.mark()  # trimming is timed with verification, as it is weighed against the rows that it saves
        plan, drafts_RK = self._trim(plan, proposals)
        self.states.write_drafts(plan, drafts_RK)
        rows = self.states.lay_out_rows(plan)
        hidden_NH, taps_NmH = self.model.forward(rows.token_ids_N, rows, self.cache)
        all_sampled = len(rows.sampled_X) == len(hidden_NH)
        hidden_XH = hidden_NH if all_sampled else hidden_NH.index_select(0, rows.sampled_X)
        clock.mark()
        prompt_logprobs = logprob_rows = None
        if self.states.logprob_slots.in_use:
            prompt_logprobs = self._prompt_logprobs(plan, hidden_NH)
            logprob_rows = self.states.rows_wanting_logprobs(plan)
        chosen_X, logprobs = self._choose(hidden_XH, rows, logprob_rows)
        token_ids_RW, num_tokens_R = self._operators.accept(chosen_X, rows.counts_R, drafts_RK)
        if len(non_finite_N := self._non_finite_rows(hidden_NH)):
            token_ids_RW[torch.from_numpy(_requests_of(non_finite_N, plan)), 0] = NOT_A_NUMBER
        self.states.advance(plan, token_ids_RW, num_tokens_R)
        clock.mark()
        if self.drafts is not None and plan.writes_context:
            self.drafts.inject(taps_NmH, rows, token_ids_RW, num_tokens_R)
        clock.mark()
        return StepResult(
            plan.step,
            token_ids=token_ids_RW.cpu().numpy().astype(np.int32),
            num_tokens=num_tokens_R.cpu().numpy().astype(np.int32),
            timings=StepTimings(*clock.seconds()),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_drafts=plan.num_drafts,
            margins=None if proposals.margins_RK is None else proposals.margins_RK.cpu().numpy(),
            expert_reads=self._expert_reads.take() if self.model.num_routed else None,
        )

    def _non_finite_rows(self, values: Tensor) -> Ints:
        """Return the indices of rows that contain NaN or infinity; none unless the model is broken."""
        return np.flatnonzero(~self._operators.are_numbers(values).cpu().numpy())

    def _propose(self, plan: SchedulerOutput) -> Proposals:
        """Get drafts, and let grammars edit them."""
        if self.drafts is None:
            assert not plan.num_draft_tokens, "drafts were planned, but there is no drafter"
            proposals = Proposals.none(plan.num_requests, self.model.device)
        else:
            proposals = self.drafts.propose(plan, self.states)
        grammars = self.states.grammars
        if grammars is None or not grammars.slots:
            return proposals
        return self.states.apply_grammars(plan, proposals)

    def _trim(self, plan: SchedulerOutput, proposals: Proposals) -> tuple[SchedulerOutput, Tensor]:
        """Return the plan with the drafts to verify, and the drafts [R, K] without the others."""
        drafts_RK, margins_RK = proposals.drafts_RK, proposals.margins_RK
        if not drafts_RK.shape[1]:
            return plan, drafts_RK
        if proposals.is_partial or margins_RK is None:
            found_RK = np.cumprod(drafts_RK.cpu().numpy() >= 0, axis=1, dtype=np.int32)
            found = plan.with_num_drafts(found_RK.sum(axis=1, dtype=np.int32))
            plan = replace(found, trim=plan.trim)
        if margins_RK is None or plan.trim is None:
            return plan, drafts_RK
        cut = torch.from_numpy(self._operators.trim(margins_RK, plan))
        # Ranks on different kinds of processors may differ in the last digits, so rank 0's result is used.
        num_drafts_R = cut.to(drafts_RK.device)
        if self._is_sharded:
            num_drafts_R = self._communicator.broadcast(num_drafts_R)
        return plan.with_num_drafts(num_drafts_R.cpu().numpy()), take_out(drafts_RK, num_drafts_R)

    def _choose(
        self, hidden_XH: Tensor, rows: StepRows, logprob_rows: LogprobRows | None
    ) -> tuple[Tensor, StepLogprobs | None]:
        """Return each sampled row's token, and the log probabilities that were requested."""
        if not len(hidden_XH):
            return rows.sampled_X, None  # an empty tensor
        logits_XV = self.model.logits(hidden_XH)
        logprobs_YV = None if logprob_rows is None else raw_logprobs(logits_XV, logprob_rows)
        non_finite_X = self._non_finite_rows(logits_XV)  # before rules and masks hide some
        chosen_X = sample_rows(logits_XV, rows.sampling, self._operators)
        if len(non_finite_X):
            chosen_X[torch.from_numpy(non_finite_X).to(chosen_X.device)] = NOT_A_NUMBER
        if self._is_sharded:
            chosen_X = self._communicator.broadcast(chosen_X)
        if logprob_rows is None or logprobs_YV is None:
            return chosen_X, None
        return chosen_X, _logprobs_of(chosen_X, logprobs_YV, logprob_rows)

    def _prompt_logprobs(self, plan: SchedulerOutput, hidden_NH: Tensor) -> StepLogprobs | None:
        """Return the requested log probabilities of prompt tokens."""
        logprob_rows = self.states.prompt_rows_wanting_logprobs(plan)
        if logprob_rows is None:
            return None
        hidden_YH = hidden_NH[torch.from_numpy(logprob_rows.rows()).to(hidden_NH.device)]
        next_ids_Y = self.states.tokens_after(plan, logprob_rows)
        packed_YE = pack_logprobs_in_chunks(hidden_YH, next_ids_Y, self.model.logits, logprob_rows.num_top)
        return unpack_logprobs(packed_YE.cpu().numpy(), logprob_rows)


def _logprobs_of(chosen_X: Tensor, logprobs_YV: Tensor, logprob_rows: LogprobRows) -> StepLogprobs:
    """Return the log probabilities of the chosen tokens and of the likeliest ones."""
    chosen_Y = chosen_X[torch.from_numpy(logprob_rows.rows()).to(chosen_X.device)]
    packed_YE = pack_logprobs(logprobs_YV, chosen_Y.clamp(min=0), logprob_rows.num_top)
    return unpack_logprobs(packed_YE.cpu().numpy(), logprob_rows)


def _requests_of(non_finite_N: Ints, plan: SchedulerOutput) -> Ints:
    """Return the requests with known tokens in these rows.

    Caches store 0 for NaN and infinity, so later rows of such a request may look sound. Drafts are judged by
    their logits instead.
    """
    ends_R = np.cumsum(plan.num_rows)
    places_N = np.searchsorted(ends_R, non_finite_N, side="right")
    return np.unique(places_N[non_finite_N < (ends_R - plan.num_drafts)[places_N]])


class DraftProposer(Protocol):
    """A drafter and its pages: that of `drafter/dflash/proposer.py` or `drafter/eagle3/proposer.py`."""

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals: ...

    def inject(self, taps_NmH: Tensor, rows: StepRows, num_tokens_R: Tensor) -> None: ...

    def with_drafter(self, drafter: Any) -> DraftProposer:  # Any: a drafter of its own kind
        """Return a proposer with another drafter of the same shape, over the same pages."""
        ...

    def with_own_pages(self, drafter: Any) -> DraftProposer:  # Any: a drafter of its own kind
        """Return a proposer with a drafter of the same shape, with the same page ids in its own memory."""
        ...


class ColocatedDrafter:
    """A colocated drafter as a source of drafts, or a drafter and a candidate on trial.

        plan ─┬─ requests of the drafter ──▶ drafts ─┐
              └─ those on trial ─▶ candidate drafts ─┴─▶ drafts [R, K]
        taps ───▶ context of both for all requests: the same page ids, each in memory of its own

    They are whole on every rank and use the target's sharded embedding and head. Both have the context of all
    requests, so either can be removed between two steps without recomputing a token. Created by
    `targets/loading/rank_loader.py`.
    """

    def __init__(
        self, proposer: DraftProposer, communicator: Communicator, mixer: SuffixMixer | None = None
    ) -> None:
        self._proposer = proposer
        self._communicator = communicator
        self._mixer = mixer
        self._is_sharded = communicator.world_size > 1
        self._candidate: DraftProposer | None = None
        self._on_trial: set[int] = set()  # slots

    def swap_drafter(self, drafter: Drafter) -> None:
        self._proposer = self._proposer.with_drafter(drafter)
        if self._mixer is not None:
            self._mixer.on_drafter_replaced()

    def begin_trial(self, drafter: Drafter) -> None:
        """Add a candidate. Running requests keep their drafter."""
        self._candidate = self._proposer.with_own_pages(drafter)
        self._on_trial.clear()

    def end_trial(self, *, promoted: bool) -> None:
        if promoted and self._candidate is not None:
            self._proposer = self._candidate
            if self._mixer is not None:
                self._mixer.on_drafter_replaced()
        self._candidate = None

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        proposals = self._propose(plan, states)
        if self._mixer is not None:
            proposals = self._mixer.mix(proposals, plan, states)
        return broadcast_proposals(proposals, self._communicator) if self._is_sharded else proposals

    def _propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        if self._candidate is None:
            return self._proposer.propose(plan, states)
        return self._propose_on_trial(self._candidate, plan, states)

    def _propose_on_trial(
        self, candidate: DraftProposer, plan: SchedulerOutput, states: RequestStates
    ) -> Proposals:
        """Return drafts of both drafters, each for its requests."""
        for request in plan.admitted:
            (self._on_trial.add if request.on_trial else self._on_trial.discard)(request.slot)
        on_trial_R = np.isin(plan.slots, list(self._on_trial))
        current = self._proposer.propose(_plan_where(plan, ~on_trial_R), states)
        tried = candidate.propose(_plan_where(plan, on_trial_R), states)
        return _merge(current, tried, torch.from_numpy(on_trial_R))

    def inject(
        self, taps_NmH: Tensor | None, rows: StepRows, token_ids_RW: Tensor, num_tokens_R: Tensor
    ) -> None:
        assert taps_NmH is not None, "a target with a drafter has taps"
        self._proposer.inject(taps_NmH, rows, num_tokens_R)
        if self._candidate is not None:
            self._candidate.inject(taps_NmH, rows, num_tokens_R)


def broadcast_proposals(proposals: Proposals, communicator: Communicator) -> Proposals:
    """Broadcast rank 0's proposals. Their shape, and whether they have margins, is equal on all ranks."""
    drafts_RK, margins_RK = proposals.drafts_RK, proposals.margins_RK
    if communicator.world_size == 1 or not drafts_RK.numel():
        return proposals
    if margins_RK is None:
        return replace(proposals, drafts_RK=communicator.broadcast(drafts_RK))
    both_2RK = torch.stack((drafts_RK.int(), margins_RK.view(torch.int32)))
    drafts_RK, margins_RK = communicator.broadcast(both_2RK).unbind(0)
    return replace(proposals, drafts_RK=drafts_RK.long(), margins_RK=margins_RK.view(torch.float32))


def _plan_where(plan: SchedulerOutput, drafts_R: np.ndarray) -> SchedulerOutput:
    """Return the plan in which only these requests draft."""
    return plan.with_num_drafts(np.where(drafts_R, plan.num_drafts, 0).astype(np.int32))


def _merge(current: Proposals, candidate: Proposals, on_trial_R: Tensor) -> Proposals:
    """Return the candidate's proposals for requests on trial, and the current drafter's for all others."""
    width = max(current.drafts_RK.shape[1], candidate.drafts_RK.shape[1])
    on_trial_R1 = on_trial_R.to(current.drafts_RK.device).unsqueeze(1)
    drafts_RK = torch.where(
        on_trial_R1, _pad_columns(candidate.drafts_RK, width, -1), _pad_columns(current.drafts_RK, width, -1)
    )
    if not width or (current.margins_RK is None and candidate.margins_RK is None):
        return Proposals(drafts_RK, None)
    current_RK, candidate_RK = (
        torch.full(drafts_RK.shape, torch.nan, device=drafts_RK.device)
        if each.margins_RK is None
        else _pad_columns(each.margins_RK, width, torch.nan)
        for each in (current, candidate)
    )
    return Proposals(drafts_RK, torch.where(on_trial_R1, candidate_RK, current_RK))


def _pad_columns(values_RK: Tensor, width: int, fill: float) -> Tensor:
    return torch.nn.functional.pad(values_RK, (0, width - values_RK.shape[1]), value=fill)


class Clock:
    """Records times between marks; on a GPU with events, which are read once the results are on the host."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        if not self._on_gpu:
            self._times.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def seconds(self) -> list[float]:
        """Return the seconds between consecutive marks."""
        if not self._on_gpu:
            return [after - before for before, after in zip(self._times, self._times[1:], strict=False)]
        self._events[-1].synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        return [before.elapsed_time(after) / 1000 for before, after in pairs]
