"""A drafter's session for one engine with device-driven steps: the counterpart of `CpuDrafterSession`.

It gets the plans that the target gets, so it has the same passes with the same rows, including padding, and
the sizes of all messages are known. The target sends the numbers of verified drafts and its choices, and the
same kernel accepts drafts on both sides. If drafts came too late, both sides use the zeros that replaced
them. None of it is in a CUDA graph yet.

Legend: N rows of a pass, X sampled rows, H hidden, R requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ....cluster.step.scheduler_output import SchedulerOutput
from ....drafter.compute.memory.kv_cache import PagedKVCache
from ....drafter.dflash.model import DFlashDrafter
from ....drafter.step.gpu_triton.inputs.row_layout import (
    NUM_LISTS,
    DeviceStepRequests,
    Ints,
    lay_out_block,
    lay_out_rows,
    pack,
    write_drafts,
)
from ....drafter.step.gpu_triton.inputs.transfers import Upload
from ....drafter.step.gpu_triton.request_states import DeviceStates
from ....drafter.step.gpu_triton.sampling.sampler import SamplingWorkspace, margins_between, sample_rows
from ....drafter.step.gpu_triton.sampling.selector import find_candidates, walk_paths
from ....drafter.step.gpu_triton.verification import accept_and_advance
from ...targets.loading.load_plan import LoadPlan
from ...targets.loading.rank_loader import device_limits
from ...targets.runners.cuda_graphs import PassKind, StepKinds
from ..shm.tensor_mailbox import Kinds


@dataclass(frozen=True, slots=True)
class _Open:
    """The requests to draft for, and those of each of the target's passes, in order."""

    plan: SchedulerOutput
    block: DeviceStepRequests | None
    passes: Sequence[DeviceStepRequests]
    filters: bool


class GpuDrafterSession:
    """`num_pages`: pages of each pool, as the target has them."""

    def __init__(
        self, plan: LoadPlan, drafter: DFlashDrafter, cache: PagedKVCache, num_pages: tuple[int, ...]
    ) -> None:
        config, (max_requests, num_rows) = plan.config, device_limits(plan)
        size = (config.max_num_seqs, plan.max_model_len, num_pages, plan.page_size)
        self._drafter, self._cache = drafter, cache
        self._states = DeviceStates(*size, plan.device, plan.pages)
        self._workspace = SamplingWorkspace.build(num_rows, plan.target.vocab_size, plan.device)
        self._kinds = StepKinds(max_requests, plan.num_speculative_tokens, plan.max_num_batched_tokens)
        self._max_rows = DeviceStepRequests.list_length(max_requests)
        num_values = 2 * NUM_LISTS * self._max_rows
        self._upload = Upload(self._states.arena, num_values, self._states.max_changes)
        self._open: dict[int, _Open] = {}

    def begin(self, plan: SchedulerOutput) -> None:
        decodes_R = _decodes(plan)
        decoding, prompts = np.flatnonzero(decodes_R), np.flatnonzero(~decodes_R)
        lists = [self._pack(plan, requests_G) for requests_G in (decoding, prompts)]
        self._upload.send(np.concatenate(lists, axis=None), self._states.changes(plan))
        # A later plan may overwrite the upload before this one has ended.
        decoding_lists, prompt_lists = (
            self._upload.values.clone().view(2, NUM_LISTS, self._max_rows).unbind(0)
        )
        passes: list[DeviceStepRequests] = []
        filters = bool(len(decoding)) and self._states.filters(plan.slots[decoding])
        block: DeviceStepRequests | None = None
        if len(decoding):
            drafters, targets = self._kinds.of(plan, decoding, filters=filters)
            passes.append(_requests_of(targets, decoding_lists))
            block = None if drafters is None else _requests_of(drafters, decoding_lists)
        if len(prompts):
            spans = (plan.num_computed[prompts], plan.num_rows[prompts])
            passes.append(DeviceStepRequests.prompts(prompt_lists, *spans, int(plan.samples[prompts].sum())))
        self._open[plan.step] = _Open(plan, block, passes, filters)

    def draft(self, plan: SchedulerOutput) -> tuple[Tensor, Tensor]:
        """Return a token and a margin for each row of `lay_out_block`'s blocks of decoding requests [N]."""
        step, drafter, tables = self._open[plan.step], self._drafter, self._states.tables
        assert step.block is not None, "draft() is called for plans with drafts"
        samples_anchor = drafter.config.samples_anchor
        requests = step.block.sampling_anchors() if samples_anchor else step.block
        rows = lay_out_block(requests, tables, drafter.config.mask_token_id)
        hidden_NH = drafter.forward(drafter.embed_block(rows.token_ids_N), rows, self._cache)
        if samples_anchor:
            rows = rows.at_next_positions()
        logits_NV, selector = drafter.logits(hidden_NH), drafter.selector
        sampling, filters = self._states.sampling, step.filters
        margins_N = torch.empty(len(hidden_NH), dtype=torch.float32, device=hidden_NH.device)
        if selector is None:
            chosen_N, scores_N = sample_rows(
                logits_NV,
                rows.slots_N,
                rows.positions_N,
                sampling,
                filters=filters,
                workspace=self._workspace,
                drafts=True,
                seconds_N=margins_N,
            )
            margins_N = margins_between(scores_N, margins_N)
        else:
            codebooks, cu_rows_R1 = selector.codebooks, requests.cu_rows_R1
            candidates = find_candidates(
                logits_NV, rows, sampling, codebooks.top_k, filters=filters, workspace=self._workspace
            )
            gates_NE = selector.gates(hidden_NH)
            chosen_N = walk_paths(
                candidates,
                gates_NE,
                rows,
                cu_rows_R1,
                sampling,
                codebooks,
                filters=filters,
                margins_N=margins_N,
                anchor_distance=drafter.config.anchor_distance,
            )
        margins_N = drafter.sharpen(margins_N, hidden_NH, chosen_N, rows)
        write_drafts(chosen_N, rows, tables)
        if samples_anchor:
            chosen_N, margins_N = map(step.block.at_masks, (chosen_N, margins_N))
        return chosen_N, margins_N

    def num_parts(self, plan: SchedulerOutput) -> int:
        return len(self._open[plan.step].passes)

    def result_kinds(self, plan: SchedulerOutput, part: int) -> Kinds:
        """Return the kinds of verified drafts [R], the target's choices [X], and features [N, H]."""
        requests, drafter = self._open[plan.step].passes[part], self._drafter
        num_chosen = requests.num_rows if requests.sampled_X is None else len(requests.sampled_X)
        features = (requests.num_rows, drafter.config.hidden_size)
        return [
            ((len(requests.slots_R),), torch.int32),
            ((num_chosen,), torch.int64),
            (features, drafter.dtype),
        ]

    def take_in(self, plan: SchedulerOutput, part: int, values: Sequence[Tensor], *, followed: bool) -> None:
        step, tables = self._open[plan.step], self._states.tables
        requests, device = step.passes[part], self._drafter.device
        num_drafts_R, chosen_X, c_NH = (value.to(device) for value in values)
        if step.block is not None and part == 0:
            if not followed:
                block = lay_out_block(step.block, tables, mask_id=0)
                write_drafts(torch.zeros_like(block.token_ids_N), block, tables)
            requests = _with_num_drafts(requests, num_drafts_R)
        rows = lay_out_rows(requests, tables)
        outcome = torch.empty(
            len(requests.slots_R), requests.max_drafts + 2, dtype=torch.int32, device=device
        )
        accept_and_advance(chosen_X, requests, tables, outcome)
        self._drafter.write_context(c_NH, rows, self._cache)
        if part == len(step.passes) - 1:
            del self._open[plan.step]

    def _pack(self, plan: SchedulerOutput, requests_G: np.ndarray) -> Ints:
        slots_G, rows_G, drafts_G = (x[requests_G] for x in (plan.slots, plan.num_rows, plan.num_drafts))
        return pack(slots_G, rows_G, drafts_G, plan.samples[requests_G], self._max_rows)


def _requests_of(kind: PassKind, lists_LW: Tensor) -> DeviceStepRequests:
    return DeviceStepRequests.decoding(lists_LW, kind.num_requests, kind.width, kind.num_rows)


def _with_num_drafts(requests: DeviceStepRequests, num_drafts_R: Tensor) -> DeviceStepRequests:
    known_R = requests.cu_rows_R1.diff() - requests.num_drafts_R
    cu_rows_R1 = torch.nn.functional.pad((known_R + num_drafts_R).cumsum(0, dtype=torch.int32), (1, 0))
    return replace(requests, cu_rows_R1=cu_rows_R1, num_drafts_R=num_drafts_R, first_chosen_R=cu_rows_R1[:-1])


def _decodes(plan: SchedulerOutput) -> np.ndarray:
    return (plan.num_rows == plan.num_drafts + 1) & plan.samples
