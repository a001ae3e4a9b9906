"""`manta demo`: the whole path on the pair that ships, in the commands that a user would type.

1. `manta serve`: a streaming chat request and a completion over HTTP, then a clean stop.
2. `manta batch` over the sample prompts, with speculation and without it.
3. A table: tokens/s, tokens per step, speed-up, and whether the outputs are the same.

Each command is a process of its own; nothing of the engine is imported here. The server's log goes to a file,
whose end is shown if it fails.
"""

from __future__ import annotations

import http.client
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cluster.errors import CheckpointError, MantaError
from .batch_io import read_results
from .report import print_table
from .serve import free_port

CHAT = "Write the function with this signature and docstring.\n\n" + (
    '```python\ndef median(values):\n    """Return the middle value of a non-empty sequence."""\n```'
)
COMPLETION = 'def read_lines(path):\n    """Return the lines of a text file without their ends."""\n'
ANSWER_TOKENS = 96
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 90.0
HEALTH_INTERVAL_S = 0.5
LOG_TAIL_LINES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the demo runs on.

    Attributes:
        target, drafter: checkpoints.
        prompts: the sample dataset, JSONL.
        rows: of them, spread over the file.
        max_tokens: of every row.
        max_num_seqs: rows that run at once. Few, as on a laptop: many rows together leave a CPU no spare
            arithmetic for verifying drafts.
    """

    target: Path = Path("models/target")
    drafter: Path = Path("models/drafter")
    prompts: Path = Path("models/prompts.jsonl")
    rows: int = 40
    max_tokens: int = 128
    max_num_seqs: int = 2


def run_demo(options: DemoOptions) -> None:
    """Run it all; raises MantaError when a step fails or outputs differ."""
    for path in (options.target, options.drafter, options.prompts):
        if not path.exists():
            raise CheckpointError(
                f"{path} is missing. Run the demo in the root of a clone, or name the folders with flags.",
                param="model",
            )
    with tempfile.TemporaryDirectory(prefix="manta-demo-") as scratch:
        _serve(options, Path(scratch) / "serve.log")
        _compare(options, Path(scratch))


def _serve(options: DemoOptions, log: Path) -> None:
    _title("1. Serve the pair over HTTP (Ray Serve), speculation on")
    port = free_port()
    command = ["serve", str(options.target), "--spec-model", str(options.drafter), "--port", str(port)]
    with _server([*command, "--served-model-name", "manta"], port, log):
        print(f"\n> streaming chat:\n{CHAT}\n", flush=True)
        usage = _stream_chat(port)
        print(f"\n> completion:\n{COMPLETION}", end="", flush=True)
        body = {"model": "manta", "prompt": COMPLETION, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        with _post(port, "/v1/completions", body) as response:
            print(json.load(response)["choices"][0]["text"])
        print(f"\n[chat: {usage}]")


def _stream_chat(port: int) -> str:
    """Print the answer as its blocks come; returns its figures."""
    body = {
        "model": "manta",
        "messages": [{"role": "user", "content": CHAT}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    last: Mapping[str, Any] = {}  # Any: JSON
    events = 0
    with _post(port, "/v1/chat/completions", body) as response:
        for chunk in _events(response):
            for choice in chunk["choices"]:
                text = choice["delta"].get("content") or ""
                events += bool(text)
                sys.stdout.write(text)
                sys.stdout.flush()
            last = chunk
    sys.stdout.write("\n")
    tokens = last["usage"]["completion_tokens"]
    return f"{tokens} tokens in {events} events, one for each verified block"


def _events(response: http.client.HTTPResponse) -> Iterator[Mapping[str, Any]]:
    for raw in response:
        line = raw.decode().strip()
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise MantaError(f"The stream failed: {chunk['error']['message']}")
        yield chunk


@contextmanager
def _post(port: int, path: str, body: Mapping[str, Any]) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body).encode(), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise MantaError(f"{path} answered {response.status}: {response.read().decode()[:500]}")
        yield response
    finally:
        connection.close()


@contextmanager
def _server(arguments: Sequence[str], port: int, log: Path) -> Iterator[None]:
    """`manta serve` in a process group of its own, ready; ended as a user would, by one Ctrl-C."""
    _show(arguments)
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(arguments), start_new_session=True, env=_environment(), stdout=output, stderr=output
        )
    try:
        _await_health(process, port)
        yield
        print("\nstopping the server", flush=True)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=STOP_TIMEOUT_S)
    except BaseException:
        print(f"\nthe server's log ends with:\n{_tail(log)}", file=sys.stderr, flush=True)
        raise
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _await_health(process: subprocess.Popen[bytes], port: int) -> None:
    started_s = time.monotonic()
    while (waited_s := time.monotonic() - started_s) < START_TIMEOUT_S:
        if process.poll() is not None:
            raise MantaError(f"manta serve ended with exit code {process.returncode}.")
        if _is_healthy(port):
            print(f"ready after {waited_s:.0f} s", flush=True)
            return
        time.sleep(HEALTH_INTERVAL_S)
    raise MantaError(f"manta serve was not ready within {START_TIMEOUT_S:.0f} s.")


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:  # not listening yet
        return False
    finally:
        connection.close()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:])


def _compare(options: DemoOptions, scratch: Path) -> None:
    _title("2. Run a dataset through the same engine (Ray Data), speculation on and off")
    dataset = scratch / "prompts.jsonl"
    lines = [line for line in options.prompts.read_text(encoding="utf-8").split("\n") if line.strip()]
    count = min(options.rows, len(lines))
    dataset.write_text("".join(lines[i * len(lines) // count] + "\n" for i in range(count)), encoding="utf-8")
    reports: dict[str, Mapping[str, Any]] = {}
    results: dict[str, list[dict[str, Any]]] = {}
    for mode, flags in (("on", ["--spec-model", str(options.drafter)]), ("off", ["--no-speculation"])):
        output = scratch / mode
        arguments = ["batch", "-i", str(dataset), "-o", str(output), "--model", str(options.target), *flags]
        arguments += ["--max-tokens", str(options.max_tokens), "--temperature", "0"]
        _run([*arguments, "--max-num-seqs", str(options.max_num_seqs)])
        reports[mode] = json.loads((output / "report.json").read_text(encoding="utf-8"))
        results[mode] = read_results(output)
    same = _answers(results["on"]) == _answers(results["off"])
    _title("3. What speculation brought")
    _print_comparison(reports, same=same)
    if not same:
        raise MantaError("The outputs with and without speculation differ; they must never.")


def _print_comparison(reports: Mapping[str, Mapping[str, Any]], *, same: bool) -> None:
    on, off = reports["on"], reports["off"]
    rows = [
        [
            name,
            str(r["rows"]),
            str(r["failed"]),
            f"{r['tokens_per_s']:.1f}",
            f"{r['tokens_per_step']:.2f}",
            gain,
        ]
        for name, r, gain in (
            ("plain decoding", off, "1.00x"),
            ("DFlash", on, f"{on['tokens_per_s'] / max(off['tokens_per_s'], 1e-9):.2f}x"),
        )
    ]
    print_table(
        "the same rows through the same target",
        ["mode", "rows", "failed", "tokens/s", "tokens per step", "speed-up"],
        rows,
    )
    print(f"outputs identical: {'yes' if same else 'NO'}", flush=True)


def _answers(results: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["id"], row["token_ids"], row["text"], row["finish_reason"]) for row in results]


def _run(arguments: Sequence[str]) -> None:
    _show(arguments)
    code = subprocess.run(_command(arguments), env=_environment(), check=False).returncode
    if code != 0:
        raise MantaError(f"manta {arguments[0]} ended with exit code {code}; see its output above.")


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "manta.jobs.cli", *arguments]


def _environment() -> dict[str, str]:
    """A Ray of the demo's own, also where another one is running."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


def _show(arguments: Sequence[str]) -> None:
    print(f"$ manta {shlex.join(arguments)}", flush=True)


def _title(text: str) -> None:
    print(f"\n=== {text}\n", flush=True)
