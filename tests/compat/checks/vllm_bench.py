"""The requests of `vllm bench serve` and the fields that it reads, written after its source.

Its package contains an engine and needs a GPU's libraries; its client is aiohttp, which runs here.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

import aiohttp
from trial import API, KEY, MODEL, URL, check, main

TOKENS = 24
HEADERS = {"Authorization": f"Bearer {KEY}", "x-request-id": "bench-0"}
COMPLETION = {
    "model": MODEL,
    "prompt": "def add(a, b):",
    "repetition_penalty": 1.0,
    "max_tokens": TOKENS,
    "logprobs": None,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
}
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Write a function."}]}],
    "max_completion_tokens": TOKENS,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
}


async def measure(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> None:
    """One request: chunks with choices are timed, the one without them has the usage."""
    begin_s, times, text, usage = time.perf_counter(), list[float](), "", None
    async with session.post(f"{API}/{path}", json=body, headers=HEADERS) as response:
        assert response.status == 200, await response.text()
        assert response.headers["X-Request-Id"] == "bench-0"
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            data = json.loads(line.removeprefix(b"data: "))
            if choices := data.get("choices"):
                times.append(time.perf_counter() - begin_s)
                text += (choices[0].get("text") or choices[0].get("delta", {}).get("content")) or ""
            elif data.get("usage"):
                usage = data["usage"]
    assert text and times and usage is not None, "never received a valid chunk"
    assert usage["completion_tokens"] == TOKENS and usage["prompt_tokens"] > 0


async def accepted(session: aiohttp.ClientSession) -> tuple[int, dict[int, int]]:
    """Accepted drafts, in total and by position, as the bench sums lines of /metrics."""
    async with session.get(f"{URL}/metrics") as response:
        assert response.status == 200
        lines = (await response.text()).splitlines()
    total, positions = 0, dict[int, int]()
    for line in lines:
        if line.startswith("vllm:spec_decode"):
            value = int(float(line.split()[-1]))
            if "num_accepted_tokens_per_pos" in line:
                found = re.search(r'position="(\d+)"', line)
                assert found is not None, line
                positions[int(found[1])] = positions.get(int(found[1]), 0) + value
            elif "num_accepted_tokens" in line:
                total += value
    return total, positions


@check("openai backend: /v1/completions streamed, with ignore_eos and usage")
async def completions() -> None:
    async with aiohttp.ClientSession() as session:
        await measure(session, "completions", COMPLETION)


@check("openai-chat backend: /v1/chat/completions streamed, with text parts")
async def chat() -> None:
    async with aiohttp.ClientSession() as session:
        await measure(session, "chat/completions", CHAT)


@check("its other requests: the first model, /tokenize, acceptance by position from /metrics")
async def beside() -> None:
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        async with session.get(f"{API}/models") as response:
            assert (await response.json())["data"][0]["id"] == MODEL
        async with session.post(f"{URL}/tokenize", json={"model": MODEL, "prompt": "def add"}) as response:
            answer = await response.json()
            assert answer["count"] == len(answer["tokens"]) > 0
        before, _ = await accepted(session)
        await measure(session, "completions", {**COMPLETION, "temperature": 0})
        after, positions = await accepted(session)
        assert after >= before and after == sum(positions.values())


main()
