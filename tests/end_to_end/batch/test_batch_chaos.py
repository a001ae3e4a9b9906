"""Batch jobs under SIGKILL at random points (driver, engine, rank, raylet), and rows that kill engines.

Every row is answered once, as in an undisturbed job, and little is computed twice. Here at one point each
over an executor that only sleeps; `make chaos` takes many points and the real one.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from manta import LLM
from manta.actors.batch.dataset.row_requests import row_seed
from manta.cluster.errors import ConfigError
from manta.cluster.request.request import SamplingParams
from manta.jobs.batch import engine_pool
from support.engines.ray_engines import actor_pids
from support.jobs.batch_outputs import num_durable, read_results
from support.jobs.chaos_job import ChaosJob, MakeJob, write_rows
from support.jobs.job_process import StartJob
from support.waiting import WAIT_S, wait_until

POINTS = int(os.environ.get("MANTA_CHAOS_POINTS", "1"))
NUM_ROWS = 1000 if POINTS > 1 else 240
MAX_ROWS_LOST = 20  # by a kill: those that ran, and those whose results were not written yet
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_rows(path, NUM_ROWS)
    return path


@pytest.fixture(scope="module")
def undisturbed(
    pair: tuple[Path, Path], rows: Path, ray_session: None, tmp_path_factory: pytest.TempPathFactory
) -> list[Any]:
    """The answers of an undisturbed job, whose tokens are counted."""
    folder = str(tmp_path_factory.mktemp("undisturbed"))
    job = ChaosJob(model=str(pair[0]), input=str(rows), folder=folder, simulated=POINTS == 1)
    job.run()
    assert job.num_tokens == NUM_ROWS * MAX_TOKENS
    return answers(job)


@pytest.fixture
def slow_job(make_job: MakeJob, rows: Path) -> Callable[..., ChaosJob]:
    """Make a job that is slow from one of the points on, a random number of tokens that a name seeds."""

    def make(name: str, number: int, **changes: Any) -> ChaosJob:
        slow_from = int(NUM_ROWS * MAX_TOKENS * random.Random(f"{name} {number}").uniform(0.2, 0.9))
        how = {"simulated": POINTS == 1, "slow_from": slow_from, "max_tokens": MAX_TOKENS}
        return make_job(rows, **{**how, **changes})

    return make


def answers(job: ChaosJob) -> list[tuple[Any, ...]]:
    return [(row["id"], row["token_ids"], row["text"], row["error"]) for row in read_results(job.out)]


def check(job: ChaosJob, undisturbed: list[Any]) -> None:
    """Check that every row is there once, as in an undisturbed job, for little more than one pass."""
    assert (job.out / "_SUCCESS").exists()
    assert answers(job) == undisturbed
    assert NUM_ROWS * MAX_TOKENS <= job.num_tokens <= (NUM_ROWS + MAX_ROWS_LOST) * MAX_TOKENS


def wait_for_the_point(job: ChaosJob, is_running: Callable[[], bool]) -> None:
    """Wait until all engines are slow and all but the last rows are durable."""
    engines = job.options.concurrency.minimum
    job.wait_until_slow(engines, is_running)
    at_least = job.num_tokens // MAX_TOKENS - 2 * job.max_num_seqs * engines
    wait_until(lambda: num_durable(job.out) >= at_least, is_running=is_running)


@contextlib.contextmanager
def running_to_its_end(job: ChaosJob) -> Iterator[threading.Thread]:
    """Run a job in a thread, which must end after the context."""
    thread = threading.Thread(target=job.run)
    thread.start()
    try:
        yield thread
    finally:
        job.release()
        thread.join(WAIT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("number", range(POINTS))
@pytest.mark.parametrize("victim", ["driver", pytest.param("raylet", marks=pytest.mark.slow)])
def test_a_job_whose_driver_or_ray_is_killed_resumes(
    victim: str,
    number: int,
    slow_job: Callable[..., ChaosJob],
    undisturbed: list[Any],
    start_job: StartJob,
    tmp_path: Path,
) -> None:
    job = slow_job(victim, number, preserve_order=bool(number % 2))
    first = start_job(job.command(), tmp_path / "log")
    wait_for_the_point(job, first.is_running)
    for pid in [first.process.pid] if victim == "driver" else first.processes("/raylet/raylet"):
        os.kill(pid, signal.SIGKILL)
    assert first.process.wait(WAIT_S) != 0
    replace(job, slow_from=None).run()
    check(job, undisturbed)


@pytest.mark.parametrize("number", range(POINTS))
def test_a_killed_engine_is_replaced_while_another_continues(
    number: int, slow_job: Callable[..., ChaosJob], undisturbed: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    job = slow_job("engine", number, concurrency="2")
    with running_to_its_end(job) as thread:
        wait_for_the_point(job, thread.is_alive)
        with pytest.raises(ConfigError, match="being written by another job"):
            job.run()
        os.kill(random.Random(number).choice(sorted(actor_pids("BatchEngine"))), signal.SIGKILL)
    check(job, undisturbed)
    assert "died; its rows go to others" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", range(POINTS))
def test_a_killed_rank_ends_its_engine_and_another_engine_gives_the_same_answers(
    number: int,
    slow_job: Callable[..., ChaosJob],
    rows: Path,
    ray_session: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Kill the workers of a real engine of two ranks, at one of the points."""
    job = slow_job("rank", number, tensor_parallel_size=2, simulated=False)
    sampling = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    params = {f"r{i}": SamplingParams(**sampling, seed=row_seed(0, f"r{i}")) for i in range(NUM_ROWS)}
    with LLM(job.model, dtype="float32", device="cpu", max_model_len=256, num_threads=1) as llm:
        prompts = [row["prompt"] for row in map(json.loads, rows.read_text().splitlines())]
        outputs = llm.generate(prompts, list(params.values()), use_tqdm=False)
    with running_to_its_end(job) as thread:
        wait_for_the_point(job, thread.is_alive)
        ranks = sorted(actor_pids("TargetWorker"))
        assert len(ranks) == 2
        os.kill(random.Random(number).choice(ranks), signal.SIGKILL)
    found = {row["id"]: row["token_ids"] for row in read_results(job.out)}
    assert found == {name: out.outputs[0].token_ids for name, out in zip(params, outputs, strict=True)}
    assert job.num_tokens <= (NUM_ROWS + MAX_ROWS_LOST) * MAX_TOKENS
    assert "died; its rows go to others" in capsys.readouterr().err


def test_a_row_that_kills_engines_is_found_and_all_others_are_answered(
    make_job: MakeJob, ray_session: None
) -> None:
    job = make_job(40, killers=(23,), concurrency="2", max_num_seqs=8)
    figures = job.run()
    assert (figures.rows, figures.failed) == (40, 1)
    (failed,) = (row for row in read_results(job.out) if row["error"])
    assert (failed["id"], failed["error"]["type"]) == ("r23", "EngineDeadError")
    assert failed["error"]["attempts"] >= 3 and "[7, 7, 7, 7]" in failed["input"]
    assert not list(job.out.glob("_manta/pending/*/*"))


def test_a_job_whose_engines_all_die_ends_with_the_reason(
    make_job: MakeJob, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_pool, "MAX_DEATHS", 2)
    job = make_job(40, killers=tuple(range(40)))
    with pytest.raises(engine_pool.EngineDeadError, match="2 engines have died one after the other"):
        job.run()
