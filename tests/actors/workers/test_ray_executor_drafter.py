"""A drafter in its own process that dies, stops, returns or is swapped changes no token."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from manta.actors.engine.uniproc_executor import InProcessExecutor
from manta.actors.workers.drafter import drafter_process
from manta.actors.workers.ray_executor import RayExecutor
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.errors import CheckpointError, ConfigError
from manta.cluster.step.executor import DrafterHealth
from support.checkpoints.tiny import make_tiny_drafter
from support.engines.ray_engines import acceptance, alive, requests, run_all
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("ray_session")


@contextmanager
def engine_of(config: EngineConfig) -> Iterator[tuple[EngineCore, RayExecutor]]:
    executor = RayExecutor(config)
    try:
        yield EngineCore(config, executor), executor
    finally:
        pids = [*executor.worker_pids, *([] if shares(config) else [executor.drafter_pid])]
        executor.close()
        wait_until(lambda: not any(alive(pid) for pid in pids if pid is not None))


def shares(config: EngineConfig) -> bool:
    return config.speculative_config is not None and config.speculative_config.placement == "shared"


@pytest.mark.parametrize(
    ("ranks", "harms"), [(1, ["stop", "kill"]), pytest.param(2, ["kill"], marks=pytest.mark.slow)]
)
def test_a_drafter_killed_stopped_and_restarted_at_random_costs_no_token(
    speculative, split, expected, ranks: int, harms: list[str]
) -> None:
    undisturbed = acceptance(EngineCore(speculative, InProcessExecutor(speculative)))
    moves = random.Random(ranks)
    with engine_of(replace(split, tensor_parallel_size=ranks)) as (engine, executor):
        assert run_all(engine) == expected
        for harm in harms:
            generation = executor.drafter_health.generation
            at, pid = moves.randrange(1, 6), executor.drafter_pid
            assert pid is not None

            def hurt(step: int, at=at, pid=pid, harm=harm) -> None:
                if step == at:
                    os.kill(pid, signal.SIGSTOP if harm == "stop" else signal.SIGKILL)

            assert run_all(engine, hurt) == expected
            if harm == "stop":
                assert not executor.drafter_health.ready, "it lags, or is lost"
                os.kill(pid, signal.SIGCONT)
                run_until(engine, lambda: executor.drafter_health.ready)
                assert executor.drafter_pid == pid, "it is the same process"
            else:
                run_until(engine, lambda old=generation: executor.drafter_health.generation > old)
                assert executor.drafter_pid != pid
            assert run_all(engine) == expected

        def accepts_as_before() -> bool:
            engine.reset_prefix_cache()
            return abs(acceptance(engine) / undisturbed - 1) < 0.05

        wait_until(accepts_as_before)  # on a busy machine some drafts are late
        assert engine.stats().drafter_losses >= 1


def run_until(engine: EngineCore, is_so: Callable[[], bool]) -> None:
    """Run one request after the other, so that each step has a known drafter."""
    numbers = itertools.count()

    def holds_after_a_request() -> bool:
        engine.add_request(replace(requests()[0], request_id=f"again-{next(numbers)}"))
        while engine.has_unfinished:
            engine.step()
        return is_so()

    wait_until(holds_after_a_request)


def test_a_drafter_is_swapped_while_requests_run_and_an_unfitting_one_changes_nothing(
    speculative, split, expected, tmp_path: Path
) -> None:
    other = make_tiny_drafter(tmp_path / "other", seed=2)
    shorter = make_tiny_drafter(tmp_path / "shorter", block_size=4)
    for config in (speculative, split):
        with closing(RayExecutor(config) if config is split else InProcessExecutor(config)) as executor:
            engine = EngineCore(config, executor)
            for model, error in ((str(tmp_path / "nothing"), CheckpointError), (str(shorter), ConfigError)):
                with pytest.raises(error, match=r"speculative_config\.model|num_speculative_tokens"):
                    executor.swap_drafter(model)
            assert executor.drafter_health.generation == 0

            def swap(step: int, executor=executor) -> None:
                if step == 3:
                    executor.swap_drafter(str(other))

            assert run_all(engine, swap) == expected
            # On a busy machine it may be late now and then, and is not ready then.
            run_until(engine, lambda executor=executor: executor.drafter_health == DrafterHealth(True, 1))
            assert run_all(engine) == expected
            assert engine.stats().num_accepted_tokens > 0


def test_two_engines_share_a_drafter_which_ends_after_both(
    split, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(drafter_process, "LINGER_S", 1.0)
    spec = replace(split.speculative_config, placement="shared")
    first = replace(split, speculative_config=spec)
    second = replace(first, num_pages=48, max_num_seqs=3, page_size=8)
    with engine_of(first) as (one, executor), engine_of(second) as (two, other):
        pid = executor.drafter_pid
        assert pid is not None and other.drafter_pid == pid, "one process for both"
        for engine in (one, two):
            for request in requests():
                engine.add_request(request)
        tokens = [{request.request_id: [] for request in requests()} for _ in range(2)]
        while one.has_unfinished or two.has_unfinished:
            for engine, theirs in zip((one, two), tokens, strict=True):
                for update in engine.step():
                    theirs[update.request_id] += update.token_ids
        assert [list(theirs.values()) for theirs in tokens] == [expected, expected]
        for engine in (one, two):
            use = engine.stats().drafter_use
            assert use.steps > 0 and use.served_s > 0 <= use.queue_s
        assert all(engine.stats().num_accepted_tokens > 0 for engine in (one, two))
        os.kill(pid, signal.SIGKILL)
        assert run_all(two) == expected
        for engine, one_of_both in ((one, executor), (two, other)):
            run_until(engine, lambda one_of_both=one_of_both: one_of_both.drafter_health.generation == 1)
        assert executor.drafter_pid == other.drafter_pid != pid, "they start one new drafter together"
        pid = executor.drafter_pid
    wait_until(lambda: not alive(pid))
    wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])
