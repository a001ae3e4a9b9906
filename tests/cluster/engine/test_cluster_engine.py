"""The engine core: how sequences end, which requests are refused, and what its stats count."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from manta.cluster.engine.engine_stats import STEP_PARTS
from manta.cluster.errors import OverloadedError, RequestError, UnprocessableError
from manta.cluster.metrics.engine_metrics import CATALOGUE
from manta.cluster.metrics.fleet_metrics import BATCH_CATALOGUE
from manta.cluster.pages.kv_cache_groups import KVCacheGroup
from manta.cluster.request.request import SamplingParams
from manta.cluster.simulation.simulated_executor import LinearCost
from manta.cluster.step.dummy_steps import dummy_step
from support.engines.cluster_checker import (
    EOS,
    VOCAB,
    expected,
    make_info,
    make_request,
    open_engine,
    simulated_engine,
)

INFO = make_info()


def seed_with_stop_within(count: int, **params: object) -> int:
    """Return a seed with which the sequence reaches an end token early."""
    for seed in range(1000):
        tokens, reason, _ = expected(make_request("r", seed=seed, max_tokens=40, **params), INFO)
        if reason == "stop" and 2 < len(tokens) <= count:
            return seed
    raise AssertionError("no such seed")


def test_the_models_end_token_is_returned_last_without_a_stop_reason() -> None:
    outputs = open_engine(INFO).run(make_request("r", max_tokens=40, seed=seed_with_stop_within(20)))
    assert outputs.tokens["r"][-1] in EOS and outputs.ends["r"] == ("stop", None)


@pytest.mark.parametrize(
    ("prompt", "params", "error", "param", "words"),
    [
        ((), {}, RequestError, "prompt", "empty"),
        ((2, VOCAB), {}, RequestError, "prompt", f"token {VOCAB}"),
        ((2, -1), {}, RequestError, "prompt", "token -1"),
        ((2,) * 64, {}, RequestError, "prompt", "max_model_len=64"),
        ((2,), {"stop_token_ids": (99,)}, RequestError, "stop_token_ids", "token 99"),
        ((2,) * 45, {}, UnprocessableError, "prompt", "41"),
        ((2,) * 20, {"max_tokens": 22}, UnprocessableError, "max_tokens", "41"),
    ],
)
def test_a_request_that_can_never_run_is_refused_by_field(
    prompt: tuple[int, ...], params: dict[str, object], error: type[RequestError], param: str, words: str
) -> None:
    engine = open_engine(make_info(num_pages=(10,)))
    with pytest.raises(error, match=words) as raised:
        engine.add("r", prompt, **params)
    assert type(raised.value) is error and raised.value.param == param
    assert not engine.has_unfinished


def test_the_longest_request_that_the_pages_hold_runs() -> None:
    engine = open_engine(make_info(num_pages=(10,)), survival=[1.0] * 4)
    outputs = engine.run(make_request("r", (2,) * 20, max_tokens=21, ignore_eos=True))
    assert len(outputs.tokens["r"]) == 21


def test_without_chunked_prefill_a_prompt_longer_than_a_step_is_refused() -> None:
    engine = open_engine(INFO, enable_chunked_prefill=False, max_num_batched_tokens=8)
    with pytest.raises(RequestError, match="max_num_batched_tokens=8"):
        engine.add("r", (2,) * 9)


def test_an_id_that_is_running_is_refused() -> None:
    engine = open_engine(INFO)
    engine.add("r")
    with pytest.raises(RequestError, match="already running") as raised:
        engine.add("r")
    assert raised.value.param == "request_id"


def test_a_full_queue_refuses_with_a_retryable_error() -> None:
    engine = open_engine(INFO, max_num_seqs=1, max_num_queued_reqs=2)
    for name in ("a", "b", "c"):
        engine.add(name)
    with pytest.raises(OverloadedError, match=r"2 requests are waiting .*max_num_queued_reqs=2") as raised:
        engine.add("d")
    assert raised.value.retryable


def test_a_burst_that_fits_free_slots_is_accepted_between_steps() -> None:
    engine = open_engine(INFO, max_num_seqs=4, max_num_queued_reqs=1)
    engine.add("a", max_tokens=50, ignore_eos=True)
    engine.step()
    for name in "bcde":  # three have seats, one waits
        engine.add(name, max_tokens=50, ignore_eos=True)
    with pytest.raises(OverloadedError, match="1 requests are waiting and 1 would join"):
        engine.add("f")
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (4, 1)
    engine.abort("a")
    engine.abort("b")
    with pytest.raises(OverloadedError):  # the next plan gives one of both seats away
        engine.add_requests([make_request(name) for name in "ghi"])


def test_free_slots_without_pages_admit_no_request() -> None:
    engine = open_engine(make_info(num_pages=(20,)), max_num_seqs=8, max_num_queued_reqs=2)
    for name in "abc":
        engine.add(name, (1,) * 40, max_tokens=20, ignore_eos=True)
    engine.step()
    assert engine.stats().running < 3
    for i in range(2 - engine.stats().waiting):
        engine.add(f"d{i}")
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        engine.add("e")


def test_completions_of_one_prompt_are_queued_together_or_not_at_all() -> None:
    engine = open_engine(INFO, max_num_seqs=1, max_num_queued_reqs=2)
    engine.add("a")
    with pytest.raises(RequestError, match='"a" is already running'):
        engine.add_requests([make_request("b"), make_request("a")])
    with pytest.raises(OverloadedError, match="0 requests are waiting and 3 would join them"):
        engine.add_requests([make_request(name) for name in "bcd"])
    assert engine.stats().waiting == 1
    engine.add_requests([make_request(name) for name in "bc"])
    assert engine.stats().waiting == 3


def test_engine_stats_count_each_token_and_draft_once() -> None:
    engine = open_engine(INFO, survival=[1.0, 1.0, 0.0])
    engine.run(make_request("r", (2, 3), max_tokens=10, ignore_eos=True))
    stats = engine.stats()
    # One token from the prompt's step, then blocks of 2 accepted drafts + 1.
    assert (stats.steps, stats.prompt_tokens, stats.generation_tokens) == (4, 2, 10)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 4 + 4 + 2, 6)
    assert stats.accepted_per_pos == (3, 3, 0, 0) and stats.finished == {"length": 1}


def test_an_accepted_draft_that_ends_the_sequence_counts_as_accepted() -> None:
    engine = open_engine(make_info(num_speculative_tokens=20), survival=[1.0] * 20)
    request = engine.add("r", max_tokens=40, seed=seed_with_stop_within(20))
    (first,), (second,) = engine.step(), engine.step()
    assert (first.num_drafted, first.num_accepted) == (0, 0) and second.finish_reason == "stop"
    assert second.num_drafted == 20 and second.num_accepted == len(second.token_ids)
    assert [*first.token_ids, *second.token_ids] == expected(request, INFO)[0]


def test_a_steps_time_is_divided_into_its_parts() -> None:
    cost = LinearCost(verify_floor_s=0.010, verify_row_s=0.001, draft_floor_s=0.002)
    engine = simulated_engine(INFO, [0.5], cost)
    engine.add("r", (2,) * 30, max_tokens=1)
    engine.step()
    assert engine.clock() == pytest.approx(0.030)  # 30 rows
    seconds = engine.stats().step_seconds
    assert tuple(seconds) == STEP_PARTS and seconds["execute"] == seconds["verify"] == engine.clock()
    engine.add("s", (2,), max_tokens=2, ignore_eos=True)
    engine.step()
    assert engine.clock() == pytest.approx(0.040)
    engine.close()


def test_queue_time_ends_with_a_requests_first_step() -> None:
    engine = simulated_engine(INFO, cost=LinearCost(verify_floor_s=0.5), max_num_seqs=1)
    for name in ("a", "b"):
        engine.add(name, max_tokens=2, ignore_eos=True, max_draft_tokens=0)
    updates = [update for _ in range(4) for update in engine.step()]
    assert [(u.request_id, u.queue_s) for u in updates] == [("a", 0.0), ("a", 0.0), ("b", 1.0), ("b", 1.0)]


def test_a_snapshot_does_not_change() -> None:
    engine = open_engine(INFO)
    before = engine.stats()
    engine.run(make_request("r", max_tokens=5))
    assert before.steps == 0 and before.step_seconds["execute"] == 0.0 and not before.finished


def test_a_slot_gets_the_sampling_parameters_of_its_request() -> None:
    engine = open_engine(INFO)
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=-3, min_tokens=2)
    fields = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
    engine.add("r", (2, 3, 4), **{**fields, "stop_token_ids": (9, EOS[0])})
    plan = engine.next_plan()
    (entered,) = plan.admitted
    sampling = entered.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.9, 0.1)
    assert (sampling.seed, sampling.min_length) == (-3, 5)
    assert sampling.stop_token_ids == (*EOS, 9) and entered.token_ids.tolist() == [2, 3, 4]


def test_metric_names_are_unique_and_buckets_increase() -> None:
    metrics = (*CATALOGUE, *BATCH_CATALOGUE)
    names = [metric.name for metric in metrics]
    assert len(set(names)) == len(names)
    for metric in metrics:
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets)) and metric.help.endswith(".")
        assert metric.kind == "histogram" or not metric.name.endswith("_total")


def test_more_stop_tokens_than_a_device_can_watch_for_are_refused() -> None:
    request = make_request("r", stop_token_ids=(2, 3, 4), max_tokens=4)
    open_engine(make_info(max_stop_token_ids=5)).add_request(request)
    with pytest.raises(RequestError, match="at most 4") as caught:
        open_engine(make_info(max_stop_token_ids=4)).add_request(request)
    assert caught.value.param == "stop_token_ids"


def test_a_dummy_plan_gives_each_request_its_own_pages_in_order() -> None:
    prompts = [np.zeros(n, np.int32) for n in (5, 2, 9)]
    plan = dummy_step([0, 0, 0], [5, 2, 9], [0, 0, 0], prompts=prompts, num_pages=[2, 0, 3])
    assert plan.page_slots.tolist() == [0, 0, 2, 2, 2]
    assert plan.page_indices.tolist() == [0, 1, 0, 1, 2]
    assert plan.page_ids.tolist() == [0, 1, 2, 3, 4]
    assert [(entered.slot, len(entered.token_ids)) for entered in plan.admitted] == [(0, 5), (1, 2), (2, 9)]
    assert plan.num_batched_tokens == 16 and plan.samples.all()
    scattered = dummy_step([4], [1], [0], num_pages=[2], page_order=np.array([7, 3, 0], np.int32))
    assert scattered.page_ids.tolist() == [7, 3] and not scattered.admitted
    groups = (KVCacheGroup(0), KVCacheGroup(1, window=8), KVCacheGroup(0, window=8))
    grouped = dummy_step([0, 0], [5, 2], [0, 0], prompts=prompts[:2], num_pages=[2, 1], groups=groups)
    assert grouped.page_groups.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert grouped.page_slots.tolist() == [0, 0, 1] * 3
    assert grouped.page_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5], "a pool's ids are used once"
    assert dummy_step([-1, -1], [4, 4], [3, 3]).page_slots.tolist() == []
