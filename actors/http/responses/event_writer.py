"""The events of a growing response of /v1/responses, and the whole response, which is their sum.

    created, in_progress
      output_item.added
        content_part.added, output_text.delta ..., output_text.done, content_part.done     (or reasoning_text)
        function_call_arguments.delta ..., function_call_arguments.done
      output_item.done
    completed | incomplete | failed

Calls of tools other than functions (`tools.py`) are sent when they are complete: their item depends on all of
their arguments.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ....cluster.request.request import FinishReason
from ...chat.text_stream import AnswerDelta
from ..generation.output_items import Events, Section, SectionWriter
from ..wire.errors import public_error
from ..wire.json_io import JsonObject
from ..wire.sse import named_event
from .tools import ClientTools

PREFIX = "resp_"
_ITEM_PREFIXES = {
    "reasoning": "rs_",
    "content": "msg_",
    "function": "fc_",
    "custom": "ctc_",
    "local_shell": "lsh_",
    "shell": "sh_",
    "apply_patch": "apc_",
}
_CALL_TEXTS = {"function_call": "arguments", "custom_tool_call": "input"}  # of items that have a text
_PARTS = {"reasoning": "reasoning_text", "content": "output_text", "call": "function_call_arguments"}


class ResponseWriter(SectionWriter):
    """`frame`: the fields that do not grow. `metrics` returns the field next to `usage`."""

    def __init__(
        self,
        frame: JsonObject,
        tools: ClientTools,
        metrics: Callable[[], JsonObject | None] = lambda: None,
    ) -> None:
        super().__init__()
        self._tools = tools
        self._response: JsonObject = {**frame, "status": "in_progress", "output": [], "usage": None}
        self._metrics = metrics
        self._num_events = 0

    def resume(self, delta: AnswerDelta, num_events: int) -> None:
        super().resume(delta, num_events)
        self._num_events = num_events

    def begin(self, usage: JsonObject) -> Events:
        return self._begin()

    def _begin(self) -> Events:
        response = {**self._response, "output": []}
        return [self._event(f"response.{status}", response=response) for status in ("created", "in_progress")]

    def opened(self, section: Section) -> Events:
        if section.kind == "call":
            return [] if self._is_sent_complete(section) else [self._added(section)]
        part = _part(section, "")
        return [
            self._added(section),
            self._event("response.content_part.added", **self._location(section), part=part),
        ]

    def extended(self, section: Section, text: str) -> Events:
        if self._is_sent_complete(section):
            return []
        return [
            self._event(
                f"{_stem(section)}.delta", **self._location(section), **_logprobs(section), delta=text
            )
        ]

    def closed(self, section: Section, *, is_complete: bool) -> Events:
        item = self._item(section, "completed" if is_complete else "incomplete")
        self._response["output"].append(item)
        place, text = self._location(section), section.text
        if section.kind == "call":
            events = self._ended_call(section, item)
        else:
            events = [
                self._event(f"{_stem(section)}.done", **place, **_logprobs(section), text=text),
                self._event("response.content_part.done", **place, part=_part(section, text)),
            ]
        return [*events, self._event("response.output_item.done", output_index=section.at, item=item)]

    def _ended_call(self, section: Section, item: JsonObject) -> Events:
        place, events, field = self._location(section), list[JsonObject](), _CALL_TEXTS.get(item["type"])
        stem = f"response.{item['type']}_{field}"
        if self._is_sent_complete(section):
            added = {**item, "status": "in_progress", **({field: ""} if field else {})}
            events.append(self._event("response.output_item.added", output_index=section.at, item=added))
            if field:
                events.append(self._event(f"{stem}.delta", **place, delta=item[field]))
        if field:
            name = {"name": item["name"]} if item["type"] == "function_call" else {}
            events.append(self._event(f"{stem}.done", **place, **name, **{field: item[field]}))
        return events

    def _is_sent_complete(self, section: Section) -> bool:
        return section.kind == "call" and self._tools.called(section.name).kind != "function"

    def _added(self, section: Section) -> JsonObject:
        item = self._item(section, "in_progress")
        if section.kind != "call":
            item["content"] = []
        return self._event("response.output_item.added", output_index=section.at, item=item)

    def finish(self, reason: FinishReason, stop_reason: int | str | None, usage: JsonObject) -> Events:
        is_complete = reason != "length"
        events = [*self.ensure_content(), *self.close(is_complete=is_complete)]
        status = "completed" if is_complete else "incomplete"
        self._response |= {
            "status": status,
            "incomplete_details": None if is_complete else {"reason": "max_output_tokens"},
            "completed_at": int(time.time()) if is_complete else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {
                    "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {
                    "reasoning_tokens": usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
                },
                "total_tokens": usage["total_tokens"],
            },
        }
        if (metrics := self._metrics()) is not None:
            self._response["metrics"] = metrics
        return [*events, self._event(f"response.{status}", response=self._response)]

    def failed(self, error: BaseException) -> Events:
        public = public_error(error)
        self._response |= {
            "status": "failed",
            "error": {"code": "server_error", "message": public.message},
        }
        events = [] if self._num_events else self._begin()
        return [*events, self._event("response.failed", response=self._response)]

    def full_body(self) -> JsonObject:
        return self._response

    def _event(self, kind: str, **fields: object) -> JsonObject:
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _location(self, section: Section) -> JsonObject:
        place = {"item_id": self._item_id(section), "output_index": section.at}
        return place if section.kind == "call" else {**place, "content_index": 0}

    def _item_id(self, section: Section) -> str:
        kind = self._tools.called(section.name).kind if section.kind == "call" else section.kind
        own = self._response["id"].removeprefix(PREFIX)
        return f"{_ITEM_PREFIXES[kind]}{own}{section.at}"

    def _item(self, section: Section, status: str) -> JsonObject:
        item = {"id": self._item_id(section), "status": status}
        if section.kind == "call":
            return {**item, **self._tools.called(section.name).call_item(section.call_id, section.text)}
        content = [_part(section, section.text)]
        if section.kind == "reasoning":
            return {"type": "reasoning", **item, "summary": [], "content": content, "encrypted_content": None}
        return {"type": "message", **item, "role": "assistant", "content": content}


def _stem(section: Section) -> str:
    return f"response.{_PARTS[section.kind]}"


def _part(section: Section, text: str) -> JsonObject:
    if section.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _logprobs(section: Section) -> JsonObject:
    """SDKs require an empty list."""
    return {"logprobs": []} if section.kind == "content" else {}


def lost_response(error: BaseException | None) -> bytes:
    """Return an error event numbered -1: the gateway does not count the events of all streams."""
    if error is None:
        return b""
    public = public_error(error)
    event = {"type": "error", "code": "server_error", "message": public.message, "param": None}
    return named_event({**event, "sequence_number": -1})
