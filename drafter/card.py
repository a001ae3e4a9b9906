"""Reads acceptance lengths from a drafter's model card (README.md).

The table is the one that `models/recipe` and `manta drafter eval` write: columns "length, ..", a row
"overall".
"""

from __future__ import annotations

import re
from pathlib import Path

_NUMBER = re.compile(r"\d+(\.\d+)?")


def card_lengths(folder: Path) -> list[float]:
    """Return the mean acceptance lengths of the card's "overall" row, with bonus token, by temperature."""
    try:
        card = (folder / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    columns: list[str] = []
    for line in card.splitlines():
        cells = [cell.strip().lower() for cell in line.strip().strip("|").split("|")]
        if len(cells) > 1 and any("length" in cell for cell in cells):
            columns = cells
        elif columns and cells[0] == "overall":
            pairs = zip(columns, cells, strict=False)
            lengths = [float(v) for name, v in pairs if "length" in name and _NUMBER.fullmatch(v)]
            return [length for length in lengths if length >= 1.0]
    return []


def min_card_length(folder: Path) -> float | None:
    """Return the smallest of `card_lengths`, which plans use; None if there is none."""
    return min(card_lengths(folder), default=None)
