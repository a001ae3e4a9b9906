"""Batch jobs under SIGKILL at random points (driver, engine, rank, raylet), and rows that kill engines.

Every row is answered once, as in an undisturbed job, and little is computed twice. Here at one point each
over an executor that only sleeps; `make chaos` takes many points and the real one.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from manta import LLM
from manta.actors.batch.dataset.row_requests import row_seed
from manta.cluster.errors import ConfigError
from manta.cluster.request.request import SamplingParams
from manta.jobs.batch import engine_pool
from manta.jobs.batch.job import run_batch
from ray import cloudpickle
from support.checkpoints.text_pair import make_text_pair
from support.jobs import chaos_job
from support.jobs.batch_outputs import read_results
from support.jobs.chaos_job import ChaosJob, write_rows

cloudpickle.register_pickle_by_value(chaos_job)  # engines do not find tests
POINTS = int(os.environ.get("MANTA_CHAOS_POINTS", "1"))
NUM_ROWS = 1000 if POINTS > 1 else 240
MAX_ROWS_LOST = 50  # by a kill, however many rows the job has: a twentieth of a pass over 1000
MAX_TOKENS = 8
WAIT_S = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_text_pair(tmp_path_factory.mktemp("pair"))[0])


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_rows(path, NUM_ROWS)
    return path


@pytest.fixture(scope="module")
def undisturbed(model: str, rows: Path, ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of an undisturbed job, whose tokens are counted."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job(model, rows, folder).run()
    assert (folder / "counter").stat().st_size == NUM_ROWS * MAX_TOKENS
    return folder / "out"


def job(model: str, rows: Path, folder: Path, **changes: Any) -> ChaosJob:
    return ChaosJob(
        model=model,
        input=str(rows),
        output=str(folder / "out"),
        counter=str(folder / "counter"),
        simulated=POINTS == 1,
        max_tokens=MAX_TOKENS,
        **changes,
    )


def answers(folder: Path) -> list[tuple[Any, ...]]:
    return [(row["id"], row["token_ids"], row["text"], row["error"]) for row in read_results(folder)]


def check(folder: Path, undisturbed: Path) -> None:
    """Check that every row is there once, as in an undisturbed job, for little more than one pass."""
    assert (folder / "out" / "_SUCCESS").exists()
    assert answers(folder / "out") == answers(undisturbed)
    tokens = (folder / "counter").stat().st_size
    assert NUM_ROWS * MAX_TOKENS <= tokens <= (NUM_ROWS + MAX_ROWS_LOST) * MAX_TOKENS


class Running:
    """A job in its own process, with a temporary folder that identifies its Ray."""

    def __init__(self, job: ChaosJob) -> None:
        self.job = job
        log = Path(job.output).with_name("log")
        self._log = log.open("w+")
        self.ray_folder = tempfile.mkdtemp(prefix="mc-")  # short: Ray puts sockets below it
        environment = {**os.environ, "RAY_TMPDIR": self.ray_folder}
        environment.pop("RAY_ADDRESS", None)
        self.process = subprocess.Popen(
            job.command(), stdout=self._log, stderr=self._log, env=environment, start_new_session=True
        )

    def said(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def wait_for_tokens(self, number: int) -> None:
        wait_for_tokens(self.job, number, lambda: self.process.poll() is None)

    def processes(self, name: str) -> list[int]:
        """Processes of this job's Ray whose command begins with the given text."""
        return [pid for pid, command in processes(self.ray_folder) if name in command]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()
        shutil.rmtree(self.ray_folder, ignore_errors=True)


def processes(mark: str) -> list[tuple[int, str]]:
    """Living processes whose command names a path: number and command."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if mark.encode() in command + (folder / "environ").read_bytes():
                found.append((int(folder.name), command.replace(b"\0", b" ").decode()))
    return found


def own_actors(kind: str) -> list[int]:
    """Actors of a class whose raylet or fork server this process started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if command.startswith(f"ray::{kind}".encode()) and os.getpid() in ancestors(int(folder.name)):
                found.append(int(folder.name))
    return sorted(found)


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid


def wait_for_tokens(job: ChaosJob, number: int, going: Any = lambda: True) -> None:
    deadline_s = time.monotonic() + WAIT_S
    counter = Path(job.counter or "")
    while not counter.exists() or counter.stat().st_size < number:
        assert time.monotonic() < deadline_s, "no tokens came"
        assert going(), "the job ended"
        time.sleep(0.01)


@pytest.fixture
def running() -> Iterator[list[Running]]:
    started: list[Running] = []
    yield started
    for each in started:
        each.close()


def point(name: str, number: int) -> int:
    """A random number of tokens, the same in every run of the tests."""
    return int(NUM_ROWS * MAX_TOKENS * random.Random(f"{name} {number}").uniform(0.05, 0.9))


@pytest.mark.parametrize("number", range(POINTS))
@pytest.mark.parametrize("victim", ["driver", pytest.param("raylet", marks=pytest.mark.slow)])
def test_a_job_whose_driver_or_ray_is_killed_resumes(
    victim: str,
    number: int,
    model: str,
    rows: Path,
    undisturbed: Path,
    running: list[Running],
    tmp_path: Path,
) -> None:
    this = job(model, rows, tmp_path, preserve_order=bool(number % 2))
    running.append(first := Running(this))
    first.wait_for_tokens(point(victim, number))
    for pid in [first.process.pid] if victim == "driver" else first.processes("/raylet/raylet"):
        os.kill(pid, signal.SIGKILL)
    if first.process.wait(WAIT_S):  # without their raylet engines go on for some seconds: it may be enough
        assert read_results(tmp_path / "out") or list((tmp_path / "out" / "_manta").glob("pending/*/*"))
        this.run()
    check(tmp_path, undisturbed)


@pytest.mark.parametrize("number", range(POINTS))
def test_a_killed_engine_is_replaced_while_another_continues(
    number: int,
    model: str,
    rows: Path,
    undisturbed: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    this = job(model, rows, tmp_path, concurrency="2")
    thread = threading.Thread(target=this.run)
    thread.start()
    wait_for_tokens(this, point("engine", number))
    with pytest.raises(ConfigError, match="being written by another job"):
        this.run()
    os.kill(random.Random(number).choice(own_actors("BatchEngine")), signal.SIGKILL)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    check(tmp_path, undisturbed)
    assert "died; its rows go to others" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", range(POINTS))
def test_a_killed_rank_ends_its_engine_and_another_engine_gives_the_same_answers(
    number: int,
    model: str,
    rows: Path,
    ray_session: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Kill the workers of a real engine of two ranks, at one of the points."""
    names = [f"r{i}" for i in range(NUM_ROWS)]
    params = [
        SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, ignore_eos=True, seed=row_seed(0, name))
        for name in names
    ]
    with LLM(model, dtype="float32", device="cpu", max_model_len=256, num_threads=1) as llm:
        prompts = [row["prompt"] for row in map(json.loads, rows.read_text().splitlines())]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    this = replace(job(model, rows, tmp_path, tensor_parallel_size=2), simulated=False)
    thread = threading.Thread(target=this.run)
    thread.start()
    wait_for_tokens(this, point("rank", number))
    ranks = own_actors("TargetWorker")
    assert len(ranks) == 2
    os.kill(random.Random(number).choice(ranks), signal.SIGKILL)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    found = {row["id"]: row["token_ids"] for row in read_results(tmp_path / "out")}
    assert found == {name: out.outputs[0].token_ids for name, out in zip(names, outputs, strict=True)}
    assert (tmp_path / "counter").stat().st_size <= (NUM_ROWS + MAX_ROWS_LOST) * MAX_TOKENS
    assert "died; its rows go to others" in capsys.readouterr().err


def test_a_row_that_kills_engines_is_found_and_all_others_are_answered(
    model: str, ray_session: None, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", 40, killers=(23,))
    this = job(model, tmp_path / "rows.jsonl", tmp_path, concurrency="2", max_num_seqs=8)
    figures = run_batch(this.config, this.options, make=replace(this, simulated=True).make).stats
    assert (figures.rows, figures.failed) == (40, 1)
    (error,) = (row for row in read_results(tmp_path / "out") if row["error"])
    assert error["id"] == "r23"
    assert error["error"]["type"] == "EngineDeadError"
    assert error["error"]["attempts"] >= 3
    assert "[7, 7, 7, 7]" in error["input"]
    assert not list((tmp_path / "out" / "_manta").glob("pending/*/*"))


def test_a_job_whose_engines_all_die_ends_with_the_reason(
    model: str, ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_pool, "MAX_DEATHS", 2)
    write_rows(tmp_path / "rows.jsonl", 40, killers=tuple(range(40)))
    this = job(model, tmp_path / "rows.jsonl", tmp_path)
    with pytest.raises(engine_pool.EngineDeadError, match="2 engines have died one after the other"):
        run_batch(this.config, this.options, make=replace(this, simulated=True).make)
