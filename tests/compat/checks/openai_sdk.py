"""openai-python: every call that this server supports."""

from __future__ import annotations

import json

import jsonschema
import openai
from pydantic import BaseModel, Field
from trial import API, FORM, KEY, MODEL, SCHEMA, TOOL, USER, WEATHER, check, error_of, main

client = openai.OpenAI(base_url=API, api_key=KEY, max_retries=0, timeout=120)


@check("models: list, retrieve")
def models() -> None:
    first = client.models.list().data[0]
    assert first.id == MODEL and client.models.retrieve(MODEL).id == MODEL


@check("a wrong key, an unknown model: AuthenticationError, NotFoundError")
def errors() -> None:
    for other, model, wanted in (
        (client.with_options(api_key="wrong"), MODEL, openai.AuthenticationError),
        (client, "nobody", openai.NotFoundError),
    ):
        error = error_of(wanted, other.completions.create, model=model, prompt="x", max_tokens=1)
        assert error.body and error.message


@check("completions: text, token ids, several prompts, n, logprobs, echo, stop")
def completions() -> None:
    def create(**fields):
        return client.completions.create(**{"model": MODEL, "max_tokens": 8, "temperature": 0, **fields})

    whole = create(prompt="def add(a, b):", logprobs=2)
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.tokens) <= 8
    assert create(prompt=[1, 2, 3]).choices[0].text
    choices = create(prompt=["a = ", "b = "], n=2, temperature=1, seed=1).choices
    assert [choice.index for choice in choices] == [0, 1, 2, 3]
    echoed = create(prompt="def add(a, b):", echo=True, logprobs=0).choices[0]
    assert echoed.text == "def add(a, b):" + whole.choices[0].text
    assert echoed.logprobs.token_logprobs[0] is None and echoed.logprobs.token_logprobs[1] <= 0
    assert create(prompt="x = ", stop=["\n"], max_tokens=64).choices[0].finish_reason in ("stop", "length")


@check("completions: a stream equals the complete answer, with usage at its end")
def completion_stream() -> None:
    body = {"model": MODEL, "prompt": "import os", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**body)
    chunks = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


@check("chat: complete, with logprobs and text parts")
def chat() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": "yes"}]}]
    answer = client.chat.completions.create(
        model=MODEL, messages=parts, max_completion_tokens=16, logprobs=True, top_logprobs=2, seed=1
    )
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens


@check("chat: a stream equals the complete answer; the SDK's accumulating helper")
def chat_stream() -> None:
    body = {"model": MODEL, "messages": USER, "max_tokens": 32, "temperature": 0}
    whole = client.chat.completions.create(**body).choices[0].message.content
    chunks = client.chat.completions.create(**body, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    # Its helper calls an answer that is cut by max_tokens an error: this one ends before.
    body |= {"stop": ["\n"], "max_tokens": 200}
    whole = client.chat.completions.create(**body).choices[0].message.content
    with client.chat.completions.stream(**body) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.content == whole


@check("speculation per request: off, limited, traced; the text is the same")
def speculation() -> None:
    body = {"model": MODEL, "prompt": "def add(a, b):", "max_tokens": 32, "temperature": 0}
    plain = client.completions.create(**body, extra_body={"speculative": False})
    traced = client.completions.create(
        **body, extra_body={"speculative": {"max_tokens": 3, "return_trace": True}}
    )
    assert traced.choices[0].text == plain.choices[0].text
    figures = traced.model_extra["metrics"]["speculative_decoding"]
    assert all(count <= 3 for count in figures["per_step_drafted"])  # on a busy machine there may be none
    assert len(figures["trace"]["origins"]) == traced.usage.completion_tokens


@check(
    "structured: response_format json_object, json_schema (complete, streamed), parse() of a pydantic class"
)
def structured() -> None:
    class Reading(BaseModel):
        celsius: int = Field(ge=-50, le=60)
        dry: bool

    body = {"model": MODEL, "messages": USER, "max_tokens": 200, "temperature": 1, "seed": 3}
    answer = client.chat.completions.create(**body, response_format=FORM)
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
    chunks = client.chat.completions.create(**body, response_format=FORM, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == answer.choices[0].message.content
    free = client.chat.completions.create(**body, response_format={"type": "json_object"})
    if free.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(free.choices[0].message.content), dict)
    parsed = client.chat.completions.parse(**body, response_format=Reading).choices[0].message.parsed
    assert isinstance(parsed, Reading)


@check("tools: required, named, none, streamed, and their result in the next request")
def tools() -> None:
    body = {"model": MODEL, "tools": [TOOL], "max_tokens": 120, "temperature": 1, "seed": 5}
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        answer = client.chat.completions.create(
            **body, messages=USER, tool_choice=choice, parallel_tool_calls=False
        ).choices[0]
        (call,) = answer.message.tool_calls
        assert call.id and call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), WEATHER["parameters"])
        assert answer.finish_reason in ("tool_calls", "stop")
    requested = {**body, "messages": USER, "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**requested) as stream:
        stream.until_done()
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0].function
    jsonschema.validate(json.loads(streamed.arguments), WEATHER["parameters"])
    said = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
    last = client.chat.completions.create(**body, messages=[*USER, said, result], tool_choice="none").choices[
        0
    ]
    assert last.message.content is not None and not last.message.tool_calls


@check("responses: complete, streamed events, instructions, structured text, a function call and its output")
def responses() -> None:
    body = {"model": MODEL, "max_output_tokens": 32, "temperature": 0}
    whole = client.responses.create(**body, input="Write a function.", instructions="Be brief.", store=False)
    assert whole.status in ("completed", "incomplete") and whole.usage.output_tokens > 0
    with client.responses.stream(**body, input="Write a function.", instructions="Be brief.") as stream:
        events = list(stream)
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.output_text == whole.output_text
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    form = {"format": {"type": "json_schema", "name": "weather", "schema": SCHEMA, "strict": True}}
    shaped = client.responses.create(**{**body, "max_output_tokens": 200}, input="Weather?", text=form)
    jsonschema.validate(json.loads(shaped.output_text), SCHEMA)
    tool = {"type": "function", **WEATHER, "strict": True}
    requested = client.responses.create(
        **{**body, "max_output_tokens": 120}, input="Weather?", tools=[tool], tool_choice="required"
    )
    call = next(item for item in requested.output if item.type == "function_call")
    jsonschema.validate(json.loads(call.arguments), WEATHER["parameters"])
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
    turns = [{"role": "user", "content": "Weather?"}, call.model_dump(exclude_none=True), result]
    assert client.responses.create(**body, input=turns).status in ("completed", "incomplete")


main()
