"""A contender behind a URL: any server with OpenAI's `/v1/models` and `/v1/completions`.

Prompts go as token ids, so that no tokenizer of the server's stands between; it must serve the same target.
Without streaming, as many requests at once as asked, each on a connection of its own that is kept. Asked
once at the beginning, so that a wrong address or model is said before anything is loaded.
"""

from __future__ import annotations

import http.client
import json
import queue
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from ...cluster.errors import ConfigError, MantaError
from .contenders import Prompts, Runner, Way
from .passes import Pass

TIMEOUT_S = 600.0
# vLLM's and llama.cpp's; what refuses unknown fields is asked without. A prefix cache would answer from the
# round before.
EXTRAS: Mapping[str, Any] = {"ignore_eos": True, "return_token_ids": True, "cache_prompt": False}
Answer = Mapping[str, Any]  # Any: JSON


class OpenAIServer:
    """The server at `url`.

    Args:
        model: name in its API; the first that it lists if absent.

    Raises:
        ConfigError: it cannot be reached, or does not complete prompts of token ids.
    """

    def __init__(self, url: str, model: str | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"server={url!r} is not a URL like http://127.0.0.1:8000.", param="server")
        self._url, self._parts = url, parts
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._model = self._first_model() if model is None else model
        self._extras: Mapping[str, Any] = {}
        self._extras = self._accepted_extras()

    @property
    def name(self) -> str:
        return f"{self._model} at {self._parts.netloc}"

    def ways(self, requests: int) -> Mapping[Way, Runner]:
        return {Way(None, requests): partial(self._run, requests)}

    def _run(self, at_once: int, prompts: Prompts, max_tokens: int) -> Pass:
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for i in range(len(prompts)):
            waiting.put(i)
        answers: dict[int, Answer] = {}
        begin_s = time.perf_counter()
        with ThreadPoolExecutor(at_once) as pool:
            work = partial(self._work, waiting, prompts, max_tokens, answers)
            for worker in [pool.submit(work) for _ in range(at_once)]:
                worker.result()
        seconds = time.perf_counter() - begin_s
        found = [answers[i] for i in range(len(prompts))]
        tokens = sum(answer["usage"]["completion_tokens"] for answer in found)
        return Pass(seconds, tokens, _token_ids(found))

    def _work(
        self, waiting: queue.SimpleQueue[int], prompts: Prompts, max_tokens: int, answers: dict[int, Answer]
    ) -> None:
        """Ask for whatever waits, until nothing does."""
        with closing(self._connect()) as connection:
            while True:
                try:
                    i = waiting.get_nowait()
                except queue.Empty:
                    return
                status, answer = self._ask(connection, "/v1/completions", self._body(prompts[i], max_tokens))
                if status != 200:
                    raise MantaError(
                        f"server: {self._url} answered {status}: {_error(answer)}", param="server"
                    )
                answers[i] = answer

    def _body(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return {**body, **self._extras}

    def _first_model(self) -> str:
        with closing(self._connect()) as connection:
            status, answer = self._ask(connection, "/v1/models")
        try:
            return str(answer["data"][0]["id"])
        except (LookupError, TypeError):
            raise ConfigError(
                f"server={self._url} lists no model at /v1/models (status {status}). Name one with "
                "--server-model, or correct --server.",
                param="server_model",
            ) from None

    def _accepted_extras(self) -> Mapping[str, Any]:
        """Those of EXTRAS that the server takes: all or none."""
        status, answer = 0, {}
        with closing(self._connect()) as connection:
            for extras in (EXTRAS, {}):
                status, answer = self._ask(connection, "/v1/completions", {**self._body([1, 2], 1), **extras})
                if status == 200 and "usage" in answer:
                    return extras
        raise ConfigError(
            f"server={self._url} does not complete token ids as {self._model!r}: status {status}, "
            f"{_error(answer)} It must serve the same target with OpenAI's /v1/completions, under the name "
            "that --server-model gives.",
            param="server_model" if status == 404 else "server",
        )

    def _connect(self) -> http.client.HTTPConnection:
        https = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if https else http.client.HTTPConnection
        return kind(self._parts.hostname or "", self._parts.port, timeout=TIMEOUT_S)

    def _ask(
        self, connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, Answer]:
        """Status and JSON object of one request."""
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
        try:
            connection.request(method, self._prefix + path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            raw = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(
                f"server={self._url} cannot be reached: {error or type(error).__name__}. Start it first, or "
                "correct --server.",
                param="server",
            ) from None
        try:
            answer = json.loads(raw)
        except ValueError:
            answer = {"error": {"message": raw[:200].decode(errors="replace")}}
        return response.status, answer if isinstance(answer, dict) else {}


def _token_ids(answers: Sequence[Answer]) -> list[list[int]] | None:
    """None unless the server told those of every answer."""
    found = [answer["choices"][0].get("token_ids") for answer in answers]
    return None if None in found else found


def _error(answer: Answer) -> str:
    error = answer.get("error", answer)
    message = str(error.get("message", error) if isinstance(error, Mapping) else error)
    return message[:300].rstrip(".") + "."
