"""A drafter's session for one engine with device-driven steps: the counterpart of `CpuDrafterSession`.

It gets the plans that the target gets, so it has the same passes with the same rows, including padding, and
the sizes of all messages are known. The target sends the numbers of verified drafts and its choices, and the
same kernel accepts drafts on both sides. If drafts came too late, both sides use the zeros that replaced
them. Passes of decoding requests read and write memory of their own, so on a GPU they are CUDA graphs,
captured as they are needed: a session begins while its engine already serves.

Draft trees grow here, as the plan has the curves, and a grown tree takes fewer bytes than its candidates. The
target sends the accepted paths, which are written as a chain with all drafts accepted.

Legend: N rows of a pass, X sampled rows, H hidden, R requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ....cluster.step.scheduler_output import SchedulerOutput
from ....drafter.compute.memory.kv_cache import PagedKVCache
from ....drafter.dflash.model import DFlashDrafter
from ....drafter.step.gpu_triton.draft_trees import DeviceTrees
from ....drafter.step.gpu_triton.inputs.row_layout import (
    DeviceStepRequests,
    lay_out_block,
    lay_out_rows,
    write_drafts,
)
from ....drafter.step.gpu_triton.inputs.transfers import Upload
from ....drafter.step.gpu_triton.request_states import DeviceStates
from ....drafter.step.gpu_triton.sampling.sampler import SamplingWorkspace
from ....drafter.step.gpu_triton.verification import accept_and_advance
from ...targets.loading.resolved_config import ResolvedConfig
from ...targets.model.tensor_parallel import SingleRank
from ...targets.runners.cuda_graphs import LazyGraphs, PassKind, StepKinds
from ...targets.runners.drafts.device_blocks import BlockPass
from ...targets.runners.drafts.device_trees import TreeMemory
from ...targets.runners.drafts.draft_source import StepMemory
from ...targets.runners.plan_layout import PlanLayout, decoding_and_prompts
from ..shm.tensor_mailbox import Kinds


@dataclass(frozen=True, slots=True)
class _Open:
    """A plan's passes: the drafter's and the target's over decoding requests, and the prompts' pass.

    `values`: those of the decoding requests (`GpuDrafterSession._values`).
    """

    values: Tensor
    block: PassKind | None
    target: PassKind | None
    prompts: DeviceStepRequests | None


def values_each(resolved: ResolvedConfig) -> int:
    """Return the int32 values of a request that `draft` returns instead of tokens; 0 if these are all."""
    return 0 if resolved.tree is None else DeviceTrees.num_values(resolved.tree)


class GpuDrafterSession:
    """`num_pages`: pages of each pool, as the target has them."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        drafter: DFlashDrafter,
        cache: PagedKVCache,
        num_pages: tuple[int, ...],
    ) -> None:
        config, tree, device = resolved.config, resolved.tree, resolved.device
        max_requests = resolved.step_sizes[0]
        size = (config.max_num_seqs, resolved.max_model_len, num_pages, resolved.page_size)
        states = DeviceStates(*size, device, resolved.pages)
        self._kinds = StepKinds(*resolved.step_sizes)
        self._layout = layout = PlanLayout(max_requests, resolved.num_speculative_tokens, tree)
        self._upload = Upload(states.arena, layout.num_values, states.max_changes)
        self._open: dict[int, _Open] = {}
        self._graphs = LazyGraphs(device)
        rows = self._kinds.rows[-1]
        # What the passes of decoding requests read and write.
        self._values = values = torch.zeros(layout.end("trim"), dtype=torch.int32, device=device)
        self._decoding_LW, blocks_LW = layout.part(values, "decoding"), layout.part(values, "blocks")
        self._blocks_LW = self._decoding_LW if tree is None else blocks_LW
        self._drafts_N = torch.zeros(rows, dtype=torch.int64, device=device)
        self._margins_N = torch.zeros(rows, dtype=torch.float32, device=device)
        self._num_drafts_R = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._chosen_N = torch.zeros(rows, dtype=torch.int64, device=device)
        self._features_NH = torch.zeros(rows, drafter.config.hidden_size, dtype=drafter.dtype, device=device)
        self._trees: TreeMemory | None = None
        if tree is not None:
            both, num_kept = (self._decoding_LW, self._blocks_LW), self._kinds.max_block_rows
            of_plan = both, layout.trim(values)
            self._trees = TreeMemory.build(tree, max_requests, *of_plan, drafter.config, num_kept)
        self._drafter, self._states, self._cache = drafter, states, cache
        workspace = SamplingWorkspace.build(self._kinds.max_block_rows, resolved.target.vocab_size, device)
        self._memory = StepMemory(states, workspace, SingleRank())

    def begin(self, plan: SchedulerOutput) -> None:
        decoding, prompts = decoding_and_prompts(plan)
        self._upload.send(self._layout.pack(plan, decoding, prompts), self._states.changes(plan))
        # A later plan may overwrite the upload before this one has ended.
        uploaded = self._upload.values.clone()
        values, prompts_LW = uploaded[: len(self._values)], self._layout.part(uploaded, "prompts")
        block = target = requests = None
        if len(decoding):
            filters = self._states.filters(plan.slots[decoding])
            block, target = self._kinds.of(plan, decoding, filters=filters)
        if len(prompts):
            spans = (plan.num_computed[prompts], plan.num_rows[prompts])
            num_sampled = int(plan.samples[prompts].sum())
            requests = DeviceStepRequests.prompts(prompts_LW, *spans, num_sampled)
        self._open[plan.step] = _Open(values, block, target, requests)

    def draft(self, plan: SchedulerOutput, *, has_grammars: bool = False) -> Sequence[Tensor]:
        """Return a token and a margin for each row of `lay_out_block`'s blocks of decoding requests [N].

        With trees these [R, E] (`DeviceTrees`) instead of tokens, and with grammars also the candidates that
        they grew from. All are valid until the next pass.
        """
        step = self._open[plan.step]
        kind, trees = step.block, self._trees
        assert kind is not None, "draft() is called for plans with drafts"
        self._values.copy_(step.values)
        self._graphs.run(kind, partial(self._run_block, kind))
        margins_N = self._margins_N[: kind.num_rows]
        if trees is None:
            return self._drafts_N[: kind.num_rows], margins_N
        found = trees.of_requests(kind.num_requests)
        assert found.candidates is not None, "candidates are kept"
        candidates = [values[: kind.num_rows] for values in found.candidates] if has_grammars else []
        return found.trees.values_RE, margins_N, *candidates

    def num_parts(self, plan: SchedulerOutput) -> int:
        step = self._open[plan.step]
        return (step.target is not None) + (step.prompts is not None)

    def result_kinds(self, plan: SchedulerOutput, part: int) -> Kinds:
        """Return the kinds of numbers of drafts [R], the target's choices [X], and features [N, H].

        With trees these are of the accepted paths.
        """
        step, drafter = self._open[plan.step], self._drafter
        if step.target is not None and part == 0:
            num_requests, num_rows = step.target.num_requests, step.target.num_context_rows
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
            self._values.copy_(step.values)
            buffers = self._num_drafts_R, self._chosen_N, self._features_NH
            for buffer, value in zip(buffers, values, strict=True):
                buffer[: len(value)].copy_(value)
            if step.block is not None and self._trees is None and not followed:
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
        """Run the drafter's pass; chains are copied to memory that is sent, trees are grown in theirs."""
        memory = self._trees
        trees = None if memory is None else memory.of_requests(kind.num_requests)
        of_step = self._memory, self._requests_of(kind), trees, self._margins_N[: kind.num_rows]
        chosen_N = BlockPass(self._drafter, self._cache, *of_step, filters=kind.filters).run()
        if trees is None:
            self._drafts_N[: kind.num_rows].copy_(chosen_N)

    def _run_target(self, kind: PassKind) -> None:
        requests, num_rows, tables = self._requests_of(kind), kind.num_context_rows, self._states.tables
        chosen_N = self._chosen_N[:num_rows]
        if kind.width > 1:
            requests = _with_num_drafts(requests, self._num_drafts_R[: kind.num_requests])
        if kind.tree is not None:  # the path's tokens are drafts that are all accepted
            depth = kind.tree.depth
            requests = replace(requests, num_rows=num_rows, max_rows=1 + depth, max_drafts=depth)
            write_drafts(chosen_N.roll(1), lay_out_rows(requests, tables), tables)
        self._advance(requests, chosen_N, self._features_NH[:num_rows])

    def _advance(self, requests: DeviceStepRequests, chosen_X: Tensor, c_NH: Tensor) -> None:
        """Accept drafts and write context, as the target's pass did."""
        tables, shape = self._states.tables, (len(requests.slots_R), requests.max_drafts + 2)
        rows = lay_out_rows(requests, tables)
        outcome = torch.empty(shape, dtype=torch.int32, device=chosen_X.device)
        accept_and_advance(chosen_X, requests, tables, outcome)
        self._drafter.write_context(c_NH, rows, self._cache)

    def _requests_of(self, kind: PassKind) -> DeviceStepRequests:
        lists_LW = self._blocks_LW if kind.drafts else self._decoding_LW
        return DeviceStepRequests.decoding(lists_LW, kind.num_requests, kind.width, kind.num_rows)


def _with_num_drafts(requests: DeviceStepRequests, num_drafts_R: Tensor) -> DeviceStepRequests:
    known_R = requests.cu_rows_R1.diff() - requests.num_drafts_R
    cu_rows_R1 = torch.nn.functional.pad((known_R + num_drafts_R).cumsum(0, dtype=torch.int32), (1, 0))
    return replace(requests, cu_rows_R1=cu_rows_R1, num_drafts_R=num_drafts_R, first_chosen_R=cu_rows_R1[:-1])
