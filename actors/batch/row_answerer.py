"""Answers one row with an engine. An error of a row becomes its result; the death of an engine is raised."""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from ...cluster.errors import ENDINGS, EngineDeadError, MantaError, brief_name
from ...cluster.request.caller import SERVER, Caller, new_id
from ..chat.chat_model import AnswerParserFactory, ChatModel
from ..engine.async_engine import AsyncEngine
from ..engine.outputs import CompletionOutput, RequestOutput
from ..http.generation.generation import full_choice
from ..http.generation.generation_task import usage_of
from ..http.protocol.chat_completion import ChatRequest, ChatShape, unused_fields
from ..http.protocol.completion import CompletionShape
from ..http.protocol.preparation import prompt_of, with_formats
from ..http.protocol.prompt_echo import PromptParts, without_answer
from ..http.wire.errors import error_body
from ..structured_outputs.grammar_frontend import left_out
from ..tokenization.generation_config import GenerationDefaults
from ..tokenization.tokenizer import Tokenizer
from .dataset.passthrough_columns import passed_through
from .dataset.row_reader import Row, id_of, record_of
from .dataset.row_requests import RowRequest, RowSchema, category_of, read_request
from .row_stats import SPENT

logger = logging.getLogger(__name__)

# `attempts`: how often the row was started, more than once if engines died.
ERROR_TYPE = pa.struct(
    [("type", pa.string()), ("message", pa.string()), ("param", pa.string()), ("attempts", pa.int64())]
)
# One per token of `token_ids`, most likely tokens first. Null if logprobs were not requested.
LOGPROBS_TYPE = pa.list_(
    pa.struct(
        [
            ("logprob", pa.float32()),
            ("rank", pa.int32()),
            ("top_token_ids", pa.list_(pa.int32())),
            ("top_logprobs", pa.list_(pa.float32())),
        ]
    )
)
# Columns that are written; `input` only for failed rows. `response` is the HTTP response body of OpenAI's
# lines, and of rows of which `text` says too little: with calls, reasoning, or several completions.
RESULT_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("text", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("stop_reason", pa.string()),
        ("seed", pa.int64()),
        ("prompt_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
        ("num_steps", pa.int64()),
        ("num_draft_tokens", pa.int64()),
        ("num_accepted_tokens", pa.int64()),
        ("logprobs", LOGPROBS_TYPE),
        ("error", ERROR_TYPE),
        ("input", pa.string()),
        ("response", pa.string()),
    ]
)
# Further columns of a result: the row's number; begin and end (Unix time); and those that only `row_stats.py`
# counts: starts, category, columns without effect, cached prompt tokens, verify steps by accepted drafts, and
# what the engine spent.
WIRE_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        *RESULT_SCHEMA,
        ("attempts", pa.int64()),
        ("begin_s", pa.float64()),
        ("end_s", pa.float64()),
        ("counted_as", pa.string()),
        ("ignored", pa.list_(pa.string())),
        ("cached_prompt_tokens", pa.int64()),
        ("acceptance_histogram", pa.list_(pa.int32())),
        ("engine_spent", pa.struct([(name, pa.float64()) for name in SPENT])),
    ]
)
NO_COLUMNS = pa.schema([])
Result = dict[str, Any]  # a row of `wire_schema`


def wire_schema(columns: pa.Schema) -> pa.Schema:
    return pa.schema([*WIRE_SCHEMA, *columns])


class RowAnswerer:
    """Answers rows concurrently with one engine.

    Args:
        columns: columns passed through from the input to the results.
        background: rows yield to the engine's other requests.
        chat: the model's chat format; by default that of its chat template.
        prefix: request ids are this followed by the row's id, which must be unique. None: numbered.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        row_schema: RowSchema,
        generation: GenerationDefaults,
        model_name: str,
        columns: pa.Schema = NO_COLUMNS,
        *,
        background: bool = False,
        chat: ChatModel | None = None,
        prefix: str | None = None,
        caller: Caller = SERVER,
    ) -> None:
        self._caller = caller
        self._engine = engine
        self._row_schema = row_schema
        self._generation = generation
        self._model_name = model_name
        self._columns = columns
        self._background = background
        self._chat = chat or ChatModel.of(engine.tokenizer)
        self._prefix = prefix
        self._ids = itertools.count()

    async def answer(self, row: Row, *, attempts: int = 1) -> Result:
        """`attempts`: starts of the row, including this one."""
        begin_s = time.time()
        name, category = id_of(row, self._row_schema), None
        try:
            record = record_of(row, self._row_schema)
            category = category_of(record, self._row_schema)
            request = read_request(record, self._row_schema, self._generation, name)
            request, answer, parsers, prompt_parts = await self._complete(name, request)
            result = self._success(request, answer, parsers, prompt_parts)
            result |= passed_through(record, self._columns, _line(row, self._row_schema))
        except EngineDeadError:
            raise
        except MantaError as error:
            result = failure(row, error, self._row_schema, self._columns, attempts=attempts)
        except ENDINGS:
            raise
        except BaseException as error:  # contain the failure: only this row fails
            logger.exception("row %d (%s) failed", row.number, brief_name(name))
            wrong = MantaError(f"{type(error).__name__} in the engine: {error}.")
            result = failure(row, wrong, self._row_schema, self._columns, attempts=attempts)
        return {
            "row": row.number,
            "id": name,
            "attempts": attempts,
            "counted_as": category,
            **result,
            "begin_s": begin_s,
            "end_s": time.time(),
        }

    async def _complete(
        self, name: str, request: RowRequest
    ) -> tuple[RowRequest, RequestOutput, AnswerParserFactory, PromptParts]:
        """Return the request as the engine got it, with its answer and what reads it."""
        body, engine = request.body, self._engine
        given = prompt_of(self._chat, body, engine.tokenizer)
        prompt = await engine.encoder.prompt(given, truncate=body.truncate_prompt_tokens)
        params, parsers = with_formats(self._chat, body, request.params, prompt.text or "")
        request = replace(request, params=params)
        answer = await engine.complete(
            f"{self._prefix}{name}" if self._prefix else f"batch-{next(self._ids)}",
            prompt,
            await engine.encoder.bad_words(params),
            **body.speculative.options,
            background=self._background,
            cache_salt=self._caller.salt(body.cache_salt),
            owner=self._caller.owner,
        )
        if body.echoes_only:
            answer = without_answer(answer)
        return (
            request,
            answer,
            parsers,
            await PromptParts.of(body, prompt, answer.prompt_logprobs_state, engine.tokenizer),
        )

    def _success(
        self,
        request: RowRequest,
        answer: RequestOutput,
        parsers: AnswerParserFactory,
        prompt_parts: PromptParts,
    ) -> Result:
        first, metrics = answer.outputs[0], answer.metrics
        result = {
            "text": (prompt_parts.echo or "") + first.text,
            "token_ids": first.token_ids,
            "finish_reason": first.finish_reason,
            "stop_reason": None if first.stop_reason is None else str(first.stop_reason),
            "seed": request.params.seed,
            "prompt_tokens": len(answer.prompt_token_ids),
            "completion_tokens": _completion_tokens(answer),
            "num_steps": metrics.num_steps,
            "num_draft_tokens": metrics.num_draft_tokens,
            "num_accepted_tokens": metrics.num_accepted_tokens,
            "cached_prompt_tokens": metrics.num_cached_tokens,
            "acceptance_histogram": metrics.acceptance_histogram,
            "logprobs": _logprobs(first, request.params.logprobs),
            "ignored": ignored_fields(request, self._engine.tokenizer),
        }
        response = self._response(request, answer, parsers, prompt_parts)
        # Jobs of version 1 have no such column, and rows of text need none that repeats it.
        is_needed = self._row_schema.version > 1 and _says_more(response, first.text)
        if self._row_schema.kind != "openai" and not is_needed:
            return result
        return result | {"response": json.dumps(response, ensure_ascii=False)}

    def _response(
        self,
        request: RowRequest,
        answer: RequestOutput,
        parsers: AnswerParserFactory,
        prompt_parts: PromptParts,
    ) -> dict[str, Any]:  # Any: JSON
        shape = ChatShape(parsers) if isinstance(request.body, ChatRequest) else CompletionShape()
        id, num_logprobs = new_id(shape.prefix), request.params.logprobs
        choices = [
            prompt_parts.begin(full_choice(shape, id, each.index, each, num_logprobs))
            for each in answer.outputs
        ]
        usage = usage_of(
            len(answer.prompt_token_ids),
            _completion_tokens(answer),
            answer.metrics.num_cached_tokens,
            [parsers.counted(each.token_ids) for each in answer.outputs],
        )
        return {
            "id": id,
            "object": shape.full_object,
            "created": int(time.time()),
            "model": self._model_name,
            "choices": choices,
            "usage": usage,
            **prompt_parts.root_fields(),
        }


def failure(
    row: Row, error: MantaError, row_schema: RowSchema, columns: pa.Schema = NO_COLUMNS, *, attempts: int = 1
) -> Result:
    """Return the result of a row without a response, without `begin_s` and `end_s`."""
    text = row.fault is not None or row_schema.lines
    try:
        passthrough = passed_through(record_of(row, row_schema), columns, _line(row, row_schema))
    except MantaError:
        passthrough = {}
    if row_schema.kind == "openai":
        passthrough["response"] = error_body(error.status, error.message, error.param, error.kind).decode()
    return {
        "row": row.number,
        "id": id_of(row, row_schema),
        "attempts": attempts,
        "error": {"type": error.kind, "message": error.message, "param": error.param, "attempts": attempts},
        "input": row.record["text"] if text else json.dumps(row.record, default=str, ensure_ascii=False),
        **passthrough,
    }


def unanswered(
    row: Row,
    kind: str,
    message: str,
    row_schema: RowSchema,
    columns: pa.Schema = NO_COLUMNS,
    *,
    attempts: int = 0,
) -> Result:
    """Return the complete result of a row that no engine will answer; `kind` is its error's type."""
    result = failure(row, MantaError(message), row_schema, columns, attempts=attempts)
    now_s, error = time.time(), result["error"] | {"type": kind}
    return result | {"error": error, "response": None, "begin_s": now_s, "end_s": now_s}


def _line(row: Row, row_schema: RowSchema) -> str | None:
    return row.record["text"] if row_schema.lines else None


def ignored_fields(request: RowRequest, tokenizer: Tokenizer | None) -> list[str]:
    """Return the row's columns and fields without effect, as HTTP names them in X-Ignored-Params.

    `request`: with the model's formats.
    """
    ignored = [*request.ignored, *left_out(request.params.structured_outputs)]
    body = request.body
    if isinstance(body, ChatRequest) and tokenizer is not None:
        ignored += unused_fields(body, body.messages, tokenizer)
    return list(dict.fromkeys(ignored))


def _says_more(response: Mapping[str, Any], text: str) -> bool:
    """Return whether a response says more than its first completion's text."""
    message = response["choices"][0].get("message")
    return len(response["choices"]) > 1 or (message is not None and message["content"] != text)


def _logprobs(completion: CompletionOutput, num_top: int | None) -> list[dict[str, Any]] | None:
    if completion.logprobs is None or num_top is None:
        return None
    found: list[dict[str, Any]] = []
    for place in completion.logprobs:
        own = next(iter(place.values()))
        top = sorted((logprob.rank, token_id, logprob.logprob) for token_id, logprob in place.items())[
            :num_top
        ]
        found.append(
            {
                "logprob": own.logprob,
                "rank": own.rank,
                "top_token_ids": [token_id for _, token_id, _ in top],
                "top_logprobs": [value for _, _, value in top],
            }
        )
    return found


def _completion_tokens(answer: RequestOutput) -> int:
    return sum(len(completion.token_ids) for completion in answer.outputs)
