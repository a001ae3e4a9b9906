"""Ending `manta serve` by real signals while it loads, and when Ray is killed under it.

How it ends while it serves: test_serve_chaos.py.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from manta.actors.system.host_resources import free_port
from support.jobs.job_process import WAIT_S, JobProcess


@pytest.fixture
def server(pair: tuple[Path, Path], tmp_path: Path) -> Iterator[JobProcess]:
    """Like `manta serve ... &` in a script: with SIGINT ignored from the start."""
    target, drafter = pair
    command = [sys.executable, "-m", "manta.jobs.cli", "serve", "--port", str(free_port()), "-m", str(target)]
    command += ["--spec-model", str(drafter), "--dtype", "float32", "--max-num-seqs", "4"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # children inherit it
    try:
        process = JobProcess(command, tmp_path / "log")
    finally:
        signal.signal(signal.SIGINT, before)
    yield process
    process.close()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_server_can_be_ended_while_it_loads(server: JobProcess, number: signal.Signals) -> None:
    server.wait_for("loading the models")
    assert server.stop(number) == 128 + number, server.output
    assert "before the server was ready" in server.output


@pytest.mark.slow
def test_a_server_whose_raylet_is_killed_ends_and_leaves_nothing_behind(server: JobProcess) -> None:
    server.wait_for("serving on")
    (raylet,) = server.processes("/raylet/raylet\0")
    assert server.processes("ray::TargetWorker")
    os.kill(raylet, signal.SIGKILL)
    assert server.process.wait(WAIT_S) == 1, server.output
    assert "Ray's raylet has ended" in server.output
    server.wait_until_all_ended()


@pytest.mark.slow
def test_a_signal_to_the_servers_group_which_ends_ray_too_ends_the_server(server: JobProcess) -> None:
    """As `timeout` sends it; Serve itself would wait a minute for the ended GCS, and fail."""
    server.wait_for("try it: ")
    url = re.search(r"serving on (http\S+);", server.output)
    assert url is not None
    body = {"prompt": "def f(", "max_tokens": 64}
    assert httpx.post(f"{url[1]}/v1/completions", json=body, timeout=WAIT_S).status_code == 200
    os.killpg(server.process.pid, signal.SIGTERM)
    assert server.process.wait(WAIT_S) == 0, server.output
    assert "has ended: running requests have ended with it" in server.output
    server.wait_until_all_ended()
