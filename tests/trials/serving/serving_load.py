"""Load for tests of deaths: parallel streams, and a client that sends requests repeatedly.

Called by `serving_chaos.py` and `test_serve_chaos.py`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass

from benchmarks.serving.streams import Stream, StreamClient
from manta.jobs.common.http_client import ServerClient
from support.waiting import wait_until

PROBE_EVERY_S = 0.1
PROBE_TIMEOUT_S = 30.0
SETTLED_PROBES = 20  # in a row that are answered: service is back


class Load:
    """Streams that run in their own thread. `resumes`: see `StreamClient`."""

    def __init__(self, url: str, count: int, max_tokens: int, *, resumes: bool = False) -> None:
        self.streams = [Stream(time.monotonic()) for _ in range(count)]
        self._url, self._max_tokens, self._resumes = url, max_tokens, resumes
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def wait_for_tokens(self, events: int = 3, seconds: float = 120.0) -> None:
        """Wait until every stream has started."""
        wait_until(
            lambda: all(len(s.token_times_s) >= events or s.end for s in self.streams),
            seconds,
            "the streams do not begin",
        )

    def join(self, seconds: float = 180.0) -> list[Stream]:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), [s.end for s in self.streams]
        return self.streams

    async def _run(self) -> None:
        await asyncio.gather(*(self._one(i, stream) for i, stream in enumerate(self.streams)))

    async def _one(self, number: int, stream: Stream) -> None:
        body = {
            "prompt": f"def f{number}(",
            "max_tokens": self._max_tokens,
            "temperature": 1.0,
            "seed": number,
            "ignore_eos": True,
        }
        async with StreamClient(self._url, timeout_s=120.0, resumes=self._resumes) as client:
            await client.ask(body, into=stream)


@dataclass(frozen=True)
class Probe:
    begin_s: float
    end_s: float
    said: str  # "200", another status, or the kind of the failure


class Prober:
    """Requests one token repeatedly, each time on a new connection."""

    def __init__(self, url: str) -> None:
        self.probes: list[Probe] = []
        self._url = url
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def settled(self, since_s: float) -> bool:
        """Whether the last requests, all sent after `since_s`, were answered."""
        last = self.probes[-SETTLED_PROBES:]
        enough = len(last) == SETTLED_PROBES and last[0].begin_s > since_s
        return enough and all(probe.said == "200" for probe in last)

    def stop(self) -> list[Probe]:
        self._over.set()
        self._thread.join(PROBE_TIMEOUT_S + 5.0)
        return self.probes

    def _ask(self) -> None:
        while not self._over.wait(PROBE_EVERY_S):
            begin_s = time.monotonic()
            try:
                with ServerClient(self._url, PROBE_TIMEOUT_S) as client:
                    answer = client.request("/v1/completions", {"prompt": "x", "max_tokens": 1})
                in_shape = "type" in answer.body.get("error", {})
                said = str(answer.status)
                said += "" if answer.status == 200 or in_shape else " in another shape"
            except Exception as error:
                said = type(error).__name__
            self.probes.append(Probe(begin_s, time.monotonic(), said))
