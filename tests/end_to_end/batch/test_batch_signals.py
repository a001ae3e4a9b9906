"""Stopping `manta batch` with real signals: what is on disk afterwards, and which processes remain."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from support.engines.small_ray import small_ray
from support.jobs.batch_outputs import read_results
from support.jobs.job_process import JobProcess, StartJob
from support.waiting import WAIT_S, wait_until

NUM_ROWS = 3000
SOME_ROWS = rf"[1-9]\d*/{NUM_ROWS} rows .* 0 failed; "


@pytest.fixture
def start_batch(
    pair: tuple[Path, Path], start_job: StartJob, write_lines: Callable[..., Path], tmp_path: Path
) -> StartJob:
    """Start `manta batch` on the same rows: `start(out, *flags, address)`."""
    rows = write_lines({"id": f"r{i}", "prompt": f"row {i}"} for i in range(NUM_ROWS))
    command = [sys.executable, "-m", "manta.jobs.cli", "batch", "-i", str(rows)]
    command += ["-m", str(pair[0]), "--spec-model", str(pair[1]), "--dtype", "float32"]
    command += ["--max-model-len", "256", "--max-num-seqs", "8", "--max-tokens", "64", "--ignore-eos"]

    def start(out: Path, *flags: str, address: str | None = None) -> JobProcess:
        return start_job([*command, "-o", str(out), *flags], tmp_path / "log", address)

    return start


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has installed its own signal handler."""
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = re.findall(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(int(caught, 16) >> (number - 1) & 1)


def answered_rows(job: JobProcess, out: Path, number: signal.Signals, suffix: str) -> list[dict[str, Any]]:
    """Read the rows of a job that was stopped by a signal, and check its message about them."""
    said = job.output
    reported = re.search(rf"stopped by {number.name}: (\d+) of {NUM_ROWS} rows are in (\S+);", said)
    assert reported, said
    rows = read_results(out)
    assert len(rows) == len({row["id"] for row in rows}) == int(reported[1]) > 0
    assert all(len(row["token_ids"]) == 64 for row in rows)
    assert reported[2] == str(out)
    assert "Traceback" not in said
    assert {path.suffix for path in out.iterdir() if path.is_file()} == {suffix}
    return rows


def test_a_stopped_job_keeps_every_answered_row(start_batch: StartJob, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = start_batch(out, "--output-format=parquet")
    job.wait_for(SOME_ROWS)
    job.process.send_signal(signal.SIGTERM)
    job.wait_for("rows are in ")  # said when it is so, and before Ray is left
    assert job.process.wait(WAIT_S) == 143, job.output
    answered_rows(job, out, signal.SIGTERM, ".parquet")
    job.wait_until_all_ended()


@pytest.mark.parametrize(("moment", "number"), [("ray", signal.SIGINT), ("import", signal.SIGTERM)])
def test_a_job_that_is_stopped_while_loading_says_so_and_leaves_nothing(
    start_batch: StartJob, tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    job = start_batch(tmp_path / "out")
    if moment == "ray":
        job.wait_for("loading the models")
    else:
        wait_until(lambda: handles(job.process.pid, number), is_running=job.is_running)
    assert job.stop(number) == 128 + number, job.output
    assert f"stopped by {number.name}" in job.output
    assert "Traceback" not in job.output
    assert read_results(tmp_path / "out") == []
    job.wait_until_all_ended()


@pytest.mark.slow
def test_a_job_without_resources_can_be_stopped_and_a_killed_one_blocks_no_other(
    start_batch: StartJob, tmp_path: Path
) -> None:
    cores, out = os.cpu_count() or 1, tmp_path / "out"
    with small_ray(cores):
        taken = placement_group([{"CPU": float(cores)}])
        assert taken.wait(WAIT_S)
        address = ray.get_runtime_context().gcs_address
        job = start_batch(out, address=address)
        job.wait_for(f"waiting for {cores} CPU; 0 of {cores} are free")
        assert job.stop(signal.SIGTERM) == 143, job.output
        assert f"stopped by SIGTERM: 0 of {NUM_ROWS} rows are in" in job.output
        remove_placement_group(taken)
        killed = start_batch(out, address=address)
        killed.wait_for(SOME_ROWS)
        killed.stop(signal.SIGKILL)
        third = start_batch(out, address=address)
        third.wait_for(SOME_ROWS)  # the engine of the killed job gave its cores back
        before = int(re.findall(rf"(\d+)/{NUM_ROWS} rows", third.output)[-1])
        assert third.stop(signal.SIGINT) == 130, third.output
        assert len(answered_rows(third, out, signal.SIGINT, ".jsonl")) >= before > 0
