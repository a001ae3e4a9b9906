"""Where the log lines of our processes go, and how they look: text, or an object of JSON a line.

A replica or a gateway sets this up for itself and hands it on to the processes that it starts (`in_force`),
each of which adds what it is. In JSON every line has `time`, `level`, `logger` and whose it is (`process`,
`replica`, `engine`, `rank`); `request_id` where it is about a request. Knows nothing of what is logged.

Whatever a message or an exception holds, it cannot forge a line or reach the terminal: what is not printable
is escaped, lines behind a record's first are indented, and a record is cut at MAX_RECORD characters.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

from ...cluster.errors import clipped, printable

MAX_RECORD = 16_000  # characters of a message, and of a traceback

LogFormat = Literal["text", "json"]

_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
_EXTRAS = ("request_id", "request_ids")  # of a line, given with `extra`


@dataclass(frozen=True, slots=True)
class LogSettings:
    """How a process logs; `origin` stands in each line of JSON."""

    format: LogFormat = "text"
    origin: Mapping[str, str | int] = field(default_factory=dict)

    def of(self, **origin: str | int) -> LogSettings:
        """The same for a process that is this, too."""
        return replace(self, origin={**self.origin, **origin})


class Event:
    """A line that is made of fields: JSON in a text log, fields of the line's own in a JSON log."""

    def __init__(self, name: str, **fields: Any) -> None:  # Any: JSON
        self.name = name
        self.fields = fields

    def __str__(self) -> str:
        return json.dumps(self.fields, ensure_ascii=False)


class JsonFormatter(logging.Formatter):
    """One object a line."""

    def __init__(self, origin: Mapping[str, str | int]) -> None:
        super().__init__()
        self._origin = origin

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {  # Any: JSON
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            **self._origin,
        }
        if (request_id := _request_id.get()) is not None:
            line["request_id"] = request_id
        line |= {name: vars(record)[name] for name in _EXTRAS if name in vars(record)}
        if isinstance(record.msg, Event):
            line |= {"event": record.msg.name, **record.msg.fields}
        else:
            line["message"] = clipped(record.getMessage(), MAX_RECORD)
        if record.exc_info:
            line["error"] = _ends_of(self.formatException(record.exc_info))
        return printable(json.dumps(line, ensure_ascii=False, default=str))


class TextFormatter(logging.Formatter):
    """Time, level, logger and message; lines behind the first are indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        first, *others = _ends_of(super().format(record)).split("\n")
        return "\n".join([printable(first), *(f"    {printable(each)}" for each in others)])


def _ends_of(text: str) -> str:
    """The text; of a long one its beginning and its end, which names the exception."""
    if len(text) <= MAX_RECORD:
        return text
    half = MAX_RECORD // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters are left out)\n{text[-half:]}"


class _Handler(logging.StreamHandler[Any]):
    """The one of our processes; remembers what it was set up with."""

    def __init__(self, settings: LogSettings) -> None:
        super().__init__(sys.__stderr__)
        self.settings = settings
        self.setFormatter(JsonFormatter(settings.origin) if settings.format == "json" else TextFormatter())


def log_to_stderr(settings: LogSettings) -> None:
    """Ray keeps a process's stderr, and shows it to the driver; `sys.stderr` may be Serve's, who keeps it."""
    ours = logging.getLogger("manta")
    ours.handlers = [_Handler(settings)]
    ours.setLevel(logging.INFO)
    ours.propagate = False


def in_force() -> LogSettings | None:
    """How this process logs, for those that it starts; None where it was not set up here."""
    handlers = logging.getLogger("manta").handlers
    return next((handler.settings for handler in handlers if isinstance(handler, _Handler)), None)


def about_request(request_id: str) -> None:
    """Lines of this task, and of those that it starts, are about this request from now on."""
    _request_id.set(request_id)
