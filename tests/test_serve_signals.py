"""Ending `manta serve` by real signals, early ones and where a shell's background ignores Ctrl-C."""

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

import httpx
import pytest
from manta.jobs.serve_checks import free_port
from text_pair import make_text_pair

WAIT_S = 120.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_text_pair(tmp_path_factory.mktemp("pair"))


@contextmanager
def serving(pair: tuple[Path, Path], port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """As `manta serve ... &` in a script: with SIGINT ignored from the start."""
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


def is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5.0).status_code == 200
    except httpx.HTTPError:  # not listening yet
        return False


def test_a_server_ends_when_it_is_asked_as_soon_as_it_answers(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    log, port = tmp_path / "log", free_port()
    with serving(pair, port, log) as process:
        wait_until(lambda: is_healthy(port), process, log)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) in (0, 130), log.read_text()  # it may not have said that it serves


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_ends_while_it_loads(
    pair: tuple[Path, Path], tmp_path: Path, number: signal.Signals
) -> None:
    log = tmp_path / "log"
    with serving(pair, free_port(), log) as process:
        wait_until(lambda: "loading the models" in log.read_text(), process, log)
        process.send_signal(number)
        assert process.wait(WAIT_S) == 128 + number, log.read_text()
    assert "before it served" in log.read_text()
