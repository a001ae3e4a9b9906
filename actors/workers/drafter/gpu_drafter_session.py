"""A drafter's session for one engine with device-driven steps: the counterpart of `CpuDrafterSession`.

It gets the plans that the target gets, so it has the same passes with the same rows, including padding, and
the sizes of all messages are known. The target sends the numbers of verified drafts and its choices, and the
same kernel accepts drafts on both sides. If drafts came too late, both sides use the zeros that replaced
them. Passes of decoding requests read and write memory of their own, so on a GPU they are CUDA graphs,
captured as they are needed: a session begins while its engine already serves.

Legend: N rows of a pass, X sampled rows, H hidden, R requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

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
from ...targets.loading.executor_info import device_limits
from ...targets.loading.load_plan import LoadPlan
from ...targets.runners.cuda_graphs import LazyGraphs, PassKind, StepKinds
from ..shm.tensor_mailbox import Kinds


@dataclass(frozen=True, slots=True)
class _Open:
    """A plan's passes: the drafter's and the target's over decoding requests, and the prompts' pass."""

    decoding_LW: Tensor
    block: PassKind | None
    target: PassKind | None
    prompts: DeviceStepRequests | None


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
        self._graphs = LazyGraphs(plan.device)
        rows, device = self._kinds.rows[-1], plan.device
        # What the passes of decoding requests read and write.
        self._decoding_LW = torch.zeros(NUM_LISTS, self._max_rows, dtype=torch.int32, device=device)
        self._drafts_N = torch.zeros(rows, dtype=torch.int64, device=device)
        self._margins_N = torch.zeros(rows, dtype=torch.float32, device=device)
        self._num_drafts_R = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._chosen_N = torch.zeros(rows, dtype=torch.int64, device=device)
        self._features_NH = torch.zeros(rows, drafter.config.hidden_size, dtype=drafter.dtype, device=device)

    def begin(self, plan: SchedulerOutput) -> None:
        decodes_R = _decodes(plan)
        decoding, prompts = np.flatnonzero(decodes_R), np.flatnonzero(~decodes_R)
        lists = [self._pack(plan, requests_G) for requests_G in (decoding, prompts)]
        self._upload.send(np.concatenate(lists, axis=None), self._states.changes(plan))
        # A later plan may overwrite the upload before this one has ended.
        decoding_LW, prompts_LW = self._upload.values.clone().view(2, NUM_LISTS, self._max_rows).unbind(0)
        block = target = requests = None
        if len(decoding):
            filters = self._states.filters(plan.slots[decoding])
            block, target = self._kinds.of(plan, decoding, filters=filters)
        if len(prompts):
            spans = (plan.num_computed[prompts], plan.num_rows[prompts])
            requests = DeviceStepRequests.prompts(prompts_LW, *spans, int(plan.samples[prompts].sum()))
        self._open[plan.step] = _Open(decoding_LW, block, target, requests)

    def draft(self, plan: SchedulerOutput) -> tuple[Tensor, Tensor]:
        """Return a token and a margin for each row of `lay_out_block`'s blocks of decoding requests [N].

        Both are valid until the next pass.
        """
        step = self._open[plan.step]
        kind = step.block
        assert kind is not None, "draft() is called for plans with drafts"
        self._decoding_LW.copy_(step.decoding_LW)
        self._graphs.run(kind, partial(self._run_block, kind))
        return self._drafts_N[: kind.num_rows], self._margins_N[: kind.num_rows]

    def num_parts(self, plan: SchedulerOutput) -> int:
        step = self._open[plan.step]
        return (step.target is not None) + (step.prompts is not None)

    def result_kinds(self, plan: SchedulerOutput, part: int) -> Kinds:
        """Return the kinds of verified drafts [R], the target's choices [X], and features [N, H]."""
        step, drafter = self._open[plan.step], self._drafter
        if step.target is not None and part == 0:
            num_requests, num_rows = step.target.num_requests, step.target.num_rows
            num_chosen = num_rows
        else:
            assert step.prompts is not None and step.prompts.sampled_X is not None, "a part is either"
            num_requests, num_rows = len(step.prompts.slots_R), step.prompts.num_rows
            num_chosen = len(step.prompts.sampled_X)
        return [
            ((num_requests,), torch.int32),
            ((num_chosen,), torch.int64),
            ((num_rows, drafter.config.hidden_size), drafter.dtype),
        ]

    def take_in(self, plan: SchedulerOutput, part: int, values: Sequence[Tensor], *, followed: bool) -> None:
        step = self._open[plan.step]
        if step.target is not None and part == 0:
            self._decoding_LW.copy_(step.decoding_LW)
            buffers = self._num_drafts_R, self._chosen_N, self._features_NH
            for buffer, value in zip(buffers, values, strict=True):
                buffer[: len(value)].copy_(value)
            if step.block is not None and not followed:
                tables = self._states.tables
                block = lay_out_block(self._requests_of(step.block), tables, mask_id=0)
                write_drafts(torch.zeros_like(block.token_ids_N), block, tables)
            self._graphs.run(step.target, partial(self._run_target, step.target))
        else:
            assert step.prompts is not None, "a part is either"
            _, chosen_X, c_NH = (value.to(self._drafter.device) for value in values)
            self._advance(step.prompts, chosen_X, c_NH)
        if part == self.num_parts(plan) - 1:
            del self._open[plan.step]

    def _run_block(self, kind: PassKind) -> None:
        drafter, tables = self._drafter, self._states.tables
        samples_anchor = drafter.config.samples_anchor
        block = self._requests_of(kind)
        requests = block.sampling_anchors() if samples_anchor else block
        rows = lay_out_block(requests, tables, drafter.config.mask_token_id)
        hidden_NH = drafter.forward(drafter.embed_block(rows.token_ids_N), rows, self._cache)
        if samples_anchor:
            rows = rows.at_next_positions()
        logits_NV, selector = drafter.logits(hidden_NH), drafter.selector
        sampling, filters = self._states.sampling, kind.filters
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
                anchor_distance=drafter.anchor_distance,
            )
        margins_N = drafter.sharpen(margins_N, hidden_NH, chosen_N, rows)
        write_drafts(chosen_N, rows, tables)
        if samples_anchor:
            chosen_N, margins_N = map(block.at_masks, (chosen_N, margins_N))
        self._drafts_N[: kind.num_rows].copy_(chosen_N)
        self._margins_N[: kind.num_rows].copy_(margins_N)

    def _run_target(self, kind: PassKind) -> None:
        requests = self._requests_of(kind)
        if kind.width > 1:
            requests = _with_num_drafts(requests, self._num_drafts_R[: kind.num_requests])
        self._advance(requests, self._chosen_N[: kind.num_rows], self._features_NH[: kind.num_rows])

    def _advance(self, requests: DeviceStepRequests, chosen_X: Tensor, c_NH: Tensor) -> None:
        """Accept drafts and write context, as the target's pass did."""
        tables, shape = self._states.tables, (len(requests.slots_R), requests.max_drafts + 2)
        rows = lay_out_rows(requests, tables)
        outcome = torch.empty(shape, dtype=torch.int32, device=chosen_X.device)
        accept_and_advance(chosen_X, requests, tables, outcome)
        self._drafter.write_context(c_NH, rows, self._cache)

    def _requests_of(self, kind: PassKind) -> DeviceStepRequests:
        return DeviceStepRequests.decoding(self._decoding_LW, kind.num_requests, kind.width, kind.num_rows)

    def _pack(self, plan: SchedulerOutput, requests_G: np.ndarray) -> Ints:
        slots_G, rows_G, drafts_G = (x[requests_G] for x in (plan.slots, plan.num_rows, plan.num_drafts))
        return pack(slots_G, rows_G, drafts_G, plan.samples[requests_G], self._max_rows)


def _with_num_drafts(requests: DeviceStepRequests, num_drafts_R: Tensor) -> DeviceStepRequests:
    known_R = requests.cu_rows_R1.diff() - requests.num_drafts_R
    cu_rows_R1 = torch.nn.functional.pad((known_R + num_drafts_R).cumsum(0, dtype=torch.int32), (1, 0))
    return replace(requests, cu_rows_R1=cu_rows_R1, num_drafts_R=num_drafts_R, first_chosen_R=cu_rows_R1[:-1])


def _decodes(plan: SchedulerOutput) -> np.ndarray:
    return (plan.num_rows == plan.num_drafts + 1) & plan.samples
