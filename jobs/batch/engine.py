"""The engine actor of a batch job: a callable class that Ray Data's `map_batches` runs.

Takes spans of the dataset's files, answers their rows concurrently through one `AsyncEngine`, and gives back
one result per row, whatever happens to it: a bad row becomes an error row. A dead engine ends the job
instead. Started lazily, on the event loop on which Ray Data calls it. Writes nothing: `sink.py` does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import replace
from typing import Any

import pyarrow as pa

from ...actors.checkpoints import resolve_checkpoint
from ...actors.engine import AsyncEngine
from ...actors.http.chat import ChatShape
from ...actors.http.completions import CompletionShape
from ...actors.http.defaults import GenerationDefaults
from ...actors.http.generation import whole_choice
from ...actors.http.protocol import ChatRequest, conversation
from ...actors.outputs import RequestOutput
from ...cluster.config import EngineConfig
from ...cluster.errors import EngineDeadError, MantaError
from .reading import Span, SpanReader
from .rows import Layout, Record, RowRequest, content_id, parse_line, read_request, row_id

ERROR_TYPE = pa.struct([("type", pa.string()), ("message", pa.string()), ("param", pa.string())])
# What is written of a row; `input` is kept for failed rows only.
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
        ("error", ERROR_TYPE),
        ("input", pa.string()),
    ]
)
# What the driver needs besides: the OpenAI response, and when the row was worked on (Unix time).
WIRE_SCHEMA = pa.schema(
    [*RESULT_SCHEMA, ("response", pa.string()), ("begin_s", pa.float64()), ("end_s", pa.float64())]
)


class BatchEngine:
    """One engine of a batch job.

    Args:
        config: of the engine; admission limits do not apply to batch rows.
        layout: how records are read.
        model_name: reported in OpenAI responses.
    """

    def __init__(self, config: EngineConfig, layout: Layout, model_name: str) -> None:
        self._config = replace(config, max_num_queued_reqs=None)
        self._layout = layout
        self._model_name = model_name
        self._reader = SpanReader(lines=layout.lines)
        self._engine: AsyncEngine | None = None
        self._generation = GenerationDefaults()
        self._starting = asyncio.Lock()
        self._ids = itertools.count()

    async def __call__(self, batch: pa.Table) -> pa.Table:
        engine = await self._started()
        spans = [Span(**span) for span in batch.to_pylist()]
        rows = await asyncio.to_thread(self._reader.read, spans)
        results = await asyncio.gather(*(self._result(engine, row) for row in rows))
        return pa.Table.from_pylist(results, schema=WIRE_SCHEMA)

    async def _started(self) -> AsyncEngine:
        async with self._starting:
            if self._engine is None:
                self._generation = GenerationDefaults.load(
                    resolve_checkpoint(self._config.model, field="model")
                )
                engine = AsyncEngine(self._config)
                await engine.start()
                self._engine = engine
        return self._engine

    async def _result(self, engine: AsyncEngine, raw: Record) -> dict[str, Any]:
        """The result of one row: its answer, or its error and input."""
        begin_s = time.time()
        row: dict[str, Any] = {}
        try:
            record = self._record(raw, row)
            request = read_request(record, self._layout, self._generation)
            answer = await self._answer(engine, request)
            row |= self._success(row["id"], request, answer)
        except EngineDeadError:
            raise  # says nothing about the row; the job must not go on with a dead engine
        except MantaError as error:
            row |= self._failure(error, raw)
        return row | {"begin_s": begin_s, "end_s": time.time()}

    def _record(self, raw: Record, row: dict[str, Any]) -> Record:
        """The row's record; its id goes into `row` first, so that a bad row keeps it."""
        if self._layout.lines:
            row["id"] = content_id(raw["text"])
            raw = parse_line(raw["text"])
        row["id"] = row_id(raw, self._layout)
        return raw

    async def _answer(self, engine: AsyncEngine, request: RowRequest) -> RequestOutput:
        body = request.body
        given = conversation(body, engine.tokenizer) if isinstance(body, ChatRequest) else body.prompts()[0]
        return await engine.complete(
            f"batch-{next(self._ids)}",
            await engine.encoder.prompt(given, truncate=body.truncate_prompt_tokens),
            request.params,
            speculate=body.speculative.enabled,
        )

    def _success(self, row: str, request: RowRequest, answer: RequestOutput) -> dict[str, Any]:
        first, metrics = answer.outputs[0], answer.metrics
        result = {
            "text": first.text,
            "token_ids": first.token_ids,
            "finish_reason": first.finish_reason,
            "stop_reason": None if first.stop_reason is None else str(first.stop_reason),
            "seed": request.params.seed,
            "prompt_tokens": len(answer.prompt_token_ids),
            "completion_tokens": _completion_tokens(answer),
            "num_steps": metrics.num_steps,
            "num_draft_tokens": metrics.num_draft_tokens,
            "num_accepted_tokens": metrics.num_accepted_tokens,
        }
        if self._layout.kind == "openai":
            result["response"] = json.dumps(self._response(row, request, answer), ensure_ascii=False)
        return result

    def _response(self, row: str, request: RowRequest, answer: RequestOutput) -> dict[str, Any]:
        """The body that the HTTP endpoint would have given."""
        shape = ChatShape() if isinstance(request.body, ChatRequest) else CompletionShape()
        choices = [whole_choice(shape, completion.index, completion) for completion in answer.outputs]
        prompt_tokens, completion_tokens = len(answer.prompt_token_ids), _completion_tokens(answer)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        return {
            "id": shape.prefix + content_id(row).removeprefix("row-"),
            "object": shape.whole_object,
            "created": int(time.time()),
            "model": self._model_name,
            "choices": choices,
            "usage": usage,
        }

    def _failure(self, error: MantaError, raw: Record) -> dict[str, Any]:
        kept = raw["text"] if self._layout.lines else json.dumps(raw, default=str, ensure_ascii=False)
        return {
            "error": {"type": error.kind, "message": error.message, "param": error.param},
            "input": kept,
        }


def _completion_tokens(answer: RequestOutput) -> int:
    return sum(len(completion.token_ids) for completion in answer.outputs)
