"""Lists the drafters in folders and in the hub's cache. Called by `manta drafter list`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ...cluster.errors import CheckpointError
from ...drafter.card import least_card_length
from ...drafter.dflash.config import DrafterConfig
from ..common.tables import NO_FIGURE, decimals, print_table
from .common.drafter_files import AnyConfig, read_config


def find_drafters(folders: Sequence[Path] | None) -> dict[str, AnyConfig]:
    """Return drafter configurations by folder or hub id; other checkpoints are skipped.

    None searches models/ and the hub's cache, else each folder and its subfolders.
    """
    here = [Path("models")] if folders is None else folders
    places = {str(each): each for folder in here for each in (folder, *_subfolders(folder))}
    if folders is None:
        places |= dict(_cached())
    found: dict[str, AnyConfig] = {}
    for name, folder in places.items():
        try:
            found[name] = read_config(folder)
        except CheckpointError:  # a target, or no checkpoint
            continue
    return found


def print_drafters(drafters: dict[str, AnyConfig]) -> None:
    rows = [
        [
            name,
            config.layout,
            _kind(config),
            str(config.num_layers),
            str(config.block_size) if isinstance(config, DrafterConfig) else NO_FIGURE,
            ", ".join(map(str, config.target_layer_ids)) or NO_FIGURE,
            decimals(least_card_length(Path(config.file).parent)),
        ]
        for name, config in drafters.items()
    ]
    columns = ["drafter", "format", "kind", "layers", "block", "taps", "length"]
    print_table("Drafters", columns, rows, num_left=3)


def _kind(config: AnyConfig) -> str:
    if isinstance(config, DrafterConfig):
        return "DFlash2" if config.convolutions or config.selector else "DFlash"
    return "EAGLE-3"


def _subfolders(folder: Path) -> list[Path]:
    return sorted(each for each in folder.glob("*") if each.is_dir())


def _cached() -> Iterator[tuple[str, Path]]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id)
    except CacheNotFound:
        return
    for repo in repos:
        if repo.repo_type == "model" and repo.revisions:
            newest = max(repo.revisions, key=lambda revision: revision.last_modified)
            yield repo.repo_id, newest.snapshot_path
