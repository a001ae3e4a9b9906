"""Turns records of a dataset into requests: ids, prompts, sampling fields, tools.

A record has messages (chat), a text or columns for a template (chat or completion, `RowSchema.chat`), token
ids (completion), or is a line of an OpenAI batch file (`custom_id`, `url`, `body`). All become bodies of the
HTTP endpoints and are validated by the same models. Pure: no Ray, no files, no engine.

What a record means is part of a job: a begun job keeps its `RowSchema.version`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
import pydantic

from ....cluster.errors import ConfigError, RequestError, brief, did_you_mean
from ....cluster.request.caller import parse_tenant
from ....cluster.request.request import SamplingParams
from ...http.protocol.chat_completion import ChatRequest
from ...http.protocol.completion import OPENAI_MAX_TOKENS, CompletionRequest
from ...http.protocol.protocol import check_extra_fields
from ...http.wire.json_io import NUMBERS_IN_TEXT
from ...http.wire.request_model import unknown_fields
from ...tokenization.client_messages import loads, replace_escapes
from ...tokenization.generation_config import DEFAULT_MAX_TOKENS, GenerationDefaults

Record = Mapping[str, Any]  # Any: whatever a row of the user's dataset holds.
CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
PROMPT_COLUMNS = ("messages", "prompt", "conversations", "conversation")  # the first one in a row counts
ID_COLUMNS = ("custom_id", "id")
CONTENT_ID = re.compile(r"row-[0-9a-f]{20}(-[0-9]+)?")  # of `content_id`, with or without a copy number
SAMPLING_COLUMNS = (
    *("max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("stop", "stop_token_ids", "ignore_eos", "logprobs", "top_logprobs", "thinking_token_budget"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids"),
    *("bad_words", "chat_template_kwargs", "response_format", "structured_outputs"),
)
# Further fields that a row may have; version 1 of rows did not read them.
CHAT_COLUMNS = (
    *("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "include_reasoning"),
    *("add_generation_prompt", "continue_final_message"),
)
OTHER_COLUMNS = ("n", "include_stop_str_in_output", "skip_special_tokens", "truncate_prompt_tokens")
FIELD_COLUMNS = (*SAMPLING_COLUMNS, *CHAT_COLUMNS, *OTHER_COLUMNS, "speculative")
# Text in these columns is JSON; in `stop` if it is a list of strings, in `tool_choice` if it is an object.
JSON_COLUMNS = frozenset(
    {
        *(*MESSAGE_COLUMNS, "tools", "speculative"),
        *("stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words"),
        *("chat_template_kwargs", "response_format", "structured_outputs"),
    }
)
# Version of what a record means. 1 (until 0.2): reads neither `CHAT_COLUMNS` nor `OTHER_COLUMNS`, nor
# conversations in ShareGPT's form; removes all nulls, also those that are data.
ROW_VERSION = 2
# Roles by `from` of ShareGPT's form.
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}


_LONG_NUMBER = re.compile(rb"[0-9]{19}")  # orjson reads an integer of more than 64 bits as a float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSchema:
    """Format of records. Raises ConfigError for an invalid template, or one next to another prompt."""

    kind: Literal["dataset", "openai"] = "dataset"  # "openai" for OpenAI batch lines, else "dataset"
    # records are unparsed lines of JSON in a column `text`, so that malformed lines are rows too
    lines: bool = False
    # column of the prompt (text, token ids or messages); found by name if absent
    prompt_column: str | None = None
    template: str | None = None  # makes the prompt from several columns, instead of one column
    chat: bool = False  # texts are messages of a user; else they are completed as they are
    system: str | None = None  # system message of chats that have none
    # column of the row's id; found by name if absent, else a hash of the record is its id
    id_column: str | None = None
    columns: tuple[str, ...] | Literal["all"] = ()  # columns of the input to copy to the results
    defaults: Mapping[str, Any] = field(default_factory=dict)  # sampling fields for rows that have none
    seed: int = 0  # seed of the job; a row without a seed gets one derived from this and its id
    # the job's report counts rows by its values. If None, OpenAI batch lines are counted by
    # `metadata.category` of their bodies.
    category_column: str | None = None
    version: int = ROW_VERSION

    def __post_init__(self) -> None:
        if self.kind == "openai" and (self.system is not None or self.chat):
            name = "chat" if self.chat else "system"
            raise ConfigError(f"{name}: OpenAI batch lines say it themselves. Leave it out.", param=name)
        if self.template is None:
            return
        template_columns(self.template)  # raises when it is invalid
        if self.kind == "openai" or self.prompt_column is not None:
            other = "OpenAI batch lines have" if self.kind == "openai" else "prompt_column names"
            raise ConfigError(
                f"template: {other} the prompt already. Leave the template out.", param="template"
            )


@dataclass(frozen=True, slots=True)
class RowRequest:
    """`ignored`: columns of the row, or fields of its body, that have no effect."""

    url: str
    body: ChatRequest | CompletionRequest
    params: SamplingParams
    ignored: tuple[str, ...] = ()


def category_of(record: Record, row_schema: RowSchema) -> str | None:
    """Return the category that the row is counted in (`RowSchema.category_column`), as text or JSON."""
    if row_schema.kind == "openai" and not row_schema.category_column:
        body = record.get("body")
        return parse_tenant(body.get("metadata")).category if isinstance(body, Mapping) else None
    value = record.get(row_schema.category_column) if row_schema.category_column else None
    return value if value is None or isinstance(value, str) else json.dumps(value, default=str)


def parse_line(line: str | bytes) -> Record:
    """Return the record in a line of a JSONL file. Raises RequestError."""
    try:
        record = orjson.loads(line)
        if _LONG_NUMBER.search(line if isinstance(line, bytes) else line.encode()):
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
    except ValueError as error:
        record = _parse_python(line, error)
    if not isinstance(record, dict):
        raise RequestError(f"The line holds {type(record).__name__}, not a JSON object.")
    return record


def _parse_python(line: str | bytes, error: ValueError) -> Any:
    """Parse what orjson rejects: NaN, Infinity, and lone surrogates, which become U+FFFD."""
    try:
        return json.loads(replace_escapes(line.encode() if isinstance(line, str) else line))
    except (ValueError, RecursionError):
        raise RequestError(f"The line is not valid JSON: {error}.") from None


def read_record(raw: Record, row_schema: RowSchema) -> Record:
    return parse_line(raw["text"]) if row_schema.lines else raw


def own_id(record: Record, row_schema: RowSchema) -> str | None:
    columns = (row_schema.id_column,) if row_schema.id_column else ID_COLUMNS
    for column in columns:
        if not _absent(value := record.get(column)) and value != "":
            return str(value)
    return None


def row_id(record: Record, row_schema: RowSchema) -> str:
    """Return the row's own id, or a hash of its content: equal rows are equal requests."""
    return own_id(record, row_schema) or content_id(_canonical(record))


def content_id(text: str | bytes) -> str:
    """Return an id for a row without one, by its canonical JSON; for a malformed row, by its text."""
    content = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return "row-" + hashlib.blake2b(content, digest_size=10).hexdigest()


def id_hash(row: str) -> int:
    """Return 64 bits of an id's hash, by which `actors/batch/row_index.py` compares millions of ids."""
    digest = hashlib.blake2b(row.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def row_seed(job_seed: int, row: str) -> int:
    """Return the seed of a row without one, which depends only on the arguments."""
    digest = hashlib.blake2b(f"{job_seed}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def read_request(
    record: Record, row_schema: RowSchema, generation: GenerationDefaults, row: str | None = None
) -> RowRequest:
    """Validate a record. Raises RequestError. `row`: its id if that is not its own; gives a seed."""
    url, body = _openai_body(record) if row_schema.kind == "openai" else _dataset_body(record, row_schema)
    body = {**row_schema.defaults, **body}
    if body.get("seed") is None:
        body["seed"] = row_seed(row_schema.seed, row or row_id(record, row_schema))
    model = ChatRequest if url == CHAT_URL else CompletionRequest
    request = _validated(model, body, NUMBERS_IN_TEXT if row_schema.kind == "dataset" else None)
    if isinstance(request, CompletionRequest) and len(request.prompt) != 1:
        raise RequestError("prompt: a row has one prompt; give each prompt its own row.", param="prompt")
    limit = DEFAULT_MAX_TOKENS
    if row_schema.kind == "openai":
        limit = None if url == CHAT_URL else OPENAI_MAX_TOKENS
    extra, known = request.model_extra or {}, type(request).model_fields
    ignored = check_extra_fields(extra, known, "ignore", unknown_fields(request))
    if row_schema.kind == "dataset":
        ignored += _unread_columns(record, row_schema)
    return RowRequest(url, request, request.sampling_params(generation, limit), tuple(ignored))


def template_columns(template: str) -> tuple[str, ...]:
    """Return the columns that a template names, each once. Raises ConfigError for an invalid template."""
    return tuple(dict.fromkeys(name for _, name in _template_parts(template) if name is not None))


def prompt_column(columns: list[str], row_schema: RowSchema) -> str | None:
    if row_schema.prompt_column is not None:
        return row_schema.prompt_column if row_schema.prompt_column in columns else None
    return next((name for name in _prompt_columns(row_schema) if name in columns), None)


def _openai_body(record: Record) -> tuple[str, dict[str, Any]]:
    url, body = record.get("url"), record.get("body")
    if url not in (CHAT_URL, COMPLETION_URL):
        raise RequestError(
            f"url={brief(url)} is not served: use {CHAT_URL} or {COMPLETION_URL}.", param="url"
        )
    if not isinstance(body, Mapping):
        raise RequestError("body is missing: give the request as a JSON object.", param="body")
    if not isinstance(record.get("custom_id"), str) or not record["custom_id"]:
        raise RequestError("custom_id is missing: give each line a unique string.", param="custom_id")
    if body.get("stream"):
        raise RequestError("body.stream: a batch does not stream; leave it out.", param="body.stream")
    return url, dict(body)


def _dataset_body(record: Record, row_schema: RowSchema) -> tuple[str, dict[str, Any]]:
    body = {
        name: _field_value(name, record[name], row_schema)
        for name in _field_columns(
            row_schema.version, row_schema.template, row_schema.prompt_column, row_schema.id_column
        )
        if not _absent(record.get(name))
    }
    if row_schema.template is not None:
        value: Any = _render(row_schema.template, record)
    else:
        value = _prompt_value(record, row_schema)
    if row_schema.chat and isinstance(value, str):
        count = body.get("logprobs")
        if count is not None and not isinstance(count, bool):
            body |= {"logprobs": True, "top_logprobs": count}  # the chat form of the same request
        return CHAT_URL, body | {"messages": _with_system([{"role": "user", "content": value}], row_schema)}
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return CHAT_URL, body | {"messages": _with_system(value, row_schema)}
    return COMPLETION_URL, body | {"prompt": value}


def _prompt_value(record: Record, row_schema: RowSchema) -> Any:
    column = _prompt_column_of(record, row_schema)
    value, is_text = record[column], isinstance(record[column], str)
    if is_text and column in JSON_COLUMNS and (column == "messages" or _is_v2(row_schema)):
        value = _json(column, value)
    if not isinstance(value, list) or not all(isinstance(turn, Mapping) for turn in value):
        return value
    if not is_text or not _is_v2(row_schema):
        value = _data(value, row_schema)
    return list(map(_message, value)) if _is_v2(row_schema) else value


def _is_v2(row_schema: RowSchema) -> bool:
    return row_schema.version > 1


def _prompt_columns(row_schema: RowSchema) -> tuple[str, ...]:
    return PROMPT_COLUMNS if _is_v2(row_schema) else PROMPT_COLUMNS[:2]


def _prompt_column_of(record: Record, row_schema: RowSchema) -> str:
    present = [name for name, value in record.items() if not _absent(value)]
    column = prompt_column(present, row_schema)
    if column is None:
        wanted = row_schema.prompt_column or " or ".join(PROMPT_COLUMNS[:2])
        raise RequestError(f"The row has no {wanted}; it has: {', '.join(present)}.", param=wanted)
    return column


@functools.lru_cache(maxsize=8)
def _field_columns(
    version: int, template: str | None, prompt: str | None, row_id: str | None
) -> tuple[str, ...]:
    """Return the columns that are fields of the request: not those that a flag names for something else."""
    if version == 1:
        return SAMPLING_COLUMNS
    named = {*template_columns(template or ""), prompt, row_id}
    return tuple(name for name in FIELD_COLUMNS if name not in named)


def _unread_columns(record: Record, row_schema: RowSchema) -> list[str]:
    if row_schema.columns == "all":
        return []
    named = (row_schema.prompt_column, row_schema.id_column, row_schema.category_column)
    read = {*named, *template_columns(row_schema.template or ""), *row_schema.columns}
    read |= {
        *_field_columns(
            row_schema.version, row_schema.template, row_schema.prompt_column, row_schema.id_column
        )
    }
    if row_schema.id_column is None:
        read |= {*ID_COLUMNS}
    if row_schema.template is None and row_schema.prompt_column is None:
        read.add(_prompt_column_of(record, row_schema))
    return [name for name, value in record.items() if name not in read and not _absent(value)]


def _message(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message; one of ShareGPT's form (`from`, `value`) in OpenAI's."""
    if "role" in turn or "from" not in turn:
        return turn
    name, others = turn["from"], {key: each for key, each in turn.items() if key not in ("from", "value")}
    if not isinstance(name, str) or name not in ROLES:
        raise RequestError(f"from={brief(name)} is not known. Known: {', '.join(ROLES)}.", param="from")
    return {"role": ROLES[name], "content": turn.get("value"), **others}


def _with_system(messages: list[Any], row_schema: RowSchema) -> list[Any]:
    if row_schema.system is None or messages[0].get("role") in ("system", "developer"):
        return messages
    return [{"role": "system", "content": row_schema.system}, *messages]


def _render(template: str, record: Record) -> str:
    parts = _template_parts(template)
    return "".join(text if name is None else text + _text_value(name, record) for text, name in parts)


def _text_value(name: str, record: Record) -> str:
    value = record.get(name)
    if value is None:
        present = [str(column) for column, held in record.items() if held is not None]
        raise RequestError(f"template: the row has no {name}. {did_you_mean(name, present)}", param=name)
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


@functools.lru_cache(maxsize=8)
def _template_parts(template: str) -> tuple[tuple[str, str | None], ...]:
    """Split `Translate {text}` into texts, each with the column that follows it. Raises ConfigError."""
    why = None
    try:
        found = list(string.Formatter().parse(template))
    except ValueError as error:
        found, why = [], str(error)
    if other := next((name for _, name, spec, conversion in found if spec or conversion), None):
        why = f"only the name in {{{other}}} is supported, not ':' or '!'"
    elif any(name == "" for _, name, _, _ in found):
        why = "{} names no column"
    if why is not None:
        raise ConfigError(
            f"template={template!r}: {why}. Write {{column}} for a column, and {{{{ or }}}} for a brace.",
            param="template",
        )
    return tuple((text, name) for text, name, _, _ in found)


def _absent(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _field_value(name: str, value: Any, row_schema: RowSchema) -> Any:
    """Return the value of a field's column; CSV has only text, and datasets often have JSON as text."""
    if isinstance(value, str):
        if name in JSON_COLUMNS or (name == "tool_choice" and value.startswith("{")):
            value = _json(name, value)
        elif name == "stop" and value.startswith("["):
            with contextlib.suppress(ValueError):
                several = loads(value)
                value = several if several and all(isinstance(each, str) for each in several) else value
    else:
        value = _data(value, row_schema)
    return [_tool(each) for each in value] if name == "tools" and isinstance(value, list) else value


def _data(value: Any, row_schema: RowSchema) -> Any:
    """Return the value without nulls that mean no value: in Parquet rows have every key of any row."""
    return value if row_schema.lines and _is_v2(row_schema) else _without_none(value)


def _tool(tool: Any) -> Any:
    """Return a tool in OpenAI's form; datasets have the bare function, or parameters by name (xLAM)."""
    if not isinstance(tool, Mapping) or "function" in tool or "name" not in tool:
        return tool
    function = {name: value for name, value in tool.items() if name != "type"}
    parameters = function.get("parameters")
    by_name = isinstance(parameters, Mapping) and all(isinstance(v, Mapping) for v in parameters.values())
    if by_name and not {"properties", "$defs", "$ref"} & set(parameters or ()):
        function["parameters"] = {"type": "object", "properties": parameters}
    return {"type": "function", "function": function}


def _json(name: str, text: str) -> Any:
    try:
        return loads(text)
    except ValueError as error:
        raise RequestError(f"{name}: the text is not valid JSON: {error}.", param=name) from None


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_none(each) for name, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def _canonical(record: Record) -> str | bytes:
    try:
        return orjson.dumps(record, default=str, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # orjson rejects integers of more than 64 bits and lone surrogates
        return json.dumps(record, sort_keys=True, default=str, ensure_ascii=False)


def _validated(
    model: type[ChatRequest] | type[CompletionRequest], body: dict[str, Any], context: str | None
) -> ChatRequest | CompletionRequest:
    try:
        return model.model_validate(body, context=context)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or None
        raise RequestError(f"{where or 'body'}: {first['msg']}.", param=where) from None
