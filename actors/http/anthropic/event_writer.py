"""The events of a growing message of /v1/messages, and the whole message, which is their sum.

    message_start, ping
      content_block_start
        content_block_delta (thinking_delta and, last, signature_delta; text_delta; input_json_delta)
      content_block_stop
    message_delta, message_stop

The arguments of a call are sent at its end as one delta, which is always a JSON object: Anthropic's SDKs
parse deltas as they arrive, and raise for invalid JSON. Arguments of tools with `eager_input_streaming` are
sent as the model writes them.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Collection

import orjson

from ....cluster.request.request import FinishReason
from ...tokenization.client_messages import invalid_json, read_object
from ..generation.output_items import Events, Section, SectionWriter
from ..wire.errors import public_error
from ..wire.json_io import JsonObject
from .errors import anthropic_error

PREFIX = "msg_"


class MessageWriter(SectionWriter):
    """`max_tokens`: an answer cut off earlier has filled the context. `eager_tools`: streamed unchecked."""

    def __init__(
        self,
        id: str,
        model: str,
        max_tokens: int,
        metrics: Callable[[], JsonObject | None] = lambda: None,
        eager_tools: Collection[str] = (),
    ) -> None:
        super().__init__()
        self._max_tokens = max_tokens
        self._eager_tools = eager_tools
        self._metrics = metrics
        self._message: JsonObject = {
            "id": id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self, usage: JsonObject) -> Events:
        usage = {**_usage(usage), "output_tokens": 0}
        message = {**self._message, "content": [], "usage": usage}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def opened(self, section: Section) -> Events:
        block = _block(section, {} if section.kind == "call" else "", signature="")
        return [{"type": "content_block_start", "index": section.at, "content_block": block}]

    def extended(self, section: Section, text: str) -> Events:
        if section.kind == "call" and section.name not in self._eager_tools:
            return []
        kind, name = {
            "reasoning": ("thinking_delta", "thinking"),
            "content": ("text_delta", "text"),
            "call": ("input_json_delta", "partial_json"),
        }[section.kind]
        return [_delta(section, {"type": kind, name: text})]

    def closed(self, section: Section, *, is_complete: bool) -> Events:
        text = _object(section.text) if section.kind == "call" else section.text
        signature = _signature(section.text)
        self._message["content"].append(_block(section, text, signature=signature))
        events: Events = [{"type": "content_block_stop", "index": section.at}]
        if section.kind == "reasoning":
            events.insert(0, _delta(section, {"type": "signature_delta", "signature": signature}))
        elif text and section.kind == "call" and section.name not in self._eager_tools:
            json = orjson.dumps(text).decode()
            events.insert(0, _delta(section, {"type": "input_json_delta", "partial_json": json}))
        return events

    def finish(self, reason: FinishReason, stop_reason: int | str | None, usage: JsonObject) -> Events:
        is_complete = reason != "length"
        events = [*self.ensure_content(), *self.close(is_complete=is_complete)]
        stopped = stop_reason if is_complete and isinstance(stop_reason, str) else None
        if not is_complete:
            is_full = usage["completion_tokens"] < self._max_tokens
            stop = "model_context_window_exceeded" if is_full else "max_tokens"
        elif stopped is not None:
            stop = "stop_sequence"
        else:
            stop = "tool_use" if self.has_calls else "end_turn"
        end = {"stop_reason": stop, "stop_sequence": stopped}
        self._message |= {**end, "usage": _usage(usage)}
        delta: JsonObject = {"type": "message_delta", "delta": end, "usage": self._message["usage"]}
        if (metrics := self._metrics()) is not None:
            self._message["metrics"] = delta["metrics"] = metrics
        return [*events, delta, {"type": "message_stop"}]

    def failed(self, error: BaseException) -> Events:
        public = public_error(error)
        return [anthropic_error(public.status, public.message)]

    def full_body(self) -> JsonObject:
        return self._message


def _block(section: Section, text: object, *, signature: str) -> JsonObject:
    if section.kind == "call":
        return {"type": "tool_use", "id": section.call_id, "name": section.name, "input": text}
    if section.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": signature}
    return {"type": "text", "text": text, "citations": None}


def _delta(section: Section, delta: JsonObject) -> JsonObject:
    return {"type": "content_block_delta", "index": section.at, "delta": delta}


def _object(arguments: str) -> JsonObject:
    """Return arguments as an object; invalid ones, as of a cut-off call, are wrapped in one."""
    found = read_object(arguments)
    return invalid_json(arguments) if found is None else found


def _signature(thinking: str) -> str:
    """Return a signature, because clients drop thinking without one. It is never verified."""
    return base64.b64encode(hashlib.blake2b(thinking.encode(), digest_size=24).digest()).decode()


def _usage(usage: JsonObject) -> JsonObject:
    """`input_tokens` excludes cached tokens, which Anthropic counts separately."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": reasoning},
    }
