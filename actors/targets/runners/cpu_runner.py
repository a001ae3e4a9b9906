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
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ....cluster.request.logprobs import StepLogprobs
from ....cluster.step.scheduler_output import (
    NOT_A_NUMBER,
    SchedulerOutput,
    StepResult,
    StepTimings,
)
from ....drafter.compute.memory.kv_cache import PagedKVCache
from ....drafter.step.inputs.draft_trees import DraftTrees
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
from ....drafter.step.sampling.tree_growth import grow_trees
from ....drafter.step.sampling.verification import take_out
from ..model.decoder import Decoder
from ..model.tensor_parallel import Communicator
from .drafts.colocated_drafter import ColocatedDrafter
from .drafts.draft_source import Drafter, DraftSource
from .page_mover import PageMover
from .runner_interface import ReadsMeter
from .verified_drafts import Accepted, Chains, Trees

if TYPE_CHECKING:
    from ....drafter.grammars.matchers import GrammarStates


class CpuModelRunner:
    """A loaded rank with host-driven steps.

    Args:
        states: this rank's copy of the running requests' state.
        operators: operators that sample and accept.
        mover: moves pages to a tier below them and back; None without one.
    """

    def __init__(
        self,
        model: Decoder,
        cache: PagedKVCache,
        states: RequestStates,
        drafts: DraftSource,
        communicator: Communicator,
        operators: StepOperators,
        mover: PageMover | None = None,
    ) -> None:
        self.model = model
        self.mover = mover
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
        drafts = self._choose_drafts(plan, proposals)
        plan = drafts.plan
        self.states.write_drafts(plan, drafts.tokens_RK)
        rows = self.states.lay_out_rows(plan, drafts.trees)
        hidden_NH, taps_NmH = self.model.forward(rows.token_ids_N, rows, self.cache)
        clock.mark()
        prompt_logprobs = self._prompt_logprobs(plan, hidden_NH)
        chosen_X, sampled_logprobs = self._sample(plan, hidden_NH, rows)
        accepted = drafts.accept(chosen_X, rows, self._operators, self._move_rows)
        self._mark_not_numbers(plan, hidden_NH, accepted.token_ids_RW)
        self.states.advance(plan, *accepted.tokens)
        clock.mark()
        if plan.writes_context:
            self.drafts.inject(*accepted.context(taps_NmH, rows), *accepted.tokens)
        clock.mark()
        logprobs = (accepted.logprobs(sampled_logprobs), prompt_logprobs)
        return self._report(proposals, drafts, accepted, logprobs, clock)

    def _non_finite_rows(self, values: Tensor) -> Ints:
        """Return the indices of rows that contain NaN or infinity; none unless the model is broken."""
        return np.flatnonzero(~self._operators.are_numbers(values).cpu().numpy())

    def _propose(self, plan: SchedulerOutput) -> Proposals:
        """Get drafts, and let grammars edit them."""
        proposals = self.drafts.propose(plan, self.states)
        grammars = self.states.grammars
        if grammars is None or not grammars.slots:
            return proposals
        return self.states.apply_grammars(plan, proposals)

    def _choose_drafts(self, plan: SchedulerOutput, proposals: Proposals) -> Chains | Trees:
        """Return the drafts to verify."""
        if plan.tree is not None and plan.num_draft_tokens:
            return self._grow_trees(plan, proposals)
        return Chains(*self._trim(plan, proposals))

    def _grow_trees(self, plan: SchedulerOutput, proposals: Proposals) -> Chains | Trees:
        """Grow trees on rank 0. Without candidates or copies, as a remote drafter is late, drafts none."""
        gain, trees = None, DraftTrees.empty(plan.num_requests, int(plan.num_drafts.max()))
        if (proposals.candidates or proposals.copies is not None) and self._communicator.rank == 0:
            trees, gain = grow_trees(plan, proposals, self.states.tree_restrictions())
        if self._is_sharded:
            packed = self._communicator.broadcast(torch.from_numpy(trees.pack()).to(self.model.device))
            trees = DraftTrees.unpack(packed.cpu().numpy())
        self.states.follow_trees(trees)
        plan = plan.with_num_drafts(trees.num_nodes_R)
        drafts_RK = torch.from_numpy(trees.tokens_RM).to(self.model.device)
        if trees.branches().any():
            return Trees(plan, drafts_RK, gain, trees)
        return Chains(plan, drafts_RK, gain)

    def _move_rows(self, rows: StepRows, sources: Ints, targets: Ints) -> None:
        if not len(sources):
            return
        groups = sorted({place.group for place in self.cache.places})
        source_slots, target_slots = (
            torch.cat(
                [rows.kv_slots[group][torch.from_numpy(each).to(self.model.device)] for group in groups]
            )
            for each in (sources, targets)
        )
        self.model.backend.compact_rows(self.cache, source_slots, target_slots)

    def _mark_not_numbers(self, plan: SchedulerOutput, hidden_NH: Tensor, token_ids_RW: Tensor) -> None:
        """Mark requests with known tokens in rows that contain NaN or infinity."""
        if len(non_finite_N := self._non_finite_rows(hidden_NH)):
            requests = torch.from_numpy(_requests_of(non_finite_N, plan))
            token_ids_RW[requests.to(token_ids_RW.device), 0] = NOT_A_NUMBER

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

    def _sample(
        self, plan: SchedulerOutput, hidden_NH: Tensor, rows: StepRows
    ) -> tuple[Tensor, StepLogprobs | None]:
        """Return each sampled row's token, and the log probabilities that were requested."""
        if not len(rows.sampled_X):
            return rows.sampled_X, None
        all_sampled, logprob_rows = len(rows.sampled_X) == len(hidden_NH), None
        hidden_XH = hidden_NH if all_sampled else hidden_NH.index_select(0, rows.sampled_X)
        if self.states.logprob_slots.in_use:
            logprob_rows = self.states.rows_wanting_logprobs(plan)
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
        if not self.states.logprob_slots.in_use:
            return None
        logprob_rows = self.states.prompt_rows_wanting_logprobs(plan)
        if logprob_rows is None:
            return None
        hidden_YH = hidden_NH[torch.from_numpy(logprob_rows.rows()).to(hidden_NH.device)]
        next_ids_Y = self.states.tokens_after(plan, logprob_rows)
        packed_YE = pack_logprobs_in_chunks(hidden_YH, next_ids_Y, self.model.logits, logprob_rows.num_top)
        return unpack_logprobs(packed_YE.cpu().numpy(), logprob_rows)

    def _report(
        self,
        proposals: Proposals,
        drafts: Chains | Trees,
        accepted: Accepted,
        logprobs: tuple[StepLogprobs | None, StepLogprobs | None],
        clock: Clock,
    ) -> StepResult:
        """Copy to the host what the step committed and what can be learned from it.

        Args:
            logprobs: of new tokens, and of prompt tokens.
        """
        token_ids_RW, num_tokens_R = (each.cpu().numpy().astype(np.int32) for each in accepted.tokens)
        return StepResult(
            drafts.plan.step,
            token_ids_RW,
            num_tokens_R,
            StepTimings(*clock.seconds()),
            *logprobs,
            num_drafts=drafts.plan.num_drafts,
            margins=None if proposals.margins_RK is None else proposals.margins_RK.cpu().numpy(),
            trees=accepted.learned,
            tree_gain=drafts.gain,
            expert_reads=self._expert_reads.take(),
            is_copied=proposals.is_copied_R,
            is_pass_skipped=proposals.is_pass_skipped,
        )


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
