"""One row through an engine: its answer, or why there is none.

The same for every door: engine actors of batch jobs, the replica that works off `/v1/batches`, and the
processor of a Ray dataset. Whatever is wrong with a row becomes its result; a dead engine is not the row's
fault and is raised. Writes nothing: `writer.py` does.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from ...cluster.errors import EngineDeadError, MantaError
from ..engine import AsyncEngine
from ..http.chat import ChatShape
from ..http.completions import CompletionShape
from ..http.defaults import GenerationDefaults
from ..http.generation import whole_choice
from ..http.protocol import ChatRequest, conversation
from ..outputs import RequestOutput
from .figures import SPENT
from .rows import Layout, Record, RowRequest, category_of, content_id, parse_line, read_request, row_id

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
# What is known of it besides: the OpenAI response; when the row was worked on (Unix time); what is counted
# and kept nowhere else (`figures.py`): how often it was begun, the category that it is counted in, verified
# blocks by accepted drafts, what its engine spent. Names that columns of the user's will hardly have.
WIRE_SCHEMA = pa.schema(
    [
        *RESULT_SCHEMA,
        ("response", pa.string()),
        ("begin_s", pa.float64()),
        ("end_s", pa.float64()),
        ("attempts", pa.int64()),
        ("counted_as", pa.string()),
        ("acceptance_histogram", pa.list_(pa.int32())),
        ("engine_spent", pa.struct([(name, pa.float64()) for name in SPENT])),
    ]
)
Result = dict[str, Any]  # a row of WIRE_SCHEMA


class RowAnswerer:
    """Answers rows concurrently through one engine.

    Args:
        engine: started.
        layout: how records are read.
        generation: the checkpoint's defaults.
        model_name: reported in OpenAI responses.
    """

    def __init__(
        self, engine: AsyncEngine, layout: Layout, generation: GenerationDefaults, model_name: str
    ) -> None:
        self._engine = engine
        self._layout = layout
        self._generation = generation
        self._model_name = model_name
        self._ids = itertools.count()

    async def answer(self, raw: Record) -> Result:
        """The result of one row. Raises EngineDeadError, which says nothing about the row."""
        begin_s = time.time()
        row: Result = {}
        try:
            record = self._record(raw, row)
            row["counted_as"] = category_of(record, self._layout)
            request = read_request(record, self._layout, self._generation)
            answer = await self._complete(request)
            row |= self._success(row["id"], request, answer)
        except EngineDeadError:
            raise
        except MantaError as error:
            row |= failure(error, raw, self._layout)
        return row | {"begin_s": begin_s, "end_s": time.time()}

    def _record(self, raw: Record, row: Result) -> Record:
        """The row's record; its id goes into `row` first, so that a bad row keeps it."""
        if self._layout.lines:
            row["id"] = content_id(raw["text"])
            raw = parse_line(raw["text"])
        row["id"] = row_id(raw, self._layout)
        return raw

    async def _complete(self, request: RowRequest) -> RequestOutput:
        body, engine = request.body, self._engine
        given = conversation(body, engine.tokenizer) if isinstance(body, ChatRequest) else body.prompts()[0]
        return await engine.complete(
            f"batch-{next(self._ids)}",
            await engine.encoder.prompt(given, truncate=body.truncate_prompt_tokens),
            request.params,
            speculate=body.speculative.enabled,
        )

    def _success(self, row: str, request: RowRequest, answer: RequestOutput) -> Result:
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
            "acceptance_histogram": metrics.acceptance_histogram,
        }
        if self._layout.kind == "openai":
            result["response"] = json.dumps(self._response(row, request, answer), ensure_ascii=False)
        return result

    def _response(self, row: str, request: RowRequest, answer: RequestOutput) -> Mapping[str, Any]:
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


def failure(error: MantaError, raw: Record, layout: Layout) -> Result:
    """What an error row says, beside its id."""
    kept = raw["text"] if layout.lines else json.dumps(raw, default=str, ensure_ascii=False)
    return {
        "error": {"type": error.kind, "message": error.message, "param": error.param},
        "input": kept,
    }


def _completion_tokens(answer: RequestOutput) -> int:
    return sum(len(completion.token_ids) for completion in answer.outputs)
