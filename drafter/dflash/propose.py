"""Drafting for a step: proposals before the target's pass, context after it.

A proposal is chosen as the target will choose: the same filters and the same noise at the same position, on
the drafter's logits; where it has a selector, along a path (`step/selection.py`). Used by target ranks
(colocated) and by a drafter in a process of its own.

Legend: N target rows, X mask rows, R requests of the step, K most drafts, m taps, H hidden, E rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...cluster.plan import SchedulerOutput
from ..compute.kv_cache import PagedKVCache
from ..step.operators import DEFINITION, StepOperators
from ..step.rows import StepRows
from ..step.sampling import sample_rows
from ..step.selection import select_paths
from ..step.states import RequestStates
from .model import DFlashDrafter


class Proposer:
    """A drafter and its pages; `operators` choose proposals."""

    def __init__(
        self, drafter: DFlashDrafter, cache: PagedKVCache, operators: StepOperators = DEFINITION
    ) -> None:
        self.drafter = drafter
        self.cache = cache
        self._operators = operators

    def with_drafter(self, drafter: DFlashDrafter) -> Proposer:
        """The same with another drafter of the same shape, over the same pages."""
        return Proposer(drafter, self.cache, self._operators)

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Tensor:
        """Drafts [R, K] (int64), -1 where a request drafts fewer than K; K = 0 if nobody drafts."""
        block = states.lay_out_block(plan, self.drafter.config.mask_token_id)
        if block is None:
            return torch.empty(plan.num_requests, 0, dtype=torch.int64, device=states.device)
        hidden_XH = self.drafter.block_hidden(block, self.cache)
        logits_XV, selector = self.drafter.logits(hidden_XH), self.drafter.selector
        if selector is not None:
            gates_XE = selector.gates(hidden_XH)
            return select_paths(logits_XV, gates_XE, block, selector.codebooks, self._operators)
        chosen_X = sample_rows(logits_XV, block.sampling, self._operators)
        if len(chosen_X) == plan.num_requests * block.max_count:
            return chosen_X.view(plan.num_requests, block.max_count)
        return self._operators.by_request(chosen_X, block.counts_R, block.max_count)

    def inject(self, taps_NmH: Tensor, rows: StepRows) -> None:
        """Make context of what the target saw.

        Rows of rejected drafts too: as in the target's pages, their slots are written again by the next block
        before any mask exposes them.
        """
        self.inject_features(self.drafter.context_features(taps_NmH), rows)

    def inject_features(self, c_NH: Tensor, rows: StepRows) -> None:
        """The same from features that were computed elsewhere."""
        self.drafter.write_context(c_NH, rows, self.cache)
