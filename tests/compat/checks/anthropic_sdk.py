"""The Anthropic SDK over /v1/messages."""

from __future__ import annotations

import anthropic
import jsonschema
from trial import KEY, MODEL, URL, USER, WEATHER, check, error_of, main

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=120)
# The SDK has no argument for the temperature any more; the API has it.
COLD, WARM = {"temperature": 0}, {"temperature": 1}
BODY = {"model": MODEL, "max_tokens": 32, "messages": USER, "extra_body": COLD}
TOOL = {
    "name": WEATHER["name"],
    "description": WEATHER["description"],
    "input_schema": WEATHER["parameters"],
}


@check("messages.create: text, system as string and as blocks, usage, stop_reason")
def create() -> None:
    answer = client.messages.create(**BODY, system="Be brief.")
    assert answer.content[0].type == "text" and answer.usage.output_tokens <= 32
    assert answer.stop_reason in ("end_turn", "max_tokens")
    blocks = client.messages.create(**BODY, system=[{"type": "text", "text": "Be brief."}])
    assert blocks.content[0].text == answer.content[0].text
    stopped = client.messages.create(**{**BODY, "max_tokens": 64}, stop_sequences=["\n"])
    assert stopped.stop_reason in ("stop_sequence", "end_turn", "max_tokens")


@check("messages.stream equals the complete answer")
def stream() -> None:
    whole = client.messages.create(**BODY)
    with client.messages.stream(**BODY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text and final.usage.output_tokens == whole.usage.output_tokens


@check("tools: any, named, streamed, and the result in the next request")
def tools() -> None:
    body = {**BODY, "max_tokens": 200, "extra_body": WARM, "tools": [TOOL]}
    once = {"disable_parallel_tool_use": True}
    for choice in ({"type": "any", **once}, {"type": "tool", "name": "get_weather", **once}):
        answer = client.messages.create(**body, tool_choice=choice)
        call = next(block for block in answer.content if block.type == "tool_use")
        jsonschema.validate(call.input, WEATHER["parameters"])
        assert answer.stop_reason == "tool_use"
    with client.messages.stream(**body, tool_choice={"type": "any", **once}) as stream:
        assert any(block.type == "tool_use" for block in stream.get_final_message().content)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"}
    turns = [
        *USER,
        {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
        {"role": "user", "content": [result]},
    ]
    last = client.messages.create(**{**body, "messages": turns}, tool_choice={"type": "none"})
    assert last.stop_reason in ("end_turn", "max_tokens")


@check("messages.count_tokens equals the request's usage")
def count() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=USER).input_tokens
    usage = client.messages.create(**BODY).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@check("errors: AuthenticationError, NotFoundError, BadRequestError")
def errors() -> None:
    for other, fields, wanted in (
        (client.with_options(api_key="wrong"), {}, anthropic.AuthenticationError),
        (client, {"model": "nobody"}, anthropic.NotFoundError),
        (client, {"max_tokens": 0}, anthropic.BadRequestError),
    ):
        assert error_of(wanted, other.messages.create, **{**BODY, **fields}).body["type"] == "error"


main()
