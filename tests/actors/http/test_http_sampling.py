"""Sampling fields and log probabilities over real HTTP: they have an effect, or are refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from support.servers.server_probes import Serve, http_client

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 20}
USER = [{"role": "user", "content": "Say something."}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def answer(http: httpx.Client, path: str, **body: Any) -> Any:
    response = http.post(path, json={**GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def streamed(http: httpx.Client, path: str, **body: Any) -> list[Any]:
    response = http.post(path, json={**GREEDY, **body, "stream": True})
    pieces = response.text.split("\n\n")[:-2]
    return [c for p in pieces for c in json.loads(p.removeprefix("data: "))["choices"]]


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 2},
        {"frequency_penalty": 2},
        {"repetition_penalty": 2},
        {"logit_bias": {"70": 100}},
        {"allowed_token_ids": [70, 71, 72]},
    ],
)
def test_a_sampling_field_has_the_same_effect_with_speculation(
    http: httpx.Client, fields: dict[str, Any]
) -> None:
    body = {"prompt": "a a a a", "return_token_ids": True, **fields}
    ruled = answer(http, COMPLETIONS, **body)["token_ids"]
    assert ruled != answer(http, COMPLETIONS, prompt="a a a a", return_token_ids=True)["token_ids"]
    assert ruled == answer(http, COMPLETIONS, **body, speculative=False)["token_ids"]
    assert set(ruled) <= set(fields.get("allowed_token_ids", ruled))
    if "logit_bias" in fields:
        assert set(ruled) == {70}


def test_bad_words_are_never_generated(http: httpx.Client) -> None:
    free = answer(http, COMPLETIONS, prompt="abc")["text"]
    word = next(free[i : i + 2] for i in range(len(free) - 2) if free[i : i + 2].strip().isascii())
    assert word not in answer(http, COMPLETIONS, prompt="abc", bad_words=[word, *word])["text"]


def test_a_chats_log_probabilities_have_openais_form_complete_and_streamed(
    http: httpx.Client, client: openai.OpenAI
) -> None:
    body = {**GREEDY, "messages": USER, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**body).choices[0]
    assert whole.logprobs is not None and whole.logprobs.content is not None
    assert len(whole.logprobs.content) == 20
    for token in whole.logprobs.content:
        assert bytes(token.bytes).decode(errors="replace") == token.token
        assert [top.logprob for top in token.top_logprobs] == sorted(
            (top.logprob for top in token.top_logprobs), reverse=True
        )
        assert len(token.top_logprobs) == 2
        assert (token.top_logprobs[0].token, token.top_logprobs[0].logprob) == (token.token, token.logprob)
    plain = answer(http, CHAT, **{**body, "speculative": False})["logprobs"]
    found = [c["logprobs"] for c in streamed(http, CHAT, **body) if c["logprobs"]]
    assert len(found) > 1
    for tokens in (plain["content"], [token for logprobs in found for token in logprobs["content"]]):
        assert [token["token"] for token in tokens] == [token.token for token in whole.logprobs.content]
        for ours, theirs in zip(tokens, whole.logprobs.content, strict=True):
            assert ours["logprob"] == pytest.approx(theirs.logprob, abs=1e-4)
    without = answer(http, CHAT, messages=USER, logprobs=True)["logprobs"]["content"]
    assert [token["top_logprobs"] for token in without] == [[]] * 20
    assert answer(http, CHAT, messages=USER, logprobs=False)["logprobs"] is None


def test_a_completions_log_probabilities_are_lists_complete_and_streamed(http: httpx.Client) -> None:
    whole = answer(http, COMPLETIONS, prompt="abc", logprobs=2)["logprobs"]
    assert {name: len(values) for name, values in whole.items()} == dict.fromkeys(
        ("text_offset", "token_logprobs", "tokens", "top_logprobs"), 20
    )
    assert whole["text_offset"] == [sum(map(len, whole["tokens"][:i])) for i in range(20)]
    chosen = zip(whole["tokens"], whole["token_logprobs"], whole["top_logprobs"], strict=True)
    assert all(top[token] == value == max(top.values()) for token, value, top in chosen)
    found = [c["logprobs"] for c in streamed(http, COMPLETIONS, prompt="abc", logprobs=2) if c["logprobs"]]
    for name in ("text_offset", "tokens"):
        assert [value for logprobs in found for value in logprobs[name]] == whole[name]


def test_logprobs_0_returns_the_chosen_tokens(http: httpx.Client) -> None:
    found = answer(http, COMPLETIONS, prompt="abc", logprobs=0)["logprobs"]
    assert len(found["token_logprobs"]) == 20
    assert found["top_logprobs"] == [
        {token: value} for token, value in zip(found["tokens"], found["token_logprobs"], strict=True)
    ]
    assert answer(http, COMPLETIONS, prompt="abc")["logprobs"] is None


def test_tokens_after_a_stop_string_have_no_log_probabilities(http: httpx.Client) -> None:
    free = answer(http, COMPLETIONS, prompt="abc")["text"]
    stop = next(c for c in free[3:] if c.isascii())
    body = {"prompt": "abc", "stop": stop, "logprobs": 1, "return_token_ids": True}
    whole = answer(http, COMPLETIONS, **body)
    assert len(whole["logprobs"]["tokens"]) == len(whole["token_ids"]) < 20
    found = streamed(http, COMPLETIONS, **body)
    assert sum(len(c["logprobs"]["tokens"]) for c in found if c["logprobs"]) == len(whole["token_ids"])


ECHO: dict[str, Any] = {"prompt": "abc def", "echo": True}


def test_an_echo_is_the_prompt_and_then_the_answer(http: httpx.Client) -> None:
    """A stream has the echo, too, and each of several prompts its own."""
    plain = answer(http, COMPLETIONS, prompt="abc def")
    assert answer(http, COMPLETIONS, **ECHO)["text"] == "abc def" + plain["text"]
    pieces = streamed(http, COMPLETIONS, prompt=["abc def", "xy"], echo=True, n=2, temperature=1, seed=3)
    whole = http.post(
        COMPLETIONS,
        json={**GREEDY, "prompt": ["abc def", "xy"], "echo": True, "n": 2, "temperature": 1, "seed": 3},
    ).json()["choices"]
    for choice in whole:
        mine = [piece["text"] for piece in pieces if piece["index"] == choice["index"]]
        assert mine[0] == ("abc def", "xy")[choice["index"] // 2]
        assert "".join(mine) == choice["text"]
    ids = http.post("/tokenize", json={"prompt": "abc def"}).json()["tokens"]
    assert answer(http, COMPLETIONS, prompt=ids, echo=True)["text"] == "abc def" + plain["text"]


@pytest.mark.parametrize("max_tokens", [0, 1, 20])
def test_an_echo_has_the_prompts_log_probabilities_for_harnesses(http: httpx.Client, max_tokens: int) -> None:
    body = {**GREEDY, **ECHO, "max_tokens": max_tokens, "logprobs": 1}
    response = http.post(COMPLETIONS, json=body).json()
    (whole,) = response["choices"]
    ids = http.post("/tokenize", json={"prompt": "abc def"}).json()["tokens"]
    assert response["usage"]["completion_tokens"] == max_tokens
    assert (len(whole["text"]) > 7) == (max_tokens > 0) and whole["text"].startswith("abc def")
    assert whole["finish_reason"] == "length"
    logprobs = whole["logprobs"]
    assert all(len(values) == len(ids) + max_tokens for values in logprobs.values())
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    columns = (logprobs[name][1:] for name in ("tokens", "token_logprobs", "top_logprobs"))
    for token, value, top in zip(*columns, strict=True):
        assert top[token] == value <= max(top.values()) <= 0
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert whole["text"][offset:].startswith(token)
    reported = [c["logprobs"] for c in streamed(http, COMPLETIONS, **body) if c["logprobs"]]
    assert {name: [x for each in reported for x in each[name]] for name in logprobs} == logprobs


def test_prompt_logprobs_are_where_vllm_has_them(http: httpx.Client) -> None:
    found = answer(http, COMPLETIONS, prompt="abc def", prompt_logprobs=2)["prompt_logprobs"]
    echoed = answer(http, COMPLETIONS, **ECHO, logprobs=5, prompt_logprobs=2)
    assert echoed["prompt_logprobs"] == found
    first, *rest = found
    assert first is None and len(rest) == len(echoed["logprobs"]["tokens"]) - 21
    for place, value in zip(rest, echoed["logprobs"]["token_logprobs"][1:], strict=False):
        own, *others = place.values()
        assert own["logprob"] == value and 2 <= len(place) <= 3
        assert sorted(each["rank"] for each in (own, *others) if each["rank"] <= 2) == [1, 2]
    body = {**GREEDY, "messages": USER, "prompt_logprobs": 0}
    chat = http.post(CHAT, json=body).json()
    first, *rest = chat["prompt_logprobs"]
    assert first is None and len(rest) == chat["usage"]["prompt_tokens"] - 1
    assert all(len(place) == 1 for place in rest) and "prompt_logprobs" not in chat["choices"][0]
    assert "prompt_logprobs" not in answer(http, COMPLETIONS, prompt="abc")


def test_a_thinking_budget_ends_reasoning(serve: Serve) -> None:
    """The prompt begins reasoning; without a budget it continues."""
    with serve(reasoning_parser="qwen3") as server, http_client(server.url) as http:
        for temperature in (0, 1):
            body = {"temperature": temperature, "seed": 5, "max_tokens": 30}
            free, plain, bound, none = (
                answer(http, COMPLETIONS, prompt="a<think>b", return_token_ids=True, **{**body, **more})
                for more in (
                    {},
                    {"thinking_token_budget": 6, "speculative": False},
                    {"thinking_token_budget": 6},
                    {"thinking_token_budget": 0},
                )
            )
            assert bound == plain and bound["token_ids"][:5] == free["token_ids"][:5]
            assert "</think>" in bound["text"] and "</think>" not in free["text"]
            assert none["text"].startswith("</think>")
            untouched = answer(http, COMPLETIONS, prompt="ab", thinking_token_budget=3, **body)["text"]
            assert untouched == answer(http, COMPLETIONS, prompt="ab", **body)["text"]
