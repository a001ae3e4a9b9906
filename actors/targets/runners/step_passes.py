"""The target's pass of a step on a device: trim, verify, sample, inject.

It does what `cpu_runner.py` does, but computes indices on the device from a few integers and the requests'
state there (`drafter/step/gpu_triton/request_states.py`). It never waits for the host, so it can be captured
in one CUDA graph and launched before the last step's outcome is known. Called by `gpu_runner.py` for prompts,
and by `cuda_graphs.py` for decoding requests, after the drafter's pass (`draft_pass.py`) if they draft. A
split drafter has an iteration of its own (`workers/drafter/gpu_drafter_session.py`), to which choices and
features are sent after it (`remote_exchange.py`).

Legend: R requests, N rows, X sampled rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor, cat, stack

from ....drafter.compute.memory.kv_cache import PagedKVCache
from ....drafter.dflash.model import DFlashDrafter
from ....drafter.step.gpu_triton.inputs.row_layout import (
    DeviceStepRequests,
    DeviceStepRows,
    lay_out_rows,
)
from ....drafter.step.gpu_triton.inputs.transfers import StepOutput, stamp
from ....drafter.step.gpu_triton.recurrent_states import DeviceRecurrent
from ....drafter.step.gpu_triton.request_states import DeviceStates
from ....drafter.step.gpu_triton.sampling.grammar_masks import DeviceMasks
from ....drafter.step.gpu_triton.sampling.sampler import SamplingWorkspace, margins_between, sample_rows
from ....drafter.step.gpu_triton.tree_rows import accept_paths, path_rows, place_rows, trim_trees
from ....drafter.step.gpu_triton.verification import (
    TrimLists,
    accept_and_advance,
    mark_not_numbers,
    trim_drafts,
)
from ..model.decoder import Decoder
from ..model.tensor_parallel import Communicator
from .device_trees import StepTrees, TreeMemory
from .eagle3_chains import Eagle3Chains
from .remote_exchange import RemoteExchange
from .tp_sampling import Head, best_of_ranks, first_rank_s, surest_of_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingModels:
    """A DFlash drafter, with what its passes read and write (`BlockPass`).

    Attributes:
        drafter, draft_cache: None if this process has no DFlash drafter.
        workspace: for sampling, over the whole vocabulary or this rank's part of it.
        trees: None if drafts form chains.
    """

    drafter: DFlashDrafter | None
    draft_cache: PagedKVCache | None
    states: DeviceStates
    workspace: SamplingWorkspace
    communicator: Communicator
    trees: TreeMemory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModels(DraftingModels):
    """A loaded rank: models, their pages, and the requests' state.

    At most one of `drafter`, `chains`, `remote` and `lookup_lengths` is there.

    Attributes:
        chains: a colocated EAGLE-3 drafter; else None.
        recurrent: the target's recurrent states; None if it has none.
        remote: what is exchanged with a drafter in a process of its own.
        lookup_lengths: n-gram lengths of prompt lookup. Without this and any drafter a rank decodes plainly.
        hidden: [N, H], where decoding steps leave hidden states for log probabilities.
        masks: grammar masks of decoding steps' rows; None if no request can have a grammar.
        copied_margins_N: fp32, margins of drafts that the host wrote (`device_suffixes.py`), instead of a
            drafter or beside it; else None.
    """

    target: Decoder
    cache: PagedKVCache
    hidden: Tensor
    remote: RemoteExchange | None = None
    lookup_lengths: tuple[int, int] | None = None
    chains: Eagle3Chains | None = None
    recurrent: DeviceRecurrent | None = None
    masks: DeviceMasks | None = None
    copied_margins_N: Tensor | None = None

    @property
    def has_margins(self) -> bool:
        """Whether the source of drafts gives margins."""
        return self.lookup_lengths is None

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def has_drafter(self) -> bool:
        """Whether a drafter has context that steps write."""
        return any(each is not None for each in (self.drafter, self.remote, self.chains))


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
        self._injects = writes_context and models.has_drafter

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
        rows = lay_out_rows(requests, models.states.tables)
        if self._trees is not None:
            rows = place_rows(requests, self._trees.trees, rows, models.states.tables)
        if models.recurrent is not None:
            rows = replace(rows, states=models.recurrent.build_rows(requests, self._saves))
        hidden_NH, taps_NmH = models.target.forward(rows.token_ids_N, rows, models.cache)
        stamp(times, next(marks))
        chosen_X = self._sample(rows, hidden_NH)
        if self._trees is None:
            tables = models.states.tables
            accept_and_advance(chosen_X, requests, tables, self._outcome.rows_RW1)
            mark_not_numbers(hidden_NH, requests, self._outcome.rows_RW1)
        else:
            rows = self._accept_paths(self._trees, requests, rows, chosen_X)
        stamp(times, next(marks))
        if self._injects:
            self._inject(requests, rows, chosen_X, taps_NmH)
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
        margins_N, written = self._models.workspace.margins_N, (outcome.num_drafts_R, outcome.margins_RD)
        if self._trees is not None:
            of_trees = (self._trees.trees, self._trees.blocks, margins_N, self._trim.weights_R)
            return trim_trees(requests, *of_trees, requests.num_rows, *written)
        return trim_drafts(requests, margins_N, self._trim, requests.num_rows, *written)

    def _sample(self, rows: DeviceStepRows, hidden_NH: Tensor) -> Tensor:
        """Return the target's tokens."""
        models, index_X = self._models, self._requests.sampled_X
        row_inputs = (hidden_NH, rows.slots_N, rows.positions_N + 1)
        if index_X is not None:
            row_inputs = [values_N.index_select(0, index_X) for values_N in row_inputs]
        if not len(row_inputs[0]):  # chunks of prompts may sample nothing
            return rows.token_ids_N[:0]
        return choose(
            models,
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
        models, tables, outcome = self._models, self._models.states.tables, self._outcome
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
            if self._trees is not None:
                rows_P = path_rows(requests, self._trees.trees, self._outcome.rows_RW1[:, -1])
                chosen_X, taps_NmH = chosen_X[rows_P], taps_NmH[rows_P]
            return remote.put(chosen_X, taps_NmH)
        assert drafter is not None and cache is not None, "a colocated drafter has pages"
        drafter.write_context(drafter.context_features(taps_NmH), rows, cache)


def choose(
    models: DeviceModels,
    head: Head,
    hidden_XH: Tensor,
    slots_X: Tensor,
    positions_X: Tensor,
    *,
    filters: bool,
    masks: DeviceMasks | None,
    paths_ND: Tensor | None = None,
) -> Tensor:
    """Return the target's token of each row, int64, equal on all ranks.

    With a split head each rank chooses within its part of the vocabulary, and the best choice wins. Filters
    and masks need all logits on every rank. `paths_ND`: see `apply_rules`.
    """
    state, workspace, communicator = models.states.sampling, models.workspace, models.communicator
    sampling_inputs = (slots_X, positions_X, state)
    if filters or masks is not None or not head.is_split:
        logits_XV = head.logits(hidden_XH)
        chosen_X, _ = sample_rows(
            logits_XV,
            *sampling_inputs,
            filters=filters,
            workspace=workspace,
            masks=masks,
            paths_ND=paths_ND,
            checks=True,
        )
        return chosen_X if communicator.world_size == 1 else communicator.broadcast(chosen_X)
    logits_XU, first_id = head.local_logits(hidden_XH)
    ids_X, scores_X = sample_rows(
        logits_XU, *sampling_inputs, filters=False, workspace=workspace, vocab_start=first_id, checks=True
    )
    return best_of_ranks(ids_X, scores_X, communicator)


def choose_drafts(
    models: DraftingModels,
    head: Head,
    hidden_NH: Tensor,
    slots_N: Tensor,
    positions_N: Tensor,
    *,
    filters: bool,
) -> tuple[Tensor, Tensor]:
    """Return a draft (int64) and its margin (fp32) for each row, chosen like the target's tokens."""
    state, workspace, communicator = models.states.sampling, models.workspace, models.communicator
    seconds_N = torch.empty(len(hidden_NH), dtype=torch.float32, device=hidden_NH.device)
    is_split, first_id = head.is_split and not filters, 0
    if is_split:
        logits, first_id = head.local_logits(hidden_NH)
    else:
        logits = head.logits(hidden_NH)
    ids_N, scores_N = sample_rows(
        logits,
        slots_N,
        positions_N,
        state,
        filters=filters,
        workspace=workspace,
        vocab_start=first_id,
        drafts=True,
        seconds_N=seconds_N,
    )
    if is_split:
        return surest_of_ranks(ids_N, scores_N, seconds_N, communicator)
    margins_N = margins_between(scores_N, seconds_N)
    if communicator.world_size == 1:
        return ids_N, margins_N
    return first_rank_s(ids_N, margins_N, communicator)
