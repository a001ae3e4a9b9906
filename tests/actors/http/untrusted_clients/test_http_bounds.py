"""Work for a request outside the engine: limits with clear errors, and slices that let others run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import orjson
import pytest
from manta.actors.engine.outputs import CompletionOutput, OutputLogprobs
from manta.actors.http.config.settings import ServerSettings
from manta.actors.http.generation import generation
from manta.actors.http.generation import request_run as running
from manta.actors.http.generation.large_responses import PIECE_BYTES, PLACES_AT_ONCE, StreamedChoices
from manta.actors.http.openai import routes
from manta.actors.http.protocol.completion import CompletionShape
from manta.actors.http.wire import json_io as numbers
from manta.actors.structured_outputs.json_schema import EnforcedSchema, SchemaReader
from manta.actors.system import event_loop as turns
from manta.actors.tokenization import prompts as encoding
from manta.actors.tokenization.prompts import encode_bad_words
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.cluster.config import EngineConfig
from manta.cluster.request.logprobs import TokenLogprobs
from manta.cluster.request.request import SamplingParams
from pydantic import TypeAdapter
from support.checkpoints.text_pair import LiveServer
from support.servers.probed_server import make_executor
from support.servers.server_probes import error_of
from trials.abuse.abuse import MODEL

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MANY = {
    "prompt": ["x", "y", "z"],
    "n": 3,
    "max_tokens": 12,
    "logprobs": 2,
    "seed": 5,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """A server of the pair that ships, which computes nothing."""
    with LiveServer(EngineConfig(model=str(MODEL)), ServerSettings(), make_executor) as server:
        yield server


def test_no_request_builds_a_validator(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """This test is the first to use its server."""
    made: list[object] = []
    init = TypeAdapter.__init__

    def count(self: TypeAdapter[Any], *arguments: Any, **named: Any) -> None:
        made.append(arguments)
        init(self, *arguments, **named)

    monkeypatch.setattr(TypeAdapter, "__init__", count)
    assert http.get("/v1/models").status_code == 200
    assert http.post("/detokenize", json={"tokens": [7]}).status_code == 200
    assert http.post(TEXT, json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert made == []


def test_limit_errors_name_the_field_the_number_and_the_remedy(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "MAX_TOKENS_TOGETHER", 10)
    monkeypatch.setattr(encoding, "MAX_CHAT_CHARS", 100)
    talk = {"messages": [{"role": "user", "content": "x" * 60}] * 2}
    many = {"prompt": "x", "logit_bias": {f"a{i}": 1 for i in range(9000)}}
    for path, body, param, words in (
        (TEXT, {"prompt": [[7] * 6] * 9}, "prompt", ("first 2 of 9 prompts have 12 tokens", "may have 10.")),
        (CHAT, talk, "messages", ("120 characters; at most 100",)),
        (TEXT, many, "logit_bias", ("9000 tokens; at most 8192",)),
    ):
        error = error_of(http.post(path, json=body))
        assert (error["code"], error["param"]) == (400, param)
        assert all(word in error["message"] for word in words), error["message"]


def test_a_long_body_is_validated_in_a_thread_and_in_slices(
    server: LiveServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, longest, cut = set[int](), 0, numbers._slices

    def slices(values: list[Any]) -> Iterator[list[Any]]:
        nonlocal longest
        threads.add(threading.get_ident())
        for each in cut(values):
            longest = max(longest, len(each))
            yield each

    monkeypatch.setattr(numbers, "_slices", slices)
    assert http.post("/detokenize", json={"tokens": [7] * 300_000}).status_code == 200
    assert http.post(TEXT, json={"prompt": [[7] * 1000] * 300, "max_tokens": 1}).status_code == 200
    assert threads and server._thread.ident not in threads
    assert 1000 <= longest <= numbers.SLICE_VALUES


def test_a_long_conversation_is_read_in_threads(
    server: LiveServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[int | None]()

    def recorded(call: Callable[..., Any]) -> Callable[..., Any]:
        def recording(*arguments: Any) -> Any:
            threads.append(threading.get_ident())
            return call(*arguments)

        return recording

    for module, name in (
        (generation, "_ignored_fields"),
        (routes, "prompt_of"),
        (routes, "unused_fields"),
    ):
        monkeypatch.setattr(module, name, recorded(getattr(module, name)))
    for mood, is_aside in (("good", False), ("good" * numbers.SHORT_BODY_BYTES, True)):
        talk = [{"role": "user", "content": "x", "mood": mood}]
        answer = http.post(CHAT, json={"messages": talk, "max_tokens": 1})
        assert "mood" in answer.headers["x-ignored-params"], answer.text
        assert len(threads) == 3 and (server._thread.ident not in threads) == is_aside
        threads.clear()


def test_a_schema_is_read_in_threads(
    server: LiveServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, read = set[int](), SchemaReader.read

    def recording(self: SchemaReader, schema: Any, field: str) -> EnforcedSchema:
        threads.add(threading.get_ident())
        return read(self, schema, field)

    monkeypatch.setattr(SchemaReader, "read", recording)
    schema = {"type": "integer", "minimum": 0, "maximum": 9}
    answer = http.post(TEXT, json={"prompt": "x", "structured_outputs": {"json": schema}})
    assert error_of(answer)["param"] == "structured_outputs.json", "this engine has no grammars"
    assert threads and server._thread.ident not in threads


def test_answers_are_the_same_in_any_number_of_slices(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = http.post(TEXT, json=MANY).json()
    assert len(whole["choices"]) == 9
    monkeypatch.setattr(turns, "TIME_SLICE_S", 0.0)
    monkeypatch.setattr(running, "BEGIN_AT_ONCE", 1)
    again = http.post(TEXT, json=MANY).json()
    assert again["choices"] == whole["choices"]
    with http.stream("POST", TEXT, json={**MANY, "stream": True}) as stream:
        events = [orjson.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    for choice in whole["choices"]:
        pieces = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert [t for piece in pieces for t in piece.get("token_ids", [])] == choice["token_ids"]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]


def test_a_thousand_prompts_start_in_several_slices() -> None:
    turn, start_turns = 0, list[int]()

    async def count_loop_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def begin() -> Any:
        start_turns.append(turn)

    async def main() -> None:
        counting = asyncio.create_task(count_loop_turns())
        await running.gather_outputs(begin() for _ in range(1000))
        counting.cancel()

    asyncio.run(main())
    assert len(start_turns) == 1000 and max(map(start_turns.count, set(start_turns))) <= running.BEGIN_AT_ONCE


async def body_and_other_turns(completions: list[CompletionOutput]) -> tuple[bytes, int]:
    """Return a response's body, and how often other tasks ran meanwhile."""
    others, sent, at_work = 0, list[bytes](), True

    async def count() -> None:
        nonlocal others
        while at_work:
            others += 1
            await asyncio.sleep(0)

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    counting = asyncio.create_task(count())
    await asyncio.sleep(0)
    body, shape = StreamedChoices(), CompletionShape()
    for completion in completions:
        logprobs = await body.logprobs(shape, completion, 2)
        await body.add({"text": completion.text, "logprobs": logprobs})
    await body.response({"id": "a"}, {"usage": None}, {})({}, None, send)  # type: ignore[arg-type]
    at_work = False
    await counting
    assert max(map(len, sent)) <= 2 * PIECE_BYTES
    return b"".join(sent), others


def test_a_long_answer_written_in_slices_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TIME_SLICE_S", 0.0)
    tokenizer, count = Tokenizer.load(MODEL), 3 * PLACES_AT_ONCE + 5
    token_ids = [i % 300 for i in range(count)]
    found = [TokenLogprobs(-1.5, 3, (7, 8), (-0.5, -1.0)) for _ in range(count)]
    places = OutputLogprobs(tokenizer, found, token_ids)
    completion = CompletionOutput(0, "é" * PIECE_BYTES, token_ids, "stop", None, places)
    written, others = asyncio.run(body_and_other_turns([completion] * 3))
    choice = {"text": completion.text, "logprobs": CompletionShape().logprobs(completion, 2, 0)}
    assert orjson.loads(written) == {"id": "a", "choices": [choice] * 3, "usage": None}
    assert others > 3 * 2 * 4  # for slices of positions built, and written


def test_bad_words_are_encoded_once_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.load(MODEL)
    encode, threads = tokenizer.encode, set[str]()

    def recording(text: str, **options: Any) -> list[int]:
        threads.add(threading.current_thread().name)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", recording)
    encoder = encoding.AsyncPromptEncoder(tokenizer, 100)
    params = SamplingParams(bad_words=["def", "class"], bad_words_token_ids=[(5,)], seed=1)
    encoded = asyncio.run(encoder.bad_words(params))
    assert encoded.bad_words == () and encoded.bad_words_token_ids[0] == (5,)
    assert tuple(encode(" class", add_special_tokens=False)) in encoded.bad_words_token_ids
    assert threads and all(name.startswith("manta-encode") for name in threads)
    threads.clear()
    assert encode_bad_words(encoded, tokenizer) is encoded and not threads
    encoder.close()


def test_long_lists_are_not_checked_again_for_each_completion() -> None:
    params = SamplingParams(allowed_token_ids=range(50_000), n=3)
    seeded = params.with_seed()
    children = [seeded.child(index) for index in range(3)]
    assert all(each.allowed_token_ids is params.allowed_token_ids for each in (seeded, *children))
    assert params.seed is None and params.n == 3 and {each.n for each in children} == {1}
    assert len({each.seed for each in children}) == 3 and children[0].seed == seeded.seed
