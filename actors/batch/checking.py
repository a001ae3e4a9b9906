"""Whether a file can be worked off as a batch of `/v1/batches`: a look at its lines before any is answered.

What is wrong with the file ends the batch, with line numbers, as OpenAI does. What is wrong with a single
request (a field, a prompt that is too long) is found when it is answered, and fails that line alone.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import pyarrow as pa

from ...cluster.errors import shown
from .rows import CHAT_URL, COMPLETION_URL

ENDPOINTS = (CHAT_URL, COMPLETION_URL)
MAX_CUSTOM_ID_CHARS = 1024
MAX_ERRORS = 50  # that are listed; a file without an end of mistakes is no longer read

LineError = dict[str, Any]  # Any: JSON; OpenAI's BatchError


@dataclass(slots=True)
class Findings:
    """What a file holds. `model` is the one that the first line names."""

    num_lines: int = 0
    model: str | None = None
    errors: list[LineError] = field(default_factory=list)


def check_lines(file: pa.NativeFile, endpoint: str, models: Sequence[str], max_lines: int) -> Findings:
    """Read a file to its end, or to its `MAX_ERRORS`th mistake."""
    found = Findings()
    seen: set[str] = set()
    for number, line in _lines(file):
        found.num_lines += 1
        if found.num_lines > max_lines:
            said = f"The file has more than {max_lines} lines (max_batch_lines); split it into several."
            found.errors.append(_error("too_many_requests", said, number))
            return found
        error = _check(line, number, endpoint, models, seen, found)
        if error is not None:
            found.errors.append(error)
        if len(found.errors) == MAX_ERRORS:
            return found
    if not found.num_lines:
        said = "The input file is empty: give a line of JSON for each request."
        found.errors.append(_error("empty_file", said))
    return found


def errors_list(errors: Sequence[LineError]) -> dict[str, Any]:
    """OpenAI's list of them."""
    return {"object": "list", "data": list(errors)}


def plain_error(code: str, message: str) -> dict[str, Any]:
    """The list of one error that is no line's."""
    return errors_list([_error(code, message)])


def _lines(file: pa.NativeFile) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers, from 1."""
    with io.BufferedReader(file) as lines:  # type: ignore[arg-type]  # it is raw IO, and says so nowhere
        yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _check(
    line: bytes, number: int, endpoint: str, models: Sequence[str], seen: set[str], found: Findings
) -> LineError | None:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return _error("invalid_json_line", f"This line is not valid JSON: {error}.", number)
    if not isinstance(record, Mapping):
        return _error("invalid_json_line", "This line is not a JSON object.", number)
    custom_id, body = record.get("custom_id"), record.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        said = "custom_id is missing: give each line a string of its own."
        return _error("missing_required_parameter", said, number, "custom_id")
    if len(custom_id) > MAX_CUSTOM_ID_CHARS:
        said = f"custom_id has {len(custom_id)} characters; at most {MAX_CUSTOM_ID_CHARS} are kept."
        return _error("invalid_custom_id", said, number, "custom_id")
    if custom_id in seen:
        said = f"custom_id={shown(custom_id)} is another line's too: each needs one of its own."
        return _error("duplicate_custom_id", said, number, "custom_id")
    seen.add(custom_id)
    if record.get("method") != "POST":
        said = f'method={shown(record.get("method"))} must be "POST".'
        return _error("invalid_method", said, number, "method")
    if record.get("url") != endpoint:
        said = f"url={shown(record.get('url'))} is not the batch's endpoint, {endpoint}."
        return _error("mismatched_endpoint", said, number, "url")
    if not isinstance(body, Mapping):
        said = "body is missing: give the request as a JSON object."
        return _error("missing_required_parameter", said, number, "body")
    model = body.get("model", models[0])
    if model not in models:
        said = f"The model {shown(model)} is not served here. Served: {', '.join(models)}."
        return _error("model_not_found", said, number, "body.model")
    found.model = found.model or model
    return None


def _error(code: str, message: str, line: int | None = None, param: str | None = None) -> LineError:
    return {"code": code, "message": message, "line": line, "param": param}
