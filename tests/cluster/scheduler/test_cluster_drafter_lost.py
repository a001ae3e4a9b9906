"""A drafter that fails, returns or is replaced: tokens are unchanged, drafts resume, at a low cost."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from manta.actors.engine.uniproc_executor import InProcessExecutor
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.request.request import Request, SamplingParams
from manta.cluster.scheduler.background_budget import CHUNK
from manta.cluster.scheduler.drafter_context import DrafterContextRefill
from manta.cluster.simulation.simulated_executor import LinearCost, SimulatedExecutor, VirtualClock
from manta.cluster.step.executor import DrafterHealth, ExecutorInfo
from manta.cluster.step.scheduler_output import SchedulerOutput
from manta.cluster.step.sequence import Sequence, SlotTable
from support.engines.cluster_checker import Outputs, add, expected, make_info, make_request, open_engine, run
from support.engines.passing_executor import PassingExecutor
from support.engines.steps import settings

LONG = {"ignore_eos": True, "max_tokens": 400}
INFO = make_info(max_model_len=512, num_pages=(1024,))


def plans_of(engine: EngineCore, outputs: Outputs, steps: int) -> list[SchedulerOutput]:
    """Run steps and record their plans."""
    plans: list[SchedulerOutput] = []
    for _ in range(steps):
        plan = engine.plan()
        if plan is None:
            break
        plans.append(plan)
        engine._executor.submit(plan)
        for update in engine.commit(engine._executor.collect()):
            outputs.put(update)
        engine.check_invariants()
    return plans


def opened(
    count: int, info: ExecutorInfo = INFO, **settings: object
) -> tuple[EngineCore, list[Request], Outputs]:
    """An engine in the middle of a number of requests."""
    engine, outputs = open_engine(info, **settings), Outputs()
    requests = [make_request(f"r{i}", (2 + i,) * (10 + i), **LONG) for i in range(count)]
    for request in requests:
        add(engine, request)
    plans_of(engine, outputs, 10)
    return engine, requests, outputs


def finish(engine: EngineCore, requests: list[Request], outputs: Outputs) -> None:
    plans_of(engine, outputs, 2000)
    assert all(outputs.tokens[r.request_id] == expected(r, engine._executor.info)[0] for r in requests)


def test_without_a_drafter_requests_decode_plainly_and_draft_again_when_the_same_one_returns() -> None:
    engine, requests, outputs = opened(3)
    engine._executor.lose_drafter()
    assert not any(plan.num_drafts.any() for plan in plans_of(engine, outputs, 5))
    stats = engine.stats()
    assert (stats.drafter_up, stats.drafter_losses, stats.drafter_refilled_tokens) == (False, 1, 0)
    engine._executor.start_drafter()
    plans_of(engine, outputs, 1)
    assert engine.stats().drafter_up and engine.stats().drafter_losses == 1
    finish(engine, requests, outputs)


def test_running_requests_are_recomputed_one_by_one_for_a_new_drafter() -> None:
    engine, requests, outputs = opened(4)
    lengths = sorted(int(engine._scheduler.table.num_tokens_S[slot]) for slot in range(4))
    engine._executor.start_drafter()
    plans = plans_of(engine, outputs, 100)
    entered = [(i, len(a.token_ids)) for i, plan in enumerate(plans) for a in plan.admitted]
    assert len(entered) == 4 and len({step for step, _ in entered}) == 4
    assert entered[0] == (0, lengths[0]), "the shortest first"
    assert all((plan.num_drafts == 4).all() for plan in plans[entered[-1][0] + 10 : -20])
    stats = engine.stats()
    assert stats.drafter_refilled_tokens == sum(count for _, count in entered)
    assert (stats.drafter_losses, stats.preemptions) == (1, 0)
    finish(engine, requests, outputs)


def test_recomputation_adds_few_rows_to_a_step() -> None:
    engine, requests, outputs = opened(16, max_num_batched_tokens=256, max_num_seqs=16)
    plans_of(engine, outputs, 30)
    engine._executor.start_drafter()
    plans = plans_of(engine, outputs, 60)
    assert max(plan.num_batched_tokens for plan in plans) <= 15 * 5 + CHUNK
    assert plans[0].num_batched_tokens <= 16 * 5
    assert max(plan.num_rows.max() for plan in plans) > CHUNK, "and those of the missing drafts are used"
    finish(engine, requests, outputs)


def test_a_single_request_is_recomputed_in_one_step() -> None:
    engine, requests, outputs = opened(1, max_num_batched_tokens=256)
    plans_of(engine, outputs, 20)
    engine._executor.start_drafter()
    first, second = plans_of(engine, outputs, 2)
    assert first.samples.all() and first.num_rows[0] == len(first.admitted[0].token_ids)
    assert second.num_drafts.tolist() == [4]
    finish(engine, requests, outputs)


def test_requests_that_end_soon_or_lack_pages_continue_plainly() -> None:
    for changes in ({"num_pages": (24,)}, {"max_model_len": 88}):
        info = make_info(**{"max_model_len": 96, "num_pages": (1024,), **changes})
        engine, requests, outputs = opened(1, info)
        while max(engine._scheduler.table.num_tokens_S) < 80:
            plans_of(engine, outputs, 1)
        engine._executor.start_drafter()
        plans = plans_of(engine, outputs, 1000)
        assert not any(plan.admitted or plan.num_drafts.any() for plan in plans)
        assert engine.stats().drafter_refilled_tokens == 0
        finish(engine, requests, outputs)


def test_requests_without_drafts_are_not_recomputed() -> None:
    engine, outputs = open_engine(INFO), Outputs()
    add(engine, make_request("r", max_draft_tokens=0, **LONG))
    plans_of(engine, outputs, 5)
    engine._executor.start_drafter()
    assert not any(plan.admitted for plan in plans_of(engine, outputs, 20))


def test_background_requests_are_recomputed_when_no_online_request_runs() -> None:
    engine, outputs = open_engine(INFO), Outputs()
    requests = [make_request(f"b{i}", background=True, seed=i, **LONG) for i in range(2)]
    for request in requests:
        add(engine, request)
    plans_of(engine, outputs, 5)
    engine._executor.start_drafter()
    plans = plans_of(engine, outputs, 20)
    assert sum(len(plan.admitted) for plan in plans) == 2 and plans[-1].num_drafts.tolist() == [4, 4]
    finish(engine, requests, outputs)


def test_pages_computed_before_a_drafter_came_are_not_in_the_prefix_cache() -> None:
    engine, requests, _ = opened(1)
    engine._executor.start_drafter()
    prompt = requests[0].prompt_token_ids
    assert run(engine, make_request("again", prompt, max_tokens=3)).cached["again"] == 0
    assert run(engine, make_request("third", prompt, max_tokens=3)).cached["third"] == 8, "what came since is"


def test_a_page_half_full_when_a_drafter_came_is_not_in_the_prefix_cache() -> None:
    engine, outputs = open_engine(INFO), Outputs()
    request = make_request("r", (5,) * 10, max_draft_tokens=0, **LONG)
    add(engine, request)
    plans_of(engine, outputs, 4)  # 13 tokens are computed: of the fourth page one
    engine._executor.start_drafter()
    add(engine, make_request("other", max_tokens=8, ignore_eos=True))
    plans_of(engine, outputs, 10)
    prompt = (*request.prompt_token_ids, *expected(request, INFO)[0][:20])
    run(engine, make_request("again", prompt, max_tokens=3, ignore_eos=True))
    outputs = run(engine, make_request("third", prompt, max_tokens=9, ignore_eos=True))
    assert outputs.cached["third"] == 28, "the second one's; its drafts had their context"


def test_after_an_abort_during_recomputation_the_next_request_is_recomputed() -> None:
    engine, requests, outputs = opened(4, max_num_batched_tokens=64)
    plans_of(engine, outputs, 40)
    engine._executor.start_drafter()
    (first,) = plans_of(engine, outputs, 1)
    gone = first.admitted[0].request_id
    assert not first.samples[-1] and engine.abort(gone)
    (second,) = plans_of(engine, outputs, 1)
    assert len(second.admitted) == 1
    finish(engine, [r for r in requests if r.request_id != gone], outputs)


def test_a_drafter_that_fails_during_recomputation_changes_no_token() -> None:
    engine, requests, outputs = opened(6)
    for _ in range(5):
        engine._executor.start_drafter()
        plans_of(engine, outputs, 3)
        engine._executor.lose_drafter()
        plans_of(engine, outputs, 2)
    assert engine.stats().drafter_losses == 6
    engine._executor.start_drafter()
    finish(engine, requests, outputs)


def test_acceptance_recovers_and_other_requests_wait_little() -> None:
    """32 requests on a machine where each row costs."""
    survival, drafts = [0.8, 0.6, 0.4, 0.2], 4
    clock, lengths = VirtualClock(), []
    info = make_info(vocab_size=1000, max_model_len=2048, num_pages=(40_000,), num_speculative_tokens=drafts)
    cost = LinearCost(verify_floor_s=0.005, verify_row_s=0.0001, draft_floor_s=0.001)
    executor = SimulatedExecutor(info, survival, cost, clock.advance)
    config = EngineConfig(model="simulated", max_num_seqs=32, max_num_batched_tokens=2048)
    engine = EngineCore(config, executor, clock)
    for i in range(32):
        engine.add_request(make_request(f"r{i}", range(2, 22), seed=i, max_tokens=1500, ignore_eos=True))

    def acceptance(steps: int) -> float:
        before = engine.stats()
        for _ in range(steps):
            begin_s = clock()
            engine.step()
            lengths.append(clock() - begin_s)
        now = engine.stats()
        return (now.num_accepted_tokens - before.num_accepted_tokens) / (now.num_drafts - before.num_drafts)

    acceptance(5)
    steady = acceptance(40)
    max_s = max(lengths[5:])
    executor.lose_drafter()
    for _ in range(10):
        engine.step()
    executor.start_drafter()
    lengths.clear()
    acceptance(120)
    assert acceptance(40) == pytest.approx(steady, rel=0.05)
    engine.plan()
    refill = engine._scheduler.drafter.refill
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
    inner = InProcessExecutor(config)
    tokens: list[dict[str, list[int]]] = []
    for changes in ({}, {8: (False, 0), 12: (True, 1), 15: (True, 2), 40: (False, 2), 44: (True, 3)}):
        executor = ChangingDrafter(inner)
        engine, found = EngineCore(config, executor), dict[str, list[int]]()
        for i in range(4):
            params = SamplingParams(temperature=i / 3, seed=i, max_tokens=150, ignore_eos=True)
            prompt = tuple(range(3 + i, 30 + i))
            engine.add_request(
                Request(
                    request_id=f"r{i}",
                    prompt_token_ids=prompt,
                    params=params,
                    max_draft_tokens=None if changes else 0,
                )
            )
        for step in count():
            if not engine.has_unfinished:
                break
            if step in changes:
                executor.drafter_health = DrafterHealth(*changes[step])
            for update in engine.step():
                found.setdefault(update.request_id, []).extend(update.token_ids)
            engine.check_invariants()
        tokens.append(found)
        stats = engine.stats()
    assert tokens[0] == tokens[1]
    assert stats.drafter_losses == 3 and stats.drafter_refilled_tokens > 0 and stats.num_drafts > 0
    inner.close()
