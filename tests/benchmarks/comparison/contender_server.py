"""A contender behind a URL: any server with OpenAI's `/v1/models` and `/v1/completions`.

Prompts are sent as token ids, without the server's tokenizer; it must serve the same target. Requests are not
streamed; each concurrent one has its own persistent connection. A first request checks address and model
before anything is loaded.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from manta.cluster.errors import ConfigError, MantaError, UnreachableError, brief_url
from manta.jobs.bench.common.engine_passes import Pass
from manta.jobs.common.http_client import Json, ServerAnswer, ServerClient, split_url

from .contenders import ContenderSetup, Prompts, Runner

# Fields of vLLM and llama.cpp; left out for servers that reject unknown fields. A prefix cache would reuse
# the previous round.
EXTRAS: Json = {"ignore_eos": True, "return_token_ids": True, "cache_prompt": False}


class OpenAIServer:
    """The server at `url`.

    Args:
        model: its name in the API; by default the first listed one.

    Raises:
        ConfigError: the server cannot be reached, or does not complete prompts of token ids.
    """

    def __init__(self, url: str, model: str | None = None) -> None:
        self._url, self._address = url, split_url(url).netloc
        self._model = self._first_model() if model is None else model
        self._extras: Json = {}
        self._extras = self._accepted_extras()

    @property
    def name(self) -> str:
        return f"{self._model} at {self._address}"

    def setups(self, requests: int) -> Mapping[ContenderSetup, Runner]:
        return {ContenderSetup(None, requests): partial(self._run, requests)}

    def _run(self, at_once: int, prompts: Prompts, max_tokens: int) -> Pass:
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for i in range(len(prompts)):
            waiting.put(i)
        answers: dict[int, Json] = {}
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
        self, waiting: queue.SimpleQueue[int], prompts: Prompts, max_tokens: int, answers: dict[int, Json]
    ) -> None:
        with ServerClient(self._url) as client:
            while True:
                try:
                    i = waiting.get_nowait()
                except queue.Empty:
                    return
                answer = self._ask(client, "/v1/completions", self._body(prompts[i], max_tokens))
                if answer.status != 200:
                    raise MantaError(
                        f"server: {brief_url(self._url)} answered {answer.status}: {answer.error}",
                        param="server",
                    )
                answers[i] = answer.body

    def _body(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return {**body, **self._extras}

    def _first_model(self) -> str:
        with ServerClient(self._url) as client:
            answer = self._ask(client, "/v1/models")
        try:
            return str(answer.body["data"][0]["id"])
        except (LookupError, TypeError):
            raise ConfigError(
                f"server={brief_url(self._url)} lists no model at /v1/models (status {answer.status}). Name "
                "one with --server-model, or correct --server.",
                param="server_model",
            ) from None

    def _accepted_extras(self) -> Json:
        """Return EXTRAS if the server accepts them, else nothing."""
        answer = ServerAnswer(0, {})
        with ServerClient(self._url) as client:
            for extras in (EXTRAS, {}):
                answer = self._ask(client, "/v1/completions", {**self._body([1, 2], 1), **extras})
                if answer.status == 200 and "usage" in answer.body:
                    return extras
        raise ConfigError(
            f"server={brief_url(self._url)} does not complete token ids as {self._model!r}: status "
            f"{answer.status}, {answer.error} It must serve the same target with OpenAI's /v1/completions, "
            "under the name that --server-model gives.",
            param="server_model" if answer.status == 404 else "server",
        )

    def _ask(self, client: ServerClient, path: str, body: Json | None = None) -> ServerAnswer:
        try:
            return client.request(path, body)
        except UnreachableError as error:
            raise ConfigError(
                f"server={error.message} Start it first, or correct --server.", param="server"
            ) from None


def _token_ids(answers: Sequence[Json]) -> list[list[int]] | None:
    """Return the token ids of all answers; None if the server does not return them."""
    found = [answer["choices"][0].get("token_ids") for answer in answers]
    return None if None in found else found
