"""Bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    WrapValidator,
    model_validator,
)

from ....cluster.errors import RequestError
from ..wire.json_numbers import ids_as_they_are
from .chat_request import ChatMessage, ChatTemplateOptions


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
