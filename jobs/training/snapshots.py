"""Snapshots of a run that survive a kill at any moment: written beside, synced, then renamed."""

import os
from pathlib import Path
from typing import Any

import torch

# Any: a snapshot is torch.save's own tree of tensors, numbers and containers.
Snapshot = dict[str, Any]


def save_snapshot(path: Path, snapshot: Snapshot) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".partial")
    with beside.open("wb") as file:
        torch.save(snapshot, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def load_snapshot(path: Path) -> Snapshot | None:
    """None when the run has not saved anything yet."""
    if not path.exists():
        return None
    return torch.load(path, map_location="cpu", weights_only=True)
