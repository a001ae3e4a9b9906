"""Tools and reasoning over real HTTP with OpenAI's client: a random model with forced text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from manta.actors.batch.dataset.row_reader import Row
from manta.actors.batch.dataset.row_requests import RowSchema
from manta.actors.batch.row_answerer import RowAnswerer
from manta.actors.engine.async_engine import AsyncEngine
from manta.actors.http.config.settings import ServerSettings
from manta.actors.tokenization.generation_config import GenerationDefaults
from manta.cluster.config import EngineConfig
from support.checkpoints.chat_pairs import (
    ARGUMENTS,
    HARMONY,
    HARMONY_TOKENS,
    HERMES,
    NOW,
    SAID,
    TOOLS,
    WEATHER,
    chat_config,
    saying,
)
from support.checkpoints.text_pair import LiveServer
from support.servers.server_probes import http_client

USER = [{"role": "user", "content": "Weather?"}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "messages": USER}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return chat_config(tmp_path_factory.mktemp("hermes"), HERMES)


@pytest.fixture(scope="module")
def server(config: EngineConfig) -> Iterator[LiveServer]:
    """A server of a pair with the chat format of Hermes."""
    with LiveServer(config, ServerSettings(served_model_name="tiny")) as server:
        yield server


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server with the chat format of gpt-oss, which trusts templates of requests."""
    trusting = {"trust_request_chat_template": True, "default_chat_template_kwargs": {"a": "b"}}
    config = chat_config(tmp_path_factory.mktemp("harmony"), HARMONY, HARMONY_TOKENS, **trusting)
    settings = {"reasoning_field_name": "reasoning", "enable_auto_tool_choice": False}
    with (
        LiveServer(config, ServerSettings(served_model_name="tiny", **settings)) as server,
        http_client(server.url) as http,
    ):
        yield http


def test_an_answer_is_split_complete_and_streamed(client: openai.OpenAI) -> None:
    body = {**GREEDY, "tools": TOOLS, "extra_body": saying(SAID)}
    (choice,) = client.chat.completions.create(**body).choices
    message = choice.message
    assert choice.finish_reason == "tool_calls" and message.content == "I look."
    assert message.model_extra is not None
    assert (
        message.model_extra["reasoning"]
        == message.model_extra["reasoning_content"]
        == "The user wants weather."
    )
    assert message.tool_calls is not None
    assert [(c.type, c.function.name, c.function.arguments) for c in message.tool_calls] == [
        ("function", "get_weather", ARGUMENTS),
        ("function", "now", "{}"),
    ]
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == 2 and all(id.startswith("chatcmpl-tool-") for id in ids)

    with client.chat.completions.stream(**body) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and final.message.content == "I look."
    assert [(c.function.name, c.function.arguments) for c in final.message.tool_calls or ()] == [
        (call.function.name, call.function.arguments) for call in message.tool_calls
    ]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (
        "".join((delta.model_extra or {}).get("reasoning", "") for delta in deltas)
        == "The user wants weather."
    )
    opening = [call for delta in deltas for call in delta.tool_calls or () if call.id]
    assert [(c.index, c.type, c.function and (c.function.name, c.function.arguments)) for c in opening] == [
        (0, "function", ("get_weather", "")),
        (1, "function", ("now", "")),
    ]
    last = chunks[-1].choices[0]
    assert last.finish_reason == "tool_calls" and not last.delta.model_dump(exclude_none=True)


def test_an_answer_truncated_after_a_call_has_finish_reason_length(client: openai.OpenAI) -> None:
    body = {**GREEDY, "tools": TOOLS, "extra_body": saying(SAID)}
    usage = client.chat.completions.create(**body).usage
    assert usage is not None
    cut = {**body, "max_tokens": usage.completion_tokens - 4}
    (choice,) = client.chat.completions.create(**cut).choices
    assert choice.finish_reason == "length" and choice.message.tool_calls
    *_, last = client.chat.completions.create(**cut, stream=True)
    assert last.choices[0].finish_reason == "length"


def test_each_of_several_completions_is_parsed_separately(client: openai.OpenAI) -> None:
    body = {**GREEDY, "tools": TOOLS, "n": 2, "temperature": 1, "seed": 3, "logprobs": True}
    texts = ["Well.", SAID]
    found = client.chat.completions.create(**body, extra_body=saying(*texts))
    pieces = client.chat.completions.create(**body, stream=True, extra_body=saying(*texts))
    reported: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in pieces:
        for choice in chunk.choices:
            reported[choice.index].append(choice)
    for choice in found.choices:
        called = choice.message.tool_calls is not None
        assert choice.message.content == ("I look." if called else "Well.")
        streamed = reported[choice.index]
        assert streamed[-1].finish_reason == choice.finish_reason == ("tool_calls" if called else "stop")
        tokens = [each for piece in streamed if piece.logprobs for each in piece.logprobs.content]
        assert choice.logprobs and tokens == choice.logprobs.content
    calls = {call.id for choice in found.choices for call in choice.message.tool_calls or ()}
    assert len(calls) == sum(len(choice.message.tool_calls or ()) for choice in found.choices)


@pytest.mark.parametrize(
    ("fields", "content", "calls"),
    [
        ({"include_reasoning": False}, "I look.", 2),
        ({"parallel_tool_calls": False}, "I look.", 1),
        ({"tool_choice": "none"}, SAID.partition("</think>\n\n")[2], 0),
        ({"tools": None}, SAID.partition("</think>\n\n")[2], 0),
        ({"stop": ["arguments"]}, 'I look.\n<tool_call>\n{"name": "get_weather", "', 0),
    ],
)
def test_fields_control_what_is_shown(http: httpx.Client, fields: Any, content: str, calls: int) -> None:
    body = {**GREEDY, "tools": TOOLS, **saying(SAID), **fields}
    (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
    message = choice["message"]
    assert message["content"] == content and len(message.get("tool_calls", ())) == calls
    assert ("reasoning" in message) == ("include_reasoning" not in fields)
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")


def test_what_a_tools_schema_cannot_enforce_is_named_or_with_strict_refused(http: httpx.Client) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "contentEncoding": "base64", "not": {}}}}
    function = {"name": "odd", "parameters": odd, "strict": True}
    for choice in ("required", "auto"):
        body = {**GREEDY, "tools": [{"type": "function", "function": function}], "tool_choice": choice}
        response = http.post("/v1/chat/completions", json={**body, "max_tokens": 5})
        assert response.status_code == 400 and response.json()["error"]["param"].startswith("tools")
    lenient = {"type": "function", "function": {**function, "strict": False}}
    body = {**GREEDY, "tools": [lenient], "tool_choice": "required", "max_tokens": 5}
    response = http.post("/v1/chat/completions", json=body).raise_for_status()
    assert response.headers["X-Ignored-Params"] == "tools.odd.parameters.properties.a.not"


@pytest.mark.parametrize(("choice", "parallel"), [("required", True), ("required", False), ("now", True)])
def test_required_calls_are_made_and_fit_their_schemas(
    client: openai.OpenAI, choice: str, parallel: bool
) -> None:
    tool_choice = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    body = {**GREEDY, "tools": TOOLS, "temperature": 1, "seed": 4, "n": 3, "max_tokens": 250}
    body |= {"tool_choice": tool_choice, "parallel_tool_calls": parallel}
    found = client.chat.completions.create(**body)
    plain = client.chat.completions.create(**body, extra_body={"speculative": False})
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
    for one, other in zip(found.choices, plain.choices, strict=True):
        calls = one.message.tool_calls
        assert calls and not one.message.content and one.finish_reason in ("tool_calls", "length")
        assert (parallel and choice == "required") or len(calls) == 1
        for call in calls if one.finish_reason == "tool_calls" else calls[:-1]:
            assert choice in ("required", call.function.name)
            jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
        assert [c.function for c in other.message.tool_calls or ()] == [c.function for c in calls]


def test_required_calls_come_after_reasoning_and_with_special_tokens(harmony: httpx.Client) -> None:
    end = harmony.post("/tokenize", json={"prompt": "<|end|>"}).json()["tokens"]
    assert len(end) == 1
    body = {
        **GREEDY,
        "tools": TOOLS,
        "tool_choice": "required",
        "max_tokens": 200,
        "logit_bias": {end[0]: 100},
    }
    answer = harmony.post("/v1/chat/completions", json=body).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (WEATHER, NOW)}
    for call in choice["message"]["tool_calls"]:
        requested = call["function"]
        jsonschema.validate(json.loads(requested["arguments"]), schemas[requested["name"]])
    with harmony.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events]
    pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    reported = "".join(piece.get("arguments", "") for piece in pieces)
    assert reported == "".join(call["function"]["arguments"] for call in choice["message"]["tool_calls"])
    auto = harmony.post("/v1/chat/completions", json={**body, "tool_choice": "auto"})
    assert auto.status_code == 400 and auto.json()["error"]["param"] == "tool_choice"


def test_a_conversation_is_passed_to_the_template_correctly(
    http: httpx.Client, harmony: httpx.Client
) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "now", "arguments": '{"b": [1, "<é>"]}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "noon"}]},
    ]
    body = {"messages": messages, "tools": [NOW], "documents": [{"text": "doc"}]}
    body["chat_template_kwargs"] = {"enable_thinking": False, "whole_tools": True}
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == (
        f"<|im_start|>system\n{json.dumps(NOW)}\ncall: <tool_call>{{...}}</tool_call><|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\n"
        '<tool_call>\n{"name": "now", "arguments": {"b": [1, "<é>"]}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\nnoon<|im_end|>\n[doc]<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    cut = [{**messages[1], "tool_calls": [{"function": {"name": "now", "arguments": "{"}}]}, messages[0]]
    assert http.post("/v1/chat/completions", json={**GREEDY, "messages": cut}).status_code == 200
    template = {"messages": messages, "chat_template": "{{ a }}{{ messages[0].content }}"}
    (tokens, expected) = (
        harmony.post("/tokenize", json=each).json()["tokens"] for each in (template, {"prompt": "bHi"})
    )
    assert tokens == expected
    broken = harmony.post("/tokenize", json={**template, "chat_template": "{% if %}"})
    assert broken.status_code == 400 and broken.json()["error"]["param"] == "chat_template"


def test_an_answer_that_continues_a_message_is_parsed_from_its_end(http: httpx.Client) -> None:
    messages = [*USER, {"role": "assistant", "content": "<think>\nWell"}]
    body = {**GREEDY, "messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    (choice,) = http.post("/v1/chat/completions", json=body | saying(", so</think>\n\nYes.")).json()[
        "choices"
    ]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (", so", "Yes.")


def test_batch_rows_have_tools_and_reasoning_in_their_responses(config: EngineConfig) -> None:
    body = {**GREEDY, "tools": TOOLS, **saying(SAID)}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}

    async def run() -> dict[str, Any]:
        engine = AsyncEngine(config)
        await engine.start()
        try:
            layout = RowSchema(kind="openai", lines=True)
            answerer = RowAnswerer(engine, layout, GenerationDefaults(), "tiny")
            return await answerer.answer(Row(0, {"text": json.dumps(line)}))
        finally:
            engine.close()

    (choice,) = json.loads(asyncio.run(run())["response"])["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I look."
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather", "now"]
