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
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from ...actors.checkpoints import resolve_checkpoint
from ...actors.engine import AsyncEngine
from ...actors.http.chat import ChatShape
from ...actors.http.completions import CompletionShape
from ...actors.http.defaults import GenerationDefaults
from ...actors.http.protocol import ChatRequest
from ...actors.outputs import RequestMetrics, RequestOutput
from ...actors.prompts import Prompt
from ...cluster.config import EngineConfig
from ...cluster.errors import EngineDeadError, MantaError, RequestError
from .reading import Span, SpanReader
from .rows import Layout, Record, RowRequest, chat_variables, content_id, parse_line, read_request, row_id

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


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class _Answer:
    """The whole of a request's outputs."""

    choices: list[_Choice]
    prompt_tokens: int = 0
    metrics: RequestMetrics | None = None

    def feed(self, output: RequestOutput) -> None:
        self.prompt_tokens, self.metrics = len(output.prompt_token_ids), output.metrics
        for piece in output.outputs:
            choice = self.choices[piece.index]
            choice.text.append(piece.text)
            choice.token_ids.extend(piece.token_ids)
            choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)


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

    async def _answer(self, engine: AsyncEngine, request: RowRequest) -> _Answer:
        answer = _Answer([_Choice() for _ in range(request.params.n)])
        prompt = await _prompt(engine, request)
        async with aclosing(self._outputs(engine, request, prompt)) as outputs:
            async for output in outputs:
                answer.feed(output)
        return answer

    def _outputs(self, engine: AsyncEngine, request: RowRequest, prompt: Prompt) -> Any:  # a generator
        outputs: AsyncIterator[RequestOutput] = engine.add(
            f"batch-{next(self._ids)}",
            prompt,
            request.params,
            speculate=request.body.speculative.enabled,
        )
        return outputs

    def _success(self, row: str, request: RowRequest, answer: _Answer) -> dict[str, Any]:
        first, metrics = answer.choices[0], answer.metrics
        assert metrics is not None, "an answered request has metrics"
        result = {
            "text": "".join(first.text),
            "token_ids": first.token_ids,
            "finish_reason": first.finish_reason,
            "stop_reason": None if first.stop_reason is None else str(first.stop_reason),
            "seed": request.params.seed,
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "num_steps": metrics.num_steps,
            "num_draft_tokens": metrics.num_draft_tokens,
            "num_accepted_tokens": metrics.num_accepted_tokens,
        }
        if self._layout.kind == "openai":
            result["response"] = json.dumps(self._response(row, request, answer), ensure_ascii=False)
        return result

    def _response(self, row: str, request: RowRequest, answer: _Answer) -> dict[str, Any]:
        """The body that the HTTP endpoint would have given."""
        shape = ChatShape() if isinstance(request.body, ChatRequest) else CompletionShape()
        choices = [
            shape.whole(i, "".join(c.text), c.finish_reason or "stop") | {"stop_reason": c.stop_reason}
            for i, c in enumerate(answer.choices)
        ]
        usage = {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
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


async def _prompt(engine: AsyncEngine, request: RowRequest) -> Prompt:
    body = request.body
    if not isinstance(body, ChatRequest):
        prompt = body.prompt[0]
    elif engine.tokenizer is None:
        raise RequestError("messages need a tokenizer: drop skip_tokenizer_init.", param="messages")
    else:
        text = engine.tokenizer.apply_chat_template(
            body.for_template(),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables=chat_variables(body),
        )
        token_ids = await engine.encoder.text(text, add_special_tokens=False, param="messages")
        return {"prompt": text, "prompt_token_ids": token_ids}
    if not prompt:
        raise RequestError("prompt is empty: give at least one token.", param="prompt")
    return prompt
