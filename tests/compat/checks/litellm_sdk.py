"""LiteLLM with both of its providers for such servers, and its assembled streams."""

from __future__ import annotations

import json

import litellm
from trial import API, FORM, KEY, MODEL, TOOL, USER, check, error_of, main

HOSTED = {"model": f"hosted_vllm/{MODEL}", "api_base": API, "api_key": KEY, "num_retries": 0}
OPENAI = {**HOSTED, "model": f"openai/{MODEL}"}
TEXT = {**HOSTED, "model": f"text-completion-openai/{MODEL}"}


@check("chat with hosted_vllm/ and openai/, with vLLM's own fields")
def chat() -> None:
    for provider in (HOSTED, OPENAI):
        answer = litellm.completion(
            **provider, messages=USER, max_tokens=16, temperature=1, seed=1, extra_body={"top_k": 5}
        )
        assert answer.choices[0].message.content and answer.usage.completion_tokens <= 16


@check("a stream assembled by stream_chunk_builder equals the complete answer, with usage")
def stream() -> None:
    body = {**HOSTED, "messages": USER, "max_tokens": 24, "temperature": 0}
    whole = litellm.completion(**body)
    chunks = list(litellm.completion(**body, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks, messages=USER)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.usage.completion_tokens == whole.usage.completion_tokens


@check("text completion")
def text() -> None:
    assert litellm.text_completion(**TEXT, prompt="def add(a, b):", max_tokens=8).choices[0].text


@check("structured output and tools")
def structured() -> None:
    body = {**HOSTED, "messages": USER, "max_tokens": 200, "temperature": 1, "seed": 2}
    answer = litellm.completion(**body, response_format=FORM)
    assert set(json.loads(answer.choices[0].message.content)) == {"city", "celsius"}
    requested = litellm.completion(**body, tools=[TOOL], tool_choice="required")
    assert requested.choices[0].message.tool_calls[0].function.name == "get_weather"


@check("errors are LiteLLM's own: NotFoundError, BadRequestError")
def errors() -> None:
    for fields, wanted in (
        ({"model": "hosted_vllm/nobody"}, litellm.NotFoundError),
        ({"temperature": -1}, litellm.BadRequestError),
    ):
        error_of(wanted, litellm.completion, **{**HOSTED, "messages": USER, "max_tokens": 1, **fields})


main()
