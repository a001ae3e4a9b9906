"""`python -m manta.models.recipe.published COMMAND`: the commands, in the order in which they are used."""

import sys
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from ....cluster.errors import MantaError
from ....jobs.common.tables import print_table
from . import sources
from .answers import TEMPERATURES, AnswerWriter, temperature_of, write_training_data
from .prompts import PromptMaker, follow_up, read_prompts, select_held_out, write_prompts

HERE = Path(__file__).parent
WORK_DIR = Path("out/published")
app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)


class Side(StrEnum):
    HELD_OUT = "held_out"
    TRAIN = "train"

    def file(self, folder: Path) -> Path:
        """Return the path of the side's prompts."""
        return folder / ("train.jsonl.gz" if self is Side.TRAIN else "held_out.jsonl")


Model = Annotated[str, typer.Option("-m", "--model", help="Folder, GGUF file or hub id of the target.")]
WorkDir = Annotated[
    Path, typer.Option("--work-dir", help="Folder of downloads and answers; reuse it to resume.")
]
Prompts = Annotated[Path, typer.Option("--prompts", help="Folder of train.jsonl.gz and held_out.jsonl.")]


@app.command()
def prompts(side: Side, model: Model, work_dir: WorkDir = WORK_DIR, prompts: Prompts = HERE) -> None:
    """Make the prompts. The target answers those that a second turn follows, or that a prompt quotes."""
    sources.download(work_dir / "sources")
    maker = PromptMaker(sources.read_texts(work_dir / "sources"), held_out=side is Side.HELD_OUT)
    made = maker.prompts()
    planned = maker.open_follow_ups(made)
    openings = [each.opening for each in planned]
    # A training prompt's answer is training data, whatever follows; held-out ones are answered again.
    with AnswerWriter(model, work_dir / ("answers" if side is Side.TRAIN else "openings"), _report) as writer:
        writer.answer((prompt, temperature_of(prompt)) for prompt in openings)
        texts = writer.texts(openings)
    made += [follow_up(each, texts[each.opening.id]) for each in planned if each.opening.id in texts]
    if side is Side.HELD_OUT:
        made = select_held_out(made)
    else:
        Random(0).shuffle(made)
    write_prompts(made, side.file(prompts))
    _report(f"{len(made)} prompts in {side.file(prompts)}")


@app.command()
def answers(side: Side, model: Model, work_dir: WorkDir = WORK_DIR, prompts: Prompts = HERE) -> None:
    """Answer the prompts: half of the training prompts greedily, held-out ones at both temperatures."""
    made = read_prompts(side.file(prompts))
    if side is Side.TRAIN:
        requests = [(prompt, temperature_of(prompt)) for prompt in made]
    else:
        requests = [(prompt, temperature) for temperature in TEMPERATURES for prompt in made]
    folder = work_dir / ("answers" if side is Side.TRAIN else "held_out")
    with AnswerWriter(model, folder, _report) as writer:
        writer.answer(requests)


@app.command()
def data(work_dir: WorkDir = WORK_DIR, prompts: Prompts = HERE) -> None:
    """Write WORK_DIR/train.jsonl for `manta drafter train --data`: all answers, cut where they loop."""
    ids = {prompt.id for prompt in read_prompts(Side.TRAIN.file(prompts))}
    counts = write_training_data(work_dir / "answers", ids, work_dir / "train.jsonl")
    rows = [[name, f"{n}", f"{looping / n:.0%}", f"{kept}"] for name, (n, looping, kept) in counts.items()]
    print_table("Training data", ["category", "answers", "loop", "tokens"], rows)


def _report(line: str) -> None:
    print(f"{datetime.now():%H:%M:%S} {line}", flush=True)


if __name__ == "__main__":
    try:
        app()
    except MantaError as error:
        sys.exit(f"error: {error.message}")
