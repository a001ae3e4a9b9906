"""Launches of the kernels of a step around the passes; see `recorded_launches.py`.

Every public function launches one or a few kernels on a device at all shapes that are compiled, the most
important one first. Four requests have blocks of up to 15 drafts.

Legend: N rows, R requests, V vocabulary.
"""

from __future__ import annotations

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

from .layer_launches import BF16, FP32, I32, I64

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

    def workspace(self, vocab: int = QWEN3) -> sampler.SamplingWorkspace:
        return sampler.SamplingWorkspace.build(ROWS, vocab, self.device)


def choose(device: torch.device) -> None:
    """Sample drafts, with their margins, and the target's tokens."""
    step = Step(device)
    for dtype, filters, is_draft, vocab in (
        (BF16, False, False, QWEN3),
        (BF16, True, False, QWEN3),
        (BF16, False, True, QWEN3),
        (BF16, True, True, GEMMA3),
        (FP32, True, False, QWEN3),
        (FP32, True, True, QWEN3),
    ):
        where = step.logits(dtype, vocab), step.slots_N, step.positions_N, step.sampling
        workspace, margins_N = step.workspace(vocab), torch.empty(ROWS) if is_draft else None
        how: dict[str, Any] = {"filters": filters, "checks": not is_draft, "ahead": 0 if is_draft else 1}
        sampler.sample_rows(*where, workspace=workspace, margins_N=margins_N, **how)


def apply_rules(device: torch.device) -> None:
    step, rules = Step(device), RuleTables.of(transfers.Arena(RuleTables.shapes(SLOTS), device))
    where = step.slots_N, step.positions_N, rules, step.tables
    logits_processors.apply_rules(step.logits(BF16), *where, drafts=False)
    logits_processors.apply_rules(step.logits(FP32), *where, drafts=True)


def find_candidates(device: torch.device) -> None:
    """Search for the 16 best tokens, as Muse-Glimmer and Qwen3.8 do, and for DSpark's 64."""
    step = Step(device)
    for dtype, filters, top_k, vocab in (
        (BF16, False, 16, QWEN3),
        (BF16, True, 16, QWEN3),
        (FP32, True, 16, QWEN3),
        (BF16, False, 16, GEMMA3),
        (BF16, False, 64, QWEN3),
    ):
        where = step.logits(dtype, vocab), step.rows, step.sampling, top_k
        selector.find_candidates(*where, filters=filters, workspace=step.workspace(vocab))


def walk_paths(device: torch.device) -> None:
    step = Step(device)
    for dtype, filters, top_k, anchor_distance in (
        (BF16, False, 16, 1),
        (BF16, True, 16, 1),
        (FP32, True, 16, 1),
        (BF16, True, 64, 0),
    ):
        given = step.candidates(top_k), torch.empty(ROWS, RANK, dtype=dtype), step.rows
        where = step.requests.cu_rows_R1, step.sampling, step.codebooks(dtype, top_k)
        margins_N = torch.empty(ROWS)
        selector.walk_paths(
            *given, *where, filters=filters, margins_N=margins_N, anchor_distance=anchor_distance
        )


def mask_tokens(device: torch.device) -> None:
    step, masks = Step(device), grammar_masks.DeviceMasks.build(ROWS, QWEN3 // 32, 7, device)
    for dtype in (BF16, FP32):
        grammar_masks.mask_tokens(step.logits(dtype), masks)
    grammar_masks.force_end_tokens(i64(ROWS), torch.empty(ROWS), masks)


def lay_out(device: torch.device) -> None:
    step = Step(device)
    row_layout.lay_out_block(step.requests, step.tables, mask_id=9)
    row_layout.lay_out_rows(step.requests, step.tables)
    row_layout.lay_out_rows(step.requests, Step(device, groups=3).tables)
    row_layout.write_drafts(i64(ROWS), step.rows, step.tables)


def look_up(device: torch.device) -> None:
    step = Step(device)
    ngram_lookup.look_up(step.requests_of(REQUESTS, 8), step.tables, 2, 4)


def verify(device: torch.device) -> None:
    step = Step(device)
    verification.accept_and_advance(i64(ROWS), step.requests, step.tables, i32(REQUESTS, DRAFTS + 2))
    ids = i32(REQUESTS)
    prompts = DeviceStepRequests(ids, ids, ids, ids, ids, ROWS, 16, 0, sampled_X=ids)
    verification.mark_not_numbers(torch.empty(ROWS, 4096, dtype=BF16), prompts, i32(REQUESTS, 2))
    for count, num_rows in ((256, 2048), (1, 16)):
        drafted, home = step.requests_of(count, DRAFTS), torch.empty(count, DRAFTS)
        verification.trim_drafts(drafted, torch.empty(num_rows), step.lists, num_rows, i32(count), home)


def grow_trees(device: torch.device) -> None:
    """Score candidates, those of a selector by the one before, and grow trees of the likeliest."""
    step = Step(device)
    cu_rows_R1 = step.requests.cu_rows_R1
    for count in (16, 64):  # 64: DSpark's Markov head
        scores_XPC = torch.empty(ROWS, 16, count)
        likely = draft_trees.likely_children(scores_XPC, cu_rows_R1, 16, step.lists, 1)
    kinds = ((16, False, False), (16, False, True), (16, True, True), (64, True, False))
    for top_k, has_pairs, filters in kinds:
        gates, codebooks = torch.empty(ROWS, RANK, dtype=BF16), step.codebooks(BF16, top_k)
        where = step.rows, cu_rows_R1, 16, step.sampling, codebooks if has_pairs else None
        draft_trees.tree_scores(
            step.candidates(top_k),
            gates if has_pairs else None,
            *where,
            filters=filters,
            floors_N=torch.empty(ROWS),
            margins_N=torch.empty(ROWS),
            anchor_distance=1,
        )
    where = i64(ROWS, 16), cu_rows_R1, i32(REQUESTS), step.lists.factors_T, step.trees, 1
    draft_trees.grow_trees(*likely, *where)


def follow_trees(device: torch.device) -> None:
    step = Step(device)
    given = step.requests, step.trees, step.requests, torch.empty(2048), step.lists.weights_R, 2048
    tree_rows.trim_trees(*given, i32(REQUESTS), torch.empty(REQUESTS, DRAFTS))
    tree_rows.place_rows(step.requests, step.trees, step.rows, step.tables)
    outcome, kv_slots = i32(REQUESTS, DRAFTS + 2), i64(2, ROWS + 6)
    tree_rows.accept_paths(i64(ROWS), step.requests, step.trees, kv_slots, step.tables, outcome)
    tree_rows.path_rows(step.requests, step.trees, outcome[:, -1])


def copy_states(device: torch.device) -> None:
    """Admit, place and save recurrent states of Qwen3.5-9B."""
    step = Step(device)
    memory = StateMemory(1, RecurrentStateSpec(16, 32, 128, 128, 4), 128, DRAFTS, BF16, device)
    recurrent, saves_2RM = DeviceRecurrent(memory, i32(SLOTS), step.tables), i32(2, REQUESTS, MAX_SAVES)
    plan = SimpleNamespace(admitted=[SimpleNamespace(state=StateEntry(3, 2, 64))])
    recurrent.admit(cast(SchedulerOutput, plan))
    recurrent.build_rows(step.requests, saves_2RM)
    recurrent.save_accepted(step.requests.slots_R, saves_2RM)


def transfer(device: torch.device) -> None:
    transfers.Upload(i32(4096), 64, 1024).send(np.zeros(64, np.int32), np.zeros((900, 2), np.int32))
    transfers.stamp(i64(8), 3)
