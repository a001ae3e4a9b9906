"""Histories with earlier answers: each API accepts calls that it sent, complete or malformed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jiter
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.actors.batch.dataset.row_requests import RowSchema, read_request
from manta.actors.chat.chat_formats import CALLS
from manta.actors.chat.chat_model import AnswerParserFactory
from manta.actors.chat.stream_parser import Splitter
from manta.actors.chat.text_stream import AnswerDelta, concatenate
from manta.actors.http.anthropic.event_writer import MessageWriter
from manta.actors.http.anthropic.request import MessagesRequest
from manta.actors.http.generation.chat_adapter import SupportedOptions
from manta.actors.http.protocol.chat_completion import ChatRequest, ChatShape, conversation
from manta.actors.http.responses.event_writer import ResponseWriter
from manta.actors.http.responses.request import ResponsesRequest
from manta.actors.http.responses.tools import ClientTools
from manta.actors.tokenization.chat_template import ChatTemplate
from manta.actors.tokenization.client_messages import parse_arguments
from manta.actors.tokenization.generation_config import GenerationDefaults
from support.recorded_answers import FORMATS, TOOLS, splitter

# How published templates write a call's arguments.
WRITTEN = {
    "json": "{{ f.arguments | tojson }}",  # Llama 3, Mistral
    "json unless text": "{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}"
    "{% endif %}",  # Qwen3, Kimi
    "items": "{% for k, v in f.arguments | items %}<{{ k }}>{{ v | string }}{% endfor %}",
    "items of a mapping": "{% for k, v in f.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}",  # GLM, MiniMax
    "joined": "{{ '```json\\n' + f.arguments + '\\n```' }}",  # DeepSeek-V3
    "sorted or text": "{% if f.arguments is mapping %}{% for k, v in f.arguments | dictsort %}{{ k }}:{{ v }}"
    "{% endfor %}{% elif f.arguments is string %}{{ f.arguments }}{% endif %}",  # Gemma 4
    "mappings alone": "{% if f.arguments is mapping %}{{ f.arguments | tojson }}{% endif %}",
}
TEMPLATES = {
    name: ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content or '' }}|{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{% set f = c.function %}[{{ f.name }} " + written + "]{% endfor %}"
        "{% endfor %}",
        {},
    )
    for name, written in WRITTEN.items()
}
SLIPS = {
    "cut": '{"city": "Os',
    "cut in a key": '{"ci',
    "newline": '{"text": "a\nb"}',
    "NaN": '{"days": NaN}',
    "half a character": '{"text": "\\ud800"}',
    "trailing comma": '{"city": "Oslo",}',
    "single quotes": "{'city': 'Oslo'}",
    "escape": '{"pattern": "\\d+"}',
    "comment": '{"city": "Oslo"} // there',
    "two objects": '{"a": 1}{"b": 2}',
    "list": '["Oslo"]',
    "text": '"Oslo"',
    "number": "5",
    "true": "true",
    "nothing": "",
    "blanks": " \n",
    "markdown": '```json\n{"city": "Oslo"}\n```',
    "deep": '{"a":' * 500 + "1" + "}" * 500,
    "long number": '{"n": ' + "9" * 400 + "}",
    "zero": '{"text": "\x00"}',
    "template": "{{ 1 / 0 }} {% raw %}",
}
RESULT, NEXT = "rain", {"role": "user", "content": "So?"}
HEEDS = SupportedOptions(effort=False, switch=False, thinks=True)
USAGE: dict[str, Any] = {
    **{"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    "prompt_tokens_details": {"cached_tokens": 0},
}


def through_json(value: Any) -> Any:
    """Return JSON as a client holds it: a lone surrogate is replaced."""
    return orjson.loads(orjson.dumps(value))


def by_chat(delta: AnswerDelta, cut: bool) -> list[Any]:
    shape = ChatShape(AnswerParserFactory())
    message = shape.full_choice(0, delta, "length" if cut else "tool_calls")["message"]
    results = [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in delta.calls]
    return [NEXT, through_json(message), *results, NEXT]


def chat(delta: AnswerDelta, cut: bool) -> ChatRequest:
    return ChatRequest.model_validate({"messages": by_chat(delta, cut)})


def batch_row(delta: AnswerDelta, cut: bool) -> ChatRequest:
    line = {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": by_chat(delta, cut)}}
    body = read_request(line, RowSchema(kind="openai"), GenerationDefaults()).body
    assert isinstance(body, ChatRequest)
    return body


def responses(delta: AnswerDelta, cut: bool) -> ChatRequest:
    """Collect a stream's items from its events, as Codex does."""
    writer = ResponseWriter({"id": "resp_1"}, ClientTools([]))
    events = [*writer.feed(delta), *writer.finish("length" if cut else "stop", None, USAGE)]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items == writer.full_body()["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": RESULT}
        for item in items
        if item["type"] == "function_call"
    ]
    request = ResponsesRequest.model_validate({"input": [NEXT, *through_json(items), *results, NEXT]})
    return request.for_chat(request.conversation(), HEEDS)


def messages(delta: AnswerDelta, cut: bool) -> ChatRequest:
    writer = MessageWriter("msg_1", "m", 9)
    events = [*writer.feed(delta), *writer.finish("length" if cut else "stop", None, USAGE)]
    content = through_json(writer.full_body()["content"])
    assert inputs_of(events) == [block["input"] for block in content if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": RESULT}
        for block in content
        if block["type"] == "tool_use"
    ]
    return of_blocks(content, [*results, {"type": "text", "text": "So?"}])


def inputs_of(events: list[Any]) -> list[Any]:
    """The inputs of a stream's calls as Anthropic's SDK builds them, parsing every delta."""
    found: dict[int, Any] = {}
    written: dict[int, bytes] = {}
    for event in map(through_json, events):
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            found[event["index"]], written[event["index"]] = {}, b""
        if event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            written[event["index"]] += event["delta"]["partial_json"].encode()
            found[event["index"]] = jiter.from_json(written[event["index"]], partial_mode=True)
    assert all(isinstance(each, dict) for each in found.values())
    return list(found.values())


def of_blocks(*turns: list[Any]) -> ChatRequest:
    roles = ("assistant", "user")
    talk = [{"role": role, "content": content} for role, content in zip(roles, turns, strict=True)]
    request = MessagesRequest.model_validate({"max_tokens": 9, "messages": [NEXT, *talk]})
    return request.for_chat(request.conversation(), HEEDS)


DOORS: dict[str, Callable[[AnswerDelta, bool], ChatRequest]] = {
    "chat": chat,
    "batch": batch_row,
    "responses": responses,
    "messages": messages,
}


def rendered(request: ChatRequest, template: ChatTemplate) -> str:
    given = conversation(request, request.messages, None)
    return template.render(parse_arguments(given.messages))


def said(name: str, text: str) -> AnswerDelta:
    reader = splitter(name)
    return concatenate([reader.feed(text), reader.finish()])


@st.composite
def answers(draw: st.DrawFn) -> tuple[AnswerDelta, bool]:
    """Return a recorded answer that was truncated or partly replaced; and whether it was truncated."""
    name = draw(st.sampled_from(sorted(FORMATS)))
    text = draw(st.sampled_from([answer["text"] for answer in FORMATS[name]["answers"]]))
    at = draw(st.integers(0, len(text)))
    if draw(st.booleans()):
        return said(name, text[:at]), True
    inserted = draw(
        st.sampled_from(sorted(SLIPS.values())) | st.text(st.characters(codec="utf-8"), max_size=9)
    )
    return said(name, text[:at] + inserted + text[at + draw(st.integers(0, 9)) :]), False


@given(answers())
def test_every_answer_is_accepted_in_a_history_by_each_api_with_each_template(
    answer: tuple[AnswerDelta, bool],
) -> None:
    piece, cut = answer
    for open_door in DOORS.values():
        request = open_door(piece, cut)
        called = [call for message in request.messages for call in message.tool_calls or ()]
        assert [call.function.name for call in called] == [call.name for call in piece.calls]
        for template in TEMPLATES.values():
            assert rendered(request, template).endswith("<user>|So?")


@pytest.mark.parametrize("arguments", SLIPS.values(), ids=SLIPS.keys())
def test_malformed_arguments_are_the_same_in_each_api_and_shown_by_each_template(arguments: str) -> None:
    piece = concatenate([open_call(arguments)])
    requests = [open_door(piece, False) for open_door in DOORS.values()]
    for name, template in TEMPLATES.items():
        first, *others = (rendered(request, template) for request in requests)
        assert others == [first] * 3, name
        written = first.partition("[f ")[2].partition("]<tool>")[0]
        shown = arguments in written or json.dumps(arguments, ensure_ascii=False)[1:-1] in written
        if arguments == SLIPS["half a character"]:  # an object, but for that
            shown = "\ufffd" in written
        assert shown or arguments == SLIPS["long number"], name


def open_call(arguments: str) -> AnswerDelta:
    reader = Splitter(None, CALLS["kimi_k2"], schemas=TOOLS)
    reader.open("f", "call1")
    reader.add(arguments)
    return reader.finish()


def test_object_arguments_reach_templates_as_objects() -> None:
    request = chat(open_call('{"city": "Oslo", "days": [1, null]}'), False)
    wanted = {
        "json": '{"city": "Oslo", "days": [1, null]}',
        "items": "<city>Oslo<days>[1, None]",
        "joined": '```json\n{"city": "Oslo", "days": [1, null]}\n```',
        "sorted or text": "city:Oslodays:[1, None]",
    }
    assert {
        name: rendered(request, TEMPLATES[name]).split("[f ")[1].split("]<tool>")[0] for name in wanted
    } == wanted


@pytest.mark.parametrize("given", [None, {}, "", '{"city": "Os', ["Oslo"], 5])
def test_arguments_of_any_json_type_are_accepted(given: Any) -> None:
    """Clients represent unreadable arguments differently, Claude Code as an empty object."""
    function = {"name": "f", "arguments": given}
    reported = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }
    by_chat = ChatRequest.model_validate({"messages": [NEXT, reported, NEXT]})
    block = {"type": "tool_use", "id": "a", "name": "f", "input": given}
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": given}
    body = ResponsesRequest.model_validate({"input": [NEXT, item, NEXT]})
    by_responses = body.for_chat(body.conversation(), HEEDS)
    by_messages = of_blocks([block], [{"type": "text", "text": "So?"}])
    for template in TEMPLATES.values():
        texts = {rendered(request, template) for request in (by_chat, by_responses, by_messages)}
        assert len(texts) == 1
