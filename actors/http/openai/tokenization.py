"""POST /tokenize and /detokenize: text to token ids and back, as in generation requests."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    WrapValidator,
    model_validator,
)

from ....cluster.errors import RequestError
from ..generation.generation import check_model
from ..generation.server_context import ServerContext
from ..protocol.chat_completion import ChatMessage, ChatTemplateOptions
from ..protocol.preparation import chat_of
from ..wire.json_io import MAX_VALUES, JsonRoute, highest, ids_as_they_are, json_response


class TokenizeRequest(ChatTemplateOptions):
    """`prompt`, or `messages` with chat's tools and template options.

    Attributes:
        model: one of /v1/models; the first if absent.
        prompt: a text.
        messages: a conversation.
        add_special_tokens: add those that the tokenizer puts around a text; if absent, as in requests.
        return_token_strs: also return each token's text.
    """

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage] | None, Field(min_length=1, fail_fast=True)] = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("Send either prompt or messages.", param="prompt")
        return self


class DetokenizeRequest(BaseModel):
    """Token ids to decode.

    Attributes:
        model: one of /v1/models; the first if absent.
        tokens: their ids.
    """

    model: str | None = None
    tokens: Annotated[
        list[Annotated[int, Field(ge=0)]], Field(fail_fast=True), WrapValidator(ids_as_they_are)
    ]


def tokenization_routes(server: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Return the token ids of a text or a conversation, as a generation request would have them."""
        check_model(server, body.model)
        prompt = body.prompt
        if prompt is None:
            prompt = chat_of(server.chat, body, body.messages or (), server.engine.tokenizer)
        token_ids = await server.engine.encoder.list_tokens(
            prompt, MAX_VALUES, add_special_tokens=body.add_special_tokens
        )
        strings = None
        if body.return_token_strs:
            strings = await server.engine.encoder.in_thread(server.tokenizer.tokens, token_ids)
        limit = server.engine.info.max_model_len
        return json_response(
            {"count": len(token_ids), "max_model_len": limit, "tokens": token_ids, "token_strs": strings}
        )

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Return the text of token ids."""
        check_model(server, body.model)
        vocabulary = server.engine.info.vocab_size
        if await server.engine.encoder.in_thread(highest, body.tokens) >= vocabulary:
            at = next(at for at, token_id in enumerate(body.tokens) if token_id >= vocabulary)
            raise RequestError(
                f"tokens.{at}: {body.tokens[at]} is no token id; the vocabulary has {vocabulary}.",
                param=f"tokens.{at}",
            )
        text = await server.engine.encoder.in_thread(
            server.tokenizer.decode_unlocked, body.tokens, skip_special_tokens=False
        )
        return json_response({"prompt": text})

    return router
