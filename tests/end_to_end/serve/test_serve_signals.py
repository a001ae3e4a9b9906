"""Ending `manta serve` by real signals while it loads, and when Ray is killed under it.

How it ends while it serves: test_serve_chaos.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from manta.actors.system.host_resources import free_port
from support.checkpoints.text_pair import make_text_pair

WAIT_S = 120.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_text_pair(tmp_path_factory.mktemp("pair"))


@contextmanager
def serving(pair: tuple[Path, Path], port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Like `manta serve ... &` in a script: with SIGINT ignored from the start."""
    folder = tempfile.mkdtemp(prefix="ms-")  # short: Ray puts sockets below it
    command = [sys.executable, "-m", "manta.jobs.cli", "serve", "--port", str(port), "-m", str(pair[0])]
    command += ["--spec-model", str(pair[1]), "--dtype", "float32", "--max-num-seqs", "4"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # children inherit it
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env={**environment, "RAY_TMPDIR": folder},
                start_new_session=True,
            )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def wait_until(true: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not true():
        assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.05)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_server_can_be_ended_while_it_loads(
    pair: tuple[Path, Path], tmp_path: Path, number: signal.Signals
) -> None:
    log = tmp_path / "log"
    with serving(pair, free_port(), log) as process:
        wait_until(lambda: "loading the models" in log.read_text(), process, log)
        process.send_signal(number)
        assert process.wait(WAIT_S) == 128 + number, log.read_text()
    assert "before the server was ready" in log.read_text()


@pytest.mark.slow
def test_a_server_whose_raylet_is_killed_ends_and_leaves_nothing_behind(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with serving(pair, free_port(), log) as process:
        wait_until(lambda: "serving on" in log.read_text(), process, log)
        family = descendants(process.pid)
        (raylet,) = (pid for pid in family if "/raylet/raylet " in command_of(pid))
        assert any("ray::TargetWorker" in command_of(pid) for pid in family)
        os.kill(raylet, signal.SIGKILL)
        assert process.wait(WAIT_S) == 1, log.read_text()
        assert "Ray's raylet has ended" in log.read_text()
        deadline_s = time.monotonic() + WAIT_S
        while left := [command_of(pid) for pid, since in family.items() if began(pid) == since]:
            assert time.monotonic() < deadline_s, left
            time.sleep(0.05)


def descendants(pid: int) -> dict[int, str | None]:
    """Processes below this one, and their start times."""
    found: dict[int, str | None] = {}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child: began(child), **descendants(child)}
    return found


def began(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
