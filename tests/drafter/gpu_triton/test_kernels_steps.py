"""The GPU's step bookkeeping against `RequestStates` and `accept` (device: see `devices.py`)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.cluster.pages.kv_cache_groups import ONE_GROUP, KVCacheGroup, KVCacheLayout, LayerPlace
from manta.cluster.step.scheduler_output import AdmittedRequest, SchedulerOutput, SlotSampling
from manta.drafter.step.gpu_triton import ngram_lookup as lookup
from manta.drafter.step.gpu_triton.inputs.row_layout import (
    DeviceStepRequests,
    DeviceStepRows,
    SlotTables,
    lay_out_block,
    lay_out_rows,
    write_drafts,
)
from manta.drafter.step.gpu_triton.inputs.transfers import Upload
from manta.drafter.step.gpu_triton.request_states import DeviceStates
from manta.drafter.step.gpu_triton.sampling.sampling_metadata import DeviceSamplingMetadata
from manta.drafter.step.gpu_triton.verification import accept_and_advance
from manta.drafter.step.inputs.row_layout import by_request
from manta.drafter.step.request_states import RequestStates
from manta.drafter.step.sampling.ngram_lookup import look_up as look_up_by_definition
from manta.drafter.step.sampling.verification import accept
from support.engines.devices import DEVICE
from support.oracles.sampling_cases import WHOLE

pytestmark = pytest.mark.usefixtures("on_the_device")
GREEDY = SlotSampling(0.0, 0, 1.0, 0.0, 0, 0, ())
SLOTS, MAX_LEN, PAGE_SIZE, MASK = 6, 60, 8, 777
SHARE = 1 if WHOLE else 3  # of examples that the short form has: one in so many
NUM_PAGES = (110, 57)  # of each pool
PAGES_OF_A_PLAN = ("page_groups", "page_slots", "page_indices", "page_ids")
# A target with two kinds of layers, and a drafter with its own pool.
THREE_GROUPS = KVCacheLayout(
    (KVCacheGroup(), KVCacheGroup(window=20), KVCacheGroup(pool=1)),
    (LayerPlace(1, 0), LayerPlace(0, 0)),
    (LayerPlace(2, 0),),
)


@dataclass
class Case:
    """A plan, with padding after its requests and rows."""

    pages: KVCacheLayout
    plan: SchedulerOutput
    padding_requests: int
    padding_rows: int
    seed: int


@st.composite
def cases(draw, *, drafts_behind: int) -> Case:
    """Draw decoding with and without drafts, and prompt chunks that sample or not.

    `drafts_behind` is the largest number of known rows of a request that drafts.
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
    pages = draw(st.sampled_from((ONE_GROUP, THREE_GROUPS)))
    return Case(pages, plan_of(slots, computed, rows, drafts, samples, seed, pages), *padding, seed)


def plan_of(
    slots, computed, rows, drafts, samples, seed: int = 0, pages: KVCacheLayout = ONE_GROUP
) -> SchedulerOutput:
    """Return a plan that admits its slots, with few different tokens (so that drafts match)."""
    rng = np.random.default_rng(seed)
    arrays = [np.array(x, dtype=np.int32) for x in (slots, computed, rows, drafts)]
    known = arrays[1] + arrays[2] - arrays[3]
    admitted = tuple(
        AdmittedRequest(slot, str(slot), rng.integers(0, 3, count).astype(np.int32), GREEDY)
        for slot, count in zip(slots, known, strict=True)
    )
    columns = range(-(-MAX_LEN // PAGE_SIZE))
    places = [(g, slot, p) for g in range(len(pages.groups)) for slot in slots for p in columns]
    free = [iter(rng.permutation(count).tolist()) for count in NUM_PAGES]
    ids = [next(free[pages.groups[group].pool]) for group, _, _ in places]
    where = np.column_stack((places, ids)).astype(np.int32).T
    return SchedulerOutput(0, admitted, *where, *arrays, np.array(samples, dtype=bool))


def put(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values).to(DEVICE)


def states_of(plan: SchedulerOutput, pages: KVCacheLayout = ONE_GROUP) -> RequestStates:
    states = RequestStates(SLOTS, MAX_LEN, NUM_PAGES, PAGE_SIZE, DEVICE, pages=pages)
    states.apply(plan)
    return states


def skip_slots(pages: KVCacheLayout) -> torch.Tensor:
    """Return the first slot after each pool's pages, by group."""
    return torch.tensor([NUM_PAGES[group.pool] * PAGE_SIZE for group in pages.groups])


def tables_of(states: RequestStates, plan: SchedulerOutput, pages: KVCacheLayout = ONE_GROUP) -> SlotTables:
    computed = torch.full((SLOTS,), 1000, dtype=torch.int32)  # a slot that is not in the step is not touched
    computed[put(plan.slots).long()] = put(plan.num_computed)
    tables = put(states.page_tables_GSP).to(torch.int32)
    return SlotTables(states.token_ids.int(), tables, computed, PAGE_SIZE, skip_slots(pages))


def ragged(
    case: Case,
    counts: np.ndarray,
    *,
    first_chosen: torch.Tensor | None = None,
    max_drafts: int = 0,
) -> DeviceStepRequests:
    """Return a number of rows of each request, with padding after them."""
    plan = case.plan

    def padded(values: np.ndarray, padding: int = 0) -> torch.Tensor:
        padding_R = np.full(case.padding_requests, padding)
        return put(np.concatenate((values, padding_R)).astype(np.int32))

    cu_rows = torch.nn.functional.pad(padded(counts).cumsum(0), (1, 0)).int()
    return DeviceStepRequests(
        padded(plan.slots, -1),
        cu_rows,
        padded(plan.num_drafts),
        padded(plan.samples),
        cu_rows[:-1] if first_chosen is None else first_chosen,
        num_rows=int(cu_rows[-1]) + case.padding_rows,
        max_rows=max(1, int(counts.max())),
        max_drafts=max_drafts,
    )


def check_padding(rows: DeviceStepRows, used: int, pages: KVCacheLayout) -> None:
    assert (rows.slots_N[used:] == -1).all() and (rows.slots_N[:used] >= 0).all()
    assert (torch.stack(rows.kv_slots)[:, used:] == skip_slots(pages)[:, None]).all()
    assert not rows.positions_N[used:].any() and not rows.token_ids_N[used:].any()


@settings(max_examples=40 // SHARE)
@given(cases(drafts_behind=3))
def test_row_inputs_equal_request_states_and_padding_reads_nothing(case: Case):
    plan, states = case.plan, states_of(case.plan, case.pages)
    states.token_ids.random_(0, 1000, generator=torch.Generator(DEVICE).manual_seed(case.seed))
    expected, used = states.lay_out_rows(plan), plan.num_batched_tokens
    rows = lay_out_rows(ragged(case, plan.num_rows), tables_of(states, plan, case.pages))
    assert rows.slots_N[:used].tolist() == np.repeat(plan.slots, plan.num_rows).tolist()
    assert rows.positions_N[:used].equal(expected.positions_N)
    assert torch.stack(rows.kv_slots)[:, :used].equal(torch.stack(expected.kv_slots))
    assert rows.token_ids_N[:used].equal(expected.token_ids_N)
    lengths = (plan.num_computed + plan.num_rows).tolist() + [0] * case.padding_requests
    assert rows.batches[0].kv_lengths_B.tolist() == lengths
    check_padding(rows, used, case.pages)


@settings(max_examples=30 // SHARE)
@given(cases(drafts_behind=1), st.booleans())
def test_blocks_and_proposals_are_placed_as_in_request_states(case: Case, samples_anchor: bool):
    plan, states = case.plan, states_of(case.plan, case.pages)
    tables = tables_of(states, plan, case.pages)
    expected = states.lay_out_block(plan, MASK, samples_anchor=samples_anchor)
    counts = np.where(plan.num_drafts > 0, plan.num_drafts + 1, 0)
    all_requests = ragged(case, counts)
    all_requests = replace(all_requests, num_rows=all_requests.num_rows + 1)  # no request may draft
    requests, counts = all_requests, counts - samples_anchor * (counts > 0)
    if samples_anchor:
        requests = all_requests.sampling_anchors()
    rows = lay_out_block(requests, tables, MASK)
    used = int(counts.sum())
    check_padding(rows, used, case.pages)
    lengths = np.where(counts > 0, plan.num_computed + counts, 0).tolist()
    assert rows.batches[0].kv_lengths_B.tolist() == lengths + [0] * case.padding_requests
    drafts = torch.full((plan.num_requests, int(plan.num_drafts.max())), -1)
    chosen = put(np.random.default_rng(case.seed).integers(0, 1000, requests.num_rows))
    if expected is not None:
        assert rows.token_ids_N[:used].equal(expected.token_ids_N)
        assert rows.positions_N[:used].equal(expected.positions_N)
        assert torch.stack(rows.kv_slots)[:, :used].equal(torch.stack(expected.kv_slots))
        drafts = by_request(chosen[expected.sampled_X], expected.counts_R, expected.max_count)
    if samples_anchor:
        chosen, rows = all_requests.at_masks(chosen), lay_out_block(all_requests, tables, MASK)
    write_drafts(chosen, rows, tables)
    states.write_drafts(plan, drafts)
    assert tables.token_ids[:, :MAX_LEN].equal(states.token_ids[:, :MAX_LEN].int())


@settings(max_examples=60 // SHARE)
@given(cases(drafts_behind=1), st.integers(1, 4), st.integers(0, 3), st.sampled_from((8, 64)))
def test_ngram_lookup_finds_the_tokens_of_the_definition(
    case: Case, shortest: int, more: int, places: int
) -> None:
    """Rounds may have few positions. Without a match token 0 takes a draft's place."""
    plan, states = case.plan, states_of(case.plan, case.pages)
    if not plan.num_drafts.any():
        return
    tables = tables_of(states, plan, case.pages)
    ends, counts = plan.num_computed.astype(np.int64) + 1, plan.num_drafts.astype(np.int64)
    slots, lengths = plan.slots.astype(np.int64), (shortest, shortest + more)
    drafts = look_up_by_definition(states.token_ids, slots, ends, counts, *lengths)
    states.write_drafts(plan, torch.where(drafts < 0, 0, drafts))
    requests = ragged(case, plan.num_drafts + 1, max_drafts=int(plan.num_drafts.max()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "_PLACES", places)
        lookup.look_up(requests, tables, *lengths)
    assert tables.token_ids[:, :MAX_LEN].equal(states.token_ids[:, :MAX_LEN].int())


SAMPLING = SlotSampling(0.7, 5, 0.9, 0.05, -(2**62) - 3, 12, (4, 9))


def send(upload: Upload, device: DeviceStates, plan: SchedulerOutput, value: int = 0) -> None:
    upload.send(np.full(upload.values.shape, value, np.int32), device.changes(plan))


@settings(max_examples=30 // SHARE)
@given(cases(drafts_behind=3), st.sampled_from((60, 5000)))
def test_device_states_have_the_hosts_pages_and_tokens(case: Case, max_changes: int):
    """A plan's upload may take any number of rounds."""
    plan = replace(case.plan, admitted=tuple(replace(r, sampling=SAMPLING) for r in case.plan.admitted))
    states = states_of(plan, case.pages)
    device = DeviceStates(SLOTS, MAX_LEN, NUM_PAGES, PAGE_SIZE, DEVICE, case.pages)
    upload = Upload(device.arena, 8, max_changes)
    before = device.tables.page_tables.clone()
    assert len(device.changes(plan)) <= SLOTS * device.max_changes
    assert len(np.unique(device.changes(plan)[:, 0])) == len(device.changes(plan)), "a word is written once"
    send(upload, device, plan, 3)
    mine, others = plan.slots, np.setdiff1d(np.arange(SLOTS), plan.slots)
    assert upload.values.tolist() == [3] * 8
    assert device.tables.page_tables[:, mine].tolist() == states.page_tables_GSP[:, mine].tolist()
    assert device.tables.page_tables[:, others].equal(before[:, others])
    assert (before * PAGE_SIZE == skip_slots(case.pages)[:, None, None]).all(), (
        "nowhere, until a page is given"
    )
    assert device.tables.skip_slots.equal(skip_slots(case.pages))
    assert device.tables.token_ids.equal(states.token_ids.int())
    assert device.tables.num_computed[mine].tolist() == plan.num_computed.tolist()
    for field in fields(DeviceSamplingMetadata):
        values, wanted = getattr(device.sampling, field.name), getattr(SAMPLING, field.name, None)
        if wanted is not None:
            assert values[mine].equal(torch.full((len(mine),), wanted, dtype=values.dtype)), field.name
    assert (device.sampling.stop_ids[mine, :3] == torch.tensor([4, 9, -1])).all()
    assert (device.sampling.top_p[others] == 1).all() and (device.sampling.stop_ids[others] == -1).all()
    freed = replace(plan, **{name: getattr(plan, name)[:0] for name in PAGES_OF_A_PLAN})
    states.apply(freed)  # admitted again, without pages: rows go nowhere
    send(upload, device, freed)
    assert device.tables.page_tables.equal(before)
    assert states.page_tables_GSP[:, mine].tolist() == before[:, mine].tolist()
    later = replace(plan, admitted=(), num_computed=np.full_like(plan.num_computed, -1))
    states.apply(later)  # pages of running requests
    send(upload, device, later)
    assert device.tables.page_tables[:, mine].tolist() == states.page_tables_GSP[:, mine].tolist()
    assert device.tables.num_computed[mine].tolist() == plan.num_computed.tolist(), "the device knows it"


def verdicts_of(case: Case, counts: np.ndarray, *, of_all_rows: bool) -> tuple[torch.Tensor, ...]:
    """Return the oracle's choices, the kernel's, and where each request's begin."""
    plan, rng = case.plan, np.random.default_rng(case.seed + 1)
    by_row = put(rng.integers(0, 3, plan.num_batched_tokens + case.padding_rows))
    ends = np.cumsum(plan.num_rows)
    begins = ends - counts
    sampled = np.concatenate([np.arange(b, b + n) for b, n in zip(begins, counts, strict=True)]).astype(int)
    first = begins if of_all_rows else np.cumsum(counts) - counts
    first = np.concatenate((first, np.zeros(case.padding_requests))).astype(np.int32)
    return by_row[sampled], by_row if of_all_rows else by_row[sampled], put(first)


@settings(max_examples=60 // SHARE)
@given(cases(drafts_behind=3), st.booleans())
def test_acceptance_and_advancing_equal_the_hosts(case: Case, of_all_rows: bool):
    plan, states = case.plan, states_of(case.plan, case.pages)
    width = int(plan.num_drafts.max())
    drafts = put(np.random.default_rng(case.seed).integers(0, 3, (plan.num_requests, width)))
    drafts.masked_fill_(torch.arange(width) >= put(plan.num_drafts)[:, None], -1)
    states.write_drafts(plan, drafts)
    tables = tables_of(states, plan, case.pages)
    counts = np.where(plan.samples, 1 + plan.num_drafts, 0)
    sampled, chosen, first = verdicts_of(case, counts, of_all_rows=of_all_rows)
    tokens, num_tokens = accept(sampled.long(), put(counts).long(), drafts)
    states.advance(plan, tokens, num_tokens)

    requests = ragged(case, plan.num_rows, first_chosen=first, max_drafts=width + 2)
    outcome = torch.full((len(requests.slots_R), width + 4), 99, dtype=torch.int32)
    accept_and_advance(chosen, requests, tables, outcome)

    real, out, num_out = plan.num_requests, outcome[:, :-1], outcome[:, -1]
    assert out[:real, : width + 1].tolist() == tokens.tolist() and (out[:real, width + 1 :] == -1).all()
    assert num_out[:real].tolist() == num_tokens.tolist()
    assert (out[real:] == -1).all() and not num_out[real:].any()
    assert tables.token_ids[:, :MAX_LEN].equal(states.token_ids[:, :MAX_LEN].int())
    accepted = (num_tokens - 1).clamp(min=0).cpu().numpy()
    advanced = np.full(SLOTS, 1000)
    advanced[plan.slots] = plan.num_computed + plan.num_rows - plan.num_drafts + accepted
    assert tables.num_computed.tolist() == advanced.tolist()
