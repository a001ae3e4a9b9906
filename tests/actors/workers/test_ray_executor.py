"""Engines with Ray actors as workers: the same tokens, reported deaths, nothing left behind."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from manta.actors.engine.uniproc_executor import InProcessExecutor, make_executor
from manta.actors.workers.ray_executor import RayExecutor
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.errors import CheckpointError, EngineDeadError, PlacementError
from support.engines.ray_engines import acceptance, alive, run_all
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("ray_session")


def assert_no_leftovers(executor: RayExecutor) -> None:
    import ray

    wait_until(lambda: not any(map(alive, executor.worker_pids)))
    wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])
    assert not any(thread.name == "manta-watcher" for thread in threading.enumerate())


def assert_killing_ends_it(engine: EngineCore, executor: RayExecutor, rank: int) -> None:
    """Kill a worker while requests run."""

    def kill(step: int) -> None:
        if step == 2:
            os.kill(executor.worker_pids[rank], signal.SIGKILL)

    with pytest.raises(EngineDeadError):
        run_all(engine, kill)
    with pytest.raises(EngineDeadError):
        executor.check_health()
    executor.close()
    assert_no_leftovers(executor)


def test_one_ray_rank_computes_as_without_ray_and_its_death_while_idle_is_noticed(plain, expected) -> None:
    executor = RayExecutor(plain)
    assert run_all(EngineCore(plain, executor)) == expected
    executor.check_health()
    os.kill(executor.worker_pids[0], signal.SIGKILL)

    def dead() -> bool:
        try:
            executor.check_health()
        except EngineDeadError as error:
            return "rank 0" in error.message
        return False

    wait_until(dead)
    executor.close()
    assert_no_leftovers(executor)


def test_two_target_ranks_give_the_same_tokens_and_die_together(speculative, expected) -> None:
    config = replace(speculative, tensor_parallel_size=2)
    executor = make_executor(config)
    assert isinstance(executor, RayExecutor)
    engine = EngineCore(config, executor)
    assert run_all(engine) == expected
    assert engine.stats().num_accepted_tokens > 0
    assert run_all(engine, max_draft_tokens=0) == expected
    assert_killing_ends_it(engine, executor, rank=1)


def test_a_split_drafter_is_accepted_like_a_colocated_one_and_a_given_group_stays(
    speculative, split, expected
) -> None:
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    beside = EngineCore(speculative, InProcessExecutor(speculative))
    assert run_all(beside) == expected
    group = placement_group([{"CPU": 1.0}, {"CPU": 0.5}], strategy="STRICT_PACK")
    executor = RayExecutor(split, placement_group=group)
    engine = EngineCore(split, executor)
    assert run_all(engine) == expected
    wanted = acceptance(beside)
    assert wanted > 1
    # On a busy machine some drafts are late, or a drafter that lags is dropped and asked again.
    wait_until(lambda: acceptance(engine) == wanted)
    executor.close()
    executor.close()
    with pytest.raises(EngineDeadError, match="closed"):
        executor.check_health()
    assert placement_group_table(group)["state"] == "CREATED"
    with pytest.raises(PlacementError, match="bundle i must hold worker i"):
        RayExecutor(replace(split, tensor_parallel_size=4), placement_group=group)
    remove_placement_group(group)
    assert_no_leftovers(executor)


def test_a_topology_larger_than_the_node_is_refused_at_once(plain) -> None:
    with pytest.raises(PlacementError, match=r"32 .*16 CPU \(there is 8\)"):
        RayExecutor(replace(plain, tensor_parallel_size=32))
    with pytest.raises(PlacementError, match=r"1 GPU \(there is 0\)"):
        RayExecutor(replace(plain, device="cuda"))


def test_a_full_node_is_reported_instead_of_waited_for(plain) -> None:
    from ray.util.placement_group import placement_group, remove_placement_group

    other = placement_group([{"CPU": 8.0}])
    assert other.wait(600)
    with pytest.raises(PlacementError, match="not free"):
        RayExecutor(plain, placement_timeout_s=1.0)
    remove_placement_group(other)


def test_errors_of_a_broken_checkpoint_keep_their_type(plain, tiny_qwen3: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_qwen3 / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
        RayExecutor(replace(plain, model=str(tmp_path)))
    assert type(caught.value) is CheckpointError


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_engines_pages_are_read_by_the_next_one_on_all_ranks(
    speculative, expected, tmp_path: Path, ranks: int
) -> None:
    config = replace(speculative, tensor_parallel_size=ranks, kv_tier_path=str(tmp_path / "tier"))
    executor = RayExecutor(config)
    engine = EngineCore(config, executor)
    assert run_all(engine) == expected
    wanted = acceptance(engine)
    wait_until(lambda: engine.step() == [] and not engine.has_work)
    kept = [len(list((tmp_path / "tier").glob(f"*/{rank}/*"))) for rank in range(ranks)]
    assert min(kept) > 0 and len(set(kept)) == 1
    os.kill(executor.worker_pids[0], signal.SIGKILL)
    executor.close()
    executor = RayExecutor(config)
    again = EngineCore(config, executor)
    assert run_all(again) == expected
    assert again.stats().tier_hits > 0 and acceptance(again) == wanted
    again.close()
    assert_no_leftovers(executor)


def test_pages_in_the_host_memory_of_all_ranks_are_read(speculative, expected) -> None:
    config = replace(speculative, tensor_parallel_size=2, kv_tier_host_bytes=2**24)
    executor = RayExecutor(config)
    engine = EngineCore(config, executor)
    assert run_all(engine) == expected
    wanted = acceptance(engine)
    engine.save_pages()
    engine.reset_prefix_cache()
    assert acceptance(engine) == wanted and engine.stats().tier_hits > 0
    assert run_all(engine) == expected
    engine.close()
    assert_no_leftovers(executor)
