"""How a killed server recovered, from its own log, in seconds after the kill.

    killed ── noticed ── began ── loaded ── ready ── a client is answered
              the dead   the new replica's:
              one's

Read by `serving_chaos.py`; the server must log in JSON (`log_format: json`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Return:
    """When a replica recovered; None if the log does not show it.

    Attributes:
        noticed_s: an engine was found to be dead.
        began_s: its replacement replica had a process.
        loaded_s: it had loaded its models.
        ready_s: it had answered its own first request.
    """

    noticed_s: float | None = None
    began_s: float | None = None
    loaded_s: float | None = None
    ready_s: float | None = None


def read_return(folder: Path, killed: float) -> Return:
    """Args: Ray's folder; the time of the kill, in seconds since the epoch."""
    lines = sorted(_lines(folder, killed), key=lambda line: line["at_s"])
    dead = next((line for line in lines if line.get("message", "").startswith("the engine is dead")), None)
    noticed_s = None if dead is None else round(dead["at_s"], 2)
    ready = next((line for line in lines if line.get("event") == "ready"), None)
    if ready is None:
        return Return(noticed_s)
    loaded_s = ready["at_s"] - ready["first_request_s"]
    return Return(
        noticed_s, round(loaded_s - ready["loading_s"], 2), round(loaded_s, 2), round(ready["at_s"], 2)
    )


def _lines(folder: Path, since: float) -> Iterator[Json]:
    """Lines of all our processes written since then; `at_s` seconds later."""
    for file in {path.resolve() for path in folder.rglob("worker-*.err")}:
        for text in file.read_text(errors="replace").splitlines():
            try:
                line = json.loads(text)
                at_s = datetime.fromisoformat(line["time"]).timestamp() - since
            except (ValueError, KeyError, TypeError):
                continue  # Ray's own
            if at_s >= 0.0:
                yield {**line, "at_s": at_s}
