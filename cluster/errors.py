"""The error tree: everything a user can get wrong, and what to do about it.

    MantaError                    status 500, not retryable
    ├── RequestError              400  a request field is wrong; `param` names it
    │   ├── NotFoundError         404  what the request names is not here: a file, a batch
    │   │   └── ModelNotFoundError     ...the model is not served here
    │   └── UnprocessableError    422  valid, but can never be served (needs more pages than exist)
    ├── ConfigError               500  a setting is wrong; raised before anything is loaded
    │   ├── InUseError            500  another job writes the output
    │   ├── CheckpointError       500  a model folder is missing, unreadable, corrupt or does not fit
    │   └── PlacementError        500  the cluster cannot hold the topology that was asked for
    ├── DatasetError              400  an input file of a batch job cannot be read or understood
    ├── OutputError               500  results of a batch job cannot be written
    ├── NotOfferedError           501  a part of the API that this server was started without
    ├── OverloadedError           503  a queue is full; retry later
    │   ├── TooManyRequestsError  503  as many requests are under way as may be; retry later
    │   ├── RateLimitError        429  as many requests of this API key are under way as may be; retry later
    │   └── NoReplicaError        503  no replica of the model is there; retry later
    ├── DrainingError             503  the replica is stopping; retry elsewhere
    ├── SlowReaderError           408  the client did not read its answer; a retry that reads may go well
    ├── EngineDeadError           503  a worker died under the request; retry
    │   └── EngineStalledError    503  ...or does not end its step
    ├── StorageError              503  where files and batches are kept cannot be used now; mend it, or retry
    └── UnreachableError          503  a server that a command asks does not answer; start it, or retry

A message names the field, the value and the remedy; for an unknown name that is the nearest known one
(`did_you_mean`). What only we can get wrong is an `assert`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import ClassVar


class MantaError(Exception):
    """Base of the tree.

    Args:
        message: one or two sentences: what is wrong, and what would be right.
        param: dotted path of the offending field, if there is one.
    """

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "InternalServerError"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        """Errors cross process borders; keyword-only fields need help to be pickled."""
        return _rebuild, (type(self), self.message, self.param)


def _rebuild(cls: type[MantaError], message: str, param: str | None) -> MantaError:
    return cls(message, param=param)


class RequestError(MantaError):
    """A field of a request is wrong."""

    status = 400
    kind = "BadRequestError"


class NotFoundError(RequestError):
    """What the request names is not here."""

    status = 404
    kind = "NotFoundError"


class ModelNotFoundError(NotFoundError):
    """The model named in the request is not served here."""


class UnprocessableError(RequestError):
    """The request is valid but can never be served by this engine."""

    status = 422
    kind = "UnprocessableEntityError"


class ConfigError(MantaError):
    """A setting is wrong; raised before anything is loaded."""


class InUseError(ConfigError):
    """Another job writes the output."""


class CheckpointError(ConfigError):
    """A model folder is missing, unreadable, corrupt, or does not fit its partner."""


class PlacementError(ConfigError):
    """The cluster cannot hold the topology that was asked for."""


class DatasetError(MantaError):
    """The input of a batch job cannot be read or understood."""

    status = 400
    kind = "BadRequestError"


class OutputError(MantaError):
    """The results of a batch job cannot be written."""


class NotOfferedError(MantaError):
    """This server was started without what the request needs."""

    status = 501
    kind = "NotImplementedError"


class OverloadedError(MantaError):
    """A queue is full."""

    status = 503
    kind = "ServiceUnavailableError"
    retryable = True


class TooManyRequestsError(OverloadedError):
    """As many requests are under way as may be."""


class RateLimitError(OverloadedError):
    """As many requests of one API key are under way as may be."""

    status = 429
    kind = "RateLimitError"


class NoReplicaError(OverloadedError):
    """No replica of the model can answer."""


class DrainingError(OverloadedError):
    """The replica is stopping."""


class EngineDeadError(MantaError):
    """A worker died under the request."""

    status = 503
    kind = "ServiceUnavailableError"
    retryable = True


class EngineStalledError(EngineDeadError):
    """A step does not end: a worker is stopped, or its device hangs."""


class SlowReaderError(MantaError):
    """The client did not read its answer, so it was ended."""

    status = 408
    kind = "RequestTimeoutError"


class StorageError(MantaError):
    """Where files and batches are kept cannot be read or written now."""

    status = 503
    kind = "ServiceUnavailableError"
    retryable = True


class UnreachableError(MantaError):
    """A server that a command of ours asks does not answer."""

    status = 503
    kind = "ServiceUnavailableError"
    retryable = True


def shown(value: object, most: int = 100) -> str:
    """A value in a message, as its sender wrote it: JSON, and of a long one the first `most` characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "", else_say: str | None = None) -> str:
    """The remedy for an unknown name: the nearest known one, or else all of them.

    Args:
        prefix: before a name, where names are parts of a dotted path.
        else_say: in place of a list that would be too long, where no known name is near.
    """
    names = list(known)
    if near := difflib.get_close_matches(name, names, n=1):
        return f"Did you mean {prefix}{near[0]}?"
    return else_say if else_say is not None else f"Known: {', '.join(names)}."
