"""The fields of a response of /v1/responses besides its output: the request as it was understood."""

from __future__ import annotations

from ..generation.request_run import GenerationRun
from ..protocol.chat_request import ChatRequest
from ..wire.json_io import JsonObject
from .request import ResponsesRequest


def frame(body: ResponsesRequest, chat: ChatRequest, run: GenerationRun) -> JsonObject:
    """Return all fields of the SDKs' response model except those that grow (`event_writer.py`).

    Args:
        chat: the translated body.
    """
    params = run.work.params
    text = body.text.model_dump() if body.text else {"format": {"type": "text"}}
    return {
        "id": run.work.id,
        "object": "response",
        "created_at": run.work.created_s,
        "completed_at": None,
        "model": run.work.model,
        "system_fingerprint": run.frontend.fingerprint,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "tools": body.tools or [],
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": text,
        "reasoning": {"effort": chat.reasoning_effort, "summary": None},
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": 0,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "truncation": "disabled",
        "background": False,
        "store": False,
        "previous_response_id": None,
        "service_tier": "default",
        "user": None,
    }
