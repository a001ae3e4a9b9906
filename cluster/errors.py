"""The error tree: everything a user can get wrong, and what to do about it.

    MantaError                    status 500, not retryable
    ├── RequestError              400  a request field is wrong; `param` names it
    │   ├── NotAllowedError       403  the request's key may not do this
    │   ├── QuotaError            413  it would store more than its key may; delete something first
    │   ├── NotFoundError         404  what the request names does not exist here: a file, a batch
    │   │   └── ModelNotFoundError     ...the model is not served here
    │   └── UnprocessableError    422  valid, but can never be served (needs more pages than exist)
    │       └── PoisonousRequestError  ...replicas died each time they served it
    ├── ConfigError               500  a setting is wrong; raised before anything is loaded
    │   ├── InUseError            500  another job writes the output
    │   ├── CheckpointError       500  a model folder is missing, unreadable, corrupt or does not fit
    │   └── PlacementError        500  the cluster cannot hold the requested topology
    ├── OutputProcessingError     500  processing the output of one request failed; others are not affected
    │   └── NotANumberError            ...the model computed NaN for it; the message is for clients, too
    ├── DatasetError              400  an input file of a batch job cannot be read or understood
    ├── OutputError               500  results of a batch job cannot be written
    ├── NotOfferedError           501  a part of the API that this server was started without
    ├── OverloadedError           503  a queue is full; retry later
    │   ├── TooManyRequestsError  503  the limit of concurrent requests is reached; retry later
    │   ├── RateLimitError        429  the API key's limit of concurrent requests is reached; retry later
    │   └── NoReplicaError        503  no replica of the model is available; retry later
    ├── DrainingError             503  the replica is stopping; retry elsewhere
    ├── SlowReaderError           408  the client did not read its answer; a retry that reads may succeed
    ├── EngineDeadError           503  a worker died under the request; retry
    │   ├── EngineGoneError            ...before the request had reached it
    │   └── EngineStalledError    503  ...or does not end its step
    ├── StorageError              503  the storage of files and batches is unavailable; fix it, or retry
    └── UnreachableError          503  a server that a command calls does not answer; start it, or retry

A message names the field, the value and the remedy; for an unknown name that is the nearest known one
(`did_you_mean`). Mistakes that only our own code can make are `assert`s.

Foreign text enters a message through one of three functions: `brief` (a value, as JSON), `brief_name` (a
name, without quotes) and `brief_url` (a path or URL, without its secrets). All of them limit the length and
escape what a terminal or log file would interpret. `MantaError` limits and escapes its whole message, so that
no message of the tree is long or breaks a line of a log.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import re
from collections.abc import Iterable, Sized
from typing import ClassVar

# Exceptions that are not caught at a request's edge. All others are that request's failure, including those
# that are not `Exception`: panics of libraries written in Rust (`pyo3_runtime.PanicException`).
ENDINGS = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
MAX_MESSAGE = 4000  # characters of an error's message; lists of known names are the longest
MAX_NAME = 256  # characters of a name, or of a field's path

_NOT_ASCII = re.compile(r"[^ -~]")  # or a control character
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*("|$)', re.S)
# key:secret@ before a bucket or host. A secret that is not percent-encoded may contain slashes and @.
_SECRET = re.compile(r"^([^/@:]*):.*@", re.S)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/{1,2}")  # pathlib reduces two slashes to one


class MantaError(Exception):
    """Base of the tree. `param` is the dotted path of the offending field, if there is one."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "InternalServerError"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        shown = None if param is None else brief_name(param)
        if param and shown and shown != param:  # so that who hides a client's name finds it in the message
            message = message.replace(param, shown)
        message = truncate("\n".join(map(printable, truncate(message, MAX_MESSAGE).split("\n"))), MAX_MESSAGE)
        super().__init__(message)
        self.message = message
        self.param = shown

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle keyword-only fields, as errors cross process boundaries."""
        return _rebuild, (type(self), self.message, self.param)


# Encodes any value; what is not JSON as its text.
_JSON = json.JSONEncoder(ensure_ascii=False, default=str)


def _rebuild(cls: type[MantaError], message: str, param: str | None) -> MantaError:
    return cls(message, param=param)


class RequestError(MantaError):
    status = 400
    kind = "BadRequestError"


class NotAllowedError(RequestError):
    status = 403
    kind = "AuthenticationError"


class QuotaError(RequestError):
    status = 413
    kind = "RequestTooLargeError"


class NotFoundError(RequestError):
    status = 404
    kind = "NotFoundError"


class ModelNotFoundError(NotFoundError):
    """The model named in the request is not served here."""


class UnprocessableError(RequestError):
    status = 422
    kind = "UnprocessableEntityError"


class PoisonousRequestError(UnprocessableError):
    """Replicas died each time they served the request; it is refused for a while."""


class ConfigError(MantaError):
    """A setting is wrong; raised before anything is loaded."""


class InUseError(ConfigError):
    """Another job writes the output."""


class CheckpointError(ConfigError):
    """A model folder is missing, unreadable, corrupt, or does not fit its partner."""


class PlacementError(ConfigError):
    """The cluster cannot hold the requested topology."""


class OutputProcessingError(MantaError):
    """Processing a request's output failed; the cause has been logged with the request's id."""


class NotANumberError(OutputProcessingError):
    """The target computed logits for a request that are NaN or infinite."""


class DatasetError(MantaError):
    status = 400
    kind = "BadRequestError"


class OutputError(MantaError):
    """The results of a batch job cannot be written."""


class NotOfferedError(MantaError):
    status = 501
    kind = "NotImplementedError"


class OverloadedError(MantaError):
    status = 503
    kind = "ServiceUnavailableError"
    retryable = True


class TooManyRequestsError(OverloadedError):
    """The server's limit of concurrent requests is reached."""


class RateLimitError(OverloadedError):
    status = 429
    kind = "RateLimitError"


class NoReplicaError(OverloadedError):
    """No replica of the model can answer."""


class DrainingError(OverloadedError):
    """The replica is stopping."""


class EngineDeadError(MantaError):
    status = 503
    kind = "ServiceUnavailableError"
    retryable = True


class EngineGoneError(EngineDeadError):
    """A worker died before the request reached it."""


class EngineStalledError(EngineDeadError):
    """A step does not end: a worker is stopped, or its device hangs."""


class SlowReaderError(MantaError):
    status = 408
    kind = "RequestTimeoutError"


class StorageError(MantaError):
    status = 503
    kind = "ServiceUnavailableError"
    retryable = True


class UnreachableError(MantaError):
    status = 503
    kind = "ServiceUnavailableError"
    retryable = True


def brief(value: object, maximum: int = 100) -> str:
    """Return a foreign value for a message: JSON in one line, cut to `maximum` characters."""
    if isinstance(value, str):
        text, size = json.dumps(value[: maximum + 1], ensure_ascii=False), f"{len(value)} characters"
        is_whole = len(value) <= maximum
    else:
        text, size, is_whole = "", "more", True
        try:
            size = f"{len(value)} elements" if isinstance(value, Sized) else size
            for piece in _JSON.iterencode(value):
                text += piece
                if len(text) > maximum:
                    is_whole = False
                    break
        except (TypeError, ValueError, RecursionError):  # keys that JSON has not, a circle, an array of one
            text = repr(value)
    text = printable(text[: maximum + 1])
    return text if is_whole and len(text) <= maximum else f"{text[:maximum]}... ({size})"


def brief_name(name: object, maximum: int = MAX_NAME) -> str:
    """Return a foreign name for a message, without quotes: a field's path, a file's name."""
    return truncate(printable(truncate(str(name), maximum)), maximum)


def first_line(error: BaseException) -> str:
    """Return the first line of another program's error, or its class if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def brief_url(where: object) -> str:
    """Return a path or URL for a message: without password, query and fragment, which may be secret."""
    text = str(where)
    scheme = _SCHEME.match(text)
    if scheme is None or scheme[1].lower() == "file":
        return brief_name(text, MAX_MESSAGE // 4)
    address = re.split(r"[?#]", _SECRET.sub(r"\1@", text[len(scheme[0]) :]), maxsplit=1)[0]
    return brief_name(f"{scheme[1]}://{address}", MAX_MESSAGE // 4)


def redact_values(message: str) -> str:
    """Return a message of this tree for a log, without the quoted parts, where `brief` puts values."""
    return _QUOTED.sub('"..."', message)


def printable(text: str) -> str:
    """Return the text in one line, with JSON's escapes for what is not printable.

    Escaped are control characters (line breaks, terminal sequences), characters that change the direction of
    text, separators other than the space, and lone surrogates.
    """
    return text if text.isprintable() else _NOT_ASCII.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    char = found[0]
    if char.isprintable():
        return char
    return "\\u007f" if char == "\x7f" else json.dumps(char)[1:-1]


def truncate(text: str, maximum: int) -> str:
    return text if len(text) <= maximum else f"{text[: maximum - 3]}..."


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "", fallback: str | None = None) -> str:
    """Return the remedy for an unknown name: the nearest known one, else all (or `fallback`, if too many)."""
    names, name = list(known), name[:MAX_NAME]
    if near := difflib.get_close_matches(name, names, n=1):
        return f"Did you mean {prefix}{near[0]}?"
    return fallback if fallback is not None else f"Known: {', '.join(names)}."
