"""A drafter that fails, returns or is replaced: tokens are unchanged, drafts resume, at a low cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from manta.actors.engine.uniproc_executor import InProcessExecutor
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.request.request import Request
from manta.cluster.scheduler.background_budget import CHUNK
from manta.cluster.scheduler.drafter_context import DrafterContextRefill
from manta.cluster.simulation.simulated_executor import LinearCost
from manta.cluster.step.executor import DrafterHealth, ExecutorInfo
from manta.cluster.step.sequence import Sequence, SlotTable
from support.engines.cluster_checker import (
    CheckedEngine,
    check_tokens_are_plain,
    expected,
    make_info,
    make_request,
    open_engine,
    simulated_engine,
)
from support.engines.passing_executor import PassingExecutor
from support.engines.steps import settings

LONG = {"ignore_eos": True, "max_tokens": 400}
INFO = make_info(max_model_len=512, num_pages=(1024,))


def opened(count: int, info: ExecutorInfo = INFO, **settings: Any) -> tuple[CheckedEngine, list[Request]]:
    """Return an engine in the middle of a number of requests."""
    engine = open_engine(info, **settings)
    requests = [engine.add(f"r{i}", (2 + i,) * (10 + i), **LONG) for i in range(count)]
    engine.run_steps(10)
    return engine, requests


def test_without_a_drafter_requests_decode_plainly_and_draft_again_when_the_same_one_returns() -> None:
    engine, requests = opened(3)
    engine.executor.lose_drafter()
    assert not any(plan.num_drafts.any() for plan in engine.run_steps(5))
    stats = engine.stats()
    assert (stats.drafter_up, stats.drafter_losses, stats.drafter_refilled_tokens) == (False, 1, 0)
    engine.executor.start_drafter()
    engine.run_steps(1)
    assert engine.stats().drafter_up and engine.stats().drafter_losses == 1
    engine.check_outputs(*requests)


def test_running_requests_are_recomputed_one_by_one_for_a_new_drafter() -> None:
    engine, requests = opened(4)
    lengths = sorted(int(engine.scheduler.table.num_tokens_S[slot]) for slot in range(4))
    engine.executor.start_drafter()
    plans = engine.run_steps(100)
    entered = [(i, len(a.token_ids)) for i, plan in enumerate(plans) for a in plan.admitted]
    assert len(entered) == 4 and len({step for step, _ in entered}) == 4
    assert entered[0] == (0, lengths[0]), "the shortest first"
    assert all((plan.num_drafts == 4).all() for plan in plans[entered[-1][0] + 10 : -20])
    stats = engine.stats()
    assert stats.drafter_refilled_tokens == sum(count for _, count in entered)
    assert (stats.drafter_losses, stats.preemptions) == (1, 0)
    engine.check_outputs(*requests)


def test_recomputation_adds_few_rows_to_a_step() -> None:
    engine, requests = opened(16, max_num_batched_tokens=256, max_num_seqs=16)
    engine.run_steps(30)
    engine.executor.start_drafter()
    plans = engine.run_steps(60)
    assert max(plan.num_batched_tokens for plan in plans) <= 15 * 5 + CHUNK
    assert plans[0].num_batched_tokens <= 16 * 5
    assert max(plan.num_rows.max() for plan in plans) > CHUNK, "and those of the missing drafts are used"
    engine.check_outputs(*requests)


def test_a_single_request_is_recomputed_in_one_step() -> None:
    engine, requests = opened(1, max_num_batched_tokens=256)
    engine.run_steps(20)
    engine.executor.start_drafter()
    first, second = engine.run_steps(2)
    assert first.samples.all() and first.num_rows[0] == len(first.admitted[0].token_ids)
    assert second.num_drafts.tolist() == [4]
    engine.check_outputs(*requests)


def test_requests_that_end_soon_or_lack_pages_continue_plainly() -> None:
    for changes in ({"num_pages": (24,)}, {"max_model_len": 88}):
        info = make_info(**{"max_model_len": 96, "num_pages": (1024,), **changes})
        engine, requests = opened(1, info)
        while max(engine.scheduler.table.num_tokens_S) < 80:
            engine.run_steps(1)
        engine.executor.start_drafter()
        plans = engine.run_steps(1000)
        assert not any(plan.admitted or plan.num_drafts.any() for plan in plans)
        assert engine.stats().drafter_refilled_tokens == 0
        engine.check_outputs(*requests)


def test_requests_without_drafts_are_not_recomputed() -> None:
    engine = open_engine(INFO)
    engine.add("r", max_draft_tokens=0, **LONG)
    engine.run_steps(5)
    engine.executor.start_drafter()
    assert not any(plan.admitted for plan in engine.run_steps(20))


def test_background_requests_are_recomputed_when_no_online_request_runs() -> None:
    engine = open_engine(INFO)
    requests = [engine.add(f"b{i}", background=True, seed=i, **LONG) for i in range(2)]
    engine.run_steps(5)
    engine.executor.start_drafter()
    plans = engine.run_steps(20)
    assert sum(len(plan.admitted) for plan in plans) == 2 and plans[-1].num_drafts.tolist() == [4, 4]
    engine.check_outputs(*requests)


def test_pages_computed_before_a_drafter_came_are_not_in_the_prefix_cache() -> None:
    engine, requests = opened(1)
    engine.executor.start_drafter()
    prompt = requests[0].prompt_token_ids
    assert engine.run(make_request("again", prompt, max_tokens=3)).cached["again"] == 0
    assert engine.run(make_request("third", prompt, max_tokens=3)).cached["third"] == 8, "what came since is"


def test_a_page_half_full_when_a_drafter_came_is_not_in_the_prefix_cache() -> None:
    engine = open_engine(INFO)
    request = engine.add("r", (5,) * 10, max_draft_tokens=0, **LONG)
    engine.run_steps(4)  # 13 tokens are computed: of the fourth page one
    engine.executor.start_drafter()
    engine.add("other", max_tokens=8, ignore_eos=True)
    engine.run_steps(10)
    prompt = (*request.prompt_token_ids, *expected(request, INFO)[0][:20])
    engine.run(make_request("again", prompt, max_tokens=3, ignore_eos=True))
    outputs = engine.run(make_request("third", prompt, max_tokens=9, ignore_eos=True))
    assert outputs.cached["third"] == 28, "the second one's; its drafts had their context"


def test_after_an_abort_during_recomputation_the_next_request_is_recomputed() -> None:
    engine, requests = opened(4, max_num_batched_tokens=64)
    engine.run_steps(40)
    engine.executor.start_drafter()
    (first,) = engine.run_steps(1)
    gone = first.admitted[0].request_id
    assert not first.samples[-1] and engine.abort(gone)
    (second,) = engine.run_steps(1)
    assert len(second.admitted) == 1
    engine.check_outputs(*(request for request in requests if request.request_id != gone))


def test_acceptance_recovers_and_other_requests_wait_little() -> None:
    """32 requests on a machine where each row costs."""
    lengths: list[float] = []
    info = make_info(vocab_size=1000, max_model_len=2048, num_pages=(40_000,))
    cost = LinearCost(verify_floor_s=0.005, verify_row_s=0.0001, draft_floor_s=0.001)
    engine = simulated_engine(info, cost=cost, max_num_seqs=32, max_num_batched_tokens=2048)
    for i in range(32):
        engine.add(f"r{i}", range(2, 22), seed=i, max_tokens=1500, ignore_eos=True)

    def acceptance(steps: int) -> float:
        before = engine.stats()
        for _ in range(steps):
            begin_s = engine.clock()
            engine.step()
            lengths.append(engine.clock() - begin_s)
        now = engine.stats()
        return (now.num_accepted_tokens - before.num_accepted_tokens) / (now.num_drafts - before.num_drafts)

    acceptance(5)
    steady = acceptance(40)
    max_s = max(lengths[5:])
    engine.executor.lose_drafter()
    engine.run_steps(10)
    engine.executor.start_drafter()
    lengths.clear()
    acceptance(120)
    assert acceptance(40) == pytest.approx(steady, rel=0.05)
    engine.plan()
    refill = engine.scheduler.drafter.refill
    assert refill.current is None and not any(refill._prompts)
    assert max(lengths) <= 1.25 * max_s


def test_the_shortest_request_that_pays_is_recomputed_first() -> None:
    table, refill = SlotTable(4, 4096, 100), DrafterContextRefill(2048, chunks=True)
    running: list[Sequence] = []
    for length, max_tokens in ((3000, 500), (900, 500), (500, 20), (1000, 500)):
        request = make_request(f"{length}", (2,) * length, max_tokens=max_tokens)
        running.append(Sequence.of(request, (0, 0, length), 4096, ()))
        table.admit(running[-1], 0, 0)
    refill.begin(running)
    chosen: list[int] = []
    while (sequence := refill.next(table, 15, 3, background=False)) is not None:
        chosen.append(len(sequence.token_ids))
        refill.on_sequence_removed(sequence.slot)
    assert chosen == [900, 1000], "the longest is too long, and the shortest about to end"
    refill.begin(running)
    assert refill.next(table, 0, 3, background=False) is None, "drafts do not pay"


class ChangingDrafter(PassingExecutor):
    """An executor that reports its drafter as failed and replaced."""

    drafter_health = DrafterHealth()


def test_tokens_equal_plain_decodings_whatever_happens_to_the_drafter(
    tiny_qwen3: Path, tiny_drafter: Path
) -> None:
    """In one process a replaced drafter still has its context, so only tokens are compared."""
    config = settings(tiny_qwen3, tiny_drafter)
    executor = ChangingDrafter(InProcessExecutor(config))
    changes = {8: (False, 0), 12: (True, 1), 15: (True, 2), 40: (False, 2), 44: (True, 3)}

    def change_drafter(step: int) -> None:
        if step in changes:
            executor.drafter_health = DrafterHealth(*changes[step])

    stats = check_tokens_are_plain(config, executor, EngineCore(config, executor), 150, change_drafter)
    assert stats.drafter_losses == 3 and stats.drafter_refilled_tokens > 0 and stats.num_drafts > 0
