"""`python -m manta.models.recipe.published COMMAND`: the commands, in the order in which they are used."""

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from ....actors.checkpoints.checkpoint_paths import shipped
from ....cluster.errors import MantaError
from ....jobs.common.options import SHIPPED_CHATS
from ....jobs.common.tables import print_table
from . import sources
from .answers import (
    TEMPERATURES,
    AnswerWriter,
    read_answers,
    temperature_of,
    write_training_data,
)
from .prompts import (
    FollowUp,
    Prompt,
    PromptMaker,
    follow_up,
    read_prompts,
    select_held_out,
    write_prompts,
)

WORK_DIR = Path("out/published")
HELD_OUT_FILE = shipped(SHIPPED_CHATS)
PROMPTS_PER_ROUND = 512
app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)

Model = Annotated[str, typer.Option("-m", "--model", help="Folder, GGUF file or hub id of the target.")]
WorkDir = Annotated[
    Path, typer.Option("--work-dir", help="Folder of downloads and answers; reuse it to resume.")
]


@app.command()
def held_out(
    model: Model,
    work_dir: WorkDir = WORK_DIR,
    file: Annotated[
        Path, typer.Option("--prompts", help="File of the prompts; made if missing.")
    ] = HELD_OUT_FILE,
) -> None:
    """Answer the held-out prompts at both temperatures."""
    if not file.exists():
        maker = _maker(work_dir, held_out=True)
        prompts = maker.prompts()
        planned = maker.plan_follow_ups(prompts)
        with AnswerWriter(model, work_dir / "openings", _report) as writer:
            writer.answer((each.opening, temperature_of(each.opening)) for each in planned)
            prompts += _follow_ups(planned, writer)
        write_prompts(select_held_out(prompts), file)
    with AnswerWriter(model, work_dir / "held_out", _report) as writer:
        prompts = read_prompts(file)
        writer.answer((prompt, temperature) for temperature in TEMPERATURES for prompt in prompts)


@app.command()
def train(model: Model, work_dir: WorkDir = WORK_DIR) -> None:
    """Make the training prompts, WORK_DIR/prompts.jsonl.gz, and answer them, half of them greedily.

    Categories are mixed from the first answer on, so that the answers can be used before all are there.
    """
    maker = _maker(work_dir, held_out=False)
    first_turns = maker.prompts()
    planned = {each.opening.id: each for each in maker.plan_follow_ups(first_turns)}
    Random(0).shuffle(first_turns)
    prompts, later = [*first_turns], list[Prompt]()
    with AnswerWriter(model, work_dir / "answers", _report) as writer:
        for at in range(0, len(first_turns) + PROMPTS_PER_ROUND, PROMPTS_PER_ROUND):
            write_prompts(prompts, work_dir / "prompts.jsonl.gz")
            part = first_turns[at : at + PROMPTS_PER_ROUND]
            writer.answer((prompt, temperature_of(prompt)) for prompt in (*later, *part))
            later = _follow_ups([planned[prompt.id] for prompt in part if prompt.id in planned], writer)
            prompts += later
            _report(f"{min(at + len(part), len(first_turns))} of {len(first_turns)} first turns are answered")


@app.command()
def data(work_dir: WorkDir = WORK_DIR) -> None:
    """Write WORK_DIR/train.jsonl for `manta drafter train --data` and held_out.jsonl, cut at loops."""
    for folder, name in (("answers", "train.jsonl"), ("held_out", "held_out.jsonl")):
        counts = write_training_data(read_answers(work_dir / folder), work_dir / name)
        rows = [[key, f"{n}", f"{looping / n:.0%}", f"{kept}"] for key, (n, looping, kept) in counts.items()]
        print_table(name, ["category and temperature", "answers", "loop", "tokens"], rows)


def _maker(work_dir: Path, *, held_out: bool) -> PromptMaker:
    sources.download(work_dir / "sources")
    return PromptMaker(sources.read_texts(work_dir / "sources"), held_out=held_out)


def _follow_ups(planned: Sequence[FollowUp], writer: AnswerWriter) -> list[Prompt]:
    texts = writer.texts([each.opening for each in planned])
    return [follow_up(each, texts[each.opening.id]) for each in planned if each.opening.id in texts]


def _report(line: str) -> None:
    print(f"{datetime.now():%H:%M:%S} {line}", flush=True)


if __name__ == "__main__":
    try:
        app()
    except MantaError as error:
        sys.exit(f"error: {error.message}")
