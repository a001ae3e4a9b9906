"""The passes of a step on a device: the drafter's, and the target's (trim, verify, sample, inject).

The target's does what `cpu_runner.py` does, but computes indices on the device from a few integers and the
requests' state there (`drafter/step/gpu_triton/request_states.py`). It never waits for the host, so it can be
captured in one CUDA graph and launched before the last step's outcome is known. Called by `gpu_runner.py` for
prompts, and by `cuda_graphs.py` for decoding requests, after the drafter's pass if they draft. A split
drafter has an iteration of its own (`workers/drafter/gpu_drafter_session.py`): its drafts are there before a
pass, and are written here; choices and features are sent after it (`remote_exchange.py`).

The drafter's pass writes blocks, drafts after the known tokens, and margins. It is a graph of its own, as the
number of rows in blocks does not depend on the number of drafts that are verified. Drafts are left in the
requests' tokens and margins in the workspace.

Legend: R requests, N rows, X sampled rows, E selector's rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import torch
from torch import Tensor

from ....drafter.compute.memory.kv_cache import PagedKVCache
from ....drafter.dflash.model import DFlashDrafter
from ....drafter.dflash.weights import Selector
from ....drafter.step.gpu_triton.inputs.row_layout import (
    DeviceStepRequests,
    DeviceStepRows,
    lay_out_block,
    lay_out_rows,
    write_drafts,
)
from ....drafter.step.gpu_triton.inputs.transfers import StepOutput, stamp
from ....drafter.step.gpu_triton.ngram_lookup import look_up
from ....drafter.step.gpu_triton.recurrent_states import DeviceRecurrent
from ....drafter.step.gpu_triton.request_states import DeviceStates
from ....drafter.step.gpu_triton.sampling.grammar_masks import DeviceMasks
from ....drafter.step.gpu_triton.sampling.sampler import SamplingWorkspace, margins_between, sample_rows
from ....drafter.step.gpu_triton.sampling.selector import find_candidates, walk_paths
from ....drafter.step.gpu_triton.verification import (
    TrimLists,
    accept_and_advance,
    mark_not_numbers,
    trim_drafts,
)
from ..model.decoder import Decoder
from ..model.tensor_parallel import Communicator
from .eagle3_chains import Eagle3Chains
from .remote_exchange import RemoteExchange
from .tp_sampling import Head, best_of_ranks, candidates_of_ranks, first_rank_s, surest_of_ranks


@dataclass(frozen=True, slots=True)
class DeviceModels:
    """A loaded rank: models, their pages, and the requests' state.

    Attributes:
        drafter, draft_cache: a colocated DFlash drafter; else None. At most one of it, `chains`, `remote` and
            `lookup_lengths` is there.
        chains: a colocated EAGLE-3 drafter; else None.
        recurrent: the target's recurrent states; None if it has none.
        remote: what is exchanged with a drafter in a process of its own.
        lookup_lengths: n-gram lengths of prompt lookup. Without this and any drafter a rank decodes plainly.
        workspace: for sampling, over the whole vocabulary or this rank's part of it.
        hidden: [N, H], where decoding steps leave hidden states for log probabilities.
        masks: grammar masks of decoding steps' rows; None if no request can have a grammar.
        copied_margins_N: fp32, margins of drafts that the host wrote (`device_suffixes.py`), instead of a
            drafter or beside it; else None.
    """

    target: Decoder
    cache: PagedKVCache
    drafter: DFlashDrafter | None
    draft_cache: PagedKVCache | None
    states: DeviceStates
    workspace: SamplingWorkspace
    communicator: Communicator
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


class DraftPass:
    """A drafting pass over given inputs.

    Args:
        requests: decoding requests, of which all that may draft do.
        times: timestamps of the step's outcome; the first two are written.
        filters: see `TargetPass`.
    """

    def __init__(
        self, models: DeviceModels, requests: DeviceStepRequests, times: Tensor, *, filters: bool
    ) -> None:
        self._models, self._requests, self._times, self._filters = models, requests, times, filters

    def run(self) -> None:
        models, tables = self._models, self._models.states.tables
        stamp(self._times, 0)
        if models.lookup_lengths is not None:
            look_up(self._requests, tables, *models.lookup_lengths)
            models.workspace.margins_N[: self._requests.num_rows].fill_(float("nan"))
            return stamp(self._times, 1)
        if not models.has_drafter:
            return self.end_on_host(copies=True)
        if models.chains is not None:
            choose = partial(choose_drafts, models, filters=self._filters)
            models.chains.draft(self._requests, tables, models.workspace.margins_N, choose)
            return stamp(self._times, 1)
        if models.remote is not None:  # its margins are in the workspace
            rows = lay_out_block(self._requests, tables, mask_id=0)
            write_drafts(models.remote.drafts_N[: self._requests.num_rows], rows, tables)
            return stamp(self._times, 1)
        drafter, cache = models.drafter, models.draft_cache
        assert drafter is not None and cache is not None, "drafts were planned, but there is no drafter"
        rows, chosen_N, margins_N = self._draft(drafter, cache)
        write_drafts(chosen_N, rows, tables)
        models.workspace.margins_N[: len(margins_N)].copy_(margins_N)
        stamp(self._times, 1)

    def replace_by_copies(self) -> None:
        """Take drafts and margins that the host wrote instead of running the pass."""
        stamp(self._times, 0)
        self.end_on_host(copies=True)

    def end_on_host(self, *, copies: bool) -> None:
        """End the pass after the host has seen its drafts, and has written others if there are `copies`."""
        if copies:
            margins_N, count = self._models.copied_margins_N, self._requests.num_rows
            assert margins_N is not None, "drafts were planned, but there is no drafter"
            self._models.workspace.margins_N[:count].copy_(margins_N[:count])
        stamp(self._times, 1)

    def _draft(self, drafter: DFlashDrafter, cache: PagedKVCache) -> tuple[DeviceStepRows, Tensor, Tensor]:
        """Return the rows of blocks with an anchor and a mask for each draft, and drafts and margins [N]."""
        tables, mask_id = self._models.states.tables, drafter.config.mask_token_id
        rows = lay_out_block(self._requests, tables, mask_id)
        if not drafter.config.samples_anchor:
            hidden_NH = drafter.forward(drafter.embed_block(rows.token_ids_N), rows, cache)
            return rows, *self._choose(drafter, hidden_NH, rows, self._requests.cu_rows_R1)
        requests = self._requests.sampling_anchors()
        block = lay_out_block(requests, tables, mask_id)
        hidden_NH = drafter.forward(drafter.embed_block(block.token_ids_N), block, cache)
        block_at_drafts, cu_rows_R1 = block.at_next_positions(), requests.cu_rows_R1
        chosen_N, margins_N = self._choose(drafter, hidden_NH, block_at_drafts, cu_rows_R1)
        return rows, self._requests.at_masks(chosen_N), self._requests.at_masks(margins_N)

    def _choose(
        self, drafter: DFlashDrafter, hidden_NH: Tensor, rows: DeviceStepRows, cu_rows_R1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return a draft and margin per row, equal on all ranks.

        Args:
            rows: with the positions of the tokens that they sample.
        """
        if drafter.selector is not None:
            return self._select(drafter, drafter.selector, hidden_NH, rows, cu_rows_R1)
        head_inputs = (hidden_NH, rows.slots_N, rows.positions_N)
        chosen_N, margins_N = choose_drafts(self._models, drafter, *head_inputs, filters=self._filters)
        return chosen_N, drafter.sharpen(margins_N, hidden_NH, chosen_N, rows)

    def _select(
        self,
        drafter: DFlashDrafter,
        selector: Selector,
        hidden_NH: Tensor,
        rows: DeviceStepRows,
        cu_rows_R1: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return a draft and margin per row, chosen along each request's path, equal on all ranks.

        With a split head each rank finds candidates within its part of the vocabulary.
        """
        models, communicator, first_id = self._models, self._models.communicator, 0
        top_k, state, is_split = (
            selector.codebooks.top_k,
            models.states.sampling,
            drafter.is_split and not self._filters,
        )
        if is_split:
            logits, first_id = drafter.local_logits(hidden_NH)
        else:
            logits = drafter.logits(hidden_NH)
        candidates = find_candidates(
            logits,
            rows,
            state,
            top_k,
            filters=self._filters,
            workspace=models.workspace,
            vocab_start=first_id,
        )
        if is_split:
            candidates = candidates_of_ranks(candidates, top_k, communicator)
        gates_NE = selector.gates(hidden_NH)
        margins_N = torch.zeros(len(gates_NE), dtype=torch.float32, device=gates_NE.device)
        chosen_N = walk_paths(
            candidates,
            gates_NE,
            rows,
            cu_rows_R1,
            state,
            selector.codebooks,
            filters=self._filters,
            margins_N=margins_N,
            anchor_distance=drafter.config.anchor_distance,
        )
        margins_N = drafter.sharpen(margins_N, hidden_NH, chosen_N, rows)
        if communicator.world_size == 1:
            return chosen_N, margins_N
        return first_rank_s(chosen_N, margins_N, communicator)


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
    ) -> None:
        self._models, self._requests, self._outcome, self._trim = models, requests, outcome, trim
        self._filters, self._masks, self._saves = filters, masks, saves
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
        if models.recurrent is not None:
            rows = replace(rows, states=models.recurrent.build_rows(requests, self._saves))
        hidden_NH, taps_NmH = models.target.forward(rows.token_ids_N, rows, models.cache)
        stamp(times, next(marks))
        chosen_X = self._sample(requests, rows, hidden_NH)
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
        margins_N = self._models.workspace.margins_N
        return trim_drafts(
            requests, margins_N, self._trim, requests.num_rows, outcome.num_drafts_R, outcome.margins_RD
        )

    def _sample(self, requests: DeviceStepRequests, rows: DeviceStepRows, hidden_NH: Tensor) -> Tensor:
        """Sample the target's tokens, accept drafts and advance the requests; returns the tokens."""
        models, index_X = self._models, requests.sampled_X
        row_inputs = (hidden_NH, rows.slots_N, rows.positions_N + 1)
        if index_X is not None:
            row_inputs = [values_N.index_select(0, index_X) for values_N in row_inputs]
        chosen_X = rows.token_ids_N[:0]
        if len(row_inputs[0]):  # chunks of prompts may sample nothing
            chosen_X = choose(models, models.target, *row_inputs, filters=self._filters, masks=self._masks)
        accept_and_advance(chosen_X, requests, models.states.tables, self._outcome.rows_RW1)
        mark_not_numbers(hidden_NH, requests, self._outcome.rows_RW1)
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
) -> Tensor:
    """Return the target's token of each row, int64, equal on all ranks.

    With a split head each rank chooses within its part of the vocabulary, and the best choice wins. Filters
    and masks need all logits on every rank.
    """
    state, workspace, communicator = models.states.sampling, models.workspace, models.communicator
    sampling_inputs = (slots_X, positions_X, state)
    if filters or masks is not None or not head.is_split:
        logits_XV = head.logits(hidden_XH)
        chosen_X, _ = sample_rows(
            logits_XV, *sampling_inputs, filters=filters, workspace=workspace, masks=masks, checks=True
        )
        return chosen_X if communicator.world_size == 1 else communicator.broadcast(chosen_X)
    logits_XU, first_id = head.local_logits(hidden_XH)
    ids_X, scores_X = sample_rows(
        logits_XU, *sampling_inputs, filters=False, workspace=workspace, vocab_start=first_id, checks=True
    )
    return best_of_ranks(ids_X, scores_X, communicator)


def choose_drafts(
    models: DeviceModels,
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
