"""Launches of the kernels of a step around the passes; see `recorded_launches.py`.

Every function returns a call that takes a device. Four requests have blocks of up to 15 drafts.

Legend: N rows, R requests, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from manta.cluster.pages.recurrent_state_spec import RecurrentStateSpec
from manta.cluster.speculation.draft_tree import TreeSizes
from manta.cluster.step.scheduler_output import SchedulerOutput, StateEntry
from manta.drafter.compute.memory.recurrent_state_cache import MAX_SAVES, StateMemory
from manta.drafter.step.gpu_triton import draft_trees, ngram_lookup, tree_rows, verification
from manta.drafter.step.gpu_triton.draft_trees import DeviceTrees
from manta.drafter.step.gpu_triton.inputs import row_layout, transfers
from manta.drafter.step.gpu_triton.inputs.row_layout import DeviceStepRequests, SlotTables
from manta.drafter.step.gpu_triton.recurrent_states import DeviceRecurrent
from manta.drafter.step.gpu_triton.sampling import grammar_masks, logits_processors, sampler, selector
from manta.drafter.step.gpu_triton.sampling.sampling_metadata import DeviceSamplingMetadata, RuleTables
from manta.drafter.step.sampling.selector import SelectorCodebooks

from .layer_launches import BF16, I32, I64, Call

REQUESTS, DRAFTS, ROWS, SLOTS = 4, 15, 64, 8
QWEN3, GEMMA3 = 151936, 262144  # sizes of vocabularies
RANK = 256  # of a selector's codebooks


def i32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=I32)


def i64(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=I64)


class Step:
    """The requests of a step, their tables and their sampling parameters."""

    def __init__(self, device: torch.device, groups: int = 1) -> None:
        self.device = device
        self.requests = self.requests_of(REQUESTS, DRAFTS)
        self.tables = SlotTables(i32(SLOTS, 4104), i32(groups, SLOTS, 515), i32(SLOTS), 64, i64(groups))
        fp32 = [torch.zeros(SLOTS) for _ in range(3)]
        self.sampling = DeviceSamplingMetadata(
            fp32[0], i32(SLOTS), fp32[1], fp32[2], i64(SLOTS), i32(SLOTS), i32(SLOTS, 128)
        )
        rows = i32(ROWS), i64(ROWS)
        self.slots_N, self.positions_N = rows
        self.rows = row_layout.DeviceStepRows(i64(ROWS), (), (), i64(ROWS), i32(ROWS))
        self.trees = DeviceTrees.build(REQUESTS, TreeSizes(DRAFTS, 4, 41), device)
        self.lists = verification.TrimLists(*(torch.zeros(n) for n in (256, 256, DRAFTS, DRAFTS, 4)))

    def requests_of(self, count: int, drafts: int) -> DeviceStepRequests:
        lists = i32(count), i32(count + 1), i32(count), i32(count), i32(count)
        return DeviceStepRequests(*lists, count * (drafts + 1), drafts + 1, drafts)

    def logits(self, dtype: torch.dtype, vocab: int = QWEN3) -> torch.Tensor:
        return torch.empty(ROWS, vocab, dtype=dtype)

    def codebooks(self, dtype: torch.dtype, top_k: int) -> SelectorCodebooks:
        return SelectorCodebooks(
            torch.empty(64, RANK, dtype=dtype), torch.empty(64, RANK, dtype=dtype), top_k
        )

    def candidates(self, top_k: int) -> selector.Candidates:
        return selector.Candidates(torch.empty(ROWS, top_k), torch.empty(ROWS, top_k), i64(ROWS, top_k))


def of_step(launch: Callable[[Step], object], groups: int = 1) -> Call:
    return lambda device: launch(Step(device, groups))


def choice(dtype: torch.dtype, *, filters: bool, seconds: bool = False, vocab: int = QWEN3) -> Call:
    """Sample a row of logits in chunks of 4096: of drafts with `seconds`, else of the target's tokens."""

    def launch(step: Step) -> None:
        workspace = sampler.SamplingWorkspace.build(ROWS, vocab, step.device)
        seconds_N = torch.empty(ROWS) if seconds else None
        where = step.logits(dtype, vocab), step.slots_N, step.positions_N, step.sampling
        how: dict[str, Any] = {"filters": filters, "seconds_N": seconds_N, "checks": not seconds}
        sampler.sample_rows(*where, workspace=workspace, **how)

    return of_step(launch)


def rules(dtype: torch.dtype, *, drafts: bool) -> Call:
    def launch(step: Step) -> None:
        arena = transfers.Arena(RuleTables.shapes(SLOTS), step.device)
        where = step.slots_N, step.positions_N, RuleTables.of(arena), step.tables
        logits_processors.apply_rules(step.logits(dtype), *where, drafts=drafts)

    return of_step(launch)


def candidates(dtype: torch.dtype, *, filters: bool = False, top_k: int = 16, vocab: int = QWEN3) -> Call:
    def launch(step: Step) -> None:
        workspace = sampler.SamplingWorkspace.build(ROWS, vocab, step.device)
        where = step.logits(dtype, vocab), step.rows, step.sampling, top_k
        selector.find_candidates(*where, filters=filters, workspace=workspace)

    return of_step(launch)


def walk(dtype: torch.dtype, *, filters: bool, top_k: int = 16, anchor_distance: int = 1) -> Call:
    def launch(step: Step) -> None:
        given = step.candidates(top_k), torch.empty(ROWS, RANK, dtype=dtype), step.rows
        where = step.requests.cu_rows_R1, step.sampling, step.codebooks(dtype, top_k)
        how: dict[str, Any] = {"filters": filters, "anchor_distance": anchor_distance}
        selector.walk_paths(*given, *where, margins_N=torch.empty(ROWS), **how)

    return of_step(launch)


def mask(dtype: torch.dtype) -> Call:
    def launch(step: Step) -> None:
        masks = grammar_masks.DeviceMasks.build(ROWS, QWEN3 // 32, 7, step.device)
        grammar_masks.mask_tokens(step.logits(dtype), masks)
        grammar_masks.force_end_tokens(i64(ROWS), torch.empty(ROWS), masks)

    return of_step(launch)


def block_rows(step: Step) -> None:
    row_layout.lay_out_block(step.requests, step.tables, mask_id=9)


def target_rows(step: Step) -> None:
    row_layout.lay_out_rows(step.requests, step.tables)


def proposals(step: Step) -> None:
    row_layout.write_drafts(i64(ROWS), step.rows, step.tables)


def lookup(step: Step) -> None:
    ngram_lookup.look_up(step.requests_of(REQUESTS, 8), step.tables, 2, 4)


def verdicts(step: Step) -> None:
    verification.accept_and_advance(i64(ROWS), step.requests, step.tables, i32(REQUESTS, DRAFTS + 2))


def broken_rows(step: Step) -> None:
    requests = DeviceStepRequests(*[i32(REQUESTS)] * 5, ROWS, 16, 0, sampled_X=i32(REQUESTS))
    verification.mark_not_numbers(torch.empty(ROWS, 4096, dtype=BF16), requests, i32(REQUESTS, 2))


def trim(requests: int, *, num_rows: int) -> Call:
    def launch(step: Step) -> None:
        drafted, home = step.requests_of(requests, DRAFTS), torch.empty(requests, DRAFTS)
        verification.trim_drafts(drafted, torch.empty(num_rows), step.lists, num_rows, i32(requests), home)

    return of_step(launch)


def children(count: int) -> Call:
    return of_step(
        lambda step: draft_trees.likely_children(
            torch.empty(ROWS, 16, count), step.requests.cu_rows_R1, 16, step.lists, 1
        )
    )


def tree_scores(top_k: int, *, pairs: bool, filters: bool) -> Call:
    """Score candidates by the one before with `pairs`, as selectors do."""

    def launch(step: Step) -> None:
        gates = torch.empty(ROWS, RANK, dtype=BF16) if pairs else None
        codebooks = step.codebooks(BF16, top_k) if pairs else None
        where = (
            step.candidates(top_k),
            gates,
            step.rows,
            step.requests.cu_rows_R1,
            16,
            step.sampling,
            codebooks,
        )
        of_rows = {"floors_N": torch.empty(ROWS), "margins_N": torch.empty(ROWS)}
        draft_trees.tree_scores(*where, filters=filters, anchor_distance=1, **of_rows)

    return of_step(launch)


def trees(step: Step) -> None:
    likely = torch.empty(ROWS, 16, 4), i32(ROWS, 16, 4)
    where = i64(ROWS, 16), step.requests.cu_rows_R1, i32(REQUESTS), step.lists.factors_T, step.trees, 1
    draft_trees.grow_trees(*likely, *where)


def trimmed_trees(step: Step) -> None:
    given = step.requests, step.trees, step.requests, torch.empty(2048), step.lists.weights_R, 2048
    tree_rows.trim_trees(*given, i32(REQUESTS), torch.empty(REQUESTS, DRAFTS))


def tree_paths(step: Step) -> None:
    rows = tree_rows.place_rows(step.requests, step.trees, step.rows, step.tables)
    outcome, kv_slots = i32(REQUESTS, DRAFTS + 2), i64(2, ROWS + 6)
    tree_rows.accept_paths(i64(ROWS), step.requests, step.trees, kv_slots, step.tables, outcome)
    tree_rows.path_rows(step.requests, step.trees, outcome[:, -1])
    assert rows is not None


def states(step: Step) -> None:
    """Admit, place and save recurrent states of Qwen3.5-9B."""
    memory = StateMemory(1, RecurrentStateSpec(16, 32, 128, 128, 4), 128, DRAFTS, BF16, step.device)
    recurrent = DeviceRecurrent(memory, i32(SLOTS), step.tables)
    plan = SimpleNamespace(admitted=[SimpleNamespace(state=StateEntry(3, 2, 64))])
    recurrent.admit(cast(SchedulerOutput, plan))
    saves_2RM = i32(2, REQUESTS, MAX_SAVES)
    recurrent.build_rows(step.requests, saves_2RM)
    recurrent.save_accepted(step.requests.slots_R, saves_2RM)


def upload(step: Step) -> None:
    transfers.Upload(i32(4096), 64, 1024).send(np.zeros(64, np.int32), np.zeros((900, 2), np.int32))


def clock(step: Step) -> None:
    transfers.stamp(i64(8), 3)
