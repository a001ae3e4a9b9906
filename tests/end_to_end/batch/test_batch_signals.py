"""Stopping `manta batch` with real signals: what is on disk afterwards, and which processes remain."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.text_pair import make_text_pair
from support.jobs.batch_outputs import read_results

NUM_ROWS = 3000
WAIT_S = 240.0
PARQUET = "--output-format=parquet"
SOME_ROWS = rf"[1-9]\d*/{NUM_ROWS} rows .* 0 failed; "


class Job:
    """A batch job in its own process, with a temporary folder that identifies its Ray."""

    def __init__(
        self, pair: tuple[Path, Path], folder: Path, *flags: str, address: str | None = None
    ) -> None:
        self.out = folder / "out"
        self._log = (folder / "log").open("w+")
        self.ray_folder = tempfile.mkdtemp(prefix="mr-")  # short: Ray puts sockets below it
        rows = folder / "rows.jsonl"
        if not rows.exists():  # otherwise a job would continue another one's output
            ids = range(NUM_ROWS)
            rows.write_text("".join(json.dumps({"id": f"r{i}", "prompt": f"row {i}"}) + "\n" for i in ids))
        command = [sys.executable, "-m", "manta.jobs.cli", "batch", "-i", str(rows), "-o", str(self.out)]
        command += ["-m", str(pair[0]), "--spec-model", str(pair[1]), "--dtype", "float32"]
        command += ["--max-model-len", "256", "--max-num-seqs", "8", "--max-tokens", "64", "--ignore-eos"]
        environment = {**os.environ, "RAY_TMPDIR": self.ray_folder}
        environment.pop("RAY_ADDRESS", None)
        if address:
            environment["RAY_ADDRESS"] = address
        self.process = subprocess.Popen(
            [*command, *flags], stdout=self._log, stderr=self._log, env=environment, start_new_session=True
        )

    def said(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def wait_for(self, words: str) -> None:  # a regular expression
        deadline_s = time.monotonic() + WAIT_S
        while True:
            ended = self.process.poll() is not None
            if re.search(words, self.said()):
                return
            assert not ended and time.monotonic() < deadline_s, self.said()
            time.sleep(0.05)

    def stop(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)

    def remaining_processes(self) -> list[str]:
        """Processes that still name this job's Ray."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            except OSError:
                continue
            if self.ray_folder.encode() in command:
                found.append(f"{folder.name}: {command[:80]!r}")
        return found

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._log.close()
        shutil.rmtree(self.ray_folder, ignore_errors=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_text_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        job.close()


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has installed its own signal handler."""
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = re.findall(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(int(caught, 16) >> (number - 1) & 1)


def all_processes_ended(job: Job) -> bool:
    deadline_s = time.monotonic() + WAIT_S
    while job.remaining_processes() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return not job.remaining_processes()


def answered_rows(job: Job, number: signal.Signals, suffix: str) -> list[dict[str, Any]]:
    """Read the rows of a job that was stopped by a signal, and check its message about them."""
    reported = re.search(rf"stopped by {number.name}: (\d+) of {NUM_ROWS} rows are in (\S+);", job.said())
    assert reported, job.said()
    rows = read_results(job.out)
    assert len(rows) == len({row["id"] for row in rows}) == int(reported[1]) > 0
    assert all(len(row["token_ids"]) == 64 for row in rows)
    assert reported[2] == str(job.out)
    assert "Traceback" not in job.said()
    assert {path.suffix for path in job.out.iterdir() if path.is_file()} == {suffix}
    return rows


def test_a_stopped_job_keeps_every_answered_row(
    pair: tuple[Path, Path], tmp_path: Path, jobs: list[Job]
) -> None:
    jobs.append(job := Job(pair, tmp_path, PARQUET))
    job.wait_for(SOME_ROWS)
    job.process.send_signal(signal.SIGTERM)
    job.wait_for("rows are in ")  # said when it is so, and before Ray is left
    assert job.process.wait(WAIT_S) == 143, job.said()
    answered_rows(job, signal.SIGTERM, ".parquet")
    assert all_processes_ended(job), job.remaining_processes()


def test_a_job_that_is_stopped_while_loading_says_so_and_leaves_nothing(
    pair: tuple[Path, Path], tmp_path: Path, jobs: list[Job]
) -> None:
    for name, moment, number in (
        ("ray", "loading the models", signal.SIGINT),
        ("import", "", signal.SIGTERM),
    ):
        (folder := tmp_path / name).mkdir()
        jobs.append(job := Job(pair, folder))
        if moment:
            job.wait_for(moment)
        else:
            while not handles(job.process.pid, number):
                time.sleep(0.02)
        assert job.stop(number) == 128 + number, job.said()
        assert f"stopped by {number.name}" in job.said()
        assert "Traceback" not in job.said()
        assert read_results(job.out) == []
        assert all_processes_ended(job), job.remaining_processes()


@pytest.mark.slow
def test_a_job_without_resources_can_be_stopped_and_a_killed_one_blocks_no_other(
    pair: tuple[Path, Path], tmp_path: Path, jobs: list[Job]
) -> None:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    folder = tempfile.mkdtemp(prefix="mr-")
    context = ray.init(
        num_cpus=os.cpu_count(),
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        _temp_dir=folder,
    )
    try:
        taken = placement_group([{"CPU": float(os.cpu_count() or 1)}])
        assert taken.wait(WAIT_S)
        address = context.address_info["gcs_address"]
        jobs.append(job := Job(pair, tmp_path, address=address))
        job.wait_for(f"waiting for {os.cpu_count()} CPU; 0 of {os.cpu_count()} are free")
        assert job.stop(signal.SIGTERM) == 143, job.said()
        assert f"stopped by SIGTERM: 0 of {NUM_ROWS} rows are in" in job.said()
        remove_placement_group(taken)
        jobs.append(killed := Job(pair, tmp_path, address=address))
        killed.wait_for(SOME_ROWS)
        killed.stop(signal.SIGKILL)
        jobs.append(third := Job(pair, tmp_path, address=address))
        third.wait_for(SOME_ROWS)  # the engine of the killed job gave its cores back
        before = int(re.findall(rf"(\d+)/{NUM_ROWS} rows", third.said())[-1])
        assert third.stop(signal.SIGINT) == 130, third.said()
        assert len(answered_rows(third, signal.SIGINT, ".jsonl")) >= before > 0
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
