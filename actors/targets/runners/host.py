"""One decoding step on one target rank: draft, verify, accept, inject.

Decides nothing (the plan does) and keeps nothing but what it is made of: model, pages, request states, and a
source of drafts. Ranks run the same steps on the same plans; what they choose is rank 0's, by broadcast.
Called by `executor.InProcessExecutor` and `workers/target_worker.py`.

    plan ─▶ apply ─▶ drafts [R, K] ─▶ trim ─▶ rows [N] ─▶ target ─┬─▶ hidden [X] ─▶ equal-noise choice ─▶ ..
                         ▲                                        └─▶ taps [N, m] ─▶ inject ─┐
                         └────────────────── drafter's context K/V, in pages ◀───────────────┘

Legend: N rows, X sampled rows, R requests, K most drafts, W = K + 1, m taps, H hidden.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from ....cluster.logprobs import StepLogprobs
from ....cluster.plan import NOT_A_NUMBER, SchedulerOutput, StepResult, StepTimings
from ....drafter.compute.kv_cache import PagedKVCache
from ....drafter.step.logprobs import AskedRows, raw_logprobs, read_told, tell, tell_in_chunks
from ....drafter.step.operators import StepOperators
from ....drafter.step.proposals import Proposals
from ....drafter.step.rows import Ints, StepRows
from ....drafter.step.sampling import sample_rows
from ....drafter.step.states import RequestStates
from ....drafter.step.trimming import take_out
from ..model.decoder import Decoder
from ..model.parallel import Communicator
from .local_drafts import LocalDrafts
from .runner import Clock, Drafter, ReadsMeter

if TYPE_CHECKING:
    from ....drafter.grammars.states import GrammarStates


class DraftSource(Protocol):
    """Where drafts come from, and where the target's features go; on every rank."""

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        """The same on all ranks; K = 0 if nobody drafts."""
        ...

    def inject(
        self, taps_NmH: Tensor | None, rows: StepRows, token_ids_RW: Tensor, num_tokens_R: Tensor
    ) -> None:
        """Take in what the target computed, where it taps, and which tokens stood; called in every step that
        writes context."""
        ...


class StepRunner:
    """A loaded rank.

    Args:
        states: this rank's mirror of the running requests.
        drafts: None decodes plainly, and nothing is tapped.
        operators: choose and accept.
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
        self._operators = operators
        self._results: deque[StepResult] = deque()
        self._expert_reads = ReadsMeter(model)

    @property
    def grammars(self) -> GrammarStates | None:
        return self.states.grammars

    def prepare(self) -> None:
        """Nothing is left to do."""

    def rehearse(self, largest: SchedulerOutput) -> int:
        """Run such a step; there are no graphs."""
        self.execute(largest)
        return 0

    def exchange(self, drafter: Drafter) -> None:
        assert isinstance(self.drafts, LocalDrafts), "a drafter beside this target"
        self.drafts.exchange(drafter)

    def begin_trial(self, candidate: Drafter) -> None:
        assert isinstance(self.drafts, LocalDrafts), "a drafter beside this target"
        self.drafts.begin_trial(candidate)

    def end_trial(self, *, promoted: bool) -> None:
        assert isinstance(self.drafts, LocalDrafts), "a drafter beside this target"
        self.drafts.end_trial(promoted=promoted)

    def submit(self, plan: SchedulerOutput) -> None:
        """Run one step; its result waits to be collected."""
        self._results.append(self.execute(plan))

    def is_ready(self) -> bool:
        """Whether `collect` would not wait: never, once a step was submitted."""
        return bool(self._results)

    def collect(self) -> StepResult:
        """The result of the oldest step submitted."""
        return self._results.popleft()

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> StepResult:
        """Run one step to its end."""
        clock = Clock(self.model.device)
        self.states.apply(plan)
        proposals = self._propose(plan)
        clock.mark()  # cutting is no part of drafting: it is weighed against the rows that it spares
        plan, drafts_RK = self._trim(plan, proposals)
        self.states.place_drafts(plan, drafts_RK)
        rows = self.states.lay_out_rows(plan)
        hidden_NH, taps_NmH = self.model.forward(rows.token_ids_N, rows, self.cache)
        all_sampled = len(rows.sampled_X) == len(hidden_NH)
        hidden_XH = hidden_NH if all_sampled else hidden_NH.index_select(0, rows.sampled_X)
        clock.mark()
        prompt_logprobs = self._tell_prompts(plan, hidden_NH)
        chosen_X, logprobs = self._choose(hidden_XH, rows, self.states.asked_rows(plan))
        token_ids_RW, num_tokens_R = self._operators.accept(chosen_X, rows.counts_R, drafts_RK)
        if len(broken_N := self._broken_rows(hidden_NH)):
            token_ids_RW[torch.from_numpy(_requests_of(broken_N, plan)), 0] = NOT_A_NUMBER
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
            expert_reads=self._expert_reads.take(),
        )

    def _broken_rows(self, values: Tensor) -> Ints:
        """Rows of a matrix that hold NaN or infinity; none in all but broken models."""
        return np.flatnonzero(~self._operators.are_numbers(values).cpu().numpy())

    def _propose(self, plan: SchedulerOutput) -> Proposals:
        """Ask for drafts, and let grammars see them."""
        if self.drafts is None:
            assert not plan.num_draft_tokens, "drafts were planned, but there is no drafter"
            proposals = Proposals.none(plan.num_requests, self.model.device)
        else:
            proposals = self.drafts.propose(plan, self.states)
        return self.states.guide(plan, proposals)

    def _trim(self, plan: SchedulerOutput, proposals: Proposals) -> tuple[SchedulerOutput, Tensor]:
        """What of the drafts is verified: the plan with so many, and the drafts [R, K] without the others."""
        drafts_RK, margins_RK = proposals.drafts_RK, proposals.margins_RK
        if not drafts_RK.shape[1]:
            return plan, drafts_RK
        if margins_RK is None:  # who is not sure of drafts may have found fewer than were planned
            found_RK = np.cumprod(drafts_RK.cpu().numpy() >= 0, axis=1, dtype=np.int32)
            return plan.verifying(found_RK.sum(axis=1, dtype=np.int32)), drafts_RK
        if plan.trim is None:
            return plan, drafts_RK
        cut = torch.from_numpy(self._operators.trim(margins_RK, plan))
        # Ranks on processors of other kinds may compute other last digits: rank 0's word counts.
        num_drafts_R = self._communicator.broadcast(cut.to(drafts_RK.device))
        return plan.verifying(num_drafts_R.cpu().numpy()), take_out(drafts_RK, num_drafts_R)

    def _choose(
        self, hidden_XH: Tensor, rows: StepRows, asked: AskedRows | None
    ) -> tuple[Tensor, StepLogprobs | None]:
        """Each sampled row's token, and the log probabilities that are asked for."""
        if not len(hidden_XH):
            return rows.sampled_X, None  # as many
        logits_XV = self.model.logits(hidden_XH)
        logprobs_YV = None if asked is None else raw_logprobs(logits_XV, asked)
        broken_X = self._broken_rows(logits_XV)  # before rules and masks hide some
        chosen_X = sample_rows(logits_XV, rows.sampling, self._operators)
        if len(broken_X):
            chosen_X[torch.from_numpy(broken_X).to(chosen_X.device)] = NOT_A_NUMBER
        chosen_X = self._communicator.broadcast(chosen_X)
        if asked is None or logprobs_YV is None:
            return chosen_X, None
        chosen_Y = chosen_X[torch.from_numpy(asked.rows()).to(chosen_X.device)]
        return chosen_X, read_told(
            tell(logprobs_YV, chosen_Y.clamp(min=0), asked.num_top).cpu().numpy(), asked
        )

    def _tell_prompts(self, plan: SchedulerOutput, hidden_NH: Tensor) -> StepLogprobs | None:
        """Log probabilities of prompts, as far as they are asked for."""
        asked = self.states.asked_prompt_rows(plan)
        if asked is None:
            return None
        hidden_YH = hidden_NH[torch.from_numpy(asked.rows()).to(hidden_NH.device)]
        next_ids_Y = self.states.tokens_behind(plan, asked)
        told_YE = tell_in_chunks(hidden_YH, next_ids_Y, self.model.logits, asked.num_top)
        return read_told(told_YE.cpu().numpy(), asked)


def _requests_of(broken_N: Ints, plan: SchedulerOutput) -> Ints:
    """Places of the requests whose known tokens are in these rows.

    Caches keep 0 for what is no number, so rows behind such a token may look sound. Drafts are judged by
    their logits.
    """
    ends_R = np.cumsum(plan.num_rows)
    places_N = np.searchsorted(ends_R, broken_N, side="right")
    return np.unique(places_N[broken_N < (ends_R - plan.num_drafts)[places_N]])
