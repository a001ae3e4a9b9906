"""Makes of a request what the engine gets: the prompt, and parameters with what the model's formats add.

All routes, /tokenize, rows of batches and their dry run take this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....cluster.request.request import SamplingParams
from ...chat.chat_model import PLAIN, AnswerParserFactory, ChatModel
from ...tokenization.prompts import Chat, Prompt
from ...tokenization.tokenizer import Tokenizer
from .chat_completion import ChatMessage, ChatRequest, ChatTemplateOptions, NamedTool, conversation
from .completion import CompletionRequest


def chat_of(
    model: ChatModel,
    options: ChatTemplateOptions,
    messages: Sequence[ChatMessage],
    tokenizer: Tokenizer | None,
) -> Chat:
    """Return a conversation. Raises RequestError for tools that the model cannot be offered."""
    if options.available_tools:
        model.check_tools(options.choice)
    return conversation(options, messages, tokenizer)


def prompt_of(model: ChatModel, body: ChatRequest | CompletionRequest, tokenizer: Tokenizer | None) -> Prompt:
    """Return the prompt of a request, the first one of a completion's. Raises RequestError."""
    if isinstance(body, ChatRequest):
        return chat_of(model, body, body.messages, tokenizer)
    return body.prompts()[0]


def with_formats(
    model: ChatModel, body: ChatRequest | CompletionRequest, params: SamplingParams, prompt: str
) -> tuple[SamplingParams, AnswerParserFactory]:
    """Add what the model's formats need, and forced tool calls; also return the parsers of the answers.

    Raises RequestError.

    Args:
        prompt: its text, which says where the answer begins.
    """
    params = model.with_thinking_budget(params, prompt)
    if not isinstance(body, ChatRequest):
        return params, PLAIN
    # A named function is called once, as in OpenAI's API.
    is_named = isinstance(body.tool_choice, NamedTool)
    constraint = model.constraint(
        prompt,
        body.schemas,
        params.structured_outputs,
        required=body.choice == "required",
        strict={tool.name for tool in body.available_tools if tool.strict},
        are_some=len(body.offered_tools) < len(body.tools or ()),
        parallel=not is_named and body.parallel_tool_calls is not False,
        continued=body.continued,
    )
    parsers = model.reading(
        prompt,
        body.schemas,
        parallel=body.parallel_tool_calls is not False,
        with_reasoning=body.include_reasoning,
        continued=body.continued,
    )
    kept = model.kept_token_ids
    return replace(params, kept_special_token_ids=kept, structured_outputs=constraint), parsers
