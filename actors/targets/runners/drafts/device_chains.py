"""Chains of EAGLE-3 (arXiv:2503.01840), MTP or an assistant driven by the device; on a host by
`drafter/eagle3/proposer.py`.

Drafting runs one pass per token of a chain, with one row for each request that still drafts. Injecting then
writes the entries of the target's rows. All indices are computed on the device from the participating
requests, so that no step waits for the host and a step's chain is captured in one graph, as a block is. Rows
after the last used one are padding: their K/V go to the skip slot, their features to the skip page.

    x of the page before ─▶ [link 1] ─▶ token, x ─▶ [link 2] ─▶ token, x ─▶ ..   while any request drafts
    requests   a  b  c      rows a b c              rows a c .                   (b had one draft)

Legend: R requests, N rows, P pages, m taps, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .....drafter.compute.memory.kv_cache import PagedKVCache
from .....drafter.dflash.model import DFlashDrafter
from .....drafter.eagle3.proposer import ChainDrafter
from .....drafter.step.gpu_triton.inputs.row_layout import (
    DeviceStepRequests,
    DeviceStepRows,
    SlotTables,
    lay_out_rows,
    write_drafts,
)
from .device_trees import StepTrees
from .draft_source import DeviceDrafts, Drafter, StepMemory, VerifiedRows
from .tp_sampling import choose_drafts


class DeviceChains(DeviceDrafts):
    """A drafter of chains, its pages, and the newest feature stored for each page.

    Attributes:
        features_PH: the last row is the skip page's.
    """

    has_context = True

    def __init__(
        self,
        drafter: ChainDrafter,
        cache: PagedKVCache,
        memory: StepMemory,
        features_PH: Tensor | None = None,
    ) -> None:
        self.drafter, self.cache, self._memory = drafter, cache, memory
        if features_PH is None:
            shape = cache.num_pages + 1, drafter.config.hidden_size
            features_PH = torch.zeros(shape, dtype=drafter.dtype, device=drafter.device)
        self.features_PH = features_PH
        self.kept_by_page = (cache.kv, features_PH[None])

    def with_drafter(self, drafter: Drafter) -> DeviceChains:
        assert not isinstance(drafter, DFlashDrafter), "the new drafter has the kind of the old one"
        return DeviceChains(drafter, self.cache, self._memory, self.features_PH)

    def propose(self, requests: DeviceStepRequests, trees: StepTrees | None, *, filters: bool) -> None:
        tables, margins_N = self._memory.states.tables, self._memory.workspace.margins_N
        num_requests = len(requests.slots_R)
        first_R, begins_R = requests.cu_rows_R1[:-1], _slots(requests)
        x_RH = self._previous_features(tables, requests, tables.num_computed.index_select(0, begins_R))
        x_RH = torch.cat((x_RH, x_RH[:1]))  # a row for padding
        for depth in range(requests.max_drafts):
            link = _requests_at_depth(requests, depth)
            at = replace(tables, num_computed=tables.num_computed + depth)
            rows, owners_N = lay_out_rows(link, at), _owners(link)
            x_NH = x_RH.index_select(0, owners_N)
            if self.drafter.has_layer_per_draft:
                normed_NH = self._run_layer(depth, x_RH, owners_N, requests, tables)
            else:
                places = rows
                if self.drafter.reads_target_kv:
                    before = replace(tables, num_computed=(tables.num_computed - 1).clamp(min=0))
                    places = lay_out_rows(link, before)
                x_NH, normed_NH = self.drafter.forward(rows.token_ids_N, x_NH, places, self.cache, depth)
            next_rows = replace(rows, positions_N=rows.positions_N + 1)
            head_inputs = (normed_NH, next_rows.slots_N, next_rows.positions_N)
            chosen_N, chosen_margins_N = choose_drafts(
                self._memory,
                _FullHead(self.drafter),
                *head_inputs,
                filters=filters,
                margins_N=torch.empty(len(normed_NH), device=normed_NH.device),
            )
            write_drafts(chosen_N, next_rows, tables)
            x_RH = x_RH.index_copy(0, owners_N, x_NH)
            # An anchor's margin is unused, so padding's margins are written to the first anchor's.
            places_N = first_R.index_select(0, owners_N.clamp(max=num_requests - 1)).long() + 1 + depth
            places_N = places_N.masked_fill(owners_N == num_requests, 0)
            margins_N.index_copy_(0, places_N, chosen_margins_N)

    def _run_layer(
        self,
        depth: int,
        states_RT: Tensor,
        owners_N: Tensor,
        requests: DeviceStepRequests,
        tables: SlotTables,
    ) -> Tensor:
        """Run layer `depth` on the entries from the anchor's on; return hidden states [N, H] of the last.

        Args:
            states_RT: the newest states of each request, and of padding, side by side.
            owners_N: request of each result.
        """
        link = _requests_at_depth(requests, depth, num_rows=depth + 1)
        rows, requests_M = lay_out_rows(link, tables), _owners(link)
        ends_R = torch.nn.functional.pad(link.cu_rows_R1[1:], (0, 1)).long()
        states_RLH = states_RT.unflatten(1, (self.drafter.config.num_layers, -1))
        # The last row of a request takes the newest state.
        after_M = ends_R[requests_M] - 1 - torch.arange(len(requests_M), device=ends_R.device)
        states_MH = states_RLH[requests_M, after_M.clamp(0, depth)]
        _, normed_MH = self.drafter.forward(rows.token_ids_N, states_MH, rows, self.cache, depth)
        return normed_MH.index_select(0, (ends_R[owners_N] - 1).clamp(min=0))

    def inject(self, verified: VerifiedRows) -> None:
        requests, rows, tables = verified.requests, verified.rows, self._memory.states.tables
        parts, first_R = [self.drafter.features(verified.taps_NmH)], requests.cu_rows_R1[:-1].long()
        num_rows, size = parts[0].shape
        positions_R = rows.positions_N.index_select(0, first_R.clamp(max=num_rows - 1))
        firsts_R = first_R.masked_fill(requests.cu_rows_R1.diff() == 0, num_rows)
        for stored_RH in self._previous_features(tables, requests, positions_R).split(size, dim=1):
            before_NH = torch.cat((parts[-1][:1], parts[-1]))  # of the row before; the last one is unused
            parts.append(before_NH.index_copy_(0, firsts_R, stored_RH)[:-1])
        self.drafter.write_entries(rows.token_ids_N, torch.cat(parts[1:], dim=1), rows, self.cache)
        self._store_features(torch.cat(parts[:-1], dim=1), requests, rows, verified.num_tokens_R)

    def _previous_features(self, tables: SlotTables, requests: DeviceStepRequests, first_R: Tensor) -> Tensor:
        """Return the features [R, H] of the position before each request's first row; zeros at the start."""
        before_R, pages = first_R.long() - 1, tables.page_tables[self.cache.group(0)]
        pages_R = pages[_slots(requests), before_R.clamp(min=0) // tables.page_size]
        found_RH = self.features_PH.index_select(0, pages_R)
        return found_RH.masked_fill((before_R < 0).unsqueeze(1), 0.0)

    def _store_features(
        self, g_NH: Tensor, requests: DeviceStepRequests, rows: DeviceStepRows, num_tokens_R: Tensor
    ) -> None:
        """Store the feature of each page's newest committed position among these rows."""
        num_verified_R = requests.samples_R * (1 + requests.num_drafts_R)
        num_committed_R = requests.cu_rows_R1.diff() - num_verified_R + num_tokens_R
        owners_N = _owners(replace(requests, num_rows=len(g_NH)))
        is_real_N = owners_N < len(num_committed_R)
        owners_N = owners_N.clamp(max=len(num_committed_R) - 1)
        place_N = torch.arange(len(g_NH), device=g_NH.device) - requests.cu_rows_R1[:-1][owners_N]
        slots_N, size = rows.kv_slots[self.cache.group(0)], self.cache.page_size
        ends_N = (slots_N % size == size - 1) | (place_N == num_committed_R[owners_N] - 1)
        is_stored_N = is_real_N & ends_N & (place_N < num_committed_R[owners_N])
        pages_N = torch.where(is_stored_N, slots_N // size, self.cache.num_pages)
        self.features_PH.index_copy_(0, pages_N, g_NH)


@dataclass(frozen=True, slots=True)
class _FullHead:
    """A drafter's head as `tp_sampling.Head`: every rank gets all logits."""

    drafter: ChainDrafter
    is_split = False

    def logits(self, hidden_XH: Tensor, /) -> Tensor:
        return self.drafter.logits(hidden_XH)

    def local_logits(self, hidden_XH: Tensor, /) -> tuple[Tensor, int]:
        raise AssertionError("only split heads have local logits")


def _requests_at_depth(requests: DeviceStepRequests, depth: int, num_rows: int = 1) -> DeviceStepRequests:
    """Return requests with `num_rows` for each that has more than `depth` drafts, and none for the others."""
    is_real_R = requests.cu_rows_R1.diff() > 0
    drafts_on_R = (is_real_R & (requests.num_drafts_R > depth)).int()
    cu_rows_R1 = torch.nn.functional.pad((drafts_on_R * num_rows).cumsum(0, dtype=torch.int32), (1, 0))
    return replace(requests, cu_rows_R1=cu_rows_R1, num_rows=len(drafts_on_R) * num_rows, max_rows=num_rows)


def _owners(requests: DeviceStepRequests) -> Tensor:
    """Return the index of each row's request, int64 [N]; R for padding."""
    rows_N = torch.arange(requests.num_rows, device=requests.slots_R.device, dtype=torch.int32)
    return torch.searchsorted(requests.cu_rows_R1[1:].contiguous(), rows_N, right=True)


def _slots(requests: DeviceStepRequests) -> Tensor:
    """Return the requests' slots, int64 [R]; slot 0 for padding."""
    return requests.slots_R.long().clamp(min=0)
