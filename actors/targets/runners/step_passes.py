"""The two passes of a step on a device: draft, and trim, verify, sample, inject.

It does what `cpu_runner.py` does, but computes indices on the device from a few integers and the requests'
state there (`drafter/step/gpu_triton/request_states.py`). It never waits for the host, so it can be captured
in one CUDA graph and launched before the last step's outcome is known. Called by `gpu_runner.py` for prompts,
and by `cuda_graphs.py` for decoding requests, after the drafter's pass if they draft.

Legend: R requests, N rows, X sampled rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count

from torch import Tensor, cat, stack

from ....drafter.compute.memory.kv_cache import PagedKVCache
from ....drafter.step.gpu_triton.inputs.row_layout import (
    DeviceStepRequests,
    DeviceStepRows,
    lay_out_rows,
)
from ....drafter.step.gpu_triton.inputs.transfers import StepOutput, stamp
from ....drafter.step.gpu_triton.recurrent_states import NO_RECURRENT, NoRecurrent
from ....drafter.step.gpu_triton.sampling.grammar_masks import DeviceMasks
from ....drafter.step.gpu_triton.tree_rows import accept_paths, place_rows, trim_trees
from ....drafter.step.gpu_triton.verification import (
    TrimLists,
    accept_and_advance,
    mark_not_numbers,
    trim_drafts,
)
from ..model.decoder import Decoder
from .drafts.device_trees import StepTrees, TreeMemory
from .drafts.draft_source import DeviceDrafts, StepMemory, VerifiedRows
from .drafts.tp_sampling import choose


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModels:
    """A loaded rank: the target with its pages, and what drafts for it.

    Attributes:
        memory: the requests' state, and that of passes.
        hidden: [N, H], where decoding steps leave hidden states for log probabilities.
        recurrent: the target's recurrent states.
        masks: grammar masks of decoding steps' rows; None if no request can have a grammar.
        trees: None if drafts form chains.
    """

    target: Decoder
    cache: PagedKVCache
    memory: StepMemory
    drafts: DeviceDrafts
    hidden: Tensor
    recurrent: NoRecurrent = NO_RECURRENT
    masks: DeviceMasks | None = None
    trees: TreeMemory | None = None


class DraftPass:
    """A drafting pass over given inputs: a graph of its own, as the number of rows in blocks does not depend
    on the number of drafts that are verified.

    Args:
        requests, trees, filters: see `DeviceDrafts.propose`.
        times: timestamps of the step's outcome; the first two are written.
    """

    def __init__(
        self,
        drafts: DeviceDrafts,
        requests: DeviceStepRequests,
        times: Tensor,
        trees: StepTrees | None = None,
        *,
        filters: bool,
    ) -> None:
        self._drafts, self._requests, self._times = drafts, requests, times
        self._trees, self._filters = trees, filters

    def run(self) -> None:
        stamp(self._times, 0)
        self._drafts.propose(self._requests, self._trees, filters=self._filters)
        stamp(self._times, 1)

    def replace_by(self, drafts: DeviceDrafts) -> None:
        """Take drafts that the host wrote instead of running the pass."""
        DraftPass(drafts, self._requests, self._times, filters=self._filters).run()

    def end_with(self, drafts: DeviceDrafts | None) -> None:
        """End the pass again, after the host has seen its drafts, and may have written others."""
        if drafts is not None:
            drafts.propose(self._requests, None, filters=self._filters)
        stamp(self._times, 1)


class TargetPass:
    """A target's pass over given inputs.

    Args:
        requests: the participating requests, with all their drafts.
        outcome: written by the pass.
        trim: values by which drafts are trimmed to the pass's rows; needed if any request drafts.
        filters: whether any request has top-k, top-p, min-p or logits rules, or requests log probabilities. A
            decoding step then leaves its hidden states in `models`.
        writes_context: whether the context of a drafter, if there is one, is written.
        masks: grammar masks of the sampled rows, which are read when the pass runs.
        saves: recurrent states that its rows save (`step/gpu_triton/recurrent_states.py`); then no request
            drafts.
        trees: the requests' draft trees, if any request drafts and drafts may form trees.
    """

    def __init__(
        self,
        models: DeviceModels,
        requests: DeviceStepRequests,
        outcome: StepOutput,
        trim: TrimLists | None = None,
        *,
        filters: bool,
        writes_context: bool,
        masks: DeviceMasks | None = None,
        saves: Tensor | None = None,
        trees: StepTrees | None = None,
    ) -> None:
        self._models, self._requests, self._outcome, self._trim = models, requests, outcome, trim
        self._filters, self._masks, self._saves, self._trees = filters, masks, saves, trees
        self._injects = writes_context and models.drafts.has_context

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
        models, times, requests = self._models, self._outcome.times, self.verified()
        marks = count(2 if requests.max_drafts else 1)
        if not requests.max_drafts:
            stamp(times, 0)
        rows = lay_out_rows(requests, models.memory.states.tables)
        if self._trees is not None:
            rows = place_rows(requests, self._trees.trees, rows, models.memory.states.tables)
        rows = replace(rows, states=models.recurrent.build_rows(requests, self._saves))
        hidden_NH, taps_NmH = models.target.forward(rows.token_ids_N, rows, models.cache)
        stamp(times, next(marks))
        chosen_X = self._sample(rows, hidden_NH)
        if self._trees is None:
            tables = models.memory.states.tables
            accept_and_advance(chosen_X, requests, tables, self._outcome.rows_RW1)
            mark_not_numbers(hidden_NH, requests, self._outcome.rows_RW1)
        else:
            rows = self._accept_paths(self._trees, requests, rows, chosen_X)
        stamp(times, next(marks))
        if self._injects:
            assert taps_NmH is not None, "a target with a drafter has taps"
            num_tokens_R = self._outcome.rows_RW1[:, -1]
            verified = VerifiedRows(requests, rows, chosen_X, taps_NmH, num_tokens_R, self._trees)
            models.drafts.inject(verified)
            stamp(times, next(marks))
        if self._filters and requests.sampled_X is None:
            models.hidden[: len(hidden_NH)].copy_(hidden_NH)
        if (reads_1 := models.target.backend.expert_reads) is not None:
            self._outcome.reads_1.copy_(reads_1)
        return hidden_NH

    def verified(self) -> DeviceStepRequests:
        """Return the requests with as many of their drafts as fit the pass, the same ones at each call."""
        requests, outcome = self._requests, self._outcome
        if not requests.max_drafts:
            return requests
        assert self._trim is not None, "a drafting pass needs values for trimming"
        margins_N, written = (
            self._models.memory.workspace.margins_N,
            (outcome.num_drafts_R, outcome.margins_RD),
        )
        if self._trees is not None:
            of_trees = (self._trees.trees, self._trees.blocks, margins_N, self._trim.weights_R)
            return trim_trees(requests, *of_trees, requests.num_rows, *written)
        return trim_drafts(requests, margins_N, self._trim, requests.num_rows, *written)

    def _sample(self, rows: DeviceStepRows, hidden_NH: Tensor) -> Tensor:
        """Return the target's tokens."""
        models, index_X = self._models, self._requests.sampled_X
        row_inputs = (hidden_NH, rows.slots_N, rows.positions_N)
        if index_X is not None:
            row_inputs = [values_N.index_select(0, index_X) for values_N in row_inputs]
        if not len(row_inputs[0]):  # chunks of prompts may sample nothing
            return rows.token_ids_N[:0]
        return choose(
            models.memory,
            models.target,
            *row_inputs,
            filters=self._filters,
            masks=self._masks,
            paths_ND=rows.tree_paths,
        )

    def _accept_paths(
        self, trees: StepTrees, requests: DeviceStepRequests, rows: DeviceStepRows, chosen_X: Tensor
    ) -> DeviceStepRows:
        """Accept a path of each tree and move its K and V; return the rows with slots of the context."""
        models, tables, outcome = self._models, self._models.memory.states.tables, self._outcome
        kv_slots_GN = rows.kv_slots[0].unsqueeze(0) if len(rows.kv_slots) == 1 else stack(rows.kv_slots)
        moves = accept_paths(chosen_X, requests, trees.trees, kv_slots_GN, tables, outcome.rows_RW1)
        groups = sorted({place.group for place in models.cache.places})
        source_slots, target_slots = (
            each.flatten(0, 1) if len(groups) == len(each) else cat([each[group] for group in groups])
            for each in moves
        )
        models.target.backend.compact_rows(models.cache, source_slots, target_slots)
        outcome.trees_RE.copy_(trees.trees.values_RE)
        return replace(rows, kv_slots=kv_slots_GN.unbind(0))
