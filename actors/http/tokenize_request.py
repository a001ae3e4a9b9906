"""Bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from ...cluster.errors import RequestError
from .chat_request import ChatMessage, ChatTemplateOptions
from .protocol import are_ids


# Any: validators see raw JSON.
def _ids_as_they_are(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """What is in order is not copied one by one; for what is not, pydantic finds the words."""
    if isinstance(value, list) and are_ids(value) and min(value, default=0) >= 0:
        return value
    return validate(value)


class TokenizeRequest(ChatTemplateOptions):
    """`prompt`, or `messages` with chat's tools and template options."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage] | None, Field(min_length=1)] = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("Send either prompt or messages.", param="prompt")
        return self


class DetokenizeRequest(BaseModel):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], WrapValidator(_ids_as_they_are)]
