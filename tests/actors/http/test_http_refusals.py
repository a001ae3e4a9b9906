"""Wrong requests to the shared server: each is refused by its field, with what would be right."""

from __future__ import annotations

import re
from typing import Any

import httpx
import openai
import pytest
from manta.actors.structured_outputs.grammar_frontend import MAX_GRAMMAR_CHARS
from support.servers.server_probes import error_of

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Say something."}]
# What a request needs to be right, apart from the fields of a case.
BASES: dict[str, dict[str, Any]] = {TEXT: {"prompt": "x"}, CHAT: {"messages": USER}}
NOW = {"type": "function", "function": {"name": "now"}}
SENT = "response_format.json_schema.schema"
TOO_LONG = list(range(256)) * 3
NUMBERS = (
    *("max_tokens", "max_completion_tokens", "min_tokens", "top_k", "n", "seed", "priority"),
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("truncate_prompt_tokens", "thinking_token_budget"),
)
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
NEITHER = {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}


def schema(given: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": given}}}


def structured(**given: Any) -> dict[str, Any]:
    return {"structured_outputs": given}


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    # prompts and messages
    (TEXT, {"prompt": None}, "prompt", "prompt"),
    (TEXT, {"prompt": ""}, "prompt", "empty"),
    (TEXT, {"prompt": [1, 99999]}, "prompt", "tokens are 0 to"),
    (TEXT, {"prompt": [1, -1]}, "prompt", "tokens are 0 to"),
    (TEXT, {"prompt": [1, 2**40]}, "prompt", "tokens are 0 to"),
    (TEXT, {"prompt": [1, 2**63]}, "prompt", ""),
    (TEXT, {"prompt": [[1], []]}, "prompt", "empty"),
    (TEXT, {"prompt": TOO_LONG}, "prompt", "512"),
    *((TEXT, {"prompt": given}, "prompt", "") for given in ([], {}, 5, [1, "a"], [[1], ["a"]], [True])),
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0", ""),
    (TEXT, {"prompt": ["x"] * 64, "n": 100}, "n", ""),
    (CHAT, {"messages": []}, "messages", ""),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", ""),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages.0.role", '"assistant"'),
    (CHAT, {"messages": [*USER, *[7] * 9999]}, "messages.1", ""),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}, "messages", "512"),
    (CHAT, {"messages": [{"role": "user", "content": "1 " * 5000}]}, "messages", "512"),
    # tools and templates
    (CHAT, {"tools": [{"type": "function"}]}, "tools.0.function", ""),
    (CHAT, {"tools": [NOW]}, "tools", ""),  # its template knows none
    (CHAT, {"tools": [NOW, NOW]}, "tools.1.function.name", ""),
    (CHAT, {"tool_choice": "required"}, "tool_choice", ""),
    (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template", ""),
    (CHAT, {"documents": [{"text": "x"}]}, "documents", ""),
    (CHAT, {"reasoning_effort": "huge"}, "reasoning_effort", 'Input should be "auto", "none"'),
    *(
        (path, {"messages": USER, "chat_template_kwargs": {name: False}}, f"chat_template_kwargs.{name}", "")
        for name in ("messages", "add_generation_prompt", "continue_final_message")
        for path in (CHAT, "/tokenize")
    ),
    # numbers
    *((TEXT, {name: True}, name, "true or false") for name in NUMBERS),
    (TEXT, {"speculative": {"max_tokens": True}}, "speculative.max_tokens", "true or false"),
    (TEXT, {"speculative": {"tpot_ms": True}}, "speculative.tpot_ms", "true or false"),
    (TEXT, {"stop_token_ids": [5, True]}, "stop_token_ids", "true or false"),
    (TEXT, {"allowed_token_ids": [5, False]}, "allowed_token_ids", "true or false"),
    (TEXT, {"logit_bias": {"5": True}}, "logit_bias", "true or false"),
    (CHAT, {"top_logprobs": True}, "top_logprobs", "true or false"),
    # lengths
    (TEXT, {"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens"),
    (TEXT, {"max_tokens": "many"}, "max_tokens", ""),
    (TEXT, {"max_tokens": 0}, "max_tokens", "at least 1"),
    (TEXT, {"max_tokens": 2**31}, "max_tokens", ""),
    (TEXT, {"min_tokens": 2**31, "max_tokens": 2**31 + 1}, "max_tokens", ""),
    *(
        (TEXT, {"prompt": [60] * 500, name: 13}, name, word)
        for name in ("max_tokens", "max_completion_tokens")
        for word in (f"{name}=13", "500 tokens", "513 tokens", "context of 512", "at most 12")
    ),
    (TEXT, {"truncate_prompt_tokens": 0}, "prompt", "empty"),
    (CHAT, {"thinking_token_budget": -1}, "thinking_token_budget", ""),
    # sampling
    (TEXT, {"temperature": -1}, "temperature", ""),
    (TEXT, {"top_k": 2**31}, "top_k", ""),
    (TEXT, {"top_k": 2**70}, "top_k", ""),
    (TEXT, {"n": 0}, "n", ""),
    (TEXT, {"priority": 3}, "priority", ""),
    (TEXT, {"request_id": "a\nb"}, "request_id", ""),
    (TEXT, {"echo": "perhaps"}, "echo", "echo"),
    (TEXT, {"stream_options": 5}, "stream_options", "Input should be an object"),
    (TEXT, {"stream_options": {"include_usage": True}, "stream": False}, "stream_options", ""),
    (CHAT, {"presence_penalty": 2.1}, "presence_penalty", "from -2 to 2"),
    (CHAT, {"frequency_penalty": -3}, "frequency_penalty", "from -2 to 2"),
    (TEXT, {"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    (TEXT, {"logit_bias": {"5": 101}}, "logit_bias.5", "from -100 to 100"),
    (TEXT, {"logit_bias": {"99999": 1}}, "logit_bias", "tokens are 0 to"),
    (TEXT, {"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    (TEXT, {"allowed_token_ids": [99999]}, "allowed_token_ids", "tokens are 0 to"),
    (TEXT, {"allowed_token_ids": [None] * 9999}, "allowed_token_ids.0", ""),
    (TEXT, {"bad_words": [""]}, "bad_words", 'bad_words=[""] is not allowed'),
    (TEXT, {"bad_words": [""]}, "bad_words", "non-empty"),
    (TEXT, {"bad_words": ["x" * 300] * 999}, "bad_words.0", ""),
    (TEXT, {"stop": ["", "x"]}, "stop", 'stop=["", "x"] is not allowed'),
    (TEXT, {"stop_token_ids": [-1]}, "stop_token_ids", ""),
    (TEXT, {"stop_token_ids": [2**31]}, "stop_token_ids", ""),
    (TEXT, {"stop_token_ids": ["a"] * 9999}, "stop_token_ids.0", ""),
    # log probabilities
    (TEXT, {"logprobs": 21}, "logprobs", "from 0 to 20"),
    (TEXT, {"logprobs": -1}, "logprobs", "from 0 to 20"),
    (TEXT, {"logprobs": True}, "logprobs", "an integer"),
    (CHAT, {"logprobs": 0}, "logprobs", "true or false"),
    (CHAT, {"logprobs": 0}, "logprobs", "logprobs=0 is not allowed"),
    (CHAT, {"logprobs": 5}, "logprobs", "top_logprobs"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs", "logprobs=true"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    (CHAT, {"prompt_logprobs": 21, "stream": False}, "prompt_logprobs", "from 0 to 20"),
    (TEXT, {"prompt_logprobs": True}, "prompt_logprobs", "an integer"),
    (TEXT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not available in streams"),
    # speculation
    (TEXT, {"speculative": {"max_tokens": -1}}, "speculative.max_tokens", ""),
    (TEXT, {"speculative": {"max_tokens": 1.5}}, "speculative.max_tokens", ""),
    (TEXT, {"speculative": {"max_token": 1}}, "speculative.max_token", ""),
    (TEXT, {"speculative": {"drafter": "d"}}, "speculative.drafter", "one drafter"),
    # constraints
    (CHAT, schema({"$ref": "#/$defs/a"}), f"{SENT}.$ref", "nothing"),
    (CHAT, schema({"description": "x" * MAX_GRAMMAR_CHARS}), SENT, "at most"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    (CHAT, {"response_format": {"type": "structural_tag"}}, "response_format.structures", "needed"),
    (CHAT, structured(regex="("), "structured_outputs.regex", "regex"),
    (CHAT, structured(regex="a", choice=["b"]), "structured_outputs", "one of"),
    (
        TEXT,
        {**structured(choice=["a"]), "allowed_token_ids": [70]},
        "structured_outputs.choice",
        "allowed_token_ids",
    ),
    (CHAT, structured(whitespace_pattern="a"), "structured_outputs.whitespace_pattern", ""),
    (CHAT, NEITHER, "structured_outputs", "one of them"),
    (CHAT, {"guided_json": {"type": "object"}}, "guided_json", "structured_outputs.json"),
    (CHAT, {"guided_regex": "a"}, "guided_regex", "structured_outputs.regex"),
    # tokens
    ("/tokenize", {}, "prompt", ""),
    ("/tokenize", {"messages": USER, "tools": [NOW]}, "tools", ""),
    ("/detokenize", {"tokens": [99999]}, "tokens.0", ""),
    ("/detokenize", {"tokens": [1, True]}, "tokens", "true or false"),
    ("/detokenize", {"tokens": [-1] * 9999}, "tokens.0", ""),
    ("/detokenize", {"tokens": [1.5] * 9999}, "tokens.0", ""),
]


def post(http: httpx.Client, path: str, fields: dict[str, Any]) -> httpx.Response:
    return http.post(path, json={**BASES.get(path, {}), **fields})


@pytest.mark.parametrize(("path", "fields", "param", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_wrong_value_is_refused_by_its_field_with_the_right_ones(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    for stream in ({"stream": False}, {"stream": True}) if path in BASES else ({},):
        response = post(http, path, {**stream, **fields})
        error = error_of(response)
        assert (response.status_code, error["param"]) == (400, param), response.text
        assert words in error["message"] and response.headers["x-request-id"]
        for word in ("/tmp", "True", "('", "llguidance"):  # nothing internal, values as JSON
            assert word not in error["message"]
        assert not re.search(r"\d\d more fields", error["message"]), "the first of many is enough"
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "words"),
    [
        ("POST", TEXT, b'{"prompt": "x", "model": "gpt-4"}', 404, "gpt-4"),
        ("POST", TEXT, b'{"prompt": "x", "model": "a\\"b"}', 404, r'model "a\"b" is not served'),
        ("POST", TEXT, b"[1]", 400, ""),
        ("POST", TEXT, b'{"prompt": ', 400, ""),
        ("POST", TEXT, b'{"prompt": "x", "temperature": NaN}', 400, "not valid JSON"),
        ("POST", TEXT, b'{"prompt": "x", "temperature": Infinity}', 400, "not valid JSON"),
        ("POST", TEXT, b"prompt=x", 400, "JSON"),
        ("POST", "/v1/embeddings", b'{"input": "x"}', 404, ""),
        ("GET", TEXT, b"", 405, ""),
    ],
)
def test_a_request_that_is_no_body_or_has_no_route_is_answered_in_openais_form(
    http: httpx.Client, method: str, path: str, content: bytes, status: int, words: str
) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded" if words == "JSON" else "application/json"}
    error = error_of(http.request(method, path, content=content, headers=headers))
    assert error["code"] == status and words in error["message"]


def test_the_openai_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 5e-324},
        {"temperature": 100, "top_p": 1e-300},
        {"min_p": 1.0, "temperature": 1.0, "top_k": 2**31 - 1},
        {"seed": -(2**63)},
        {"n": 128, "max_tokens": 2},
        {"stop_token_ids": list(range(384)), "min_tokens": 2},
        {"stop": ["x" * 10000]},
        {"truncate_prompt_tokens": -1, "prompt": [60] * 2000},
        {"prompt": [60] * 500, "max_tokens": 12},
    ],
    ids=lambda value: str(value)[:40],
)
def test_extreme_values_that_are_allowed_are_served(http: httpx.Client, fields: dict[str, Any]) -> None:
    response = post(http, TEXT, {"max_tokens": 4, **fields})
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] > 0
