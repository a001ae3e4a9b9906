"""gpt-oss over real HTTP: efforts, channels, calls in `commentary`, and which marks end an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from manta.actors.http.config.settings import ServerSettings
from manta.cluster.config import EngineConfig
from support.checkpoints.chat_pairs import HARMONY_TOKENS, SETTINGS, TOOLS
from support.checkpoints.text_pair import LiveServer, make_text_pair

# As published, in short: a system message with an effort, and the turns' channels.
TEMPLATE = (
    "{%- macro system() -%}{%- if reasoning_effort is not defined %}"
    '{%- set reasoning_effort = "medium" %}{%- endif %}{{- "Reasoning: " + reasoning_effort }}'
    "{%- endmacro -%}"
    '{{- "<|start|>system<|message|>" + system() + "<|end|>" }}'
    "{%- if tools %}<|start|>developer<|message|>"
    "{%- for tool in tools %}type {{ tool.function.name }};{% endfor %}<|end|>{%- endif %}"
    '{%- for m in messages %}{%- if m.role == "assistant" %}'
    '{%- if m.thinking %}{{- "<|start|>assistant<|channel|>analysis<|message|>" + m.thinking + "<|end|>" }}'
    "{%- endif %}{%- for call in m.tool_calls or [] %}"
    '{{- "<|start|>assistant to=functions." + call.function.name + "<|channel|>commentary json<|message|>" }}'
    '{{- call.function.arguments | tojson }}{{- "<|call|>" }}{%- endfor %}'
    '{%- if m.content %}{{- "<|start|>assistant<|channel|>final<|message|>" + m.content + "<|end|>" }}'
    '{%- endif %}{%- else %}{{- "<|start|>" + m.role + "<|message|>" + m.content + "<|end|>" }}{%- endif %}'
    "{%- endfor %}{%- if add_generation_prompt %}<|start|>assistant{%- endif %}"
)
USER = {"role": "user", "content": "Weather?"}
ARGUMENTS = '{"city": "Paris", "days": 3}'


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    target, drafter = make_text_pair(
        tmp_path_factory.mktemp("gpt_oss"), family="gpt_oss", special_tokens=HARMONY_TOKENS, template=TEMPLATE
    )
    tokens = json.loads((target / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in tokens}
    # As generation_config.json is published: return, end of text and call; not the end of a message.
    ends = [ids[name] for name in ("<|return|>", "<|endoftext|>", "<|call|>")]
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    config = EngineConfig.from_dict(
        {"model": str(target), "speculative_config": {"model": str(drafter), "adaptive": False}, **SETTINGS}
    )
    with (
        LiveServer(config, ServerSettings(served_model_name="tiny")) as server,
        httpx.Client(base_url=server.url, timeout=600) as client,
    ):
        yield client


def prompt_of(http: httpx.Client, **body: Any) -> str:
    tokens = http.post("/tokenize", json=body).raise_for_status().json()["tokens"]
    return http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, "medium"),
        ({"reasoning_effort": "high"}, "high"),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "low"),
    ],
)
def test_an_effort_reaches_the_system_message(http: httpx.Client, fields: Any, effort: str) -> None:
    assert prompt_of(http, messages=[USER], **fields) == (
        f"<|start|>system<|message|>Reasoning: {effort}<|end|>"
        "<|start|>user<|message|>Weather?<|end|><|start|>assistant"
    )


def test_reasoning_before_a_call_is_returned_to_its_channel(http: httpx.Client) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    requested = {"role": "assistant", "reasoning": "Hm.", "tool_calls": [call]}
    assert prompt_of(http, messages=[USER, requested], tools=TOOLS).endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|><|start|>assistant"
    )


def end_of_message(http: httpx.Client) -> int:
    (token,) = http.post("/tokenize", json={"prompt": "<|end|>"}).json()["tokens"]
    return token


def saying(*marks_and_texts: str) -> dict[str, Any]:
    """An answer forced to begin with a text: marks are tokens, and the rest is free."""
    parts = (part if part in HARMONY_TOKENS else json.dumps(part) for part in marks_and_texts)
    return {"grammar": f"start: {' '.join(parts)} /(.|\\n)*/"}


# The grammar applies to the text of the final message, which here begins other messages.
THOUGHT = (
    *("<|start|>", "assistant", "<|channel|>", "analysis", "<|message|>", "Rain?", "<|end|>"),
    *("<|start|>", "assistant"),
)
CALL = (
    *THOUGHT,
    *("<|channel|>", "commentary to=functions.get_weather ", "<|constrain|>", "json", "<|message|>"),
    *(ARGUMENTS, "<|call|>"),
)
ANSWER = (*THOUGHT, "<|channel|>", "final", "<|message|>", "It rains.", "<|return|>")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("said", "content", "calls"), [(CALL, "", 1), (ANSWER, "It rains.", 0)])
def test_an_answer_continues_a_message_and_ends_with_a_call_or_a_return(
    http: httpx.Client, said: tuple[str, ...], content: str, calls: int, stream: bool
) -> None:
    body = {"model": "tiny", "temperature": 0, "messages": [USER], "tools": TOOLS, "stream": stream}
    body |= {
        "max_tokens": 200,
        "structured_outputs": saying(*said),
        "logit_bias": {end_of_message(http): 100},
    }
    response = http.post("/v1/chat/completions", json=body).raise_for_status()
    if stream:
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        message, reason = gathered(events)
    else:
        (choice,) = response.json()["choices"]
        message, reason = choice["message"], choice["finish_reason"]
    assert reason == ("tool_calls" if calls else "stop")
    assert message["reasoning"] == "Rain?" and (message["content"] or "") == content
    requested = [call["function"] for call in message.get("tool_calls") or ()]
    assert [(f["name"], f["arguments"]) for f in requested] == [("get_weather", ARGUMENTS)] * calls


def test_a_required_call_ends_with_the_token_that_ends_an_answer(http: httpx.Client) -> None:
    body = {"model": "tiny", "temperature": 0, "messages": [USER], "tools": TOOLS, "tool_choice": "required"}
    body |= {"max_tokens": 200, "parallel_tool_calls": False, "logit_bias": {end_of_message(http): 100}}
    (choice,) = http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]).keys() in ({"city", "days"}, set())


def gathered(events: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """Return the message of a stream's deltas, with at most one call, and its finish reason."""
    choices = [choice for event in events for choice in event["choices"]]
    deltas = [choice["delta"] for choice in choices]
    message: dict[str, Any] = {
        name: "".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning", "content")
    }
    pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    if pieces:
        arguments = "".join(piece.get("arguments", "") for piece in pieces)
        message["tool_calls"] = [{"function": {"name": pieces[0]["name"], "arguments": arguments}}]
    return message, choices[-1]["finish_reason"]
