"""The server that is measured: what it calls its model, which fields it takes, and what it counts.

Any server with OpenAI's API. Beside that only `/metrics` is asked, for counters of speculation by vLLM's
names, which Manta has too; a server without them is measured all the same.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....cluster.acceptance import mean_acceptance_length
from ....cluster.errors import ConfigError, MantaError, shown_url
from ...client import HEALTH_TIMEOUT_S, Json, ServerClient
from ..load.asks import Ask, is_chat
from ..streams import Stream, StreamClient

# Asked for if the server takes them; what refuses unknown fields is asked without.
_EXTRAS: tuple[Json, ...] = ({"ignore_eos": True}, {})
_COUNTER = re.compile(
    r"^vllm:spec_decode_num_(drafts|accepted_tokens_per_pos|accepted_tokens)_total(\{.*\})? (\S+)$"
)
_POSITION = re.compile(r'position="(\d+)"')
Counters = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Target:
    """A server that answered.

    Attributes:
        extras: fields beyond OpenAI's that it takes.
    """

    url: str
    model: str
    api_key: str | None
    extras: Json

    def client(self, timeout_s: float) -> StreamClient:
        return StreamClient(self.url, timeout_s=timeout_s, api_key=self.api_key)

    def body(self, ask: Ask) -> dict[str, Any]:  # Any: JSON
        """What is sent."""
        prompt = {"messages": list(ask.prompt.messages)} if is_chat(ask.prompt) else {"prompt": ask.prompt}
        return {
            "model": self.model,
            **prompt,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "seed": ask.seed & 0x7FFFFFFF,  # some servers take 32 bits
            "stream_options": {"include_usage": True},
            **self.extras,
        }


def find_server(url: str, model: str | None, api_key: str | None) -> Target:
    """Ask it for a token.

    Args:
        model: its name there; the first that the server lists if absent.

    Raises:
        ConfigError: it cannot be reached, lists no model, or does not answer.
    """
    name = model or _first_model(url, api_key)
    said = Stream(0.0)
    for extras in _EXTRAS:
        target = Target(url, name, api_key, extras)
        said = asyncio.run(_try(target))
        if said.end == "whole":
            return target
    why = dict(said.error) or said.end
    raise ConfigError(
        f"url={shown_url(url)} does not stream a completion as {name!r}: status {said.status}, {why}. Start "
        "it first, or correct --url, --server-model or OPENAI_API_KEY.",
        param="url",
    )


async def _try(target: Target) -> Stream:
    async with target.client(timeout_s=60.0) as client:
        return await client.ask(target.body(Ask(0, "all", "1, 2, 3,", 2, 0.0, 0)))


def _first_model(url: str, api_key: str | None) -> str:
    try:
        with ServerClient(url, HEALTH_TIMEOUT_S, api_key=api_key) as client:
            answer = client.ask("/v1/models")
        return str(answer.body["data"][0]["id"])
    except (LookupError, TypeError):
        raise ConfigError(
            f"url={url} lists no model at /v1/models. Name one with --server-model, or correct --url.",
            param="server_model",
        ) from None
    except MantaError as error:
        raise ConfigError(f"url={error.message} Start it first, or correct --url.", param="url") from None


def read_counters(target: Target) -> Counters:
    """What the server has counted of speculation since its start; empty where it tells nothing."""
    try:
        with ServerClient(target.url, HEALTH_TIMEOUT_S, api_key=target.api_key) as client:
            lines = client.text("/metrics").splitlines()
    except MantaError:
        return {}
    found: dict[str, float] = {}
    for match in filter(None, map(_COUNTER.match, lines)):
        place = _POSITION.search(match[2] or "")
        name = match[1] if place is None else f"position {place[1]}"
        found[name] = found.get(name, 0.0) + float(match[3])  # several replicas add up
    return found


def speculation(before: Counters, after: Counters) -> Json | None:
    """What came between; None where nothing was drafted, or nothing is told."""
    counted = {name: value - before.get(name, 0.0) for name, value in after.items()}
    blocks = counted.get("drafts", 0.0)
    if not blocks:
        return None
    positions = sorted(int(name.split()[1]) for name in counted if name.startswith("position"))
    length = mean_acceptance_length(round(blocks), round(counted.get("accepted_tokens", 0.0)))
    return {
        "blocks": round(blocks),
        "mean_acceptance_length": None if length is None else round(length, 4),
        "accepted": [round(counted[f"position {i}"] / blocks, 4) for i in positions],
    }
