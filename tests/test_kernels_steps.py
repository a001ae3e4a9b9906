"""The GPU's step bookkeeping, in Triton's interpreter, against `RequestStates` and `accept`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.cluster.plan import AdmittedRequest, SchedulerOutput, SlotSampling
from manta.drafter.step.device.rows import (
    SlotTables,
    StepRequests,
    StepRows,
    lay_out_block,
    lay_out_rows,
    place_drafts,
)
from manta.drafter.step.device.verification import accept_and_advance
from manta.drafter.step.rows import by_request
from manta.drafter.step.states import RequestStates
from manta.drafter.step.verification import accept

if os.environ["TRITON_INTERPRET"] != "1":
    pytest.skip("these tests run kernels on the CPU", allow_module_level=True)

GREEDY = SlotSampling(0.0, 0, 1.0, 0.0, 0, 0, ())
SLOTS, MAX_LEN, PAGE_SIZE, PAGES, MASK = 6, 60, 8, 50, 777


@dataclass
class Case:
    """A plan, and padding behind its requests and rows."""

    plan: SchedulerOutput
    padding_requests: int
    padding_rows: int
    seed: int


@st.composite
def cases(draw, *, drafts_behind: int) -> Case:
    """Decoding with and without drafts, prompt chunks that sample or not.

    Args:
        drafts_behind: the most known rows of a request that drafts.
    """
    slots = draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True))
    computed, rows, drafts, samples = [], [], [], []
    for _ in slots:
        computed.append(draw(st.integers(0, 40)))
        samples.append(draw(st.booleans()))
        drafts.append(draw(st.integers(0, 5)) if samples[-1] else 0)
        known = draw(st.integers(1, drafts_behind if drafts[-1] else 12))
        rows.append(known + drafts[-1])
    seed, padding = draw(st.integers(0, 2**20)), draw(st.tuples(st.integers(0, 2), st.integers(0, 40)))
    return Case(plan_of(slots, computed, rows, drafts, samples, seed), padding[0], padding[1], seed)


def plan_of(slots, computed, rows, drafts, samples, seed: int = 0) -> SchedulerOutput:
    """Admits all of its slots, with few different tokens (so that drafts match) and scattered pages."""
    rng, pages = np.random.default_rng(seed), -(-MAX_LEN // PAGE_SIZE)
    arrays = [np.array(x, dtype=np.int32) for x in (slots, computed, rows, drafts)]
    known = arrays[1] + arrays[2] - arrays[3]
    admitted = tuple(
        AdmittedRequest(slot, str(slot), rng.integers(0, 3, count).astype(np.int32), GREEDY)
        for slot, count in zip(slots, known, strict=True)
    )
    page_ids = rng.permutation(PAGES)[: len(slots) * pages].astype(np.int32)
    where = (
        np.zeros_like(page_ids),
        np.repeat(arrays[0], pages),
        np.tile(np.arange(pages, dtype=np.int32), len(slots)),
        page_ids,
    )
    return SchedulerOutput(0, admitted, *where, *arrays, np.array(samples, dtype=bool))


def states_of(plan: SchedulerOutput) -> RequestStates:
    states = RequestStates(SLOTS, MAX_LEN, PAGES, PAGE_SIZE, "cpu")
    states.apply(plan)
    return states


def tables_of(states: RequestStates, plan: SchedulerOutput) -> SlotTables:
    computed = torch.full((SLOTS,), 1000, dtype=torch.int32)  # a slot that is not in the step is not touched
    computed[torch.from_numpy(plan.slots).long()] = torch.from_numpy(plan.num_computed)
    pages = torch.from_numpy(states.page_table).to(torch.int32)
    return SlotTables(states.token_ids.clone(), pages, computed, PAGE_SIZE, states.skip_slot)


def ragged(
    case: Case,
    counts: np.ndarray,
    *,
    first_chosen: torch.Tensor | None = None,
    max_drafts: int = 0,
) -> StepRequests:
    """So many rows of each request, with padding behind."""
    plan = case.plan

    def padded(values: np.ndarray, padding: int = 0) -> torch.Tensor:
        padding_R = np.full(case.padding_requests, padding)
        return torch.from_numpy(np.concatenate((values, padding_R)).astype(np.int32))

    cu_rows = torch.nn.functional.pad(padded(counts).cumsum(0), (1, 0)).int()
    return StepRequests(
        padded(plan.slots, -1),
        cu_rows,
        padded(plan.num_drafts),
        padded(plan.samples),
        cu_rows[:-1] if first_chosen is None else first_chosen,
        num_rows=int(cu_rows[-1]) + case.padding_rows,
        max_rows=max(1, int(counts.max())),
        max_drafts=max_drafts,
    )


def check_padding(rows: StepRows, used: int, states: RequestStates) -> None:
    assert (rows.slots_N[used:] == -1).all() and (rows.slots_N[:used] >= 0).all()
    assert (rows.kv_slots_N[used:] == states.skip_slot).all()
    assert not rows.positions_N[used:].any() and not rows.token_ids_N[used:].any()


@settings(max_examples=40)
@given(cases(drafts_behind=3))
def test_rows_are_those_of_request_states_and_padding_reads_nothing(case: Case):
    plan, states = case.plan, states_of(case.plan)
    states.token_ids.random_(0, 1000, generator=torch.Generator().manual_seed(case.seed))
    expected, used = states.lay_out_rows(plan), plan.num_batched_tokens
    rows = lay_out_rows(ragged(case, plan.num_rows), tables_of(states, plan))
    assert rows.slots_N[:used].tolist() == np.repeat(plan.slots, plan.num_rows).tolist()
    assert rows.positions_N[:used].equal(expected.positions_N)
    assert rows.kv_slots_N[:used].equal(expected.kv_slots_N)
    assert rows.token_ids_N[:used].equal(expected.token_ids_N)
    lengths = (plan.num_computed + plan.num_rows).tolist() + [0] * case.padding_requests
    assert rows.batch.kv_lengths_B.tolist() == lengths
    check_padding(rows, used, states)


@settings(max_examples=30)
@given(cases(drafts_behind=1))
def test_a_block_is_laid_out_and_its_proposals_are_placed_as_request_states_does(case: Case):
    plan, states = case.plan, states_of(case.plan)
    tables, expected = tables_of(states, plan), states.lay_out_block(plan, MASK)
    counts = np.where(plan.num_drafts > 0, plan.num_drafts + 1, 0)
    requests = ragged(case, counts)
    requests = replace(requests, num_rows=requests.num_rows + 1)  # nobody may draft
    rows = lay_out_block(requests, tables, MASK)
    used = int(counts.sum())
    check_padding(rows, used, states)
    lengths = np.where(counts > 0, plan.num_computed + counts, 0).tolist()
    assert rows.batch.kv_lengths_B.tolist() == lengths + [0] * case.padding_requests
    drafts = torch.full((plan.num_requests, int(plan.num_drafts.max())), -1)
    chosen = torch.randint(0, 1000, (requests.num_rows,), generator=torch.Generator().manual_seed(case.seed))
    if expected is not None:
        assert rows.token_ids_N[:used].equal(expected.token_ids_N)
        assert rows.positions_N[:used].equal(expected.positions_N)
        assert rows.kv_slots_N[:used].equal(expected.kv_slots_N)
        drafts = by_request(chosen[expected.sampled_X], expected.counts_R, expected.max_count)
    place_drafts(chosen, rows, tables)
    states.place_drafts(plan, drafts)
    assert tables.token_ids[:, :MAX_LEN].equal(states.token_ids[:, :MAX_LEN])


def verdicts_of(case: Case, counts: np.ndarray, *, of_all_rows: bool) -> tuple[torch.Tensor, ...]:
    """(the oracle's choices, the kernel's, where each request's begin in them): of sampled rows or of all."""
    plan, rng = case.plan, np.random.default_rng(case.seed + 1)
    by_row = torch.from_numpy(rng.integers(0, 3, plan.num_batched_tokens + case.padding_rows))
    ends = np.cumsum(plan.num_rows)
    begins = ends - counts
    sampled = np.concatenate([np.arange(b, b + n) for b, n in zip(begins, counts, strict=True)]).astype(int)
    first = begins if of_all_rows else np.cumsum(counts) - counts
    first = np.concatenate((first, np.zeros(case.padding_requests))).astype(np.int32)
    return by_row[sampled], by_row if of_all_rows else by_row[sampled], torch.from_numpy(first)


@settings(max_examples=60)
@given(cases(drafts_behind=3), st.booleans())
def test_accepting_and_advancing_are_those_of_the_host(case: Case, of_all_rows: bool):
    plan, states = case.plan, states_of(case.plan)
    width = int(plan.num_drafts.max())
    drafts = torch.from_numpy(np.random.default_rng(case.seed).integers(0, 3, (plan.num_requests, width)))
    drafts.masked_fill_(torch.arange(width) >= torch.from_numpy(plan.num_drafts)[:, None], -1)
    states.place_drafts(plan, drafts)
    tables = tables_of(states, plan)
    counts = np.where(plan.samples, 1 + plan.num_drafts, 0)
    sampled, chosen, first = verdicts_of(case, counts, of_all_rows=of_all_rows)
    tokens, num_tokens = accept(sampled.long(), torch.from_numpy(counts).long(), drafts)
    states.advance(plan, tokens, num_tokens)

    requests = ragged(case, plan.num_rows, first_chosen=first, max_drafts=width + 2)
    out, num_out = accept_and_advance(chosen, requests, tables)

    real = plan.num_requests
    assert out.dtype == num_out.dtype == torch.int32 and out.shape == (len(requests.slots_R), width + 3)
    assert out[:real, : width + 1].tolist() == tokens.tolist() and (out[:real, width + 1 :] == -1).all()
    assert num_out[:real].tolist() == num_tokens.tolist()
    assert (out[real:] == -1).all() and not num_out[real:].any()
    assert tables.token_ids[:, :MAX_LEN].equal(states.token_ids[:, :MAX_LEN])
    accepted = (num_tokens - 1).clamp(min=0).numpy()
    advanced = np.full(SLOTS, 1000)
    advanced[plan.slots] = plan.num_computed + plan.num_rows - plan.num_drafts + accepted
    assert tables.num_computed.tolist() == advanced.tolist()


def test_two_steps_of_one_request_follow_each_other_without_the_host():
    plan = plan_of([4], [9], [4], [3], [True])
    states = states_of(plan)
    tables = tables_of(states, plan)
    known = tables.token_ids[4, :10].tolist()
    requests = ragged(Case(plan, 0, 0, 0), plan.num_rows, max_drafts=3)
    for proposed, chosen, new in (
        ([5, 6, 7], [5, 6, 8, 9], [5, 6, 8]),
        ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]),
    ):
        block = lay_out_block(requests, tables, MASK)
        assert block.token_ids_N.tolist() == [known[-1], MASK, MASK, MASK]
        place_drafts(torch.tensor([99, *proposed]), block, tables)
        rows = lay_out_rows(requests, tables)
        assert rows.token_ids_N.tolist() == [known[-1], *proposed]
        out, count = accept_and_advance(torch.tensor(chosen), requests, tables)
        assert out[0, : count[0]].tolist() == new
        known += new
        assert tables.token_ids[4, : len(known)].tolist() == known
        assert tables.num_computed[4] == len(known) - 1
