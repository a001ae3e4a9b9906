"""How many completions of one API key may be under way: running and waiting ones together.

Where a request is run without a gateway its run counts it (`actors/http/generation/request_run.py`), else the
gateway does (`gateway/generation_proxy.py`): whoever knows the keys. Of a key only its digest is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ....cluster.errors import RateLimitError, RequestError
from ..config.settings import ServerSettings

NAME = "max_requests_per_key"


class KeyShares:
    """The completions under way, by key."""

    def __init__(self, settings: ServerSettings) -> None:
        self._most = settings.max_requests_per_key
        self._num_open: Counter[str] = Counter()

    @contextmanager
    def take(self, key: str | None, count: int, num_replicas: int = 1) -> Iterator[None]:
        """Count completions as under way.

        Args:
            key: `Caller.owner` of the request; None where the server asks for none, and counts none.
            count: completions of the request.
            num_replicas: that serve the model: the setting is of each.

        Raises:
            RateLimitError: too many are under way with them.
            RequestError: the request alone has more than may be.
        """
        if key is None or self._most is None:
            yield
            return
        most = self._most * max(num_replicas, 1)
        if count > most:
            raise RequestError(
                f"The request asks for {count} completions, and one API key may have {most} under way "
                f"({NAME}). Ask for fewer (`n`, prompts).",
                param="n",
            )
        if (num_open := self._num_open[key]) + count > most:
            raise RateLimitError(
                f"{num_open} completions of this API key are under way and {count} would join them; at most "
                f"{most} may be ({NAME}). Retry when some have ended.",
                param=NAME,
            )
        self._num_open[key] += count
        try:
            yield
        finally:
            self._num_open[key] -= count
            if not self._num_open[key]:
                del self._num_open[key]
