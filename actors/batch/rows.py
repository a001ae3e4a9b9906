"""From a record of a dataset to a request: ids, the request's body, the sampling fields of the row.

Three shapes of records: a `messages` column (chat), a `prompt` column (completion), or a line of an OpenAI
batch file (`custom_id`, `url`, `body`). All become the bodies that the HTTP endpoints take, checked by the
same models. Pure: no Ray, no files, no engine. Used by the engine actors (`engine.py`) and, for
early errors, by the driver.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pydantic

from ...cluster.errors import RequestError
from ...cluster.request import SamplingParams
from ..http.completions import OPENAI_MAX_TOKENS
from ..http.defaults import DEFAULT_MAX_TOKENS, GenerationDefaults
from ..http.fields import check_extra_fields
from ..http.protocol import ChatRequest, CompletionRequest

Record = Mapping[str, Any]  # Any: whatever a row of the user's dataset holds.
CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
PROMPT_COLUMNS = ("messages", "prompt")
ID_COLUMNS = ("custom_id", "id")
SAMPLING_COLUMNS = (
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "chat_template_kwargs",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How records are read.

    Attributes:
        kind: "openai" for OpenAI batch lines, else "dataset".
        lines: records come as unparsed lines of JSON in a column `text`, so that malformed ones come too.
        prompt_column: column of the prompt (text, token ids or messages); found by name if absent.
        id_column: column of the row's id; found by name if absent, else the record's hash is its id.
        defaults: sampling fields for rows that bring none.
        seed: of the job; a row without a seed gets one from it and its id.
        category_column: rows are counted by its values in the job's report.
    """

    kind: Literal["dataset", "openai"] = "dataset"
    lines: bool = False
    prompt_column: str | None = None
    id_column: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    category_column: str | None = None


@dataclass(frozen=True, slots=True)
class RowRequest:
    """A row, checked and ready for an engine."""

    url: str
    body: ChatRequest | CompletionRequest
    params: SamplingParams


def category_of(record: Record, layout: Layout) -> str | None:
    """The category that the row is counted in, if any. What is not text is shown as JSON."""
    value = record.get(layout.category_column) if layout.category_column else None
    return value if value is None or isinstance(value, str) else json.dumps(value, default=str)


def parse_line(line: str) -> Record:
    """The record in a line of a JSONL file."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise RequestError(f"The line is not valid JSON: {error}.") from None
    if not isinstance(record, dict):
        raise RequestError(f"The line holds {type(record).__name__}, not a JSON object.")
    return record


def row_id(record: Record, layout: Layout) -> str:
    """The row's own id, or a hash of its content: equal rows are equal requests."""
    columns = [layout.id_column] if layout.id_column else ID_COLUMNS
    for column in columns:
        if (value := record.get(column)) is not None:
            return str(value)
    return content_id(json.dumps(record, sort_keys=True, default=str, ensure_ascii=False))


def content_id(text: str) -> str:
    return "row-" + hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=10).hexdigest()


def row_seed(job_seed: int, row: str) -> int:
    """The seed of a row that brings none; the same whoever runs it, and when."""
    digest = hashlib.blake2b(f"{job_seed}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def read_request(record: Record, layout: Layout, generation: GenerationDefaults) -> RowRequest:
    """Check a record. Raises RequestError, whose `param` names the column or field."""
    url, body = _openai_body(record) if layout.kind == "openai" else _dataset_body(record, layout)
    body = {**layout.defaults, **body}
    if body.get("seed") is None:
        body["seed"] = row_seed(layout.seed, row_id(record, layout))
    model = ChatRequest if url == CHAT_URL else CompletionRequest
    request = _validated(model, body)
    if isinstance(request, CompletionRequest) and len(request.prompt) != 1:
        raise RequestError("prompt: a row holds one prompt; give each a row of its own.", param="prompt")
    limit = DEFAULT_MAX_TOKENS
    if layout.kind == "openai":
        limit = None if url == CHAT_URL else OPENAI_MAX_TOKENS
    elif request.n not in (None, 1):
        raise RequestError(f"n={request.n}: a row of a dataset has one completion.", param="n")
    return RowRequest(url, request, request.sampling_params(generation, limit))


def prompt_column(columns: list[str], layout: Layout) -> str | None:
    """Which of a record's columns holds the prompt."""
    if layout.prompt_column is not None:
        return layout.prompt_column if layout.prompt_column in columns else None
    return next((name for name in PROMPT_COLUMNS if name in columns), None)


def _openai_body(record: Record) -> tuple[str, dict[str, Any]]:
    url, body = record.get("url"), record.get("body")
    if url not in (CHAT_URL, COMPLETION_URL):
        raise RequestError(f"url={url!r} is not served: use {CHAT_URL} or {COMPLETION_URL}.", param="url")
    if not isinstance(body, Mapping):
        raise RequestError("body is missing: give the request as a JSON object.", param="body")
    if not isinstance(record.get("custom_id"), str):
        raise RequestError("custom_id is missing: give each line a string of its own.", param="custom_id")
    if body.get("stream"):
        raise RequestError("body.stream: a batch does not stream; leave it out.", param="body.stream")
    return url, dict(body)


def _dataset_body(record: Record, layout: Layout) -> tuple[str, dict[str, Any]]:
    present = [name for name, value in record.items() if value is not None]
    column = prompt_column(present, layout)
    if column is None:
        wanted = layout.prompt_column or " or ".join(PROMPT_COLUMNS)
        raise RequestError(f"The row has no {wanted}; it has: {', '.join(present)}.", param=wanted)
    value = record[column]
    body = {name: record[name] for name in SAMPLING_COLUMNS if not _absent(record.get(name))}
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return CHAT_URL, body | {"messages": [_without_none(message) for message in value]}
    return COMPLETION_URL, body | {"prompt": value}


def _absent(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _without_none(message: Any) -> Any:
    """Parquet gives every message all keys that any message has."""
    if not isinstance(message, Mapping):
        return message
    return {name: value for name, value in message.items() if value is not None}


def _validated(
    model: type[ChatRequest] | type[CompletionRequest], body: dict[str, Any]
) -> ChatRequest | CompletionRequest:
    try:
        request = model.model_validate(body)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or None
        raise RequestError(f"{where or 'body'}: {first['msg']}.", param=where) from None
    check_extra_fields(request.model_extra or {}, type(request).model_fields, "ignore")
    return request
