"""Log destination and format of our processes: text, or one JSON object per line.

A replica or a gateway passes its settings on to the processes that it starts (`in_force`), each of which adds
its own origin. In JSON every line has `time`, `level`, `logger` and its origin (`process`, `replica`,
`engine`, `rank`), and `request_id` if it concerns a request.

A message or an exception cannot forge a line or send control sequences to the terminal: unprintable
characters are escaped, continuation lines are indented, and a record is truncated at MAX_RECORD characters.
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

from ...cluster.errors import printable, truncate

MAX_RECORD = 16_000  # characters of a message, and of a traceback

LogFormat = Literal["text", "json"]

# The request that the log lines of this task and its subtasks concern.
current_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
_EXTRAS = ("request_id", "request_ids")  # fields of a line, given with `extra`


@dataclass(frozen=True, slots=True)
class LogSettings:
    """`origin` is included in each line of JSON."""

    format: LogFormat = "text"
    origin: Mapping[str, str | int] = field(default_factory=dict)

    def of(self, **origin: str | int) -> LogSettings:
        return replace(self, origin={**self.origin, **origin})


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """A log line made of fields: JSON in a text log, fields of the line itself in a JSON log."""

    name: str
    fields: Mapping[str, Any]  # Any: JSON

    def __str__(self) -> str:
        return json.dumps(self.fields, ensure_ascii=False)


class JsonFormatter(logging.Formatter):
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
        if (request_id := current_request_id.get()) is not None:
            line["request_id"] = request_id
        line |= {name: vars(record)[name] for name in _EXTRAS if name in vars(record)}
        if isinstance(record.msg, Event):
            line |= {"event": record.msg.name, **record.msg.fields}
        else:
            line["message"] = truncate(record.getMessage(), MAX_RECORD)
        if record.exc_info:
            line["error"] = _ends_of(self.formatException(record.exc_info))
        return printable(json.dumps(line, ensure_ascii=False, default=str))


class TextFormatter(logging.Formatter):
    """Continuation lines are indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        first, *others = _ends_of(super().format(record)).split("\n")
        return "\n".join([printable(first), *(f"    {printable(each)}" for each in others)])


def _ends_of(text: str) -> str:
    """Return the beginning of a long text and its end, which names the exception."""
    if len(text) <= MAX_RECORD:
        return text
    half = MAX_RECORD // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters are left out)\n{text[-half:]}"


class _Handler(logging.StreamHandler[Any]):
    def __init__(self, settings: LogSettings) -> None:
        super().__init__(sys.__stderr__)
        self.settings = settings
        self.setFormatter(JsonFormatter(settings.origin) if settings.format == "json" else TextFormatter())


def log_to_stderr(settings: LogSettings) -> None:
    """Log to the standard error that Ray captures; Serve may replace `sys.stderr`."""
    ours = logging.getLogger("manta")
    ours.handlers = [_Handler(settings)]
    ours.setLevel(logging.INFO)
    ours.propagate = False


def in_force() -> LogSettings | None:
    """Return this process's settings, for processes it starts; None if not set up here."""
    handlers = logging.getLogger("manta").handlers
    return next((handler.settings for handler in handlers if isinstance(handler, _Handler)), None)
