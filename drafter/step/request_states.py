"""A worker's state of the running requests by slot: tokens, pages, sampling; it also lays out a step's rows.

A mirror: only plans and results change it. Token ids live on the device, where new ones are made; pages and
sampling parameters stay on the host, so a step's indices are made with NumPy and copied to the device once.
Used by target ranks and by a split drafter.

Order within a step: `apply(plan)`, the drafter's `lay_out_block(plan, mask_id)`, `apply_grammars(plan,
proposals)`; then, with the original or trimmed plan, `write_drafts(plan, drafts)`, `lay_out_rows(plan)` and
`advance(plan, token_ids, num_tokens)`. The twin of `step/gpu_triton/request_states.py`.

Legend: N rows of a step, X sampled rows, R requests of a step, D those that draft, E those in a pass of a
chain, K most drafts, W = K + 1, P pages of a request, G page groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...cluster.pages.kv_cache_groups import ONE_GROUP, KVCacheLayout, pages_for
from ...cluster.speculation.draft_tree import Restriction
from ...cluster.step.scheduler_output import AdmittedRequest, SchedulerOutput
from ..compute.eager.attention_metadata import AttentionBatch
from .inputs.draft_trees import DraftTrees, chain_parents
from .inputs.logits_processors import RuledRows
from .inputs.proposals import Proposals
from .inputs.row_layout import Ints, RequestRows, StepRequests, StepRows
from .inputs.sampling_metadata import SamplingMetadata
from .recurrent_states import RecurrentStates
from .sampling.logits_processor_states import RuleStates
from .sampling.logprobs import LogprobRows, LogprobSlots
from .sampling.ngram_lookup import look_up
from .sampling.step_ops import DEFINITION, StepOperators

if TYPE_CHECKING:  # workers without grammars, such as drafters, need no llguidance
    from ..grammars.matchers import GrammarStates, StepWalks


class RequestStates:
    """State of the running requests by slot.

    Args:
        num_pages: pages of each pool.
        attention_batch: builds the backend's metadata of a step; see `AttentionBatch.build`.
        operators: lay out rows and write tokens; by default the definition.
        pages: the models' page groups; by default one that all layers share.
        grammars: of a target with requests that may have grammars. A drafter has none: its drafts are edited
            where they are verified.
        recurrent: of a target with recurrent layers; no drafter has any.

    Attributes:
        logprob_slots: which slots want log probabilities; if none does, rows need not be asked for.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        num_pages: Sequence[int],
        page_size: int,
        device: torch.device | str,
        attention_batch: Callable[..., Any] = AttentionBatch.build,
        operators: StepOperators = DEFINITION,
        pages: KVCacheLayout = ONE_GROUP,
        grammars: GrammarStates | None = None,
        recurrent: RecurrentStates | None = None,
    ) -> None:
        self.device = torch.device(device)
        self._attention_batch = attention_batch
        self._operators = operators
        self.page_size = page_size
        self._groups = pages.groups
        self._target_groups, self._drafter_groups = (
            frozenset(place.group for place in places) for places in (pages.target, pages.drafter)
        )
        # One more column than the longest sequence: discarded values are written there.
        self.token_ids = torch.zeros(num_slots, max_model_len + 1, dtype=torch.int64, device=self.device)
        self._no_page_G = np.array([num_pages[group.pool] for group in pages.groups], dtype=np.int64)
        shape = (len(pages.groups), num_slots, pages_for(max_model_len, page_size))
        # Rows of unused slots go to the skip page: a drafter may be newer than the requests.
        self.page_tables_GSP = np.broadcast_to(self._no_page_G[:, None, None], shape).copy()
        self._temperature = np.zeros(num_slots, dtype=np.float32)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.ones(num_slots, dtype=np.float32)
        self._min_p = np.zeros(num_slots, dtype=np.float32)
        self._seed = np.zeros(num_slots, dtype=np.int64)
        self._min_length = np.zeros(num_slots, dtype=np.int64)
        self._stop_ids: list[tuple[int, ...]] = [()] * num_slots
        self._rules = RuleStates(self.device)
        self.logprob_slots = LogprobSlots(num_slots)
        self._num_computed = np.zeros(num_slots, dtype=np.int64)
        self.grammars = grammars
        self._recurrent = recurrent
        self._walks: StepWalks | None = None  # of the current step:
        self._now: StepRequests | None = None

    def apply(self, plan: SchedulerOutput) -> None:
        """Apply a plan's admissions and new pages; first call of a step."""
        for request in plan.admitted:
            self._admit(request)
        if self._recurrent is not None:
            self._recurrent.apply(plan)
        if len(plan.page_slots):
            self.page_tables_GSP[plan.page_groups, plan.page_slots, plan.page_indices] = plan.page_ids

    def _admit(self, request: AdmittedRequest) -> None:
        slot, sampling = request.slot, request.sampling
        tokens = torch.from_numpy(np.array(request.token_ids, dtype=np.int64))
        self.token_ids[slot, : len(tokens)] = tokens.to(self.device)
        # A sequence may end after its next step was planned: rows beyond its pages go to the skip page.
        self.page_tables_GSP[:, slot] = self._no_page_G[:, None]
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = sampling.top_k
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self._seed[slot] = sampling.seed
        self._min_length[slot] = sampling.min_length
        self._stop_ids[slot] = sampling.stop_token_ids
        if sampling.rules is not None or slot in self._rules.slots:
            self._rules.admit(slot, sampling.rules)
        if (sampling.logprobs, sampling.prompt_logprobs) != (None, None) or self.logprob_slots.in_use:
            self.logprob_slots.admit(slot, sampling)
        if self.grammars is not None and (sampling.grammar is not None or slot in self.grammars.slots):
            self.grammars.admit(slot, sampling.grammar)

    def lay_out_rows(self, plan: SchedulerOutput, trees: DraftTrees | None = None) -> StepRows:
        """Return the target's rows; drafts must have been placed. `trees`: None if all drafts are chains."""
        r = self._requests(plan)
        rows_R = RequestRows(r.slots_R, r.first_R, r.num_rows_R, r.counts_R)
        rows = self._lay_out(rows_R, r.counts_R, mask_id=None, trees=trees)
        if self._recurrent is not None:
            rows = replace(rows, states=self._recurrent.rows(r))
        if self._walks is None:
            return rows
        assert self.grammars is not None, "who walked"
        masks = self.grammars.masks(self._walks, r.counts_R)
        return replace(rows, sampling=replace(rows.sampling, masks=masks))

    def lay_out_block(
        self, plan: SchedulerOutput, mask_id: int, *, samples_anchor: bool = False
    ) -> StepRows | None:
        """Return the drafter's rows, or None if no request drafts. `samples_anchor`: see `DrafterConfig`."""
        r, block_drafts_R = self._requests(plan), plan.block_drafts.astype(np.int64)
        drafting_D = np.flatnonzero(block_drafts_R)
        if len(drafting_D) == 0:
            return None
        drafts_D = block_drafts_R[drafting_D]
        num_rows_D = drafts_D if samples_anchor else drafts_D + 1
        rows_D = RequestRows(r.slots_R[drafting_D], r.first_R[drafting_D], num_rows_D, drafts_D)
        return self._lay_out(rows_D, block_drafts_R, mask_id=mask_id, samples_anchor=samples_anchor)

    def lay_out_link(
        self,
        plan: SchedulerOutput,
        drafting_E: Ints,
        depth: int,
        attention_batch: Callable[..., Any],
        num_rows: int = 1,
    ) -> StepRows:
        """Return the rows of a chain's pass: each request's last is `depth` after its anchor; -1: before it.

        Token ids are valid up to the anchor only; later ones are the previous passes' drafts.

        Args:
            attention_batch: replaces this state's own: the drafter may use another backend.
            num_rows: of each request, of which the last one samples.
        """
        r = self._requests(plan)
        slots_E, known_E = r.slots_R[drafting_E], r.first_R[drafting_E] + 1
        ones_E = np.ones(len(drafting_E), np.int64)
        last_E = np.maximum(known_E + (depth - 1), 0)
        rows_E = RequestRows(slots_E, last_E - (num_rows - 1), ones_E * num_rows, ones_E)
        token_ids_N, positions_N, kv_slots_GN, sampled_E, _ = self._operators.lay_out_rows(
            self.token_ids, rows_E, self.page_tables_GSP, self.page_size
        )
        ruled = self._ruled(slots_E, known_E, ones_E, None, follows_drafts=False)
        in_link_R = np.zeros(len(r.slots_R), np.int64)
        in_link_R[drafting_E] = 1
        return StepRows(
            positions_N=self._put(positions_N),
            kv_slots=self._put(kv_slots_GN).unbind(0),
            batches=self._attention(rows_E, self._drafter_groups, attention_batch),
            token_ids_N=token_ids_N,
            sampled_X=self._put(sampled_E),
            counts_R=self._put(in_link_R),
            max_count=1,
            sampling=self._sampling(slots_E, last_E + 1, ruled),
            num_rows_R=rows_E.num_rows_R,
        )

    def pages_before(self, plan: SchedulerOutput, group: int) -> Ints:
        """Return the page [R] of the position before each request's first row; -1 at a sequence's start."""
        r = self._requests(plan)
        before_R = r.first_R - 1
        pages_R = self.page_tables_GSP[group, r.slots_R, np.maximum(before_R, 0) // self.page_size]
        return np.where(before_R < 0, -1, pages_R)

    def look_up(self, plan: SchedulerOutput, shortest: int, longest: int) -> Tensor:
        """Return drafts [R, K] by prompt look-up (`sampling/ngram_lookup.py`); -1 if none is found."""
        r = self._requests(plan)
        lengths = (shortest, longest)
        return look_up(self.token_ids, r.slots_R, r.begin_R, r.num_drafts_R, *lengths)

    def rows_wanting_logprobs(self, plan: SchedulerOutput) -> LogprobRows | None:
        """Return the sampled rows that want log probabilities."""
        r = self._requests(plan)
        return self.logprob_slots.chosen(r.slots_R, np.cumsum(r.counts_R) - r.counts_R, r.counts_R)

    def prompt_rows_wanting_logprobs(self, plan: SchedulerOutput) -> LogprobRows | None:
        """Return the prompt rows that want log probabilities."""
        r = self._requests(plan)
        return self.logprob_slots.prompts(r.slots_R, r.first_R, r.num_rows_R)

    def tokens_after(self, plan: SchedulerOutput, logprob_rows: LogprobRows) -> Tensor:
        """Return the known token [Y] (int64) after each of these prompt rows."""
        r = self._requests(plan)
        in_request_Y = logprob_rows.rows() - np.repeat(logprob_rows.begins_A, logprob_rows.counts_A)
        requests_Y = np.repeat(logprob_rows.requests_A, logprob_rows.counts_A)
        positions_Y = r.first_R[requests_Y] + in_request_Y + 1
        return self.token_ids[self._put(r.slots_R[requests_Y]), self._put(positions_Y)]

    def apply_grammars(self, plan: SchedulerOutput, proposals: Proposals) -> Proposals:
        """Return the drafts as edited by grammars; also prepares the masks of the rows laid out next."""
        if self.grammars is None or not self.grammars.holds(plan.slots):
            return proposals
        r, guided_RK = self._requests(plan), proposals.drafts_RK.cpu().numpy().copy()
        margins_RK = None if proposals.margins_RK is None else proposals.margins_RK.cpu().numpy().copy()
        walks = self.grammars.walk(r.slots_R, r.begin_R, r.counts_R, guided_RK, self.known_tokens, margins_RK)
        self._walks = walks
        if walks is None:
            return proposals
        margins = None if margins_RK is None else torch.from_numpy(margins_RK).to(self.device)
        drafts = torch.from_numpy(guided_RK).to(self.device)
        return replace(proposals, drafts_RK=drafts, margins_RK=margins)

    def tree_restrictions(self) -> dict[int, Restriction]:
        """Return what grammars restrict draft trees to, by the index of the request in the plan."""
        if self.grammars is None or self._walks is None:
            return {}
        return {walk.place: self.grammars.tree_restriction(walk.slot) for walk in self._walks.walks}

    def follow_trees(self, trees: DraftTrees) -> None:
        """Make grammars follow these trees instead of the drafts that they have edited."""
        if self._walks is not None:
            self._walks = replace(self._walks, trees=(trees.tokens_RM, trees.parents_RM))

    def num_known(self, plan: SchedulerOutput) -> Ints:
        """Return the number of known tokens [R] of each request."""
        return self._requests(plan).begin_R

    def known_tokens(self, slot: int, begin: int, end: int) -> list[int]:
        return self.token_ids[slot, begin:end].tolist()

    def write_drafts(self, plan: SchedulerOutput, drafts_RK: Tensor) -> None:
        """Write drafts after the known tokens, where `lay_out_rows` reads them; -1 means none."""
        if drafts_RK.shape[1]:
            r = self._requests(plan)
            self._operators.write_tokens(self.token_ids, r.slots_R, r.begin_R, r.num_drafts_R, drafts_RK)

    def advance(self, plan: SchedulerOutput, token_ids_RW: Tensor, num_tokens_R: Tensor) -> None:
        """Write the step's new tokens over the drafts, and advance.

        Args:
            token_ids_RW: NOT_A_NUMBER, which ends a request, is written as token 0.
        """
        token_ids_RW = token_ids_RW.clamp(min=0)
        r, counts_R = self._requests(plan), num_tokens_R.cpu().numpy()
        self._operators.write_tokens(self.token_ids, r.slots_R, r.begin_R, counts_R, token_ids_RW)
        self._num_computed[r.slots_R] = r.begin_R + np.maximum(counts_R - 1, 0)
        if self._recurrent is not None:
            self._recurrent.advance(r, counts_R)
        self._now = self._walks = None

    def _requests(self, plan: SchedulerOutput) -> StepRequests:
        if self._now is None or self._now.plan is not plan:
            self._now = requests_of(plan, self._num_computed)
        return self._now

    def _lay_out(
        self,
        rows_R: RequestRows,
        all_counts_R: Ints,
        *,
        mask_id: int | None,
        samples_anchor: bool = False,
        trees: DraftTrees | None = None,
    ) -> StepRows:
        """Lay out rows of some requests; `all_counts_R` are the counts of all requests of the plan."""
        _, first_R, num_rows_R, counts_R = rows_R
        token_ids_N, positions_N, kv_slots_GN, sampled_X, slots_X = self._operators.lay_out_rows(
            self.token_ids, rows_R, self.page_tables_GSP, self.page_size
        )
        if trees is not None:
            positions_N = trees.positions(positions_N, num_rows_R)
        rows_X, chosen_at_X = self._put(sampled_X), positions_N[sampled_X]
        groups = self._target_groups if mask_id is None else self._drafter_groups
        if mask_id is None or samples_anchor:
            chosen_at_X += 1  # a known token's row samples the next one, a mask's usually its own
        if mask_id is not None:
            masks = np.flatnonzero(positions_N > np.repeat(first_R, num_rows_R)) if samples_anchor else None
            token_ids_N.index_fill_(0, rows_X if masks is None else self._put(masks), mask_id)
        known_R = first_R + (1 if mask_id is not None else num_rows_R - counts_R + 1)
        ruled = self._ruled(slots_X, known_R, counts_R, trees, follows_drafts=mask_id is None)
        return StepRows(
            positions_N=self._put(positions_N),
            kv_slots=self._put(kv_slots_GN).unbind(0),
            batches=self._attention(rows_R, groups, self._attention_batch, trees),
            token_ids_N=token_ids_N,
            sampled_X=rows_X,
            counts_R=self._put(all_counts_R),
            max_count=int(all_counts_R.max()),
            sampling=self._sampling(slots_X, chosen_at_X, ruled),
            num_rows_R=num_rows_R,
            anchor_distance=0 if samples_anchor else 1,
        )

    def _attention(
        self,
        rows_R: RequestRows,
        groups: Collection[int],
        batch: Callable[..., Any],
        trees: DraftTrees | None = None,
    ) -> tuple[Any, ...]:
        """Build the backend's metadata for each page group in which the model has layers."""
        slots_R, first_R, num_rows_R, _ = rows_R
        used = -(-int((first_R + num_rows_R).max()) // self.page_size)
        how = self.page_size, self.device
        paths = () if trees is None else (trees.paths(num_rows_R),)
        built: list[Any] = [None] * len(self._groups)
        for number in groups:
            pages_RP = self.page_tables_GSP[number, slots_R, :used]
            built[number] = batch(first_R, num_rows_R, pages_RP, *how, self._groups[number].window, *paths)
        return tuple(built)

    def _ruled(
        self, slots_X: Ints, known_R: Ints, counts_R: Ints, trees: DraftTrees | None, *, follows_drafts: bool
    ) -> tuple[RuledRows, ...]:
        """Return the sampled rows with rules; each request's first one sees `known_R` tokens."""
        if not self._rules.slots:
            return ()
        if not follows_drafts:
            parents_X = np.full(len(slots_X), -1)  # masks see only the known tokens
        else:
            parents_X = chain_parents(counts_R) if trees is None else trees.row_parents(counts_R)
        return self._rules.rows(self.token_ids, slots_X, np.repeat(known_R, counts_R), parents_X)

    def _sampling(self, slots_X: Ints, positions_X: Ints, ruled: tuple[RuledRows, ...]) -> SamplingMetadata:
        temperature_X = self._temperature[slots_X]
        early_E = np.flatnonzero(positions_X < self._min_length[slots_X])
        forbidden_F = self._forbidden(slots_X, early_E) if len(early_E) else None
        if not temperature_X.any():
            return SamplingMetadata(len(slots_X), forbidden_F=forbidden_F, ruled=ruled)
        return SamplingMetadata.build(
            temperature=temperature_X,
            top_k=self._top_k[slots_X],
            top_p=self._top_p[slots_X],
            min_p=self._min_p[slots_X],
            seed=self._seed[slots_X],
            position=positions_X,
            forbidden_F=forbidden_F,
            device=self.device,
            ruled=ruled,
        )

    def _forbidden(self, slots_X: Ints, early_E: Ints) -> Tensor | None:
        """Return (row, stop token) pairs [2, F] of these rows, which are below their minimum length."""
        pairs = [(row, token) for row in early_E.tolist() for token in self._stop_ids[slots_X[row]]]
        return self._put(np.ascontiguousarray(np.array(pairs, dtype=np.int64).T)) if pairs else None

    def _put(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def requests_of(plan: SchedulerOutput, num_computed_S: Ints) -> StepRequests:
    """Return a plan's requests; `num_computed` has positions that the plan leaves open."""
    numbers = (plan.slots, plan.num_rows, plan.num_drafts)
    slots_R, num_rows_R, num_drafts_R = (x.astype(np.int64) for x in numbers)
    first_R = np.where(plan.num_computed < 0, num_computed_S[slots_R], plan.num_computed)
    begin_R, counts_R = first_R + num_rows_R - num_drafts_R, (num_drafts_R + 1) * plan.samples
    return StepRequests(plan, slots_R, num_rows_R, num_drafts_R, first_R, begin_R, counts_R)
