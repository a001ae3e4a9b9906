"""`manta demo`: the whole path on the pair that ships, in the commands that a user would type.

1. `manta serve`: a streaming chat request and a completion over HTTP, then a clean stop.
2. `manta batch` over the sample prompts, with speculation and without it: the same answers.
3. `manta bench` over the same prompts: tokens/s, mean acceptance length and speed-up of modes in turns.

Nothing of the engine is imported here: see `demo_commands.py`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..actors.batch.source import read_results
from ..cluster.errors import CheckpointError, MantaError
from .client import ServerClient
from .demo_commands import run_command, serving
from .serve_checks import free_port
from .tables import decimals

CHAT = "Write the function with this signature and docstring.\n\n" + (
    '```python\ndef median(values):\n    """Return the middle value of a non-empty sequence."""\n```'
)
COMPLETION = 'def read_lines(path):\n    """Return the lines of a text file without their ends."""\n'
ANSWER_TOKENS = 96
ANSWER_TIMEOUT_S = 120.0
ROUNDS = 2  # of the comparison; some seconds each


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
        dataset = Path(scratch) / "prompts.jsonl"
        _run_dataset(options, dataset, Path(scratch))
        compare_modes(options, dataset, Path(scratch))


def _serve(options: DemoOptions, log: Path) -> None:
    _title("1. Serve the pair over HTTP (Ray Serve), speculation on")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = ["serve", str(options.target), "--spec-model", str(options.drafter), "--port", str(port)]
    with (
        serving([*command, "--served-model-name", "manta"], url, log),
        ServerClient(url, ANSWER_TIMEOUT_S) as client,
    ):
        print(f"\n> streaming chat:\n{CHAT}\n", flush=True)
        usage = _stream_chat(client)
        print(f"\n> completion:\n{COMPLETION}", end="", flush=True)
        body = {"model": "manta", "prompt": COMPLETION, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        print(client.complete(body))
        print(f"\n[chat: {usage}]")


def _stream_chat(client: ServerClient) -> str:
    """Print the answer as its blocks come; returns its figures."""
    body = {
        "model": "manta",
        "messages": [{"role": "user", "content": CHAT}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    last: Mapping[str, Any] = {}  # Any: JSON
    events = 0
    for last in client.stream_chat(body):
        for choice in last["choices"]:
            text = choice["delta"].get("content") or ""
            events += bool(text)
            sys.stdout.write(text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    tokens = last["usage"]["completion_tokens"]
    return f"{tokens} tokens in {events} events, one for each verified block"


def _run_dataset(options: DemoOptions, dataset: Path, scratch: Path) -> None:
    _title("2. Run a dataset through the same engine (Ray Data), speculation on and off")
    lines = [line for line in options.prompts.read_text(encoding="utf-8").split("\n") if line.strip()]
    count = min(options.rows, len(lines))
    dataset.write_text("".join(lines[i * len(lines) // count] + "\n" for i in range(count)), encoding="utf-8")
    answers: dict[str, list[tuple[Any, ...]]] = {}
    for mode, flags in (("on", ["--spec-model", str(options.drafter)]), ("off", ["--no-speculation"])):
        output = scratch / mode
        arguments = ["batch", "-i", str(dataset), "-o", str(output), "--model", str(options.target), *flags]
        arguments += ["--max-tokens", str(options.max_tokens), "--temperature", "0"]
        run_command([*arguments, "--max-num-seqs", str(options.max_num_seqs)])
        answers[mode] = _answers(read_results(output))
    if answers["on"] != answers["off"]:
        raise MantaError("The outputs with and without speculation differ; they must never.")
    print(
        f"\nBoth jobs gave the same answers to all {count} rows, token for token. "
        "They ran one after the other: how fast the modes are beside each other is next.",
        flush=True,
    )


def compare_modes(options: DemoOptions, dataset: Path, scratch: Path) -> None:
    """By a benchmark and not by the jobs of step 2, each of which ran alone at a time of its own."""
    _title("3. What speculation brings: both modes over the same rows, taking turns")
    output = scratch / "figures.json"
    arguments = ["bench", "--model", str(options.target), "--spec-model", str(options.drafter)]
    arguments += ["--prompts", str(dataset), "--num-prompts", str(options.rows), "--rounds", str(ROUNDS)]
    arguments += ["--max-tokens", str(options.max_tokens), "--max-concurrency", str(options.max_num_seqs)]
    run_command([*arguments, "--no-trial", "-o", str(output)])
    (point,) = json.loads(output.read_text(encoding="utf-8"))["points"]
    if not all(point["identical"].values()):
        raise MantaError("The outputs with and without speculation differ; they must never.")
    print(
        f"\nDFlash has a mean acceptance length of {decimals(point['on']['mean_acceptance_length'])} and "
        f"{point['speedup']:.2f} times the speed of plain decoding; the outputs are identical.",
        flush=True,
    )


def _answers(results: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["id"], row["token_ids"], row["text"], row["finish_reason"]) for row in results]


def _title(text: str) -> None:
    print(f"\n=== {text}\n", flush=True)
