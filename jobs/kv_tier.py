"""The command `manta kv-tier clear`: deletes the files of K/V pages that servers and jobs keep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..cluster.errors import ConfigError
from ..cluster.pages.page_files import clear_tier
from .common.command_groups import CommandGroup

kv_tier = CommandGroup(help="Prompts kept on disk (--kv-tier-path).")


@kv_tier.command()
def clear(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What --kv-tier-path names.")],
) -> None:
    """Delete all kept K/V pages of a folder, also while servers use it: they compute what is missing."""
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}. Give what --kv-tier-path names.", param="folder")
    typer.echo(f"deleted {clear_tier(folder) / 2**20:,.1f} MiB in {folder}")
