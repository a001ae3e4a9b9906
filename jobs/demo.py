"""`manta demo`: runs serving, a batch job and a benchmark on the shipped pair, with the commands of a user.

1. `manta serve`: a streamed chat request over HTTP, then the same with and without speculation, alternating.
2. `manta batch` over the sample prompts.
3. `manta bench` over the same prompts: both modes alternate, and their outputs are compared.

A table at the end shows the speed-up in 1 and 3. Commands are subprocesses, printed as typed, and a server is
stopped by one Ctrl-C. Does not import the engine.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..actors.system.host_resources import free_port
from ..cluster.errors import CheckpointError, MantaError
from .common.http_client import ServerClient, await_ready
from .common.tables import decimals, print_table

# A prompt of models/prompts.jsonl that the small pair answers well.
CHAT = "Write the function with this signature and docstring.\n\n" + (
    "```python\ndef allowed_domains(self):\n"
    '    """Return None, or the sequence of allowed domains (as a tuple)."""\n```'
)
ANSWER_TOKENS = 96
ANSWER_TIMEOUT_S = 120.0
REQUESTS_PER_MODE = 3  # requests per mode, alternating; the median is reported
ROUNDS = 2  # rounds of the comparison over the dataset, some seconds each
TAKES = "about two minutes on two idle cores"
DIFFER = "The outputs with and without speculation differ, which must never happen."
REPORT_INTERVAL_S = 4.0
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 90.0
LOG_TAIL_LINES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Options of `manta demo`.

    Attributes:
        target: target checkpoint.
        drafter: drafter checkpoint.
        prompts: sample dataset, JSONL.
        rows: number of rows, taken evenly from the file.
        max_tokens: output tokens per row.
        max_num_seqs: concurrent rows. With many rows a CPU has no spare compute for verifying drafts.
    """

    target: Path = Path("models/target")
    drafter: Path = Path("models/drafter")
    prompts: Path = Path("models/prompts.jsonl")
    rows: int = 40
    max_tokens: int = 128
    max_num_seqs: int = 2


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A streamed answer: number of tokens and of events, and seconds until the last event."""

    text: str
    num_tokens: int
    num_events: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def run_demo(options: DemoOptions) -> None:
    for path in (options.target, options.drafter, options.prompts):
        if not path.exists():
            raise CheckpointError(
                f"{path} is missing. Run the demo in the root of a clone, or give the paths with flags.",
                param="model",
            )
    print(f"A server, a dataset and a comparison; takes {TAKES}.", flush=True)
    with tempfile.TemporaryDirectory(prefix="manta-demo-") as scratch:
        dataset = Path(scratch) / "prompts.jsonl"
        _choose_rows(options, dataset)
        chat = _serve(options, Path(scratch) / "serve.log")
        _title("2. Run a dataset, each row exactly once")
        run_command([*_arguments("batch", options), "-i", str(dataset), "-o", str(Path(scratch) / "answers")])
        bench = compare_modes(options, dataset, Path(scratch))
    print_result(chat, bench, options)


def _serve(options: DemoOptions, log: Path) -> dict[bool, ChatAnswer]:
    """Serve the pair and chat; return the answers of median speed with (True) and without speculation."""
    _title("1. Serve the pair over HTTP, and chat")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = ["serve", str(options.target), "--spec-model", str(options.drafter), "--port", str(port)]
    with (
        serving([*command, "--served-model-name", "manta"], url, log),
        ServerClient(url, ANSWER_TIMEOUT_S) as client,
    ):
        print(f"\n> {CHAT}\n", flush=True)
        stream_chat(client, speculate=True, show=True)
        print("\nthe same again, alternating with and without speculation", flush=True)
        modes = [mode for _ in range(REQUESTS_PER_MODE) for mode in (True, False)]
        answers = [(mode, stream_chat(client, speculate=mode)) for mode in modes]
    if len({answer.text for _, answer in answers}) != 1:
        raise MantaError(DIFFER)
    return {mode: _median([answer for each, answer in answers if each is mode]) for mode in (True, False)}


def stream_chat(client: ServerClient, *, speculate: bool, show: bool = False) -> ChatAnswer:
    body = {
        "model": "manta",
        "messages": [{"role": "user", "content": CHAT}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "speculative": speculate,
        "stream_options": {"include_usage": True},
    }
    last: Mapping[str, Any] = {}  # Any: JSON
    texts: list[str] = []
    begin_s = end_s = time.perf_counter()
    for last in client.stream_chat(body):
        for choice in last["choices"]:
            if text := choice["delta"].get("content"):
                texts.append(text)
                end_s = time.perf_counter()
                if show:
                    sys.stdout.write(text)
                    sys.stdout.flush()
    if show:
        print(flush=True)
    return ChatAnswer("".join(texts), last["usage"]["completion_tokens"], len(texts), end_s - begin_s)


def _median(answers: list[ChatAnswer]) -> ChatAnswer:
    rate = statistics.median_low(answer.tokens_per_s for answer in answers)
    return next(answer for answer in answers if answer.tokens_per_s == rate)


def _choose_rows(options: DemoOptions, dataset: Path) -> None:
    lines = [line for line in options.prompts.read_text(encoding="utf-8").split("\n") if line.strip()]
    count = min(options.rows, len(lines))
    dataset.write_text("".join(lines[i * len(lines) // count] + "\n" for i in range(count)), encoding="utf-8")


def _arguments(command: str, options: DemoOptions) -> list[str]:
    models = ["--model", str(options.target), "--spec-model", str(options.drafter)]
    return [command, *models, "--max-tokens", str(options.max_tokens), "--temperature", "0"]


def compare_modes(options: DemoOptions, dataset: Path, scratch: Path) -> Mapping[str, Any]:  # Any: JSON
    """Benchmark both modes over the same rows, alternating; return the figures."""
    _title("3. Both modes over the same rows, alternating")
    output = scratch / "figures.json"
    arguments = [*_arguments("bench", options), "--prompts", str(dataset), "--num-prompts", str(options.rows)]
    arguments += ["--rounds", str(ROUNDS), "--max-concurrency", str(options.max_num_seqs), "--no-trial"]
    run_command([*arguments, "-o", str(output)], show=False)
    (point,) = json.loads(output.read_text(encoding="utf-8"))["points"]
    if not all(point["identical"].values()):
        raise MantaError(DIFFER)
    return point


def print_result(chat: Mapping[bool, ChatAnswer], bench: Mapping[str, Any], options: DemoOptions) -> None:
    _title("With speculation: the same tokens in fewer steps of the target")
    on, off = chat[True], chat[False]
    length = decimals(bench["on"]["mean_acceptance_length"])
    many = f"dataset, {options.max_num_seqs} requests at once"
    rates = [f"{bench[mode]['tokens_per_s']:,.0f}" for mode in ("on", "off")]
    rows = [
        ["chat: tokens", str(on.num_tokens), str(off.num_tokens), ""],
        ["chat: events", str(on.num_events), str(off.num_events), ""],
        [
            "chat: tokens/s",
            f"{on.tokens_per_s:,.0f}",
            f"{off.tokens_per_s:,.0f}",
            f"{on.tokens_per_s / off.tokens_per_s:.2f} x",
        ],
        [f"{many}: tokens/s", *rates, f"{bench['speedup']:.2f} x"],
    ]
    print_table("", ["", "with speculation", "without", "faster"], rows)
    print(
        f"The texts are equal. Mean acceptance length over the dataset: {length} tokens per step.", flush=True
    )
    if warning := bench["idleness"]["warning"]:
        print(warning, flush=True)


def _title(text: str) -> None:
    print(f"\n=== {text}\n", flush=True)


def run_command(arguments: Sequence[str], *, show: bool = True) -> None:
    _show(arguments)
    output = None if show else subprocess.DEVNULL
    code = subprocess.run(manta(*arguments), env=without_ray(), stdout=output, check=False).returncode
    if code != 0:
        raise MantaError(f"manta {arguments[0]} exited with code {code}; see its output above.")


@contextmanager
def serving(arguments: Sequence[str], url: str, log: Path) -> Iterator[None]:
    """Run `manta serve`, ready in the `with` block; if that fails, print the end of its log."""
    _show(arguments)
    begin_s = printed_s = time.monotonic()

    def print_progress() -> None:
        nonlocal printed_s
        if time.monotonic() - printed_s >= REPORT_INTERVAL_S:
            printed_s = time.monotonic()
            print(f"starting ({printed_s - begin_s:.0f} s)", flush=True)

    with server(manta(*arguments), url, log, print_progress) as ready_s:
        print(f"ready after {ready_s:.0f} s", flush=True)
        try:
            yield
        except BaseException:
            print(f"\nthe server's log ends with:\n{log_tail(log)}", file=sys.stderr, flush=True)
            raise
        print("\nstopping the server", flush=True)


def _show(arguments: Sequence[str]) -> None:
    print(f"$ manta {shlex.join(arguments)}", flush=True)


def manta(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "manta.jobs.cli", *arguments]


def without_ray() -> dict[str, str]:
    """Return the environment without RAY_ADDRESS, so that the command starts its own Ray."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


@contextmanager
def server(
    command: Sequence[str], url: str, log: Path, while_waiting: Callable[[], None] | None = None
) -> Iterator[float]:
    """Run a server in its own process group; yield the seconds until it was ready."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, start_new_session=True, env=without_ray(), stdout=output, stderr=output
        )

    def look() -> None:
        if while_waiting is not None:
            while_waiting()
        if process.poll() is not None:
            raise MantaError(f"The server exited with code {process.returncode}:\n{log_tail(log)}")

    try:
        yield await_ready(url, START_TIMEOUT_S, look)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise MantaError(f"The server did not exit within {STOP_TIMEOUT_S:.0f} s:\n{log_tail(log)}") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def log_tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:])
