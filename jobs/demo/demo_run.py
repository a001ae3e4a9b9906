"""`manta demo`: runs serving, a batch job and a benchmark on a trained pair, with the commands of a user.

1. `manta serve`: chat requests over HTTP, streamed with speculation and then without.
2. `manta batch` over a dataset.
3. `manta bench` over the same rows: both modes alternate, and their outputs are compared.

A table at the end shows the target's steps and the time in 1, and the speed in 3. Commands are subprocesses,
printed as typed, and a server is stopped by one Ctrl-C. Does not import the engine.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...actors.checkpoints.checkpoint_paths import shipped
from ...actors.system.host_resources import free_port
from ...cluster.errors import CheckpointError, MantaError
from ..common.http_client import ServerClient
from ..common.server_process import run_command, serving
from ..common.tables import decimals, print_table
from .answer_stream import ChatAnswer, SideBySide, stream_answer
from .demo_models import DemoPair, usual_pair

ANSWER_TOKENS = 128
ANSWER_TIMEOUT_S = 120.0
ROUNDS = 2  # of requests, and of the comparison over the dataset
TAKES = "three minutes on two idle cores"
DIFFER = "The outputs with and without speculation differ, which must never happen."


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Options of `manta demo`.

    Attributes:
        target, drafter, prompts: another pair and its dataset (JSONL); all three, or none.
        rows: number of rows, taken evenly from the file.
        max_tokens: output tokens per row.
        max_num_seqs: concurrent rows. With many rows a CPU has no spare compute for verifying drafts.
    """

    target: Path | None = None
    drafter: Path | None = None
    prompts: Path | None = None
    rows: int = 40
    max_tokens: int = 96
    max_num_seqs: int = 2


def run_demo(options: DemoOptions) -> None:
    print(f"A server, a dataset and a comparison; takes about {TAKES}.", flush=True)
    pair = _pair(options)
    with tempfile.TemporaryDirectory(prefix="manta-demo-") as scratch:
        dataset = Path(scratch) / "prompts.jsonl"
        _choose_rows(pair.prompts, options.rows, dataset)
        answers = _serve(pair, Path(scratch) / "serve.log")
        _title("2. Run a dataset, each row exactly once")
        arguments = _arguments("batch", pair, options)
        run_command([*arguments, "-i", str(dataset), "-o", str(Path(scratch) / "answers")])
        bench = compare_modes(pair, options, dataset, Path(scratch))
    print_result(answers, bench, options)


def _pair(options: DemoOptions) -> DemoPair:
    given = options.target, options.drafter, options.prompts
    if given == (None, None, None):
        return usual_pair()
    paths = []
    for name, path in zip(("target", "drafter", "prompts"), given, strict=True):
        if path is None or not shipped(path).exists():
            what = "is not given" if path is None else f"{path} is missing"
            raise CheckpointError(
                f"{name}: {what}. Give target, drafter and prompts, or none of them.", param=name
            )
        paths.append(shipped(path))
    return DemoPair.of(*paths)


def _serve(pair: DemoPair, log: Path) -> list[dict[bool, ChatAnswer]]:
    """Serve the pair and ask; return the faster answer to each question with (True) and without drafts."""
    _title("1. Serve the pair over HTTP, and ask")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    # Without prompts of earlier demos: both modes compute theirs.
    command = ["serve", *_models(pair), "--port", str(port), "--kv-tier-path", "none"]
    with serving(command, url, log), ServerClient(url, ANSWER_TIMEOUT_S) as client:
        return [_ask(client, pair, number) for number in range(len(pair.questions))]


def _ask(client: ServerClient, pair: DemoPair, number: int) -> dict[bool, ChatAnswer]:
    """Ask a question several times, with speculation and without; return the fastest answer of each."""
    question = pair.questions[number]
    print(f"\n> {question.text}\n", flush=True)
    answers: dict[bool, list[ChatAnswer]] = {True: [], False: []}
    with SideBySide() as view:
        for index in range(ROUNDS):
            for mode, given in answers.items():
                shown = view if index == 0 else None
                given.append(stream_answer(client, question, ANSWER_TOKENS, speculate=mode, view=shown))
    if len({answer.text for given in answers.values() for answer in given}) != 1:
        raise MantaError(DIFFER)
    best = {mode: min(given, key=lambda answer: answer.seconds) for mode, given in answers.items()}
    on, off = best[True], best[False]
    print(
        f"the same {on.num_tokens} tokens in {on.num_steps} steps of the target instead of {off.num_steps}; "
        f"{on.seconds:.2f} s instead of {off.seconds:.2f} s",
        flush=True,
    )
    return best


def _choose_rows(prompts: Path, rows: int, dataset: Path) -> None:
    lines = [line for line in prompts.read_text(encoding="utf-8").split("\n") if line.strip()]
    count = min(rows, len(lines))
    dataset.write_text("".join(lines[i * len(lines) // count] + "\n" for i in range(count)), encoding="utf-8")


def _models(pair: DemoPair) -> list[str]:
    """Return flags with which each step drafts: the demo shows the method on a busy machine, too."""
    drafting: dict[str, Any] = {"model": pair.drafter, "adaptive": False}
    if pair.num_drafts is not None:
        drafting["num_speculative_tokens"] = pair.num_drafts
    return ["--model", pair.target, "--speculative-config", json.dumps(drafting)]


def _arguments(command: str, pair: DemoPair, options: DemoOptions) -> list[str]:
    return [command, *_models(pair), "--max-tokens", str(options.max_tokens), "--temperature", "0"]


def compare_modes(
    pair: DemoPair, options: DemoOptions, dataset: Path, scratch: Path
) -> Mapping[str, Any]:  # Any: JSON
    """Benchmark both modes over the same rows, alternating; return the figures."""
    _title("3. Both modes over the same rows, alternating")
    output = scratch / "figures.json"
    arguments = [*_arguments("bench", pair, options), "--prompts", str(dataset)]
    arguments += ["--num-prompts", str(options.rows), "--rounds", str(ROUNDS)]
    arguments += ["--max-concurrency", str(options.max_num_seqs), "--no-trial"]
    run_command([*arguments, "-o", str(output)], show=False)
    (point,) = json.loads(output.read_text(encoding="utf-8"))["points"]
    if not all(point["identical"].values()):
        raise MantaError(DIFFER)
    return point


def print_result(
    answers: Sequence[Mapping[bool, ChatAnswer]], bench: Mapping[str, Any], options: DemoOptions
) -> None:
    _title("With speculation: the same tokens in fewer steps of the target")
    steps, seconds = (
        [sum(getattr(answer[mode], name) for answer in answers) for mode in (True, False)]
        for name in ("num_steps", "seconds")
    )
    length = bench["on"]["mean_acceptance_length"]
    rates = [f"{bench[mode]['tokens_per_s']:,.0f}" for mode in ("on", "off")]
    rows = [
        ["answers: steps of the target", *map(str, steps), f"{steps[1] / steps[0]:.2f} x fewer"],
        ["dataset: tokens of a step", decimals(length), "1.00", f"{length:.2f} x as many"],
        ["answers: seconds", *map(decimals, seconds), f"{seconds[1] / seconds[0]:.2f} x as fast"],
        [
            f"dataset, {options.max_num_seqs} requests at once: tokens/s",
            *rates,
            f"{bench['speedup']:.2f} x as fast",
        ],
    ]
    print_table("", ["", "with speculation", "without", ""], rows)
    print(
        "The texts are equal. Here each step drafts; servers and jobs draft by default as far as it pays.",
        flush=True,
    )
    if warning := bench["idleness"]["warning"]:
        print(warning, flush=True)


def _title(text: str) -> None:
    print(f"\n=== {text}\n", flush=True)
