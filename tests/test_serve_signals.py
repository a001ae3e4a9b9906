"""Ending `manta serve` by real signals, early ones and where a shell's background ignores Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from manta.actors.machine import free_port
from text_pair import make_text_pair

WAIT_S = 120.0
CONTEXT = 4096  # so that streams can last longer than a server that ends waits


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    pair = make_text_pair(tmp_path_factory.mktemp("pair"))
    for file in (folder / "config.json" for folder in pair):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": CONTEXT}))
    return pair


@contextmanager
def serving(pair: tuple[Path, Path], port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """As `manta serve ... &` in a script: with SIGINT ignored from the start."""
    folder = tempfile.mkdtemp(prefix="ms-")  # short: Ray puts sockets below it
    command = [sys.executable, "-m", "manta.jobs.cli", "serve", "--port", str(port), "-m", str(pair[0])]
    command += ["--spec-model", str(pair[1]), "--dtype", "float32", "--max-num-seqs", "4"]
    command += ["--shutdown-timeout", "2"]
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


def health(port: int) -> int:
    """What a probe sees; 0 where nobody listens."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5.0).status_code
    except httpx.HTTPError:
        return 0


def stream(port: int, n: int, max_tokens: int, began: threading.Event) -> str:
    """Its last two events."""
    body = {"prompt": "x", "n": n, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    url = f"http://127.0.0.1:{port}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60.0) as response:
        events = []
        for line in response.iter_lines():
            began.set()
            events += [line] if line else []
    return "\n".join(events[-2:])


def test_a_server_that_is_asked_to_end_takes_no_request_and_lets_streams_end_in_their_time(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    log, port = tmp_path / "log", free_port()
    with serving(pair, port, log) as process, ThreadPoolExecutor(9) as pool:
        statuses: set[int] = set()
        wait_until(lambda: statuses.add(status := health(port)) or status == 200, process, log)
        assert statuses <= {0, 503, 200}, "never 404 while it loads"
        wait_until(lambda: "serving on" in log.read_text(), process, log)
        begun = [threading.Event() for _ in range(2)]
        short = pool.submit(stream, port, 1, 100, begun[0])
        assert begun[0].wait(WAIT_S), "it would wait behind the others"
        # More than there are slots for.
        long = [pool.submit(stream, port, 4, CONTEXT - 96, begun[1]) for _ in range(8)]
        assert begun[1].wait(WAIT_S)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: "no new requests" in log.read_text() and health(port) == 503, process, log)
        refused = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "x"}, timeout=10.0)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        last = [each.result(WAIT_S) for each in long]
        # Those that had not begun get the status.
        assert all(events.endswith("data: [DONE]") or '"code":503' in events for events in last), last
        assert any("this request's time is up" in events for events in last), "2 s are not enough for all"
        assert '"finish_reason":"length"' in short.result(WAIT_S)
        assert process.wait(WAIT_S) == 0, log.read_text()
    said = log.read_text()
    assert "drained in" in said and "\x1b[" not in said and "pid=" not in said
    scripts = [script.read_text() for script in Path("/tmp").glob("manta-ha-*/haproxy")]
    assert not any(f"--owner {process.pid} " in script for script in scripts), "its folder is gone"


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_server_ends_while_it_loads(
    pair: tuple[Path, Path], tmp_path: Path, number: signal.Signals
) -> None:
    log = tmp_path / "log"
    with serving(pair, free_port(), log) as process:
        wait_until(lambda: "loading the models" in log.read_text(), process, log)
        process.send_signal(number)
        assert process.wait(WAIT_S) == 128 + number, log.read_text()
    assert "before the server was ready" in log.read_text()


@pytest.mark.slow
def test_a_server_whose_raylet_is_killed_ends_and_leaves_nothing(
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
    """Processes below this one, and when they began."""
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
