"""`response_format` and `structured_outputs` over HTTP: answers keep to them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tokenizers
from manta.cluster.config import EngineConfig
from pydantic import BaseModel
from support.checkpoints.text_pair import LiveServer, make_text_pair, tiny_settings
from support.paths import ROOT
from support.servers.server_probes import http_client

USER = [{"role": "user", "content": "Say something."}]
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
CLOSED = {**SCHEMA, "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}

TAG = {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[xy]{3}"}, "end": "</a>"}


class Answer(BaseModel):
    ok: bool


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def test_the_sdk_parses_an_answer_into_a_model(client: openai.OpenAI) -> None:
    for seed in range(20):  # whitespace may fill an answer
        try:
            parsed = client.chat.completions.parse(
                model="tiny", messages=USER, response_format=Answer, max_tokens=100, seed=seed
            )
        except openai.LengthFinishReasonError:
            continue
        assert isinstance(parsed.choices[0].message.parsed, Answer)
        return
    pytest.fail("no answer came to an end")


def test_a_stream_is_constrained_like_a_complete_answer(client: openai.OpenAI) -> None:
    requested: dict[str, Any] = {
        "model": "tiny",
        "messages": USER,
        "response_format": schema_format(CLOSED, strict=True),
        "max_tokens": 40,
        "seed": 5,
    }
    whole = client.chat.completions.create(**requested).choices[0]
    pieces = [
        choice.delta.content or ""
        for chunk in client.chat.completions.create(**requested, stream=True)
        for choice in chunk.choices
    ]
    assert whole.finish_reason == "stop" and "".join(pieces) == whole.message.content
    assert set(json.loads("".join(pieces))) == {"ok"}


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-z]{2}"}}, "[0-9]{3}-[a-z]{2}"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"structured_outputs": {"grammar": 'start: "(" ("a" | "b") ")"'}}, r"\([ab]\)"),
        ({"structured_outputs": {"json": {"const": [1, 2]}, "disable_any_whitespace": True}}, r"\[1,2\]"),
        ({"structured_outputs": {"json": '{"enum": [7, 8]}'}}, "[78]"),
        ({"structured_outputs": {}, "response_format": schema_format({"enum": [7, 8]})}, "[78]"),
        ({"response_format": {"type": "json_object"}, "max_tokens": 3}, r"\{(.|\n)*"),
        ({"response_format": {"type": "structural_tag", "format": TAG}}, "<a>[xy]{3}</a>"),
        ({"response_format": {"type": "text"}, "max_tokens": 3}, r"(.|\n)*"),
    ],
)
def test_completions_are_constrained_too(http: httpx.Client, fields: dict[str, Any], pattern: str) -> None:
    response = http.post("/v1/completions", json={"prompt": "x", "seed": 2, "max_tokens": 40, **fields})
    assert response.status_code == 200, response.text
    assert re.fullmatch(pattern, response.json()["choices"][0]["text"])


def requests_of_the_guide() -> list[dict[str, Any]]:
    """JSON examples of a guide's code block: one per block, or one per line; and where each ends."""
    text = (ROOT / "docs/how-to/structured-output.md").read_text()
    blocks = re.findall(r"^```json\n(.*?)^```", text, re.M | re.S)
    pieces = [piece for block in blocks for piece in ([block] if block[1] == "\n" else block.splitlines())]
    return [json.loads(piece) for piece in pieces]


@pytest.mark.parametrize("body", requests_of_the_guide())
def test_the_guides_requests_are_accepted(http: httpx.Client, body: dict[str, Any]) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = http.post(path, json={**body, "max_tokens": 4})
    if "thinking_token_budget" in body:  # this pair does not think
        assert response.json()["error"]["param"] == "thinking_token_budget"
    else:
        assert response.status_code == 200, response.text


TAGS = {"properties": {"ok": {"type": "boolean"}, "tags": {"type": "array", "uniqueItems": True}}}
PATH = "schema.properties.tags.uniqueItems"


def test_a_keyword_that_cannot_be_enforced_is_named_in_the_header(http: httpx.Client) -> None:
    chat = {"model": "tiny", "messages": USER, "max_tokens": 3, "response_format": schema_format(TAGS)}
    answer = http.post("/v1/chat/completions", json=chat)
    assert answer.headers["x-ignored-params"] == f"response_format.json_schema.{PATH}"
    text = {"format": {"type": "json_schema", "name": "a", "schema": TAGS}}
    answer = http.post("/v1/responses", json={"input": "x", "max_output_tokens": 3, "text": text})
    assert answer.headers["x-ignored-params"] == f"text.format.{PATH}"
    config = {"format": {"type": "json_schema", "schema": TAGS}}
    body = {"model": "tiny", "messages": USER, "max_tokens": 3, "output_config": config}
    answer = http.post("/v1/messages", json=body)
    assert answer.headers["x-ignored-params"] == f"output_config.format.{PATH}"


def test_strict_refuses_a_keyword_that_cannot_be_enforced(http: httpx.Client) -> None:
    chat = {"model": "tiny", "messages": USER, "response_format": schema_format(TAGS, strict=True)}
    refused = http.post("/v1/chat/completions", json=chat)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == f"response_format.json_schema.{PATH}"


def test_a_decoder_that_llguidance_does_not_know_costs_only_structured_outputs(tmp_path: Path) -> None:
    target, drafter = make_text_pair(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(target / "tokenizer.json"))
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.save(str(target / "tokenizer.json"))
    config = EngineConfig.from_dict(tiny_settings((target, drafter), num_pages=64))
    with LiveServer(config) as server, http_client(server.url) as http:
        body = {"model": str(target), "messages": USER, "max_tokens": 4}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        refused = http.post("/v1/chat/completions", json={**body, "response_format": schema_format(SCHEMA)})
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"].startswith("response_format")
        assert "llguidance does not support" in error["message"]
        assert http.post("/v1/chat/completions", json=body).status_code == 200
