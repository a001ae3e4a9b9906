"""Derives from a `ChatRequest` how its answers are parsed and which tokens may be generated.

Used by the routes for conversations (`actors/http/openai/chat.py`) and for batch rows
(`batch/row_answerer.py`).
"""

from __future__ import annotations

from dataclasses import replace

from ....cluster.errors import RequestError
from ....cluster.request.request import SamplingParams
from ...chat.answer_parser import AnswerParserFactory
from ...chat.chat_model import ChatModel
from .chat_request import ChatRequest
from .tools import ToolOptions


def check_tools(chat: ChatModel, body: ToolOptions) -> None:
    if body.offered:
        chat.check_tools(body.choice)


def reading_of(chat: ChatModel, body: ChatRequest, prompt: str) -> AnswerParserFactory:
    return chat.reading(
        prompt,
        body.schemas,
        parallel=body.parallel_tool_calls is not False,
        with_reasoning=body.include_reasoning,
        continued=body.continued,
    )


def chat_params(chat: ChatModel, body: ChatRequest, params: SamplingParams, prompt: str) -> SamplingParams:
    """Return the sampling parameters with what the model's formats need, and with forced tool calls."""
    params = replace(params, kept_special_token_ids=chat.kept_token_ids)
    asked = params.structured_outputs
    if body.choice == "required":
        if asked is not None:
            raise RequestError(
                f"{asked.field} and a tool_choice that requires calls exclude each other; send one of them.",
                param=asked.field,
            )
        # A named function is called once, as in OpenAI's API.
        several = body.tool_choice == "required" and body.parallel_tool_calls is not False
        forced = chat.forced(prompt, body.schemas, parallel=several)
        return replace(params, structured_outputs=forced)
    strict = {tool.name for tool in body.offered if tool.strict}
    if asked is None and strict:
        return replace(params, structured_outputs=chat.strict(prompt, body.schemas, strict))
    if asked is not None and not asked.after_token_ids and not body.continue_final_message:
        behind = chat.end_of_reasoning(prompt)
        return replace(params, structured_outputs=replace(asked, after_token_ids=behind))
    return params
