"""The drafter's pass of a decoding step: it writes blocks, drafts after the known tokens, and margins.

It precedes the target's pass (`target_pass.py`) and is a graph of its own, as the number of rows in blocks
does not depend on the number of drafts that are verified. Drafts are left in the requests' tokens and margins
in the workspace. Created by `DeviceModels.drafting`, called by `cuda_graphs.py`.

Legend: R requests, N rows of blocks, E selector's rank.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ....drafter.compute.memory.kv_cache import PagedKVCache
from ....drafter.dflash.model import DFlashDrafter
from ....drafter.dflash.weights import Selector
from ....drafter.step.gpu_triton.inputs.row_layout import (
    DeviceStepRequests,
    DeviceStepRows,
    lay_out_block,
    write_drafts,
)
from ....drafter.step.gpu_triton.inputs.transfers import stamp
from ....drafter.step.gpu_triton.ngram_lookup import look_up
from ....drafter.step.gpu_triton.sampling.selector import find_candidates, walk_paths
from .eagle3_chains import Eagle3Chains
from .runner_interface import RemoteDrafter
from .tp_sampling import TPSampler, candidates_of_ranks, choose_drafts, first_rank_s


class Drafters(TPSampler, Protocol):
    """The parts of a loaded rank that drafting needs.

    One of these drafts: a drafter with its pages, EAGLE-3 chains, a remote drafter, or prompt lookup.
    """

    @property
    def drafter(self) -> DFlashDrafter | None: ...

    @property
    def draft_cache(self) -> PagedKVCache | None: ...

    @property
    def remote(self) -> RemoteDrafter | None: ...

    @property
    def chains(self) -> Eagle3Chains | None: ...

    @property
    def lookup_lengths(self) -> tuple[int, int] | None: ...


class DraftPass:
    """A drafting pass over given inputs.

    Args:
        requests: decoding requests, of which all that may draft do.
        times: timestamps of the step's outcome; the first two are written.
        filters: see `iteration.Iteration`.
    """

    def __init__(
        self, models: Drafters, requests: DeviceStepRequests, times: Tensor, *, filters: bool
    ) -> None:
        self._models, self._requests, self._times, self._filters = models, requests, times, filters

    def run(self) -> None:
        models, tables = self._models, self._models.states.tables
        stamp(self._times, 0)
        if models.lookup_lengths is not None:
            look_up(self._requests, tables, *models.lookup_lengths)
            models.workspace.margins_N[: self._requests.num_rows].fill_(float("nan"))
            return stamp(self._times, 1)
        if models.chains is not None:
            models.chains.draft(models, self._requests, filters=self._filters)
            return stamp(self._times, 1)
        if models.remote is not None:
            rows = lay_out_block(self._requests, tables, mask_id=0)
            chosen_N, margins_N = models.remote.receive(self._requests.num_rows)
        else:
            drafter, cache = models.drafter, models.draft_cache
            assert drafter is not None and cache is not None, "drafts were planned, but there is no drafter"
            rows = lay_out_block(self._requests, tables, drafter.config.mask_token_id)
            hidden_NH = drafter.forward(drafter.embed_block(rows.token_ids_N), rows, cache)
            chosen_N, margins_N = self._choose(drafter, hidden_NH, rows)
        write_drafts(chosen_N, rows, tables)
        models.workspace.margins_N[: len(margins_N)].copy_(margins_N)
        stamp(self._times, 1)

    def _choose(
        self, drafter: DFlashDrafter, hidden_NH: Tensor, rows: DeviceStepRows
    ) -> tuple[Tensor, Tensor]:
        if drafter.selector is not None:
            return self._select(drafter, drafter.selector, hidden_NH, rows)
        head_inputs = (hidden_NH, rows.slots_N, rows.positions_N)
        return choose_drafts(self._models, drafter, *head_inputs, filters=self._filters)

    def _select(
        self, drafter: DFlashDrafter, selector: Selector, hidden_NH: Tensor, rows: DeviceStepRows
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
        gates_NE, cu_rows_R1 = selector.gates(hidden_NH), self._requests.cu_rows_R1
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
        )
        return first_rank_s(chosen_N, margins_N, communicator)
