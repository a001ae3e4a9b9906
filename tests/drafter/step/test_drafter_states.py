"""Request states: which rows a step has, and what it leaves behind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from manta.cluster.pages.kv_cache_groups import KVCacheGroup, KVCacheLayout, LayerPlace
from manta.cluster.step.scheduler_output import AdmittedRequest, SchedulerOutput, SlotSampling
from manta.drafter.step.inputs.row_layout import StepRows
from manta.drafter.step.request_states import RequestStates
from support.oracles.drafter_requests import GREEDY, plan_of

MASK = 99
DRAFTS = torch.tensor([[21, 22], [-1, -1], [-1, -1]])
CHOSEN = torch.tensor([[21, 33, -1], [-1, -1, -1], [72, -1, -1]]), torch.tensor([2, 0, 1])


def admit(slot: int, tokens: list[int], sampling: SlotSampling = GREEDY) -> AdmittedRequest:
    return AdmittedRequest(slot, str(slot), np.array(tokens, dtype=np.int32), sampling)


def slots_of(rows: StepRows) -> list[int]:
    (kv_slots_N,) = rows.kv_slots
    return kv_slots_N.tolist()


def mixed_step() -> tuple[RequestStates, SchedulerOutput]:
    """Slot 2 decodes with 2 drafts at position 3; slot 0 is in its prompt; slot 1 ends its prompt."""
    states = RequestStates(3, max_model_len=12, num_pages=(9,), page_size=4, device="cpu")
    plan = plan_of(
        [2, 0, 1],
        [3, 4, 0],
        [3, 2, 2],
        [2, 0, 0],
        samples=[True, False, True],
        admitted=[admit(0, list(range(50, 60))), admit(1, [70, 71]), admit(2, [10, 11, 12, 13])],
        pages=[(0, 0, 5), (0, 1, 6), (1, 0, 8), (2, 0, 3), (2, 1, 1)],
    )
    states.apply(plan)
    return states, plan


def test_rows_hold_known_tokens_then_drafts_at_their_positions_and_pages():
    states, plan = mixed_step()
    states.write_drafts(plan, DRAFTS)
    rows = states.lay_out_rows(plan)
    assert rows.token_ids_N.tolist() == [13, 21, 22, 54, 55, 70, 71]
    assert rows.positions_N.tolist() == [3, 4, 5, 4, 5, 0, 1]
    assert slots_of(rows) == [3 * 4 + 3, 1 * 4, 1 * 4 + 1, 6 * 4, 6 * 4 + 1, 8 * 4, 8 * 4 + 1]
    assert rows.sampled_X.tolist() == [0, 1, 2, 6]
    assert rows.counts_R.tolist() == [3, 0, 1]


def test_a_step_planned_ahead_continues_where_the_last_one_ended():
    states, plan = mixed_step()
    states.write_drafts(plan, DRAFTS)
    states.advance(plan, *CHOSEN)
    ahead = plan_of([2, 0, 1], [-1, 6, -1], [3, 3, 1], [2, 0, 0], samples=[True, False, True])
    rows = states.lay_out_rows(ahead)
    assert rows.positions_N.tolist() == [5, 6, 7, 6, 7, 8, 2]
    assert rows.token_ids_N[[0, 3, 4, 5, 6]].tolist() == [33, 56, 57, 58, 72]


def test_rows_beyond_the_pages_of_an_ended_sequence_are_not_written():
    states, _ = mixed_step()
    rows = states.lay_out_rows(plan_of([1], [3], [2], [0]))
    assert slots_of(rows) == [8 * 4 + 3, 9 * 4]


def test_tokens_of_a_step_replace_its_drafts():
    states, plan = mixed_step()
    states.write_drafts(plan, DRAFTS)
    states.advance(plan, *CHOSEN)
    assert states.token_ids[2, :6].tolist() == [10, 11, 12, 13, 21, 33]
    assert states.token_ids[1, :3].tolist() == [70, 71, 72]
    assert states.token_ids[0, :10].tolist() == list(range(50, 60))


def test_drafts_at_the_end_of_the_longest_sequence_stay_in_bounds():
    states = RequestStates(1, max_model_len=5, num_pages=(2,), page_size=4, device="cpu")
    plan = plan_of([0], [3], [2], [1], admitted=[admit(0, [1, 2, 3, 4])], pages=[(0, 0, 0), (0, 1, 1)])
    states.apply(plan)
    states.write_drafts(plan, torch.tensor([[9]]))
    assert states.lay_out_rows(plan).token_ids_N.tolist() == [4, 9]
    states.advance(plan, torch.tensor([[8, -1]]), torch.tensor([1]))
    assert states.token_ids[0, :5].tolist() == [1, 2, 3, 4, 8]


@pytest.mark.parametrize("samples_anchor", [False, True], ids=["masks predict", "the anchor predicts"])
def test_a_block_is_an_anchor_and_masks_in_lookahead_slots(samples_anchor: bool):
    """A block whose anchor predicts has a mask less."""
    states, plan = mixed_step()
    block = states.lay_out_block(plan, MASK, samples_anchor=samples_anchor)
    assert block is not None
    count = 2 if samples_anchor else 3
    assert block.token_ids_N.tolist() == [13, MASK, MASK][:count]
    assert block.sampled_X.tolist() == ([0, 1] if samples_anchor else [1, 2])
    assert block.positions_N.tolist() == [3, 4, 5][:count]
    assert slots_of(block) == [15, 4, 5][:count]
    assert block.counts_R.tolist() == [2, 0, 0] and block.max_count == 2
    if samples_anchor:
        assert block.previous(torch.tensor([[7], [8]])).tolist() == [[13], [7]]


def test_stop_tokens_are_forbidden_below_the_minimum_length_only():
    early = SlotSampling(0.0, 0, 1.0, 0.0, 0, 5, (7, 9))
    states = RequestStates(2, 16, (8,), 4, "cpu")
    plan = plan_of(
        [1, 0],
        [2, 2],
        [4, 4],
        [3, 3],
        samples=[True, True],
        admitted=[admit(1, [1, 2, 3], early), admit(0, [1, 2, 3])],
    )
    states.apply(plan)
    # Rows 0, 1 of slot 1 choose tokens 3 and 4; the sequence must reach length 5 before it may stop.
    for rows in (states.lay_out_rows(plan), states.lay_out_block(plan, MASK)):
        assert rows.sampling.forbidden_F.T.tolist() == [[0, 7], [0, 9], [1, 7], [1, 9]]


def test_every_page_group_has_its_own_slots_and_visible_pages():
    """The target's layers are in groups 0 and 1, the drafter's in group 2, which uses another pool."""
    groups = (KVCacheGroup(), KVCacheGroup(window=6), KVCacheGroup(pool=1, window=9))
    pages = KVCacheLayout(groups, (LayerPlace(1, 0), LayerPlace(0, 0)), (LayerPlace(2, 0),))
    requested: list[tuple] = []

    def batch(first_R, num_rows_R, pages_RP, page_size, device, window):
        requested.append((first_R.tolist(), num_rows_R.tolist(), pages_RP.tolist(), page_size, window))
        return window or "all"

    states = RequestStates(2, 12, (9, 4), 4, "cpu", batch, pages=pages)
    plan = plan_of([1], [3], [3], [2], admitted=[admit(1, [7, 7, 7, 7])])
    where = np.array([(0, 1, 0, 5), (0, 1, 1, 6), (1, 1, 1, 8), (2, 1, 0, 3), (2, 1, 1, 2)], dtype=np.int32).T
    names = ("page_groups", "page_slots", "page_indices", "page_ids")
    states.apply(replace(plan, **dict(zip(names, where, strict=True))))
    rows, block = states.lay_out_rows(plan), states.lay_out_block(plan, MASK)
    assert block is not None
    for laid_out in (rows, block):  # group 1 has given back its first page: its row goes to page 9, nowhere
        assert [kv_slots_N.tolist() for kv_slots_N in laid_out.kv_slots] == [
            [5 * 4 + 3, 6 * 4, 6 * 4 + 1],
            [9 * 4 + 3, 8 * 4, 8 * 4 + 1],
            [3 * 4 + 3, 2 * 4, 2 * 4 + 1],
        ]
    assert rows.batches == ("all", 6, None) and block.batches == (None, None, 9)
    assert requested == [
        ([3], [3], [[5, 6]], 4, None),
        ([3], [3], [[9, 8]], 4, 6),
        ([3], [3], [[3, 2]], 4, 9),
    ]
    behind = plan_of([1], [8], [1], [0])  # rows beyond their pages: each pool has a padding slot
    assert [int(slots_N) for slots_N in states.lay_out_rows(behind).kv_slots] == [9 * 4, 9 * 4, 4 * 4]


def test_a_reused_slot_forgets_its_former_request():
    states, _ = mixed_step()
    fresh = plan_of([2], [0], [2], [0], admitted=[admit(2, [90, 91])], pages=[(2, 0, 7)])
    states.apply(fresh)
    rows = states.lay_out_rows(fresh)
    assert rows.token_ids_N.tolist() == [90, 91] and slots_of(rows) == [28, 29]
