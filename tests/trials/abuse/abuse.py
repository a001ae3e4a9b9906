"""A real server under hostile clients: `make abuse`. Exits with 1 if the server misbehaves.

    python tests/trials abuse [-o FILE]     FILE: JSON for the figures

Nonsense gets an error in OpenAI's form; schemathesis' requests get no 500 and no status that the OpenAPI
document lacks. Slow readers, 1,000 silent streams and 300 disconnects, four times, leave no request, page,
task or thread behind, and no more memory than after the third time. The longest possible requests delay a
parallel stream by at most BAR_MS. One key's load delays another key's request by at most a second
(`abuse_neighbors.py`). Servers of the shipped pair, with and without a gateway, get hostile
requests and grammars during another key's stream, and held connections (`abuse_hostile.py`). A short form is
`test_abuse.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from manta.jobs.bench.common.provenance import provenance
from manta.jobs.common.tables import print_table
from support.paths import MODELS
from support.servers.probed_server import Found, ProbedServer

from trials.abuse import abuse_hostile, abuse_neighbors
from trials.abuse.abuse_clients import be_silent, leave, nonsense, read_slowly, request_bytes, send
from trials.abuse.abuse_long import Measured, measure
from trials.abuse.abuse_readers import stop_reading

MODEL = MODELS / "target"
BAR_MS = 50.0
GROWTH_BYTES = 24 << 20
REPETITIONS, SETTLED = 4, 3  # buffers of slow readers leave holes, which are full after three times
FUZZ_S = 300
READER_TIMEOUT_S, UNREAD_S = 10.0, 40.0

Attack = Callable[[int], Coroutine[Any, Any, None]]  # of a port
ATTACKS: Mapping[str, Attack] = {
    "300 departures": lambda port: leave(port, 300),
    "8 clients that do not read for a minute": lambda port: read_slowly(port, 8, 8, 15_000),
    "1,000 silent streams": lambda port: be_silent(port, 1000),
    "streams and answers that nobody reads": lambda port: stop_reading(port, UNREAD_S),
}


def _printed(measured: Iterable[Measured]) -> Iterator[Measured]:
    """Yield results as they come: some take long."""
    for each in measured:
        print(f"{each.name}: {each.status} after {each.seconds} s", flush=True)
        yield each


def refuse_nonsense(port: int) -> list[str]:
    """Errors in the answers to nonsense; there should be none."""
    said: list[str] = []
    for name, path, body, headers in nonsense():
        answer = send(port, request_bytes(path, body, headers))
        if not 400 <= answer.status < 500 or not answer.is_openai_error:
            said.append(f"{name}: {answer.status} {answer.body[:200]!r}")
    return said


def suffer(
    server: ProbedServer,
    attacks: Mapping[str, Attack],
    repetitions: int,
    growth_bytes: int,
    settled: int = 1,
) -> Iterator[tuple[str, Found, list[str]]]:
    """Run each attack a number of times: its name, the server's state after it, and errors."""
    before = server.rest()
    for repetition in range(repetitions):
        for name, attack in attacks.items():
            asyncio.run(attack(server.port))
            after = server.rest(before.tasks)
            wrong = ["something is left of the requests"] if after.busy(before.tasks) else []
            if repetition < settled:
                before = _with_memory(before, after)
            elif after.rss_bytes > before.rss_bytes + growth_bytes * (repetition - settled + 1):
                wrong.append(f"memory grew from {before.rss_bytes} to {after.rss_bytes} bytes")
            if repetition and after.threads > before.threads:
                wrong.append(f"{after.threads} threads; {before.threads} before")
            yield f"{name}, time {repetition + 1}", after, wrong


def _with_memory(before: Found, after: Found) -> Found:
    """Allocations of the first round are permanent: pools of threads, and of memory."""
    grown = {
        "rss_bytes": max(before.rss_bytes, after.rss_bytes),
        "threads": max(before.threads, after.threads),
    }
    return Found(**{**asdict(before), **grown})


def fuzz(url: str, seconds: int) -> bool:
    """Whether schemathesis finds nothing."""
    command = shutil.which("schemathesis", path=str(Path(sys.executable).parent)) or "schemathesis"
    checks = "not_a_server_error,status_code_conformance"
    arguments = ["run", f"{url}/openapi.json", "-c", checks, "--phases", "examples,coverage,fuzzing"]
    arguments += ["--max-time", str(seconds), "--continue-on-failure"]
    with tempfile.TemporaryDirectory() as folder:  # it writes into its folder
        return subprocess.run([command, *arguments], cwd=folder, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="A server under clients that mean no good.")
    parser.add_argument("-o", "--output", type=Path)
    output = parser.parse_args().output
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))  # the server inherits it
    wrong: list[str] = []
    with ProbedServer(MODEL) as server:
        measured = list(_printed(measure(server)))
        wrong += [
            f"{m.name}: the loop stood still for {m.pause_ms} ms" for m in measured if m.pause_ms > BAR_MS
        ]
        wrong += [f"{m.name}: {m.status}" for m in measured if m.status >= 500]
    rows = [[m.name, *map(str, (m.megabytes, m.status, m.seconds, m.pause_ms, m.wait_ms))] for m in measured]
    print_table("long requests", ["what", "MB", "status", "s", "pause ms", "wait ms"], rows, num_left=1)
    states: dict[str, Any] = {}
    with ProbedServer(MODEL, {"reader_timeout": READER_TIMEOUT_S}) as server:
        wrong += refuse_nonsense(server.port)
        for name, found, said in suffer(server, ATTACKS, REPETITIONS, GROWTH_BYTES, SETTLED):
            states[name] = asdict(found)
            wrong += [f"{name}: {each}" for each in said]
    names = ("tasks", "threads", "rss_bytes", "running", "waiting", "kv_usage")
    rows = [[name, *(str(found[each]) for each in names)] for name, found in states.items()]
    print_table("after attacks", ["what", *names], rows, num_left=1)
    with ProbedServer(MODEL, {"api_key": abuse_neighbors.KEYS}, has_end_token=True) as server:
        met, said = abuse_neighbors.meet_all(server)
        wrong += said
    rows = [[m.name, str(m.status), str(m.alone_s), str(m.beside_s)] for m in met]
    print_table("another key's request", ["beside", "status", "alone s", "beside s"], rows, num_left=1)
    with (
        tempfile.TemporaryDirectory() as folder,
        ProbedServer(MODEL, {"batch_storage": folder}, max_model_len=256) as server,
    ):
        if not fuzz(server.url, FUZZ_S):
            wrong.append("schemathesis found something: see above")
    hostile, said = abuse_hostile.run()
    wrong += said
    if output is not None:
        figures = {
            "long": [asdict(m) for m in measured],
            "attacks": states,
            "neighbors": [asdict(each) for each in met],
            "hostile": hostile,
            "wrong": wrong,
        }
        output.write_text(json.dumps({"provenance": provenance(), **figures}, indent=1) + "\n")
    print(*wrong or ["nothing is wrong"], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
