"""The engine actor of a Ray dataset: a callable class for Ray Data's `map_batches`.

Answers a batch's rows concurrently through one `AsyncEngine` and returns the batch with columns for the
answers. An error of a row is a column of that row. A dead engine ends the process: Ray Data then starts
another one and sends it the running batches. A raised error would send them to the dead engine again. The
engine starts at the first batch, on the event loop on which Ray Data calls it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import pyarrow as pa

from ...actors.batch.dataset.row_reader import Row
from ...actors.batch.dataset.row_requests import (
    CHAT_COLUMNS,
    ID_COLUMNS,
    PROMPT_COLUMNS,
    SAMPLING_COLUMNS,
    RowSchema,
)
from ...actors.batch.row_answerer import LOGPROBS_TYPE, Result, RowAnswerer
from ...actors.checkpoints.checkpoint_paths import served_name, target_folder
from ...actors.engine.async_engine import AsyncEngine
from ...actors.http.protocol.protocol import check_extra_fields
from ...actors.tokenization.generation_config import GenerationDefaults
from ...cluster.config import EngineConfig
from ...cluster.errors import EngineDeadError, MantaError, RequestError, did_you_mean
from ...cluster.speculation.acceptance_length import mean_acceptance_length

logger = logging.getLogger(__name__)

SAMPLING_COLUMN = "sampling_params"
ERROR_COLUMN = "__inference_error__"
# No other columns are read: one with the name of a sampling field may mean something else.
READ_COLUMNS = (*PROMPT_COLUMNS, *ID_COLUMNS, *CHAT_COLUMNS, "chat_template_kwargs", SAMPLING_COLUMN)
# In `ray.data.llm` another stage may convert tokens to text.
IGNORED_SAMPLING = ("detokenize",)
ANSWER_SCHEMA = pa.schema(
    [
        ("generated_text", pa.string()),
        ("generated_tokens", pa.list_(pa.int32())),
        ("num_input_tokens", pa.int64()),
        ("num_generated_tokens", pa.int64()),
        ("finish_reason", pa.string()),
        ("stop_reason", pa.string()),
        ("seed", pa.int64()),
        ("mean_acceptance_length", pa.float64()),
        ("num_draft_tokens", pa.int64()),
        ("num_accepted_tokens", pa.int64()),
        ("time_taken_llm", pa.float64()),
        ("logprobs", LOGPROBS_TYPE),
        (ERROR_COLUMN, pa.string()),
    ]
)

Record = dict[str, Any]  # Any: whatever a row of the user's dataset holds


class ProcessorEngine:
    """One engine of a processor; if `continuing`, a bad row becomes a row with an error, else it raises."""

    def __init__(self, config: EngineConfig, row_schema: RowSchema, continuing: bool) -> None:
        self._config = config
        self._row_schema = row_schema
        self._continuing = continuing
        self._answerer: RowAnswerer | None = None
        self._starting = asyncio.Lock()

    async def __call__(self, batch: pa.Table) -> pa.Table:
        columns = [name for name in READ_COLUMNS if name in batch.column_names]
        rows: list[Record] = batch.select(columns).to_pylist() if columns else [{}] * batch.num_rows
        try:
            answerer = await self._started()
            answers = await asyncio.gather(*(self._answer(answerer, row) for row in rows))
        except EngineDeadError as error:
            _end(error)
        return _join_columns(batch, answers)

    async def _answer(self, answerer: RowAnswerer, row: Record) -> Record:
        try:
            result = await answerer.answer(Row(0, _record(row, self._row_schema.defaults)))
        except RequestError as error:
            result = {"error": {"type": error.kind, "message": error.message, "param": error.param}}
        error = result.get("error")
        if error and not self._continuing:
            raise RequestError(error["message"], param=error["param"])
        return _columns(result)

    async def _started(self) -> RowAnswerer:
        async with self._starting:
            if self._answerer is None:
                folder = target_folder(self._config, field="model_source")
                generation = GenerationDefaults.load(folder)
                engine = AsyncEngine(self._config)
                await engine.start()
                await engine.measure_steps()
                self._answerer = RowAnswerer(
                    engine, self._row_schema, generation, served_name(self._config.model)
                )
        return self._answerer


def check_sampling(given: Mapping[str, Any]) -> None:
    unknown = {name: value for name, value in given.items() if name not in SAMPLING_COLUMNS}
    check_extra_fields(unknown, SAMPLING_COLUMNS, "ignore")
    for name in unknown:
        if name not in IGNORED_SAMPLING:
            hint = did_you_mean(name, SAMPLING_COLUMNS, prefix=f"{SAMPLING_COLUMN}.")
            raise RequestError(
                f"{SAMPLING_COLUMN}.{name} is not known. {hint}", param=f"{SAMPLING_COLUMN}.{name}"
            )


def _record(row: Record, defaults: Mapping[str, Any]) -> Record:
    """Return the record for `read_request`, with sampling fields beside the prompt."""
    sampling = row.get(SAMPLING_COLUMN) or {}
    if not isinstance(sampling, Mapping):
        raise RequestError(
            f"{SAMPLING_COLUMN}={sampling!r} must be a mapping of sampling fields.", param=SAMPLING_COLUMN
        )
    # Arrow gives every row's mapping all keys that any row's has.
    sampling = {name: value for name, value in sampling.items() if value is not None}
    check_sampling(sampling)
    logprobs = sampling.get("logprobs", defaults.get("logprobs"))
    if isinstance(logprobs, int) and not isinstance(logprobs, bool) and _has_messages(row):
        sampling |= {"logprobs": True, "top_logprobs": logprobs}  # the chat form of the same request
    others = {name: value for name, value in row.items() if name != SAMPLING_COLUMN}
    return {**others, **{name: value for name, value in sampling.items() if name not in IGNORED_SAMPLING}}


def _has_messages(row: Record) -> bool:
    given = [row.get(name) for name in PROMPT_COLUMNS]
    return any(isinstance(each, list) and bool(each) and isinstance(each[0], Mapping) for each in given)


def _columns(result: Result) -> Record:
    error = result.get("error")
    return {
        "generated_text": result.get("text") or "",
        "generated_tokens": result.get("token_ids") or [],
        "num_input_tokens": result.get("prompt_tokens") or 0,
        "num_generated_tokens": result.get("completion_tokens") or 0,
        "finish_reason": result.get("finish_reason"),
        "stop_reason": result.get("stop_reason"),
        "seed": result.get("seed"),
        "mean_acceptance_length": mean_acceptance_length(
            result.get("num_steps") or 0, result.get("num_accepted_tokens") or 0
        ),
        "num_draft_tokens": result.get("num_draft_tokens") or 0,
        "num_accepted_tokens": result.get("num_accepted_tokens") or 0,
        "time_taken_llm": result.get("end_s", 0.0) - result.get("begin_s", 0.0),
        "logprobs": result.get("logprobs"),
        ERROR_COLUMN: f"{error['type']}: {error['message']}" if error else "",
    }


def _join_columns(batch: pa.Table, answers: Sequence[Record]) -> pa.Table:
    table = batch.drop_columns([name for name in ANSWER_SCHEMA.names if name in batch.column_names])
    answered = pa.Table.from_pylist(list(answers), schema=ANSWER_SCHEMA)
    for name in ANSWER_SCHEMA.names:
        table = table.append_column(name, answered[name])
    return table


def _end(error: MantaError) -> NoReturn:
    """End this process like a crash, which Ray retries elsewhere."""
    logger.error("the engine is dead, and this actor ends with it: %s", error.message)
    logging.shutdown()
    os._exit(1)
