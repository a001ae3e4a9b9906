"""The scheduler's decisions, by example: which requests run when, with how many rows and drafts."""

from __future__ import annotations

from typing import Any

import pytest
from manta.cluster.pages.kv_cache_groups import KVCacheGroup
from manta.cluster.step.scheduler_output import NOT_A_NUMBER, SchedulerOutput
from support.engines.cluster_checker import make_info, make_request, open_engine

LONG = {"ignore_eos": True}
PROMPT = tuple(range(2, 22))  # 20 tokens: 5 pages
POOLS = (KVCacheGroup(), KVCacheGroup(window=8), KVCacheGroup(1, 5))


def admitted(plan: SchedulerOutput) -> list[str]:
    return [a.request_id for a in plan.admitted]


def test_a_long_prompt_is_computed_in_chunks_while_another_request_decodes() -> None:
    engine = open_engine(max_num_batched_tokens=10)
    engine.add("short", max_tokens=30, **LONG)
    engine.run_step()
    engine.add("long", PROMPT, max_tokens=5, **LONG)
    plan = engine.run_step()
    assert plan.num_drafts.tolist() == [4, 0] and plan.num_rows.tolist() == [5, 5]
    assert plan.samples.tolist() == [True, False]
    while not plan.samples[-1]:
        plan = engine.run_step()
        assert plan.num_batched_tokens <= 10 and plan.num_rows[0] == 5


def test_without_chunked_prefill_a_prompt_waits_for_a_step_with_enough_rows() -> None:
    engine = open_engine(max_num_batched_tokens=24, enable_chunked_prefill=False)
    engine.add("a", PROMPT, max_tokens=2, **LONG)
    engine.add("b", PROMPT[:19], max_tokens=2, **LONG)
    first, second = engine.run_step(), engine.run_step()
    assert (admitted(first), first.num_rows.tolist()) == (["a"], [20])
    assert (admitted(second), second.samples.all()) == (["b"], True)


def test_without_chunked_prefill_a_prompt_as_long_as_a_step_waits_for_an_empty_step() -> None:
    engine = open_engine(max_num_batched_tokens=24, enable_chunked_prefill=False)
    engine.add("short", PROMPT[8:12], max_tokens=1)
    engine.add("long", PROMPT + PROMPT[:4], max_tokens=1)
    first, second = engine.run_step(), engine.run_step()
    assert (admitted(first), first.num_rows.tolist()) == (["short"], [4])
    assert (admitted(second), second.num_rows.tolist()) == (["long"], [24])


def test_without_chunked_prefill_a_preempted_request_longer_than_a_step_resumes() -> None:
    engine = open_engine(
        make_info(num_pages=(12,)),
        survival=[],
        max_num_batched_tokens=16,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
    )
    for i in range(2):
        engine.add(f"r{i}", PROMPT[:8], max_tokens=24, seed=i, **LONG)
    longest = max(len(admitted.token_ids) for plan in engine.run_steps(200) for admitted in plan.admitted)
    assert longest > 16 and engine.stats().preemptions > 0 and not engine.has_unfinished


def test_every_running_request_gets_a_row_before_any_gets_drafts() -> None:
    engine = open_engine(max_num_batched_tokens=6, max_num_seqs=4)
    for i in range(4):
        engine.add(f"r{i}", (2,), max_tokens=20, **LONG)
    engine.run_step()
    plan = engine.run_step()
    assert plan.num_rows.tolist() == [3, 1, 1, 1] and plan.num_drafts.tolist() == [2, 0, 0, 0]


@pytest.mark.parametrize(
    ("max_model_len", "fields", "drafts"),
    [
        (64, {"max_tokens": 4}, [0, 2, 1, 0]),
        (7, {"max_tokens": None}, [0, 2, 1, 0]),
        (64, {"max_tokens": 5, "max_draft_tokens": 2}, [0, 2, 2, 1, 0]),
    ],
    ids=["max_tokens", "context", "the request's own bound"],
)
def test_drafts_are_bounded_by_the_remaining_tokens(
    max_model_len: int, fields: dict[str, Any], drafts: list[int]
) -> None:
    engine = open_engine(make_info(max_model_len=max_model_len), survival=[])
    engine.add("r", **fields, **LONG)
    assert [int(plan.num_drafts[0]) for plan in engine.run_steps(9)] == drafts


def test_a_repeated_prompt_is_computed_only_from_its_last_page() -> None:
    engine = open_engine()
    engine.run(make_request("a", PROMPT, max_tokens=3))
    engine.add("b", PROMPT, max_tokens=3)
    plan = engine.run_step()
    assert plan.num_computed.tolist() == [16] and plan.num_rows.tolist() == [4]
    stats = engine.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (40, 16)


def test_a_prompt_with_nan_logits_is_not_cached() -> None:
    engine = open_engine()
    for request_id, reason in (("broken", "error"), ("again", "length")):
        engine.add(request_id, PROMPT, max_tokens=1, **LONG)
        plan = engine.next_plan()
        engine.submit(plan)
        result = engine.executor.collect()
        if reason == "error":
            result.token_ids[0, 0] = NOT_A_NUMBER
        (update,) = engine.commit(result)
        assert update.finish_reason == reason
    assert engine.stats().prefix_cache_hits == 0


def test_generated_tokens_are_cached_for_later_prompts() -> None:
    engine = open_engine()
    first = engine.run(make_request("a", PROMPT, max_tokens=13, **LONG)).tokens["a"]
    outputs = engine.run(make_request("b", (*PROMPT, *first), max_tokens=1))
    assert outputs.cached == {"b": 32}


def test_another_salt_or_a_disabled_cache_finds_nothing() -> None:
    engine = open_engine()
    engine.run(make_request("a", PROMPT, cache_salt="alice"))
    assert engine.run(make_request("b", PROMPT, cache_salt="bob")).cached == {"b": 0}
    engine = open_engine(enable_prefix_caching=False)
    assert engine.run(make_request("a", PROMPT), make_request("b", PROMPT)).cached == {"a": 0, "b": 0}


def test_a_reset_cache_finds_nothing_and_running_requests_continue() -> None:
    engine = open_engine(make_info(page_groups=POOLS, num_pages=(64, 64)))
    request = engine.add("a", PROMPT, max_tokens=20, **LONG)
    engine.run_step()
    engine.reset_prefix_cache()
    engine.add("b", PROMPT, max_tokens=2)
    engine.check_outputs(request)
    assert engine.outputs.cached["b"] == 0


def test_a_preempted_request_finds_its_own_pages_again() -> None:
    engine = open_engine(make_info(num_pages=(9,)), survival=[])
    engine.add("old", PROMPT[:4], max_tokens=20, **LONG)
    engine.add("new", PROMPT[4:12], max_tokens=20, **LONG)
    *_, again = (plan for plan in engine.run_steps(200)[1:] if plan.admitted)
    assert engine.stats().preemptions >= 1
    assert again.num_computed[-1] > 0 and len(again.admitted[0].token_ids) > 8


def test_without_enough_pages_drafts_are_dropped_before_requests_are_preempted() -> None:
    engine = open_engine(make_info(num_pages=(2,), max_model_len=9), survival=[])
    engine.add("a", (2, 3, 4), max_tokens=2, **LONG)
    engine.add("b", (2,), max_tokens=5, **LONG)
    engine.run()
    assert engine.stats().preemptions == 0


def test_admission_leaves_every_running_request_a_page_to_grow() -> None:
    one, two = (KVCacheGroup(),), (KVCacheGroup(), KVCacheGroup(window=40))
    for groups, num_pages, enters in ((one, 6, False), (one, 7, True), (two, 13, False), (two, 14, True)):
        engine = open_engine(make_info(page_groups=groups, num_pages=(num_pages,)), survival=[])
        engine.add("a", (2, 3, 4), max_tokens=8, max_draft_tokens=0, **LONG)
        engine.run_step()
        engine.add("b", PROMPT, max_tokens=1)
        assert (admitted(engine.run_step()) == ["b"]) is enters


def test_fcfs_ignores_priority_and_the_priority_policy_serves_the_lowest_first() -> None:
    for policy, order in (("fcfs", ["a", "b", "c"]), ("priority", ["c", "b", "a"])):
        engine = open_engine(max_num_seqs=1, scheduling_policy=policy)
        requests = [make_request(name, max_tokens=3, priority=-i) for i, name in enumerate("abc")]
        assert list(engine.run(*requests).ends) == order


def test_the_lowest_priority_is_preempted_whenever_it_arrived() -> None:
    engine = open_engine(make_info(num_pages=(14,)), scheduling_policy="priority")
    requests = [make_request(f"r{i}", PROMPT[i:], max_tokens=20, priority=i == 0, **LONG) for i in range(3)]
    assert list(engine.run(*requests).ends)[-1] == "r0" and engine.stats().preemptions > 0


def test_an_abort_in_flight_frees_the_pages_and_drops_the_steps_results() -> None:
    engine = open_engine(make_info(page_groups=POOLS, num_pages=(64, 64)))
    engine.add("r", PROMPT, max_tokens=20)
    plan = engine.next_plan()
    assert engine.abort("r")
    assert engine.stats().kv_usage == 0 and engine.has_unfinished
    engine.submit(plan)
    assert engine.finish_step() == []
    assert not engine.has_unfinished
    assert engine.stats().generation_tokens == 0 and engine.stats().finished == {"abort": 1}


def test_an_id_can_be_used_again_while_its_aborted_request_is_still_in_flight() -> None:
    engine = open_engine()
    engine.add("r", PROMPT, max_tokens=20)
    plan = engine.next_plan()
    engine.submit(plan)
    assert engine.abort("r")
    again = engine.add("r", (5, 6), max_tokens=4, seed=9)
    engine.finish_step()
    engine.check_outputs(again)


def test_a_waiting_request_is_aborted_immediately() -> None:
    engine = open_engine(max_num_seqs=1)
    engine.add("a", max_tokens=20)
    engine.add("b", max_tokens=20)
    engine.run_step()
    assert engine.abort("b", "stop") and not engine.abort("b") and not engine.abort("unknown")
    assert engine.stats().waiting == 0 and engine.stats().finished == {"stop": 1}


def test_the_next_step_is_planned_before_the_last_result_is_known() -> None:
    engine = open_engine(make_info(max_in_flight=2), survival=[1.0] * 4)
    engine.add("r", (2, 3), max_tokens=13, **LONG)
    first, second = engine.next_plan(), engine.next_plan()
    assert first.num_computed.tolist() == [0] and second.num_computed.tolist() == [-1]
    assert second.num_drafts.tolist() == [4] and second.samples.all()
    engine.submit(first, second)
    engine.finish_step()
    third = engine.next_plan()
    # 3 tokens are known, the second step returns up to 5: the third may return the rest of 13, no more.
    assert third.num_drafts.tolist() == [4]
    engine.submit(third)
    engine.finish_step()
    # 8 tokens are known, the third step returns 1 to 5; beyond the limit there are no drafts.
    assert engine.next_plan().num_drafts.tolist() == [1]


def test_a_sequence_that_ends_in_any_case_is_not_planned_again() -> None:
    engine = open_engine(make_info(max_in_flight=2))
    engine.add("r", (2, 3), max_tokens=1, **LONG)
    assert engine.plan() is not None and engine.plan() is None
