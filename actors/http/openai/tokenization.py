"""POST /tokenize and /detokenize: text to token ids and back, as in generation requests."""

from __future__ import annotations

from fastapi import APIRouter, Response

from ....cluster.errors import RequestError
from ..generation.server_context import ServerContext
from ..protocol.chat_params import check_tools
from ..protocol.chat_request import conversation
from ..protocol.tokenize_request import DetokenizeRequest, TokenizeRequest
from ..wire.json_io import MAX_VALUES, JsonRoute, json_response
from ..wire.json_numbers import highest


def tokenization_routes(frontend: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Return the token ids of a text or a conversation, as a generation request would have them."""
        frontend.check_model(body.model)
        prompt = body.prompt
        if prompt is None:
            check_tools(frontend.chat, body)
            prompt = conversation(body, body.messages or (), frontend.engine.tokenizer)
        token_ids = await frontend.engine.encoder.list_tokens(
            prompt, MAX_VALUES, add_special_tokens=body.add_special_tokens
        )
        strings = None
        if body.return_token_strs:
            strings = await frontend.engine.encoder.in_thread(frontend.tokenizer.tokens, token_ids)
        limit = frontend.engine.info.max_model_len
        return json_response(
            {"count": len(token_ids), "max_model_len": limit, "tokens": token_ids, "token_strs": strings}
        )

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Return the text of token ids."""
        frontend.check_model(body.model)
        vocabulary = frontend.engine.info.vocab_size
        if await frontend.engine.encoder.in_thread(highest, body.tokens) >= vocabulary:
            at = next(at for at, token_id in enumerate(body.tokens) if token_id >= vocabulary)
            raise RequestError(
                f"tokens.{at}: {body.tokens[at]} is no token id; the vocabulary has {vocabulary}.",
                param=f"tokens.{at}",
            )
        text = await frontend.engine.encoder.in_thread(
            frontend.tokenizer.decode_unlocked, body.tokens, skip_special_tokens=False
        )
        return json_response({"prompt": text})

    return router
