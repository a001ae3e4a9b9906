"""The route and the response format of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastapi import APIRouter, Request, Response

from ...chat.chat_model import AnswerParserFactory
from ...chat.text_stream import AnswerDelta, CallPiece
from ...engine.outputs import CompletionOutput
from ..generation.generation import prepare, respond
from ..generation.generation_task import GenerationTask
from ..generation.server_context import ServerContext
from ..protocol.chat_request import ChatRequest, chat_params, check_tools, conversation, reading_of
from ..protocol.logprobs import chat_logprobs
from ..wire.json_io import JsonObject, JsonRoute

REASONING_FIELDS = ("reasoning", "reasoning_content")  # vLLM's name, and that of most others


class ChatShape:
    """Deltas of calls are OpenAI's: first id and name, then the arguments."""

    prefix = "chatcmpl-"
    full_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, parser_factory: AnswerParserFactory, reasoning_fields: Sequence[str] = REASONING_FIELDS
    ) -> None:
        self.reading = parser_factory
        self._reasoning_fields = reasoning_fields

    def opening(self, index: int) -> JsonObject | None:
        return _choice(index, {"role": "assistant", "content": ""})

    def chunks(self, index: int, piece: AnswerDelta) -> list[JsonObject]:
        delta = dict.fromkeys(self._reasoning_fields, piece.reasoning) if piece.reasoning else {}
        if piece.content:
            delta["content"] = piece.content
        choices = [_choice(index, delta)] if delta else []
        for call in piece.calls:
            choices += [_choice(index, {"tool_calls": [call_delta]}) for call_delta in _call_deltas(call)]
        return choices or [_choice(index, {"content": ""})]

    def end(self, index: int, finish_reason: str) -> JsonObject:
        return _choice(index, {}, finish_reason)

    def full_choice(self, index: int, piece: AnswerDelta, finish_reason: str) -> JsonObject:
        content = piece.content if piece.content or not piece else None
        message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
        if piece.reasoning:
            message |= dict.fromkeys(self._reasoning_fields, piece.reasoning)
        if piece.calls:
            message["tool_calls"] = [_call(call) for call in piece.calls]
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}

    def logprobs(self, completion: CompletionOutput, num_top: int, offset: int) -> JsonObject:
        return chat_logprobs(completion, num_top)


def _choice(index: int, delta: JsonObject, finish_reason: str | None = None) -> JsonObject:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _call_deltas(call: CallPiece) -> list[JsonObject]:
    found: list[JsonObject] = []
    if call.id is not None:
        found.append({"index": call.index, **_call(replace(call, arguments=""))})
    if call.arguments:
        found.append({"index": call.index, "function": {"arguments": call.arguments}})
    return found


def _call(call: CallPiece) -> JsonObject:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def chat_routes(frontend: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, http: Request) -> Response:
        """Answer a conversation, with OpenAI's tools, reasoning and schemas."""
        work, parser_factory = await prepare_chat(frontend, ChatShape.prefix, body, http)
        field = frontend.settings.reasoning_field_name
        shape = ChatShape(parser_factory, REASONING_FIELDS if field is None else (field,))
        return await respond(frontend, shape, work, http)

    return router


async def prepare_chat(
    frontend: ServerContext,
    prefix: str,
    body: ChatRequest,
    http: Request,
    *,
    ignored: Sequence[str] = (),
    resumable: bool = True,
    ends_with_context: bool = False,
) -> tuple[GenerationTask, AnswerParserFactory]:
    """Return the task of a conversation and the parsers of its answers; see `prepare`."""
    check_tools(frontend.chat, body)
    chat = conversation(body, body.messages, frontend.engine.tokenizer)
    prompt = await frontend.engine.encoder.prompt(
        chat, truncate=body.truncation(frontend.engine.info.max_model_len)
    )
    ignored_fields = [
        f"chat_template_kwargs.{name}"
        for name in chat.variables or ()
        if not frontend.tokenizer.template_uses(name)
    ]
    work = prepare(
        frontend,
        prefix,
        body,
        http,
        [prompt],
        default_max_tokens=None,
        ignored=[*ignored, *ignored_fields],
        resumable=resumable,
        ends_with_context=ends_with_context,
    )
    parser_factory = reading_of(frontend.chat, body, prompt.text or "")
    params = chat_params(frontend.chat, body, work.params, prompt.text or "")
    return replace(work, params=params, reading=parser_factory), parser_factory
