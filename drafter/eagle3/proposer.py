"""Proposes chains, one pass per token, and writes entries after the target's pass.

The drafter is EAGLE-3's, a target's own layer for multi-token prediction (`actors/targets/model/mtp.py`), or
an assistant, which has no entries and reads the target's K and V (`actors/targets/model/assistant.py`).

Drafts are sampled as the target samples: same filters, same noise at the same position, on the drafter's
logits; each has a margin (`step/inputs/proposals.py`). The first pass needs the target's feature of the
position before the anchor. Each page stores the feature of its newest committed position, so it is available
after a step, after a prefix hit, and to all requests that share the page.

Legend: N target rows, R requests of the step, E requests that still draft, K most drafts, D drafts before
one, m taps, H hidden, L layers, T = L H, P pages.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...cluster.step.scheduler_output import SchedulerOutput
from ..compute.backend import PlacedRows
from ..compute.eager.attention_metadata import AttentionBatch
from ..compute.memory.kv_cache import PagedKVCache
from ..step.inputs.proposals import Proposals
from ..step.inputs.row_layout import StepRows
from ..step.request_states import RequestStates
from ..step.sampling.sampler import sample_with_margins
from ..step.sampling.step_ops import DEFINITION, StepOperators


class HasSizes(Protocol):
    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...


class ChainDrafter(Protocol):
    """A drafter that combines each token with a feature of the position before (`model.py`)."""

    @property
    def config(self) -> HasSizes: ...

    @property
    def reads_target_kv(self) -> bool:
        """Whether all passes read the target's K and V of the tokens before the anchor, and write none."""
        ...

    @property
    def has_layer_per_draft(self) -> bool:
        """Whether draft k is made by layer k, which reads the target's states alone.

        Its feature is then as many states as there are layers, newest first, and its pass runs the entries
        from the anchor's on.
        """
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def new_cache(self, num_pages: int, page_size: int, dtype: torch.dtype | None = None) -> PagedKVCache: ...

    def features(self, taps_NmH: Tensor) -> Tensor: ...

    def write_entries(
        self, token_ids_N: Tensor, g_NH: Tensor, rows: PlacedRows, cache: PagedKVCache, /
    ) -> None: ...

    def forward(
        self, token_ids_N: Tensor, g_NH: Tensor, rows: PlacedRows, cache: PagedKVCache, depth: int, /
    ) -> tuple[Tensor, Tensor]: ...

    def logits(self, normed_XH: Tensor, /) -> Tensor: ...


class ChainProposer:
    """A drafter with its pages; `operators` sample the drafts."""

    def __init__(
        self,
        drafter: ChainDrafter,
        cache: PagedKVCache,
        operators: StepOperators = DEFINITION,
        features_PH: Tensor | None = None,
    ) -> None:
        self.drafter = drafter
        self.cache = cache
        self._operators = operators
        if features_PH is None:
            shape = cache.num_pages + 1, drafter.config.hidden_size
            features_PH = torch.zeros(shape, dtype=drafter.dtype, device=drafter.device)
        self._features_PH = features_PH
        self._before_RH = features_PH[:0]  # this step's features of the positions before the first rows

    def with_drafter(self, drafter: ChainDrafter) -> ChainProposer:
        """Return a proposer with another drafter of the same shape over the same pages."""
        return ChainProposer(drafter, self.cache, self._operators, self._features_PH)

    @property
    def kept_by_page(self) -> tuple[Tensor, ...]:
        """All that is kept of the tokens in a page: [A, P + 1, ...] each."""
        return self.cache.kv, self._features_PH[None]

    def settle(self) -> None:
        """Nothing is deferred."""

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        """Return drafts and margins [R, K]; K = 0 if no request drafts."""
        pages_R = torch.from_numpy(states.pages_before(plan, self.cache.group(0))).to(states.device)
        self._before_RH = self._features_PH.index_select(0, pages_R.clamp(min=0))
        self._before_RH.masked_fill_((pages_R < 0).unsqueeze(1), 0.0)  # start of a sequence
        num_drafts = int(plan.num_drafts.max(initial=0))
        if num_drafts == 0:
            return Proposals.none(plan.num_requests, states.device)
        shape, device = (plan.num_requests, num_drafts), states.device
        drafts_RK = torch.full(shape, -1, dtype=torch.int64, device=device)
        margins_RK = torch.full(shape, float("nan"), device=device)
        self._fill(plan, states, drafts_RK, margins_RK)
        return Proposals(drafts_RK, margins_RK)

    def _fill(
        self, plan: SchedulerOutput, states: RequestStates, drafts_RK: Tensor, margins_RK: Tensor
    ) -> None:
        x_RH, tokens_R = self._before_RH, drafts_RK.new_zeros(len(drafts_RK))
        by_layer = self.drafter.has_layer_per_draft
        for depth in range(drafts_RK.shape[1]):
            drafting_E = np.flatnonzero(plan.num_drafts > depth)
            num_rows = depth + 1 if by_layer else 1
            rows = states.lay_out_link(plan, drafting_E, depth, AttentionBatch.build, num_rows)
            everyone = len(drafting_E) == plan.num_requests
            index_E = torch.from_numpy(drafting_E).to(drafts_RK.device)
            x_EH = x_RH if everyone else x_RH.index_select(0, index_E)
            if by_layer:
                normed_EH = self._run_layer(depth, x_EH, drafts_RK[index_E, :depth], rows)
            else:
                tokens_E = rows.token_ids_N if depth == 0 else tokens_R.index_select(0, index_E)
                places = rows
                if self.drafter.reads_target_kv:
                    places = states.lay_out_link(plan, drafting_E, -1, AttentionBatch.build)
                x_EH, normed_EH = self.drafter.forward(tokens_E, x_EH, places, self.cache, depth)
            logits_EV = self.drafter.logits(normed_EH)
            tokens_E, margins_E = sample_with_margins(logits_EV, rows.sampling, self._operators)
            x_RH = x_EH if everyone else x_RH.index_copy(0, index_E, x_EH)
            tokens_R = tokens_R.index_copy(0, index_E, tokens_E)
            drafts_RK[index_E, depth], margins_RK[index_E, depth] = tokens_E, margins_E

    def _run_layer(self, depth: int, states_ET: Tensor, drafts_ED: Tensor, rows: StepRows) -> Tensor:
        """Run layer `depth` on the entries from the anchor's on; return hidden states [E, H] of the last.

        Args:
            states_ET: the newest states of each request, side by side.
            drafts_ED: those before it.
        """
        tokens_EW = torch.cat((rows.token_ids_N.view(-1, depth + 1)[:, :1], drafts_ED), dim=1)
        states_ELH = states_ET.unflatten(1, (self.drafter.config.num_layers, -1))
        states_NH = states_ELH[:, : depth + 1].flip(1).flatten(0, 1)
        _, normed_NH = self.drafter.forward(tokens_EW.flatten(), states_NH, rows, self.cache, depth)
        return normed_NH.index_select(0, rows.sampled_X)

    def inject(self, taps_NmH: Tensor, rows: StepRows, num_tokens_R: Tensor) -> None:
        """Write entries of the target's rows, rejected drafts included, and keep the newest features.

        As in the target's pages, entries of rejected drafts are overwritten before any mask exposes them.
        `num_tokens_R` are tokens that the step produced.
        """
        first_R = np.cumsum(rows.num_rows_R) - rows.num_rows_R
        starts_R = torch.from_numpy(first_R).to(taps_NmH.device)
        parts = [self.drafter.features(taps_NmH)]
        for stored_RH in self._before_RH.split(parts[0].shape[1], dim=1):
            before_NH = parts[-1].roll(1, 0)
            before_NH[starts_R] = stored_RH
            parts.append(before_NH)
        self.drafter.write_entries(rows.token_ids_N, torch.cat(parts[1:], dim=1), rows, self.cache)
        g_NT = torch.cat(parts[:-1], dim=1)
        self._store_features(g_NT, rows, first_R, num_tokens_R.cpu().numpy())

    def _store_features(
        self, g_NH: Tensor, rows: StepRows, first_R: np.ndarray, num_tokens_R: np.ndarray
    ) -> None:
        """Store in each page the feature of its newest committed position among these rows."""
        num_rows_R, page_size = rows.num_rows_R, self.cache.page_size
        # Committed rows: all but rejected drafts; the last produced token has no row yet.
        accepted_end_R = num_rows_R - rows.counts_R.cpu().numpy() + num_tokens_R
        in_request_N = np.arange(len(g_NH)) - np.repeat(first_R, num_rows_R)
        slots_N = rows.kv_slots[self.cache.group(0)].cpu().numpy()
        ends_N = (slots_N % page_size == page_size - 1) | (
            in_request_N == np.repeat(accepted_end_R, num_rows_R) - 1
        )
        is_stored = np.flatnonzero(ends_N & (in_request_N < np.repeat(accepted_end_R, num_rows_R)))
        pages = torch.from_numpy(slots_N[is_stored] // page_size).to(g_NH.device)
        self._features_PH[pages] = g_NH[torch.from_numpy(is_stored).to(g_NH.device)]
