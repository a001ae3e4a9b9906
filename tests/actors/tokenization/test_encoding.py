"""Encoding of long texts: refusals by length, no blocking of the event loop, the same ids."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from manta.actors.engine.async_engine import AsyncEngine
from manta.actors.tokenization.prompts import LONG_TEXT_CHARS, MAX_LONG_TEXTS, AsyncPromptEncoder
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.cluster.config import EngineConfig
from manta.cluster.errors import RequestError
from manta.cluster.request.request import SamplingParams

CODE = Path(__file__).read_text(encoding="utf-8")


@pytest.fixture
def encoder(tokenizer: Tokenizer) -> Iterator[AsyncPromptEncoder]:
    encoder = AsyncPromptEncoder(tokenizer, max_model_len=2_000_000)
    yield encoder
    encoder.close()


class UnreadOutputs(Tokenizer):
    """Fails if a text is encoded that must be refused by its length."""

    def encode_unlocked(self, text: str, *, add_special_tokens: bool = True) -> tokenizers.Encoding:
        raise AssertionError("the text was encoded")


class Waiting(Tokenizer):
    """Encodes only after the event loop has run meanwhile."""

    turns: threading.Semaphore
    running: int = 0
    most: int = 0

    def encode_unlocked(self, text: str, *, add_special_tokens: bool = True) -> tokenizers.Encoding:
        self.running += 1
        self.most = max(self.most, self.running)
        assert self.turns.acquire(timeout=600), "the event loop stood still"
        self.running -= 1
        return super().encode_unlocked(text, add_special_tokens=add_special_tokens)


async def count_loop_turns(done: asyncio.Event) -> int:
    turns = 0
    while not done.is_set():
        turns += 1
        await asyncio.sleep(0.001)
    return turns


def test_the_ids_equal_a_plain_encoding(tokenizer: Tokenizer, encoder: AsyncPromptEncoder) -> None:
    for text in ("", "x", CODE[: LONG_TEXT_CHARS // 2], CODE * 20, "e\u0301\u2603 " * 4000):
        wanted = tokenizer.encode(text)
        assert asyncio.run(encoder.text(text)) == wanted
        assert asyncio.run(encoder.list_tokens(text, 2_000_000)) == wanted
        for count in (0, 1, 50, 10**9):
            ended = asyncio.run(encoder.text(text, keep_last=count))
            assert ended == (wanted[-count:] if count else [])


def test_a_text_that_cannot_fit_is_refused_unread_with_the_engines_message(folder: Path) -> None:
    encoder = AsyncPromptEncoder(UnreadOutputs.load(folder), max_model_len=100)
    for what in ("prompt", "messages"):
        with pytest.raises(
            RequestError, match=r"more than 99 tokens.*must fit max_model_len=100\."
        ) as caught:
            asyncio.run(encoder.text("x " * 10_000_000, param=what))
        assert caught.value.param == what
    with pytest.raises(RequestError, match="has 100 tokens"):
        asyncio.run(encoder.prompt([1] * 100))
    with pytest.raises(RequestError, match="at most 1000 are listed"):
        asyncio.run(encoder.list_tokens("x" * 10_000_000, 1000))


def test_a_text_that_may_fit_is_encoded_and_refused_by_its_tokens(tokenizer: Tokenizer) -> None:
    count = len(tokenizer.encode("word " * 100))
    with pytest.raises(RequestError, match=rf"has {count} tokens.*max_model_len={count}\."):
        asyncio.run(AsyncPromptEncoder(tokenizer, count).text("word " * 100))
    assert len(asyncio.run(AsyncPromptEncoder(tokenizer, count + 1).text("word " * 100))) == count


def test_only_the_end_of_an_overlong_truncated_text_is_encoded(folder: Path) -> None:
    read: list[int] = []

    class Recording(Tokenizer):
        def encode_unlocked(self, text: str, *, add_special_tokens: bool = True) -> tokenizers.Encoding:
            read.append(len(text))
            return super().encode_unlocked(text, add_special_tokens=add_special_tokens)

    tokenizer, text = Recording.load(folder), CODE * 1000
    found = asyncio.run(AsyncPromptEncoder(tokenizer, max_model_len=100).text(text, keep_last=99))
    assert found == tokenizer.encode(text[-50_000:])[-99:]
    assert read[0] < 50_000 < len(text)


def test_the_event_loop_runs_while_long_texts_are_encoded(encoder: AsyncPromptEncoder) -> None:
    async def run() -> tuple[int, int]:
        done = asyncio.Event()
        counting = asyncio.create_task(count_loop_turns(done))
        count = len(await encoder.text(CODE * 300))
        done.set()
        return await counting, count

    turns, count = asyncio.run(run())
    assert count > 500_000
    assert turns > 10  # with Python's lock held it is one or two, on a machine of any speed


def test_few_long_texts_are_encoded_at_a_time_also_after_disconnects(folder: Path) -> None:
    tokenizer = Waiting.load(folder)
    assert isinstance(tokenizer, Waiting)
    tokenizer.turns = threading.Semaphore(0)
    encoder = AsyncPromptEncoder(tokenizer, max_model_len=1_000_000)

    async def run() -> None:
        tasks = [asyncio.create_task(encoder.text(CODE * 3)) for _ in range(6)]
        while tokenizer.running < MAX_LONG_TEXTS:
            await asyncio.sleep(0.001)
        for task in tasks[:MAX_LONG_TEXTS]:
            task.cancel()
        await asyncio.sleep(0.05)  # time to go wrong; on a slower machine less is tested
        tokenizer.turns.release(len(tasks))
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(f, asyncio.CancelledError) for f in found] == [True] * 2 + [False] * 4

    asyncio.run(run())
    assert tokenizer.most == MAX_LONG_TEXTS


def test_the_engine_encodes_off_its_loop_and_admits_an_id_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Waiting.turns = threading.Semaphore(0)
    monkeypatch.setattr("manta.actors.tokenization.prompts.Tokenizer", Waiting)
    small = {"dtype": "float32", "max_num_seqs": 2, "num_pages": 64, "num_threads": 1}
    engine = AsyncEngine(EngineConfig.from_dict({"model": str(folder), **small}))
    monkeypatch.setattr("manta.actors.tokenization.prompts.LONG_TEXT_CHARS", 10)
    text = "def f(x): return x"

    params = SamplingParams(max_tokens=32, ignore_eos=True)

    async def read(prompt: Any, request_id: str) -> int:
        output = await engine.complete(request_id, await engine.encoder.prompt(prompt), params)
        return len(output.outputs[0].token_ids)

    async def run() -> list[Any]:
        await engine.start()
        twice = [asyncio.create_task(read(text, "same")) for _ in range(2)]
        assert await read([5, 6], "other") == 32  # while both wait in their threads
        Waiting.turns.release(2)
        return await asyncio.gather(*twice, return_exceptions=True)

    try:
        found = asyncio.run(run())
    finally:
        engine.close()
    (refused,) = [error for error in found if isinstance(error, RequestError)]
    assert refused.param == "request_id" and 32 in found
    with pytest.raises(RequestError, match="more than 511 tokens"):
        asyncio.run(AsyncPromptEncoder(engine.tokenizer, 512).prompt(" x" * 100_000))
