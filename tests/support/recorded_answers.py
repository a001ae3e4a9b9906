"""Recorded answers of every chat format, with the parts that a model's publisher reads in them."""

from __future__ import annotations

import json
from typing import Any

from manta.actors.chat.chat_formats import CALLS, REASONING
from manta.actors.chat.stream_parser import Splitter

from support.paths import DATA

_FOLDER = DATA / "chat"
TOOLS: dict[str, Any] = json.loads((_FOLDER / "tools.json").read_text())
FORMATS: dict[str, Any] = {
    path.stem: json.loads(path.read_text()) for path in sorted(_FOLDER.glob("*.json")) if path.stem != "tools"
}


def splitter(name: str, *, opened: bool = False, parallel: bool = True) -> Splitter:
    """Return a parser of answers in this format."""
    thinking, calls = FORMATS[name]["thinking"], FORMATS[name]["calls"]
    return Splitter(
        None if thinking is None else REASONING[thinking],
        CALLS[calls],
        schemas=TOOLS,
        opened=opened,
        id_seed="x",
        parallel=parallel,
    )
