"""`python -m manta.models.recipe -o DIR`: the command."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ...cluster.errors import MantaError
from .pair import train_pair


def main(
    output_dir: Annotated[
        Path, typer.Option("-o", "--output", help="Output folder: target/, drafter/, prompts.jsonl.")
    ],
    work_dir: Annotated[
        Path, typer.Option("--work-dir", help="Folder of snapshots and data; reuse it to resume.")
    ] = Path("out/train-pair"),
    hours: Annotated[float, typer.Option("--hours", help="Time for all stages.")] = 3.25,
    num_threads: Annotated[
        int | None, typer.Option("--num-threads", help="Threads of torch on a CPU.")
    ] = None,
) -> None:
    """Train the shipped pair from the sources of Python's standard library. A killed run can be resumed."""
    train_pair(output_dir, work_dir, hours, num_threads)


if __name__ == "__main__":
    try:
        typer.run(main)
    except MantaError as error:
        sys.exit(f"error: {error.message}")
