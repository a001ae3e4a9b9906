"""Limits the completions in flight of one API key, running and waiting ones together.

The process that checks the keys counts: without a gateway the request's run
(`actors/http/generation/request_run.py`), else the gateway (`gateway/generation_proxy.py`). Only digests of
keys are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ....cluster.errors import RateLimitError, RequestError
from ..config.settings import ServerSettings

NAME = "max_requests_per_key"


class KeyShares:
    """Counts the completions in flight by key."""

    def __init__(self, settings: ServerSettings) -> None:
        self._most = settings.max_requests_per_key
        self._num_open: Counter[str] = Counter()

    @contextmanager
    def take(self, key: str | None, count: int, num_replicas: int = 1) -> Iterator[None]:
        """Count completions as in flight.

        Args:
            key: `Caller.owner` of the request; None if the server has no keys, in which case nothing is
                counted.
            count: completions of the request.
            num_replicas: replicas of the model; the limit applies to each.

        Raises:
            RateLimitError: with these, too many would be in flight.
            RequestError: the request alone exceeds the limit.
        """
        if key is None or self._most is None:
            yield
            return
        most = self._most * max(num_replicas, 1)
        if count > most:
            raise RequestError(
                f"The request needs {count} completions, and one API key may have {most} at a time "
                f"({NAME}). Request fewer (`n`, prompts).",
                param="n",
            )
        if (num_open := self._num_open[key]) + count > most:
            raise RateLimitError(
                f"{num_open} completions of this API key are in progress and {count} would join them; at "
                f"most {most} are allowed ({NAME}). Retry when some have ended.",
                param=NAME,
            )
        self._num_open[key] += count
        try:
            yield
        finally:
            self._num_open[key] -= count
            if not self._num_open[key]:
                del self._num_open[key]
