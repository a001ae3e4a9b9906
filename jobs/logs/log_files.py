"""Finds the lines of log files about a request, by the client's request id or the response's id.

A line is about a request if one of its fields is one of the request's ids. The summary line logged at the end
of a request links its ids. Lines that are not JSON are skipped; text before an object, such as Ray's
"(Replica pid=7)", is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...cluster.errors import DatasetError, NotFoundError, shown

Json = dict[str, Any]  # Any: JSON
_NAMES = ("request_id", "id")
_PLACE = ("process", "replica", "engine", "rank")
_SHOWN = ("time", "level", "logger", *_PLACE, "message", "error")  # shown separately from other fields


class Line(NamedTuple):
    fields: Json

    @property
    def text(self) -> str:
        where = " ".join(f"{name}={self.fields[name]}" for name in _PLACE if name in self.fields)
        rest = [f"{name}={_text_of(value)}" for name, value in self.fields.items() if name not in _SHOWN]
        what = self.fields.get("message") or " ".join(rest)
        head = f"{self.fields.get('time', '-')} {self.fields.get('level', '-')} {where}".rstrip()
        return f"{head}: {what}" + (f"\n{self.fields['error']}" if "error" in self.fields else "")


def lines_about(request: str, files: Sequence[Path]) -> list[Line]:
    """Return the lines about a request, ordered by time; NotFoundError if there are none."""
    names = {request}
    for fields in _objects(files):
        ids = {fields[name] for name in _NAMES if isinstance(fields.get(name), str)}
        names |= ids if names & ids else set()
    found = [Line(fields) for fields in _objects(files) if _is_about(fields, names)]
    if not found:
        raise NotFoundError(
            f"{', '.join(map(str, files))}: no line is about a request {shown(request)}. Give the "
            "id of the response or the X-Request-Id, and logs of a server with --log-format json.",
            param="id",
        )
    return sorted(found, key=lambda line: str(line.fields.get("time", "")))


def _is_about(fields: Json, names: set[str]) -> bool:
    ids = [fields.get("request_id"), fields.get("id"), *(fields.get("request_ids") or ())]
    return any(name in names or _is_part(name, names) for name in ids if isinstance(name, str))


def _is_part(name: str, names: set[str]) -> bool:
    """Return whether the name is that of one of several completions of a response, or of a retry."""
    return any(name.startswith((f"{whole}-", f"{whole}.")) for whole in names)


def _objects(files: Sequence[Path]) -> Iterator[Json]:
    for path in files:
        try:
            with path.open("rb") as lines:
                for line in lines:
                    if (fields := _object(line)) is not None:
                        yield fields
        except OSError as error:
            raise DatasetError(f"{path} cannot be read: {error.strerror}.", param="file") from None


def _object(line: bytes) -> Json | None:
    at = line.find(b"{")
    try:
        found = json.loads(line[at:]) if at >= 0 else None
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def _text_of(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
