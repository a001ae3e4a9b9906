"""Background work: after online requests for every resource, and finished in the end."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from manta.cluster.errors import OverloadedError, UnprocessableError
from manta.cluster.request.request import Request
from manta.cluster.scheduler.background_budget import BackgroundBudget, BackgroundWork
from manta.cluster.speculation.step_cost_model import StepCostModel, StepLoad
from manta.cluster.step.scheduler_output import SchedulerOutput, StepTimings
from support.engines.cluster_checker import (
    CheckedEngine,
    make_info,
    make_request,
    open_engine,
    simulated_engine,
    vary_background,
)
from support.engines.random_workloads import LAYOUTS, Arrival, arrivals, infos

WHOLE = os.environ.get("MANTA_GRID") == "whole"
LONG = {"ignore_eos": True}
PROMPT = tuple(range(2, 22))  # 20 tokens: 5 pages


def step(engine: CheckedEngine) -> dict[str, tuple[int, int]]:
    """Run a step, if there is one; return the rows and drafts of its requests."""
    if (plan := engine.plan()) is None:
        return {}
    names = [engine.scheduler.table.sequences[slot].request.request_id for slot in plan.slots.tolist()]
    engine.submit(plan)
    engine.finish_step()
    sizes = zip(plan.num_rows.tolist(), plan.num_drafts.tolist(), strict=True)
    return dict(zip(names, sizes, strict=True))


def add_background(
    engine: CheckedEngine, name: str, prompt: tuple[int, ...] = PROMPT, **fields: Any
) -> Request:
    return engine.add(name, prompt, background=True, max_tokens=30, **LONG, **fields)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_an_online_request_preempts_background_work_which_resumes(policy: str) -> None:
    engine = open_engine(max_num_seqs=2, scheduling_policy=policy)
    ours = [add_background(engine, f"b{i}", priority=-5, seed=i) for i in range(3)]
    assert step(engine).keys() == {"b0", "b1"}
    engine.add("online", max_tokens=3, priority=5, **LONG)
    assert step(engine).keys() == {"online"}
    assert (engine.stats().background_running, engine.stats().background_waiting) == (1, 2)
    assert engine.stats().preemptions == 1
    engine.check_outputs(*ours)


def test_a_background_request_without_rows_keeps_its_slot_and_pages() -> None:
    engine = open_engine(max_num_batched_tokens=12)
    add_background(engine, "early")
    add_background(engine, "late", PROMPT[::-1], seed=9)
    engine.run_steps(4)  # "late" is in the middle of its prompt
    usage = engine.stats().kv_usage
    engine.add("online", (5, 6, 7), max_tokens=12, **LONG)
    while "online" not in engine.outputs.ends:
        assert step(engine).keys() == {"online"}
        assert engine.stats().kv_usage >= usage or "online" in engine.outputs.ends
    engine.run()
    assert engine.stats().preemptions == 0
    assert [len(engine.outputs.tokens[name]) for name in ("early", "late")] == [30, 30]


def test_an_online_request_takes_the_pages_of_background_work() -> None:
    engine = open_engine(make_info(num_pages=(16,)), enable_prefix_caching=False)
    for i in range(2):
        add_background(engine, f"b{i}", seed=i)
    step(engine)
    engine.add("online", PROMPT, max_tokens=30, **LONG)
    steps = [step(engine)]
    assert steps[0].keys() == {"online"}, "entered at once"
    while "online" not in engine.outputs.ends:
        steps.append(step(engine))
    assert all(step.keys() == {"online"} for step in steps)
    assert all(drafts == 4 for step in steps[1:-2] for _, drafts in step.values()), "drafts have pages, too"
    assert engine.stats().preemptions == 2
    engine.run()


def test_background_work_is_never_refused_and_counts_for_no_limit() -> None:
    engine = open_engine(max_num_seqs=1, max_num_queued_reqs=0)
    for i in range(20):
        add_background(engine, f"b{i}", seed=i)
    engine.add("a")
    with pytest.raises(OverloadedError):
        engine.add("b")
    assert (engine.stats().waiting, engine.stats().background_waiting) == (21, 20)


def test_background_work_alone_has_the_whole_engine() -> None:
    """The plans equal those of the same requests without the mark."""

    def plans(**fields: Any) -> list[dict[str, tuple[int, int]]]:
        engine = open_engine(max_num_batched_tokens=40)
        for i in range(12):
            engine.add(f"r{i}", PROMPT[i:], max_tokens=20, seed=i, **LONG, **fields)
        return list(iter(lambda: step(engine), {}))

    assert plans(background=True) == plans()


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=40 if WHOLE else 15, deadline=None)
@given(data=st.data())
def test_online_requests_are_scheduled_as_if_they_were_alone(layout: str, data: st.DataObject) -> None:
    """The same rows in every step. (Without prefixes, because background work fills that cache, too.)"""
    info = data.draw(infos(LAYOUTS[layout]))
    limits = {
        "max_num_seqs": data.draw(st.integers(1, 6)),
        "max_num_batched_tokens": data.draw(st.integers(1, 40)),
        "scheduling_policy": data.draw(st.sampled_from(("fcfs", "priority"))),
        "enable_prefix_caching": False,
    }
    work = [data.draw(arrivals(i)) for i in range(data.draw(st.integers(1, 10)))]
    mixed, alone = (open_engine(info, [0.8, 0.5], **limits) for _ in range(2))
    vary_background(mixed, data.draw(st.integers(0, 999)))
    now, num_mixed, num_paused = 0, 0, 0
    while now <= 6 or alone.has_unfinished or mixed.has_unfinished:
        for arrival in (a for a in work if a.step == now):
            arrive(mixed, arrival)
            if not arrival.request.background:
                arrive(alone, arrival)
        seen, online = step(mixed), step(alone)
        ours = {name for name in seen if work[int(name[1:])].request.background}
        assert {name: rows for name, rows in seen.items() if name not in ours} == online
        num_mixed += bool(ours and online)
        num_paused += bool(online and not ours and mixed.stats().background_running)
        now += 1
        assert now < 3000, "no progress"
    for name, tokens in alone.outputs.tokens.items():
        assert mixed.outputs.tokens[name] == tokens
    event(f"preempted: {mixed.stats().preemptions > 0}")
    event(f"paused: {num_paused > 0}, joined: {num_mixed > 0}")


def arrive(engine: CheckedEngine, arrival: Arrival) -> None:
    try:
        engine.add_request(arrival.request)
    except UnprocessableError:
        event("too long for the pages")


class Machine:
    """Seconds of a step: on a CPU each row costs; on a GPU very many do, and prompts are another pass."""

    def __init__(self, kind: str) -> None:
        self._on_gpu, self._random = kind == "gpu", np.random.default_rng(0)

    def __call__(self, plan: SchedulerOutput) -> StepTimings:
        decode_R = (plan.num_rows == plan.num_drafts + 1) & plan.samples
        decodes, prompts = (int(plan.num_rows[which].sum()) for which in (decode_R, ~decode_R))
        if self._on_gpu:
            seconds = max(0.005, 2e-5 * decodes) * bool(decodes) + max(0.004, 2e-5 * prompts) * bool(prompts)
        else:
            seconds = 4e-4 + 3e-5 * (decodes + prompts)
        return StepTimings(verify_s=seconds * self._random.lognormal(0, 0.05))


def serve(kind: str, seconds: float, *, num_online: int, with_background: bool) -> tuple[list[float], float]:
    """Times per token of online requests at a given concurrency, and tokens per second of background work."""
    apart = {"max_in_flight": 2, "row_buckets": tuple(range(1, 201))} if kind == "gpu" else {}
    info = make_info(num_pages=(4096,), page_size=16, max_model_len=512, vocab_size=1000, **apart)
    engine = simulated_engine(info, cost=Machine(kind), speculative_config={"model": "d"}, max_num_seqs=32)
    num_made, num_tokens = 0, 0
    first: dict[str, float] = {}
    per_token: list[float] = []

    def fill(kind: str, missing: int, length: int) -> None:
        nonlocal num_made
        for _ in range(missing):
            num_made += 1
            marks = {"seed": num_made, "max_tokens": 100, "background": kind == "background", **LONG}
            engine.add_request(make_request(f"{kind} {num_made}", [num_made % 1000] * length, **marks))

    while engine.clock() < seconds:
        stats = engine.stats()
        num_background = stats.background_running + stats.background_waiting
        fill("background", (40 - num_background) * with_background, 150)
        fill("online", num_online - (stats.running + stats.waiting - num_background), 50)
        for update in engine.step():
            if update.request_id.startswith("background"):
                num_tokens += len(update.token_ids)
            elif update.finish_reason is not None:
                per_token.append((engine.clock() - first[update.request_id]) / 99)
            else:
                first.setdefault(update.request_id, engine.clock())
    return per_token, num_tokens / seconds


@pytest.mark.parametrize(("kind", "seconds"), [("cpu", 2.0), ("gpu", 10.0)])
def test_online_requests_decode_nearly_as_fast_with_background_work(kind: str, seconds: float) -> None:
    alone, _ = serve(kind, seconds, num_online=2, with_background=False)
    mixed, rate = serve(kind, seconds, num_online=2, with_background=True)
    # Beyond, luck with drafts decides: a request has some forty blocks.
    assert np.percentile(mixed, 80) <= 1.08 * np.percentile(alone, 80)
    # The first ones start with forty prompts, when nothing is measured yet.
    assert np.mean(mixed[2:]) <= 1.08 * np.mean(alone[2:])
    assert rate > 0, "a share is left even where online requests never pause"


def test_background_decoding_joins_every_step_if_rows_are_free_and_few_if_they_are_not() -> None:
    joined = {}
    for kind, row_s in (("gpu", 1e-7), ("cpu", 3e-5)):
        costs, random, joined[kind] = StepCostModel(), np.random.default_rng(3), 0
        share = BackgroundBudget(costs, 2048, chunks=True)
        for _ in range(4000):
            num_joining = share.with_online(StepLoad(2, 0, 0.0), 4, num_decoding=16).num_decoding
            base_s, rows = 5e-4 + row_s * 10, 5 * (2 + num_joining)
            seconds = (5e-4 + row_s * rows) * random.lognormal(0, 0.05)
            share.observe(base_s if num_joining else seconds, seconds)
            costs.observe(
                StepLoad(2 + num_joining, 0, 0.0), rows * 4 // 5, rows, 1e-6, seconds, 2 + num_joining
            )
            joined[kind] += num_joining
    assert joined["gpu"] > 0.6 * 16 * 4000
    assert 0 < joined["cpu"] < 0.2 * 4000, "one at a time, once in several steps"


def test_background_steps_are_short_while_online_requests_arrive() -> None:
    costs = StepCostModel()
    share = BackgroundBudget(costs, 2048, chunks=True)
    assert share.without_online(64, 4, 0.0, quiet=False) == BackgroundWork(64, 2048), "nothing is known"
    for _ in range(20):
        for num_requests, prompt_rows in ((1, 0), (8, 0), (20, 0), (1, 64), (8, 512)):
            seconds = 1e-3 + 3e-5 * (5 * num_requests + prompt_rows)
            load = StepLoad(num_requests, prompt_rows, 0.0)
            costs.observe(load, 4 * num_requests, 5 * num_requests, 1e-6, seconds, num_requests)
    share.observe(1.15e-3, 1.15e-3)
    work = share.without_online(64, 4, 0.0, quiet=False)  # 4.6 ms
    assert 18 <= work.num_decoding <= 24 and work.prompt_rows == 32
    work = share.without_online(64, 4, 0.0, quiet=True)
    assert work.num_decoding == 64 and 1700 <= work.prompt_rows <= 2048, "80 ms, of prompts alone"
