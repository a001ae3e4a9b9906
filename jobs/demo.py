"""`manta demo`: the whole path on the pair that ships, in the commands that a user would type.

1. `manta serve`: a streaming chat request over HTTP, then the same by turns with speculation and without.
2. `manta batch` over the sample prompts.
3. `manta bench` over the same prompts: both modes take turns, and their outputs are compared.

One table at the end says what speculation brought in 1 and 3. Nothing of the engine is imported here: see
`demo_commands.py`.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..actors.machine import free_port
from ..cluster.errors import CheckpointError, MantaError
from .client import ServerClient
from .demo_commands import run_command, serving
from .tables import decimals, print_table

# A prompt of models/prompts.jsonl that the small pair answers well.
CHAT = "Write the function with this signature and docstring.\n\n" + (
    "```python\ndef allowed_domains(self):\n"
    '    """Return None, or the sequence of allowed domains (as a tuple)."""\n```'
)
ANSWER_TOKENS = 96
ANSWER_TIMEOUT_S = 120.0
ASKED = 3  # times of each mode, by turns; the median counts
ROUNDS = 2  # of the comparison over the dataset; some seconds each
TAKES = "about two minutes on two idle cores"
DIFFER = "The outputs with and without speculation differ; they must never."


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the demo runs on.

    Attributes:
        target: target checkpoint.
        drafter: drafter checkpoint.
        prompts: sample dataset, JSONL.
        rows: rows of it to run, spread over the file.
        max_tokens: tokens of every row.
        max_num_seqs: rows that run at once. Few, as on a laptop: many rows together leave a CPU no spare
            arithmetic for verifying drafts.
    """

    target: Path = Path("models/target")
    drafter: Path = Path("models/drafter")
    prompts: Path = Path("models/prompts.jsonl")
    rows: int = 40
    max_tokens: int = 128
    max_num_seqs: int = 2


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A streamed answer: its tokens, the events that they came in, and the seconds until the last one."""

    text: str
    num_tokens: int
    num_events: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def run_demo(options: DemoOptions) -> None:
    """Run it all; raises MantaError when a step fails or outputs differ."""
    for path in (options.target, options.drafter, options.prompts):
        if not path.exists():
            raise CheckpointError(
                f"{path} is missing. Run the demo in the root of a clone, or name the folders with flags.",
                param="model",
            )
    print(f"A server, a dataset and a comparison; this takes {TAKES}.", flush=True)
    with tempfile.TemporaryDirectory(prefix="manta-demo-") as scratch:
        dataset = Path(scratch) / "prompts.jsonl"
        _choose_rows(options, dataset)
        chat = _serve(options, Path(scratch) / "serve.log")
        _title("2. Run a dataset, exactly once by row")
        run_command([*_arguments("batch", options), "-i", str(dataset), "-o", str(Path(scratch) / "answers")])
        bench = compare_modes(options, dataset, Path(scratch))
    print_result(chat, bench, options)


def _serve(options: DemoOptions, log: Path) -> dict[bool, ChatAnswer]:
    """Return the answer of median speed with speculation (True) and the one without."""
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
        print("\nthe same again, by turns with speculation and without", flush=True)
        modes = [mode for _ in range(ASKED) for mode in (True, False)]
        answers = [(mode, stream_chat(client, speculate=mode)) for mode in modes]
    if len({answer.text for _, answer in answers}) != 1:
        raise MantaError(DIFFER)
    return {mode: _median([answer for each, answer in answers if each is mode]) for mode in (True, False)}


def stream_chat(client: ServerClient, *, speculate: bool, show: bool = False) -> ChatAnswer:
    """Ask for a chat answer; with `show`, print it as its blocks come."""
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
    """What `batch` and `bench` have in common."""
    models = ["--model", str(options.target), "--spec-model", str(options.drafter)]
    return [command, *models, "--max-tokens", str(options.max_tokens), "--temperature", "0"]


def compare_modes(options: DemoOptions, dataset: Path, scratch: Path) -> Mapping[str, Any]:  # Any: JSON
    """Both modes over the same rows, by a benchmark in which they take turns. Returns its figures.

    Raises:
        MantaError: the outputs differ.
    """
    _title("3. Both modes over the same rows, by turns")
    output = scratch / "figures.json"
    arguments = [*_arguments("bench", options), "--prompts", str(dataset), "--num-prompts", str(options.rows)]
    arguments += ["--rounds", str(ROUNDS), "--max-concurrency", str(options.max_num_seqs), "--no-trial"]
    run_command([*arguments, "-o", str(output)], show=False)
    (point,) = json.loads(output.read_text(encoding="utf-8"))["points"]
    if not all(point["identical"].values()):
        raise MantaError(DIFFER)
    return point


def print_result(chat: Mapping[bool, ChatAnswer], bench: Mapping[str, Any], options: DemoOptions) -> None:
    """The one table of the demo."""
    _title("What speculation brought: the same tokens, in fewer steps of the target")
    on, off = chat[True], chat[False]
    length = decimals(bench["on"]["mean_acceptance_length"])
    many = f"dataset, {options.max_num_seqs} requests at once"
    rates = [f"{bench[mode]['tokens_per_s']:,.0f}" for mode in ("on", "off")]
    rows = [
        ["chat: tokens", str(on.num_tokens), str(off.num_tokens), ""],
        ["chat: events", str(on.num_events), str(off.num_events), ""],
        ["chat: tokens/s", f"{on.tokens_per_s:,.0f}", f"{off.tokens_per_s:,.0f}", _times(on, off)],
        [f"{many}: tokens/s", *rates, f"{bench['speedup']:.2f} x"],
    ]
    print_table("", ["", "with speculation", "without", "faster"], rows)
    print(f"The texts are the same. Over the dataset a step brought {length} tokens on average.", flush=True)
    if warning := bench["idleness"]["warning"]:
        print(warning, flush=True)


def _times(on: ChatAnswer, off: ChatAnswer) -> str:
    return f"{on.tokens_per_s / off.tokens_per_s:.2f} x"


def _title(text: str) -> None:
    print(f"\n=== {text}\n", flush=True)
