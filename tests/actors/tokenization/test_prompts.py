"""Every API gives a conversation the same tokens or the same error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from manta import LLM, SamplingParams
from manta.actors.batch.dataset.row_reader import Row
from manta.actors.batch.dataset.row_requests import RowSchema
from manta.actors.batch.row_answerer import RowAnswerer
from manta.actors.http.config.settings import ServerSettings
from manta.actors.tokenization.generation_config import GenerationDefaults
from manta.actors.tokenization.prompts import Chat, EncodedPrompt
from manta.cluster.config import EngineConfig
from manta.cluster.errors import RequestError
from support.checkpoints.text_pair import LiveServer
from support.servers.server_probes import idle
from support.waiting import wait_until

SAID = [{"role": "user", "content": "Say something."}, {"role": "assistant", "content": "It is"}]
Answer = tuple[str, str] | tuple[int, list[int] | None]  # the field refused; prompt tokens, greedy answer
T = TypeVar("T")
Ask = Callable[[dict[str, Any]], Answer]


@pytest.fixture(scope="module")
def config(text_pair: tuple[Path, Path]) -> EngineConfig:
    small = {"dtype": "float32", "max_num_seqs": 4, "num_pages": 64, "num_threads": 1}
    target, drafter = map(str, text_pair)
    return EngineConfig.from_dict({"model": target, "speculative_config": {"model": drafter}, **small})


@pytest.fixture(scope="module")
def server(config: EngineConfig) -> Iterator[LiveServer]:
    with LiveServer(config, ServerSettings(served_model_name="tiny")) as server:
        yield server


@pytest.fixture(scope="module")
def apis(config: EngineConfig, server: LiveServer) -> Iterator[dict[str, Ask]]:
    """Every API that answers a conversation, by name; `/tokenize` only returns its tokens."""
    with LLM(**asdict(config)) as llm, httpx.Client(base_url=server.url, timeout=600) as http:
        yield {
            "LLM.chat": lambda options: _ask_llm(llm, options),
            "chat": lambda options: _ask_http(http, "/v1/chat/completions", options),
            "stream": lambda options: _ask_http(http, "/v1/chat/completions", {**options, "stream": True}),
            "tokenize": lambda options: _ask_http(http, "/tokenize", options),
            "batch": lambda options: _ask_batch(server, options),
        }


def run_on(server: LiveServer, work: Coroutine[Any, Any, T]) -> T:
    """Run a task on the event loop of a server's engine."""
    return asyncio.run_coroutine_threadsafe(work, server.loop).result(300)


def _ask_llm(llm: LLM, options: dict[str, Any]) -> Answer:
    try:
        params = SamplingParams(temperature=0.0, max_tokens=6)
        (output,) = llm.chat(SAID, params, use_tqdm=False, **options)
    except RequestError as error:
        return "refused", error.param or ""
    return len(output.prompt_token_ids), output.outputs[0].token_ids


def _ask_http(http: httpx.Client, path: str, options: dict[str, Any]) -> Answer:
    body = {"messages": SAID, "temperature": 0, "max_tokens": 6, "return_token_ids": True, **options}
    response = http.post(path, json=body)
    if response.status_code != 200:
        assert response.status_code == 400, response.text
        return "refused", response.json()["error"]["param"]
    if path == "/tokenize":
        return response.json()["count"], None
    if "stream" not in options:
        (choice,) = response.json()["choices"]
        return response.json()["usage"]["prompt_tokens"], choice["token_ids"]
    events = [json.loads(e.removeprefix("data: ")) for e in response.text.split("\n\n") if "{" in e]
    choices = [choice for event in events for choice in event["choices"]]
    return len(choices[0]["prompt_token_ids"]), [i for c in choices for i in c.get("token_ids", ())]


def _ask_batch(server: LiveServer, options: dict[str, Any]) -> Answer:
    body = {"messages": SAID, "temperature": 0, "max_tokens": 6, **options}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    layout = RowSchema(kind="openai", lines=True)
    defaults = GenerationDefaults.load(Path(server.engine.config.model))
    answerer = RowAnswerer(server.engine, layout, defaults, "tiny")
    row = run_on(server, answerer.answer(Row(0, {"text": json.dumps(line)})))
    if row.get("error") is not None:
        return "refused", row["error"]["param"]
    return row["prompt_tokens"], row["token_ids"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"chat_template_kwargs": {"style": "So:"}},
        {"chat_template_kwargs": {"style": {"deep": [1, None]}, "": 1, "template_name": 2, "self": 3}},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        {"chat_template_kwargs": {"continue_final_message": True}},
        {"chat_template_kwargs": {"messages": []}},
    ],
)
def test_a_conversation_has_the_same_prompt_in_every_api(
    apis: dict[str, Ask], options: dict[str, Any]
) -> None:
    found = {name: ask(options) for name, ask in apis.items()}
    first, answer = found["LLM.chat"]
    wanted = {name: (first, None if name == "tokenize" and first != "refused" else answer) for name in found}
    assert found == wanted


def test_a_conversation_is_truncated_in_every_api(apis: dict[str, Ask]) -> None:
    chat, stream, batch = (apis[n]({"truncate_prompt_tokens": 3}) for n in ("chat", "stream", "batch"))
    assert chat == stream == batch and chat[0] == 3
    for name in ("chat", "stream", "batch"):
        assert apis[name]({"truncate_prompt_tokens": 0}) == ("refused", "prompt")


def test_a_reasoning_effort_without_effect_is_ignored_in_every_api(apis: dict[str, Ask]) -> None:
    for name in ("chat", "stream", "tokenize", "batch"):
        assert apis[name]({"reasoning_effort": "high"}) == apis[name]({})


def test_tools_that_the_template_does_not_write_are_refused_in_every_api(apis: dict[str, Ask]) -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    assert {ask({"tools": [tool]}) for ask in apis.values()} == {("refused", "tools")}


def test_a_complete_answer_equals_its_stream(server: LiveServer) -> None:
    engine = server.engine
    params = SamplingParams(max_tokens=9, n=3, seed=5, ignore_eos=True)
    watched: list[int] = []

    async def run() -> None:
        prompt = await engine.encoder.prompt(Chat(SAID))
        whole = await engine.complete(
            "whole", prompt, params, watch=lambda o: watched.append(len(o.outputs[0].token_ids))
        )
        ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for output in engine.add("stream", prompt, params):
            for piece in output.outputs:
                ids[piece.index] += piece.token_ids
        assert whole.finished and {c.index: c.token_ids for c in whole.outputs} == ids
        assert sum(watched) == 3 * 9
        with pytest.raises(RequestError, match="holds token 99999"):
            await engine.complete("bad", EncodedPrompt((1, 99999)), params)
        with pytest.raises(ZeroDivisionError):
            await engine.complete("left", prompt, params, watch=lambda _: 1 // 0)
        leaving = asyncio.create_task(engine.complete("gone", prompt, SamplingParams(max_tokens=400)))
        await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert (await engine.complete("left", prompt, params)).finished  # its id is free again

    run_on(server, run())
    wait_until(lambda: idle(server))


def test_options_of_llm_chat_without_effect_are_logged_once(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(max_tokens=1)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi", "colour": "red"}]}]
    with LLM(**asdict(config)) as llm:
        llm.chat(SAID, params, use_tqdm=False, chat_template_kwargs={"style": "x"})
        assert not caplog.messages
        llm.chat([SAID, parts], params, use_tqdm=False, chat_template_kwargs={"stile": "x"})
    (said,) = caplog.messages
    assert said.endswith(" chat_template_kwargs.stile, messages.content.colour")
