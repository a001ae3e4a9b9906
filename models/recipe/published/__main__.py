"""`python -m manta.models.recipe.published COMMAND`: the commands, in the order in which they are used."""

import sys
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from ....cluster.errors import MantaError
from ....jobs.common.tables import print_table
from . import sources
from .answers import TEMPERATURES, AnswerWriter, temperatures_of, write_training_data
from .prompts import Prompt, PromptMaker, follow_up, read_prompts, select_held_out, write_prompts

HERE = Path(__file__).parent
TRAIN, HELD_OUT = "train.jsonl.gz", "held_out.jsonl"
app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)

Model = Annotated[str, typer.Option("-m", "--model", help="Folder, GGUF file or hub id of the target.")]
WorkDir = Annotated[
    Path, typer.Option("--work-dir", help="Folder of downloads and answers; reuse it to resume.")
]
Prompts = Annotated[Path, typer.Option("--prompts", help=f"Folder of {TRAIN} and {HELD_OUT}.")]


@app.command()
def prompts(
    model: Model,
    output_dir: Annotated[Path, typer.Option("-o", "--output", help=f"Folder for {TRAIN} and {HELD_OUT}.")],
    work_dir: WorkDir = Path("out/published"),
) -> None:
    """Make the prompts. The target answers those that are followed by a second turn."""
    folder = work_dir / "sources"
    sources.download(folder)
    with AnswerWriter(model, work_dir / "openings", _report) as writer:
        held_out = _all_prompts(PromptMaker(folder, held_out=True), writer)
    write_prompts(select_held_out(held_out), output_dir / HELD_OUT)
    with AnswerWriter(model, work_dir / "answers", _report) as writer:  # they are training data, too
        train = _all_prompts(PromptMaker(folder, held_out=False), writer)
    Random(0).shuffle(train)
    write_prompts(train, output_dir / TRAIN)


@app.command()
def answers(model: Model, work_dir: WorkDir = Path("out/published"), prompts: Prompts = HERE) -> None:
    """Answer the prompts: held-out ones at both temperatures, then the others, half of them greedily."""
    with AnswerWriter(model, work_dir / "held_out", _report) as writer:
        held_out = read_prompts(prompts / HELD_OUT)
        writer.answer((prompt, temperature) for temperature in TEMPERATURES for prompt in held_out)
    with AnswerWriter(model, work_dir / "answers", _report) as writer:
        writer.answer((prompt, temperatures_of(prompt)[0]) for prompt in read_prompts(prompts / TRAIN))


@app.command()
def data(work_dir: WorkDir = Path("out/published"), prompts: Prompts = HERE) -> None:
    """Write WORK_DIR/train.jsonl for `manta drafter train --data`: all answers, cut where they loop."""
    ids = {prompt.id for prompt in read_prompts(prompts / TRAIN)}
    counts = write_training_data(work_dir / "answers", ids, work_dir / "train.jsonl")
    rows = [[name, f"{n}", f"{looping / n:.0%}", f"{kept}"] for name, (n, looping, kept) in counts.items()]
    print_table("Training data", ["category", "answers", "loop", "tokens"], rows)


def _all_prompts(maker: PromptMaker, writer: AnswerWriter) -> list[Prompt]:
    made = maker.prompts()
    planned = maker.open_follow_ups(made)
    openings = [each.opening for each in planned]
    writer.answer((prompt, temperatures_of(prompt)[0]) for prompt in openings)
    texts = writer.texts(openings)
    return made + [follow_up(each, texts[each.opening.id]) for each in planned if each.opening.id in texts]


def _report(line: str) -> None:
    print(f"{datetime.now():%H:%M:%S} {line}", flush=True)


if __name__ == "__main__":
    try:
        app()
    except MantaError as error:
        sys.exit(f"error: {error.message}")
