"""Reads the metadata of a checkpoint's card, the front matter of README.md, as the hub defines it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def card_metadata(folder: Path) -> Mapping[str, Any]:  # Any: YAML values
    """Return the metadata, empty without a card or with one that cannot be read."""
    from huggingface_hub import metadata_load

    try:
        return metadata_load(folder / "README.md") or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}


def sample_prompt(folder: Path) -> str | None:
    """Return the text of the first example that the card gives (`widget`), None if it has none."""
    examples = card_metadata(folder).get("widget")
    first = examples[0] if isinstance(examples, list) and examples else None
    text = first.get("text") if isinstance(first, Mapping) else None
    return text.strip() or None if isinstance(text, str) else None
