"""HTTP client of Manta's own commands, for any OpenAI-compatible server.

Uses only Python's `http.client`: openai and httpx are test dependencies. Ignores proxies of the environment.
Each client has one persistent connection and is not thread-safe. Used by `jobs/serve/server.py` and the demo
while a server starts, by the demo for its requests, and by `jobs/logs.py` and `tests/benchmarks/`.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import SplitResult, urlsplit

from ...actors.http.middleware.api_keys import ENVIRONMENT
from ...cluster.errors import ConfigError, MantaError, UnreachableError, brief_url
from ...cluster.json_text import parse_json

Json = Mapping[str, Any]  # Any: JSON
LONG_S = 600.0
HEALTH_TIMEOUT_S = 5.0
POLL_S = 0.2
MAX_SHOWN = 300  # characters of a server's error message


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """A server's response. `body` is {} unless it was a JSON object; text becomes an OpenAI error object."""

    status: int
    body: Json

    @property
    def error(self) -> str:
        error = self.body.get("error", self.body)
        message = str(error.get("message", error) if isinstance(error, Mapping) else error)
        return message[:MAX_SHOWN].rstrip(".") + "."


class ServerClient:
    def __init__(self, url: str, timeout_s: float = LONG_S, *, api_key: str | None = None) -> None:
        parts = split_url(url)
        self.url = url
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)

    def request(self, path: str, body: Json | None = None) -> ServerAnswer:
        """GET a path, or POST a body to it. Returns any status; raises UnreachableError."""
        response = self._request(path, body)
        return ServerAnswer(response.status, _json_object(self._read(response)))

    def text(self, path: str) -> str:
        """GET a path and return its body, whatever the status; raises UnreachableError."""
        return self._read(self._request(path, None)).decode(errors="replace")

    def get_json(self, path: str) -> Json:
        """GET a path and return its body; raises MantaError with the server's message for other statuses."""
        answer = self.request(path)
        self._accept(path, answer)
        return answer.body

    def stream_chat(self, body: Json) -> Iterator[Json]:
        path = "/v1/chat/completions"
        response = self._request(path, {**body, "stream": True})
        if response.status != 200:
            self._accept(path, ServerAnswer(response.status, _json_object(self._read(response))))
        try:
            yield from _chunks(response)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        finally:
            self.close()  # the rest of an abandoned stream must not be read as the next response

    def is_ready(self) -> bool:
        try:
            return self.request("/health").status == 200
        except UnreachableError:  # not listening yet
            return False

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, path: str, body: Json | None) -> http.client.HTTPResponse:
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
        try:
            self._connection.request(method, self._prefix + path, content, self._headers)
            return self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> UnreachableError:
        self.close()
        return UnreachableError(f"{self.url} cannot be reached: {error or type(error).__name__}.")

    def _accept(self, path: str, answer: ServerAnswer) -> None:
        if answer.status != 200:
            raise MantaError(f"{self.url}{path} answered {answer.status}: {answer.error}")


def operators_key() -> str | None:
    names = (ENVIRONMENT["admin_api_key"], ENVIRONMENT["api_key"])
    return next((keys.split()[0] for name in names if (keys := os.environ.get(name, "").strip())), None)


def num_requests(url: str, api_key: str | None = None) -> int:
    counted = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    with ServerClient(url, HEALTH_TIMEOUT_S, api_key=api_key) as client:
        try:
            lines = client.text("/metrics").splitlines()
        except MantaError:
            return 0
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith(counted))


def split_url(url: str) -> SplitResult:
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:  # invalid port
        known = False
    if not known:
        raise ConfigError(f"server={brief_url(url)} is not a URL like http://127.0.0.1:8000.", param="server")
    return parts


def await_ready(url: str, timeout_s: float, look: Callable[[], None] = lambda: None) -> float:
    """Return the seconds until the server at `url` is ready; `look` may raise while it waits."""
    begin_s = time.monotonic()
    with ServerClient(url, HEALTH_TIMEOUT_S) as client:
        while not client.is_ready():
            look()
            if time.monotonic() - begin_s > timeout_s:
                raise UnreachableError(f"{brief_url(url)} was not ready within {timeout_s:.0f} s.")
            time.sleep(POLL_S)
    return time.monotonic() - begin_s


def _chunks(response: http.client.HTTPResponse) -> Iterator[Json]:
    for raw in response:
        line = raw.decode().strip()
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk = parse_json(data)
        if "error" in chunk:
            raise MantaError(f"The stream failed: {ServerAnswer(200, chunk).error}")
        yield chunk
    raise MantaError("The stream ended early: its last event is missing.")


def _json_object(raw: bytes) -> Json:
    try:
        found = parse_json(raw)
    except ValueError:
        return {"error": {"message": raw[:MAX_SHOWN].decode(errors="replace")}}
    return found if isinstance(found, dict) else {}
