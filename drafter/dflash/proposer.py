"""Proposes DFlash drafts before the target's pass and writes context after it.

Drafts are sampled as the target samples: same filters, same noise at the same position, on the drafter's
logits; with DFlash2's selector or DSpark's Markov head along a path (`step/sampling/sampler.py`). Each draft
has a margin (`step/inputs/proposals.py`), which DSpark's confidence head sharpens. Used by target ranks
(colocated) and by a drafter in its own process.

Legend: N target rows, X rows that sample a draft, R requests of the step, K most drafts, m taps, H hidden,
E rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...cluster.step.scheduler_output import SchedulerOutput
from ..compute.backend import PlacedRows
from ..compute.memory.kv_cache import PagedKVCache
from ..step.inputs.proposals import BlockCandidates, Proposals
from ..step.inputs.row_layout import StepRows
from ..step.request_states import RequestStates
from ..step.sampling.sampler import block_candidates, sample_with_margins, select_paths
from ..step.sampling.step_ops import DEFINITION, StepOperators
from .model import DFlashDrafter

# Most rows whose context is written together while no request drafts; so many take about as long as one row.
_DEFERRED_ROWS = 128


class DFlashProposer:
    """A drafter with its pages; `operators` sample the drafts.

    While no request drafts, the context of several steps is written at once, in the order of the steps, and
    at the latest before the next block, or before pages move (`settle`).
    """

    def __init__(
        self, drafter: DFlashDrafter, cache: PagedKVCache, operators: StepOperators = DEFINITION
    ) -> None:
        self.drafter = drafter
        self.cache = cache
        self._operators = operators
        self._drafts = True  # whether a request drafted in the last step
        self._deferred: list[tuple[Tensor, StepRows]] = []  # taps and rows, oldest first
        self._num_deferred = 0  # rows

    def with_drafter(self, drafter: DFlashDrafter) -> DFlashProposer:
        """Return a proposer with another drafter of the same shape over the same pages."""
        return DFlashProposer(drafter, self.cache, self._operators)

    @property
    def kept_by_page(self) -> tuple[Tensor, ...]:
        """All that is kept of the tokens in a page: [A, P + 1, ...] each."""
        return (self.cache.kv,)

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        """Return drafts and margins [R, K]; K = 0 if no request drafts."""
        config = self.drafter.config
        block = states.lay_out_block(plan, config.mask_token_id, samples_anchor=config.samples_anchor)
        self._drafts = block is not None
        if block is None:
            return Proposals.none(plan.num_requests, states.device)
        self.settle()
        hidden_XH = self.drafter.block_hidden(block, self.cache)
        proposals = self._choose(hidden_XH, block, keeps_candidates=plan.needs_candidates)
        if self.drafter.confidence_head is None:
            return proposals
        return self.drafter.confidence_head.sharpened(proposals, hidden_XH, block)

    def _choose(self, hidden_XH: Tensor, block: StepRows, *, keeps_candidates: bool) -> Proposals:
        logits_XV, selector = self.drafter.logits(hidden_XH), self.drafter.selector
        if selector is None:
            return self._sample_each(logits_XV, block, keeps_candidates=keeps_candidates)
        gates_XE, codebooks = selector.gates(hidden_XH), selector.codebooks
        inputs = logits_XV, gates_XE, block, codebooks, self._operators
        return select_paths(*inputs, keeps_candidates=keeps_candidates)

    def _sample_each(self, logits_XV: Tensor, block: StepRows, *, keeps_candidates: bool) -> Proposals:
        """Sample each draft by its own logits, without the drafts before it."""
        chosen = sample_with_margins(logits_XV, block.sampling, self._operators)
        candidates: tuple[BlockCandidates, ...] = ()
        if keeps_candidates:
            _, num_candidates = self.drafter.config.num_candidates
            candidates = (block_candidates(logits_XV, block, num_candidates, self._operators),)
        shape = len(block.counts_R), block.max_count
        if len(chosen[0]) == shape[0] * shape[1]:
            by_request = [values_X.view(shape) for values_X in chosen]
        else:
            by_request = [
                self._operators.by_request(values_X, block.counts_R, block.max_count) for values_X in chosen
            ]
        return Proposals(*by_request, candidates=candidates)

    def inject(self, taps_NmH: Tensor, rows: StepRows, num_tokens_R: Tensor) -> None:
        """Write context K/V from the target's hidden states, rejected drafts included.

        As in the target's pages, slots of rejected drafts are overwritten by the next block before any mask
        exposes them.
        """
        self._deferred.append((taps_NmH, rows))
        self._num_deferred += len(taps_NmH)
        if self._drafts or self._num_deferred > _DEFERRED_ROWS:
            self.settle()

    def settle(self) -> None:
        """Write the context of the steps since the last block: no row reads it before the next one.

        One write for several steps costs about what one for a single step does.
        """
        if not self._deferred:
            return
        (taps_NmH, rows), *others = self._deferred
        if not others:
            placed: PlacedRows = rows
        else:
            taps_NmH = torch.cat([taps for taps, _ in self._deferred])
            slots = zip(*(rows.kv_slots for _, rows in self._deferred), strict=True)
            placed = PlacedRows(
                torch.cat([rows.positions_N for _, rows in self._deferred]),
                kv_slots=tuple(torch.cat(of_group) for of_group in slots),
                batches=(),  # nothing attends
            )
        self._deferred, self._num_deferred = [], 0
        self.inject_features(self.drafter.context_features(taps_NmH), placed)

    def inject_features(self, c_NH: Tensor, rows: PlacedRows) -> None:
        """Write context K/V from features C that were computed elsewhere."""
        self.drafter.write_context(c_NH, rows, self.cache)
