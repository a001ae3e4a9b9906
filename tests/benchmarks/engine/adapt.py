"""Benchmark of `manta drafter adapt`: the shipped drafter, a new kind of text, twenty minutes on a CPU.

    python tests/benchmarks adapt -o docs/benchmarks/adapt-cpu.json

JSON logs are the new text (`json_logs.py`); prompts from the pair's training files are replayed. Neither
contains a prompt of models/prompts.jsonl, on which the shipped categories are measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from manta.actors.system.atomic_files import write_json
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.jobs.bench.common.provenance import provenance
from manta.jobs.common.tables import print_table
from manta.jobs.drafters.train.adapt_data import read_examples
from manta.jobs.drafters.train.adapt_run import (
    MAX_LOSS,
    AdaptOptions,
    judge,
    measure,
    print_figures,
    run_adapt,
)

from .json_logs import write_logs

MIN_GAIN = 0.2
_TARGET, _DRAFTER, _SHIPPED = Path("models/target"), Path("models/drafter"), Path("models/prompts.jsonl")
_NUM_LOGS, _HELD_OUT_LOGS, _REPLAYED_OF_EACH = 3000, 64, 400
_SEED, _HELD_OUT_SEED, _REPLAY_SEED = 1, 2, 3


def write_replay(path: Path) -> None:
    """Write prompts of the shipped categories, from files that are not held out."""
    from manta.models.recipe import corpus
    from manta.models.recipe.prompt_selection import all_prompts, select_prompts
    from manta.models.recipe.prompts import write_prompts
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(_TARGET / "tokenizer.json"))
    learned = [file for file in corpus.library_files() if not file.is_held_out]
    prompts = all_prompts(learned, backend, _REPLAY_SEED)
    write_prompts(select_prompts(prompts, _REPLAYED_OF_EACH, _REPLAY_SEED), path)


def run(minutes: float, work: Path) -> dict[str, Any]:
    """Adapt, measure on text that the gate has not used, and return the figures with `met`."""
    options = AdaptOptions(
        drafter=str(_DRAFTER),
        target=str(_TARGET),
        data=work / "logs.jsonl",
        replay=work / "replay.jsonl",
        output=work / "drafter",
        minutes=minutes,
        chat=False,
    )
    for path, write in (
        (options.data, lambda path: write_logs(path, _NUM_LOGS, _SEED)),
        (options.replay, write_replay),
    ):
        if not path.exists():
            write(path)
    adapted = run_adapt(options)
    print_figures(adapted, options)
    unseen = work / "unseen.jsonl"
    write_logs(unseen, _HELD_OUT_LOGS, _HELD_OUT_SEED)
    tokenizer = Tokenizer.load(_TARGET)
    logs, shipped = (read_examples(path, tokenizer, "data") for path in (unseen, _SHIPPED))
    before, after = (measure(drafter, _TARGET, logs, shipped) for drafter in (_DRAFTER, options.candidate))
    verdict = judge(before, after, MIN_GAIN)
    return {
        "bar": {"least_gain": MIN_GAIN, "most_loss": MAX_LOSS, "minutes": minutes},
        "met": verdict.passed and adapted["passed"],
        "unseen": verdict.as_json(),
        "adapt": adapted,
    }


def main(
    minutes: Annotated[
        float, typer.Option("--minutes", help="Minutes for generating answers and training.")
    ] = 20.0,
    work: Annotated[Path, typer.Option("--work-dir", help="Work folder; the same one resumes.")] = Path(
        "out/adapt"
    ),
    output: Annotated[Path | None, typer.Option("-o", "--output", help="JSON file for the figures.")] = None,
) -> None:
    """Adapt the shipped drafter to JSON logs; exit code 1 if the bar is missed."""
    work.mkdir(parents=True, exist_ok=True)
    figures = {"provenance": provenance(), **run(minutes, work)}
    if output is not None:
        write_json(output, figures)
    rows = [
        [name, f"{found['before']:.2f}", f"{found['after']:.2f}", f"{found['gain']:+.1%}"]
        for name, found in figures["unseen"]["tokens_per_step"].items()
    ]
    print_table("tokens per step on unseen text", ["text", "before", "after", "gain"], rows)
    if not figures["met"]:
        raise typer.Exit(1)
