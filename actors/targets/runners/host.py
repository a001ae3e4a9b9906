"""One decoding step on one target rank: draft, verify, accept, inject.

Decides nothing (the plan does) and keeps nothing but what it is made of: model, pages, request states, and a
source of drafts. Ranks run the same steps on the same plans; what they choose is rank 0's, by broadcast.
Called by `executor.InProcessExecutor` and `workers/target_worker.py`.

    plan ─▶ apply ─▶ drafts [R, K] ─▶ rows [N] ─▶ target ─┬─▶ hidden [X] ─▶ equal-noise choice ─▶ accept
                         ▲                                └─▶ taps [N, m] ─▶ inject ─┐
                         └─────────────── drafter's context K/V, in pages ◀──────────┘

Legend: N rows, X sampled rows, R requests, K most drafts, W = K + 1, m taps, H hidden.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ....cluster.logprobs import StepLogprobs
from ....cluster.plan import SchedulerOutput, StepResult, StepTimings
from ....drafter.compute.kv_cache import PagedKVCache
from ....drafter.dflash.model import DFlashDrafter
from ....drafter.dflash.propose import Proposer
from ....drafter.step.logprobs import AskedRows, raw_logprobs, read_told, tell, tell_in_chunks
from ....drafter.step.operators import StepOperators
from ....drafter.step.rows import StepRows
from ....drafter.step.sampling import sample_rows
from ....drafter.step.states import RequestStates
from ..model.decoder import Decoder
from ..model.parallel import Communicator
from .runner import Clock


class DraftSource(Protocol):
    """Where drafts come from, and where the target's features go; on every rank."""

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Tensor:
        """Drafts [R, K] int64, the same on all ranks; -1 where there is none. K = 0 if nobody drafts."""
        ...

    def inject(self, taps_NmH: Tensor, rows: StepRows, token_ids_RW: Tensor, num_tokens_R: Tensor) -> None:
        """Take in what the target computed and which tokens stood; called in every step."""
        ...


class LocalDrafts:
    """A drafter beside the target. Every rank has it whole; embedding and head are the target's, split."""

    def __init__(self, proposer: Proposer, communicator: Communicator) -> None:
        self._proposer = proposer
        self._communicator = communicator

    def exchange(self, drafter: DFlashDrafter) -> None:
        self._proposer = self._proposer.with_drafter(drafter)

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Tensor:
        drafts_RK = self._proposer.propose(plan, states)
        return self._communicator.broadcast(drafts_RK) if drafts_RK.shape[1] else drafts_RK

    def inject(self, taps_NmH: Tensor, rows: StepRows, token_ids_RW: Tensor, num_tokens_R: Tensor) -> None:
        self._proposer.inject(taps_NmH, rows)


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

    def prepare(self) -> None:
        """Nothing is left to do."""

    def rehearse(self, largest: SchedulerOutput) -> int:
        """Run such a step; there are no graphs."""
        self.execute(largest)
        return 0

    def exchange(self, drafter: DFlashDrafter) -> None:
        assert isinstance(self.drafts, LocalDrafts), "a drafter beside this target"
        self.drafts.exchange(drafter)

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
        drafts_RK = self._propose(plan)
        clock.mark()
        rows = self.states.lay_out_rows(plan)
        hidden_NH, taps_NmH = self.model.forward(rows.token_ids_N, rows, self.cache)
        all_sampled = len(rows.sampled_X) == len(hidden_NH)
        hidden_XH = hidden_NH if all_sampled else hidden_NH.index_select(0, rows.sampled_X)
        clock.mark()
        prompt_logprobs = self._tell_prompts(plan, hidden_NH)
        chosen_X, logprobs = self._choose(hidden_XH, rows, self.states.asked_rows(plan))
        token_ids_RW, num_tokens_R = self._operators.accept(chosen_X, rows.counts_R, drafts_RK)
        self.states.advance(plan, token_ids_RW, num_tokens_R)
        clock.mark()
        if self.drafts is not None:
            assert taps_NmH is not None, "a target with a drafter taps"
            self.drafts.inject(taps_NmH, rows, token_ids_RW, num_tokens_R)
        clock.mark()
        return StepResult(
            plan.step,
            token_ids=token_ids_RW.cpu().numpy().astype(np.int32),
            num_tokens=num_tokens_R.cpu().numpy().astype(np.int32),
            timings=StepTimings(*clock.seconds()),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _propose(self, plan: SchedulerOutput) -> Tensor:
        """Ask for drafts, let grammars see them, and put them behind the known tokens."""
        if self.drafts is None:
            assert not plan.num_drafts.any(), "drafts were planned, but there is no drafter"
            drafts_RK = torch.empty(plan.num_requests, 0, dtype=torch.int64, device=self.model.device)
        else:
            drafts_RK = self.drafts.propose(plan, self.states)
        drafts_RK = self.states.guide(plan, drafts_RK)
        self.states.place_drafts(plan, drafts_RK)
        return drafts_RK

    def _choose(
        self, hidden_XH: Tensor, rows: StepRows, asked: AskedRows | None
    ) -> tuple[Tensor, StepLogprobs | None]:
        """Each sampled row's token, and the log probabilities that are asked for."""
        if not len(hidden_XH):
            return rows.sampled_X, None  # as many
        logits_XV = self.model.logits(hidden_XH)
        logprobs_YV = None if asked is None else raw_logprobs(logits_XV, asked)
        chosen_X = self._communicator.broadcast(sample_rows(logits_XV, rows.sampling, self._operators))
        if asked is None or logprobs_YV is None:
            return chosen_X, None
        chosen_Y = chosen_X[torch.from_numpy(asked.rows()).to(chosen_X.device)]
        return chosen_X, read_told(tell(logprobs_YV, chosen_Y, asked.num_top).cpu().numpy(), asked)

    def _tell_prompts(self, plan: SchedulerOutput, hidden_NH: Tensor) -> StepLogprobs | None:
        """Log probabilities of prompts, as far as they are asked for."""
        asked = self.states.asked_prompt_rows(plan)
        if asked is None:
            return None
        hidden_YH = hidden_NH[torch.from_numpy(asked.rows()).to(hidden_NH.device)]
        next_ids_Y = self.states.tokens_behind(plan, asked)
        told_YE = tell_in_chunks(hidden_YH, next_ids_Y, self.model.logits, asked.num_top)
        return read_told(told_YE.cpu().numpy(), asked)
