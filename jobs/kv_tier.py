"""The command `manta kv-tier clear`: deletes the files of K/V pages that servers and jobs keep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..cluster.errors import ConfigError
from ..cluster.pages.page_files import clear_tier, default_tier
from .common.command_groups import CommandGroup

kv_tier = CommandGroup(help="Prompts kept on disk (--kv-tier-path).")


@kv_tier.command()
def clear(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]",
            show_default=False,
            help="By default that of manta serve.",
        ),
    ] = None,
) -> None:
    """Delete all kept K/V pages of a folder, also while servers use it."""
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}. Give what --kv-tier-path names.", param="folder")
    folder = folder or default_tier()
    typer.echo(f"deleted {clear_tier(folder) / 2**20:,.1f} MiB in {folder}")
