"""Recurrent states: which are allocated and saved, where a hit begins, and that none is lost or shared.

`cluster_checker.py` simulates real states; `test_cluster_properties.py` tests random workloads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.cluster.kv_cache.prefix_cache import PagePool, PrefixCache
from manta.cluster.kv_cache.recurrent_state_manager import MOVES_PAGES, RecurrentStateManager
from manta.cluster.pages.kv_cache_groups import KVCacheGroup
from manta.cluster.step.dummy_steps import dummy_step
from manta.cluster.step.sequence import Sequence, SlotTable
from manta.cluster.step.step_outcome import StepOutcome
from support.engines.cluster_checker import (
    EOS,
    VOCAB,
    CheckedEngine,
    make_info,
    make_request,
    open_engine,
)

PAGE = 2
LONG = {"ignore_eos": True}
STEM = tuple(2 + 5 * i % 19 for i in range(24))


def engine_with(
    num_states: int, *, max_in_flight: int = 1, pages: int = 64, **settings: Any
) -> CheckedEngine:
    info = make_info(num_states=num_states, page_size=PAGE, num_pages=(pages,), max_in_flight=max_in_flight)
    return open_engine(info, **settings)


def saved_in(engine: CheckedEngine) -> Mapping[bytes, int]:
    """Return the saved states, by digest."""
    states = engine.scheduler.kv_cache_manager.states
    assert states is not None
    return states.saved


def cached(engine: CheckedEngine, request_id: str, prompt: tuple[int, ...], max_tokens: int = 2) -> int:
    """Return the prompt tokens that need not be computed, after checking the output."""
    engine.check_outputs(engine.add(request_id, prompt, max_tokens=max_tokens, **LONG))
    return engine.outputs.cached[request_id]


def test_a_repeated_prompt_starts_from_the_state_saved_at_its_end() -> None:
    engine, prompt = engine_with(8), STEM[:22]
    assert cached(engine, "a", prompt) == 0
    assert cached(engine, "b", prompt) == 20  # one row must be computed for the first token
    assert cached(engine, "c", (*prompt, 9, 9)) == 20


def test_equal_prompts_computed_together_save_one_state() -> None:
    engine = engine_with(8)
    engine.run(*(make_request(name, STEM, max_tokens=2, **LONG) for name in "ab"))
    assert len(saved_in(engine)) == 1
    assert cached(engine, "c", STEM) == len(STEM) - PAGE


def test_pages_without_a_state_are_no_hit_and_a_state_is_saved_where_prompts_diverge() -> None:
    engine = engine_with(8)
    first, second, third = ((*STEM[:10], *(token,) * 9) for token in (3, 4, 5))
    assert cached(engine, "a", first) == 0
    assert cached(engine, "b", second) == 0  # ten tokens are in pages, but there was no state after them
    assert cached(engine, "c", third) == 10


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_an_answer_is_found_up_to_its_last_saved_state(max_in_flight: int) -> None:
    engine = engine_with(8, max_in_flight=max_in_flight, survival=[1.0] * 4)
    answer = engine.run(make_request("a", STEM[:5], max_tokens=30, **LONG)).tokens["a"]
    conversation = (*STEM[:5], *answer, 7, 7, 7)
    moves = PAGE * MOVES_PAGES
    assert cached(engine, "b", conversation) == (5 + len(answer) - 1) // moves * moves


def test_an_unfinished_prompt_saves_its_last_state() -> None:
    engine = engine_with(2, max_num_batched_tokens=20)
    engine.add("a", STEM, max_tokens=4)
    engine.step()
    engine.abort("a")
    assert cached(engine, "b", STEM) == 2 * PAGE * MOVES_PAGES


def test_a_preempted_request_resumes_from_its_last_saved_state() -> None:
    engine = engine_with(8, max_num_batched_tokens=32)
    request = engine.add("a", STEM[:5], max_tokens=40, **LONG)
    while len(engine.outputs.tokens.get("a", ())) < 20:
        engine.step()
    num_tokens, queues = 5 + len(engine.outputs.tokens["a"]), engine.scheduler.queues
    queues.preempt(queues.running[0])
    moves = PAGE * MOVES_PAGES
    assert engine.run_step().num_computed.tolist() == [(num_tokens - 1) // moves * moves]
    engine.check_outputs(request)


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_no_more_requests_run_than_there_are_states(max_in_flight: int) -> None:
    engine = engine_with(3, max_in_flight=max_in_flight, pages=256)
    requests = [engine.add(f"r{i}", STEM[: 3 + i], max_tokens=12, **LONG) for i in range(8)]
    maximum = 0
    while engine.has_unfinished:
        engine.step()
        maximum = max(maximum, engine.stats().running)
    assert maximum == 3 and engine.stats().preemptions == 0
    engine.check_outputs(*requests)


def test_saved_states_are_evicted_for_admitted_requests_and_the_last_one_is_reused() -> None:
    engine = engine_with(1)
    for request_id in ("a", "b"):  # one state: none can be saved while a request runs
        assert cached(engine, request_id, STEM) == 0
    engine = engine_with(2)
    assert cached(engine, "a", STEM) == 0
    assert cached(engine, "b", STEM) == len(STEM) - PAGE
    assert cached(engine, "c", tuple(reversed(STEM))) == 0
    assert cached(engine, "d", STEM) == 0  # of two states the other prompt took one, and saved in one


def test_the_least_recently_used_saved_state_is_evicted() -> None:
    books = RecurrentStateManager(3, 3, PAGE, saves=True)
    books.saved.update({b"old": books._free.pop(), b"new": books._free.pop()})
    assert books.admit(0, [b"old"], 1, 1, 9).source is not None  # and the last free state is taken
    books.admit(1, [], 0, 0, 9)
    assert list(books.saved) == [b"old"]
    entry = books.admit(2, [b"old"], 1, 1, 9)
    assert entry.source == entry.state and not books.saved  # taken over, as nothing else is left


def step_between(before: int, behind: int) -> StepOutcome:
    """Return a step of one request in slot 0: its anchor and accepted drafts."""
    one, ends = np.ones(1, np.int32), np.zeros(1, np.bool_)
    counts = np.array([behind - before], np.int32)
    return StepOutcome(
        slots=one - 1,
        num_known=one,
        num_planned=counts - 1,
        num_drafts=counts - 1,
        samples=~ends,
        token_ids=np.zeros((1, behind - before), np.int32),
        num_out=counts,
        num_accepted=counts - 1,
        num_computed=np.array([behind], np.int32),
        stopped=ends,
        full=ends,
        failed=ends,
        branches={},
        logprobs={},
        prompt_logprobs={},
    )


@pytest.mark.parametrize(
    ("before", "behind", "saved", "requested"), [(4, 9, 1, 0), (4, 8, 1, 0), (4, 7, 0, 1), (8, 10, 0, 0)]
)
def test_only_positions_that_the_requested_step_passes_are_saved(
    before: int, behind: int, saved: int, requested: int
) -> None:
    books, table = RecurrentStateManager(3, 1, PAGE, saves=True), SlotTable(1, 64, VOCAB)
    sequence = Sequence.of(make_request("a", STEM[:5]), (0, 0, 0), 64, EOS)
    sequence.digests = [bytes([i]) for i in range(8)]
    books.admit(table.admit(sequence, 0, 4), [], 0, 0, 5)
    slots, first, end = (np.array([n], np.int32) for n in (0, 4, 9))
    saves = books.plan_saves(slots, first, end)
    assert saves is not None and saves.positions.tolist() == [8]
    plan = replace(dummy_step([before], [5], [4]), saves=saves)
    books.commit(plan, step_between(before, behind), table)
    books.check_invariants((0,))
    assert len(books.saved) == saved and len(books._planned[0]) == requested
    assert not saved or list(books.saved) == [bytes([8 // PAGE - 1])]


def test_a_hit_ends_at_a_state_and_has_its_windows() -> None:
    """The window lacks one of 5 pages and two have no state: 1 page is left."""
    pool, groups = PagePool(16), (KVCacheGroup(), KVCacheGroup(window=4))
    books = RecurrentStateManager(4, 1, PAGE, saves=True)
    cache, digests = PrefixCache([pool], groups, PAGE, books), [bytes([i]) for i in range(6)]
    cache.insert(0, zip(digests, pool.allocate(6), strict=True))
    cache.insert(1, zip([digests[i] for i in (0, 1, 4, 5)], pool.allocate(4), strict=True))
    for number in (1, 5):
        books.saved[digests[number - 1]] = books._free.pop()
    hit = cache.match(digests)
    assert (hit.num_pages, hit.num_shared) == (1, 6)


def test_a_saved_state_is_evicted_with_the_page_before_it() -> None:
    engine = engine_with(8, pages=20)
    assert cached(engine, "a", STEM) == 0
    assert saved_in(engine)
    assert cached(engine, "b", tuple(reversed(STEM)), max_tokens=12) == 0  # needs nearly all pages
    assert cached(engine, "c", STEM) == 0
    assert len(saved_in(engine)) <= 3  # those of the last two prompts, and of their answers


def test_nothing_is_saved_without_a_prefix_cache_or_drafter_context() -> None:
    engine = engine_with(8, enable_prefix_caching=False)
    cached(engine, "a", STEM, max_tokens=20)
    assert not saved_in(engine)
    engine = engine_with(8)
    engine.add("a", STEM, max_tokens=20, **LONG, max_draft_tokens=0)
    engine.step()
    engine.executor.start_drafter()
    engine.run()
    assert not saved_in(engine) and engine.stats().kv_usage == 0.0


def test_with_all_states_taken_running_requests_are_recomputed_for_a_new_drafter() -> None:
    engine = engine_with(3, pages=256)
    requests = [engine.add(f"r{i}", STEM[: 4 + i], max_tokens=50, **LONG) for i in range(3)]
    engine.run_steps(4)
    engine.executor.start_drafter()
    engine.check_outputs(*requests)
    assert engine.stats().drafter_refilled_tokens > 0


def test_a_reset_prefix_cache_drops_states() -> None:
    engine = engine_with(8)
    cached(engine, "a", STEM)
    engine.reset_prefix_cache()
    assert cached(engine, "b", STEM) == 0


def test_plans_for_targets_without_recurrent_layers_have_no_states() -> None:
    engine = open_engine(make_info())
    engine.add("a", STEM, max_tokens=2)
    plan = engine.next_plan()
    assert plan.saves is None and plan.admitted[0].state is None


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_state_is_lost_and_none_has_two_owners(data: st.DataObject) -> None:
    """The state manager alone gets any calls that a scheduler may make."""
    num_slots = data.draw(st.integers(1, 4))
    books = RecurrentStateManager(
        data.draw(st.integers(1, 8)), num_slots, PAGE, saves=data.draw(st.booleans())
    )
    digests = [[bytes([salt, i]) for i in range(16)] for salt in range(2)]
    running: dict[int, tuple[int, int]] = {}  # slot -> salt, tokens computed
    moving: list[tuple[int, bytes | None]] = []  # states that a tier holds; the digest of those being read
    for _ in range(data.draw(st.integers(1, 30))):
        idle = [slot for slot in range(num_slots) if slot not in running]
        action = data.draw(
            st.sampled_from(("enter", "ask", "leave", "drop", "clear", "hold", "read", "moved"))
        )
        if action == "enter" and idle and books.num_available:
            salt, shared = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 15))
            saved = [n for n in range(1, shared + 1) if digests[salt][n - 1] in books.saved]
            pages = max(saved, default=0)
            entry = books.admit(idle[0], digests[salt], pages, shared, data.draw(st.integers(1, 32)))
            assert (entry.source is None) == (pages == 0) and entry.num_tokens == pages * PAGE
            running[idle[0]] = salt, entry.num_tokens
        elif action == "ask" and running:
            slots = np.array(sorted(running), dtype=np.int32)
            first = np.array([running[slot][1] for slot in slots.tolist()], dtype=np.int32)
            rows = data.draw(st.lists(st.integers(1, 24), min_size=len(slots), max_size=len(slots)))
            saves = books.plan_saves(slots, first, first + np.array(rows, dtype=np.int32))
            if saves is not None:
                owners = [books._live[slot] for slot in running]
                requested = saves.states.tolist()
                assert len(set(requested)) == len(requested) and not set(requested) & set(owners)
                assert not set(requested) & set(books.saved.values()), "what is saved is not written"
                assert not set(requested) & {state for state, _ in moving}, "what moves is not written"
        elif action == "leave" and running:
            slot = data.draw(st.sampled_from(sorted(running)))
            books.free(slot)
            del running[slot]
        elif action == "drop":
            books.evict(data.draw(st.sampled_from(digests[0] + digests[1])))
        elif action == "clear":
            books.clear()
        elif action == "hold" and set(books.saved.values()) - {state for state, _ in moving}:
            still = sorted(set(books.saved.values()) - {state for state, _ in moving})
            moving.append((data.draw(st.sampled_from(still)), None))
            books.hold([moving[-1][0]])
        elif action == "read" and books.num_available > 1:
            moving.append((books.hold_new(), data.draw(st.sampled_from(digests[0] + digests[1]))))
        elif action == "moved" and moving:
            state, digest = moving.pop(data.draw(st.integers(0, len(moving) - 1)))
            if digest is not None and data.draw(st.booleans()):
                books.insert(digest, state)
            books.drop([state])
        books.check_invariants(running)
    for slot in running:
        books.free(slot)
    for state, _ in moving:
        books.drop([state])
    books.clear()
    books.check_invariants(())
    assert len(books._free) == books.num_states
