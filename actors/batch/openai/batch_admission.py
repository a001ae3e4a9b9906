"""Opens a queued batch of `/v1/batches` on this replica: locks it, validates its file, opens its ledger.

Errors of the file end the batch with line numbers, as OpenAI does. Errors of a single request (a field, a
prompt that is too long) are found when it is answered, and fail that line only. Blocking.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import pyarrow as pa

from ....cluster.errors import DatasetError, NotFoundError, brief, redact_values
from ....cluster.request.caller import SERVER
from ...tokenization.client_messages import loads
from ..dataset.row_reader import RowReader
from ..dataset.row_requests import CHAT_URL, COMPLETION_URL, RowSchema
from ..dataset.source import Dataset, SourceFile
from ..ledger.job_runs import JobRun
from ..ledger.job_spec import JobSpec
from ..ledger.ledger import Ledger
from ..ledger.output_lock import Lock, lock
from ..ledger.output_parts import OutputForm
from ..row_index import RowIndex, index_rows
from .batch_store import Batch, BatchStore
from .file_store import FileStore, JsonObject, StoredFile

logger = logging.getLogger(__name__)

ENDPOINTS = (CHAT_URL, COMPLETION_URL)
MAX_CUSTOM_ID_CHARS = 1024
MAX_ERRORS = 50  # reported errors, after which the rest of the file is not read
LAYOUT = RowSchema(kind="openai", lines=True)
FORM = OutputForm(format="openai")


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch that this replica has locked. `given_up`: why no more lines can be answered."""

    batch: Batch
    lock: Lock
    ledger: Ledger
    index: RowIndex
    reader: RowReader
    given_up: JsonObject | None = None

    def close(self) -> None:
        self.reader.close()
        self.ledger.close()


@dataclass(frozen=True, slots=True)
class BatchOpener:
    """Opens batches for one replica. A batch begun with other settings (`made_from`) is given up."""

    _batches: BatchStore
    _files: FileStore
    _names: Sequence[str]
    _made_from: Mapping[str, Any]  # Any: JSON
    _max_lines: int

    def open(self, batch_id: str, *, has_capacity: bool) -> OpenBatch | None:
        """Return the batch if this replica may run it now.

        `has_capacity`: if False, the batch is only validated or ended early. Raises InUseError if another
        replica has locked it; ConfigError or OSError if the storage fails.
        """
        batch = self._batches.find(batch_id)
        if batch is None:
            self._batches.drop_abandoned(batch_id)
            return None
        if batch.ended:  # its replica was killed before it removed the batch from the queue
            self._batches.remove_from_queue(batch_id)
            return None
        if batch.status == "in_progress" and not (has_capacity or batch.is_late):
            return None
        held_lock = lock(self._batches.output(batch_id), logger.info)
        opened = None
        try:
            opened = self._open(batch_id, held_lock, has_capacity=has_capacity)
        finally:
            if opened is None:
                held_lock.close()
        return opened

    def _open(self, batch_id: str, held_lock: Lock, *, has_capacity: bool) -> OpenBatch | None:
        batch = self._batches.saved(batch_id)  # it may have changed before it was locked
        if batch is None or batch.ended:
            return None
        try:
            file = self._files.get(batch.input_file_id, SERVER)
            if batch.status == "validating":
                batch = self._validated(batch, file)
                cancelled = self._batches.cancel_requested_at(batch_id) is not None
                if batch.ended or not (has_capacity or batch.is_late or cancelled):
                    return None
            return self._begin(batch, file, held_lock)
        except (DatasetError, NotFoundError) as error:
            self._fail(batch, plain_error("input_file_unusable", error.message))
            return None

    def _validated(self, batch: Batch, file: StoredFile) -> Batch:
        (name,) = file.pieces
        found = validate_lines(self._files.storage.reader(name), batch.endpoint, self._names, self._max_lines)
        if found.errors:
            return self._fail(batch, _errors_list(found.errors))
        counts = batch.request_counts | {"total": found.num_lines}
        batch = batch.moved("in_progress", model=found.model or self._names[0], request_counts=counts)
        self._batches.save(batch)
        return batch

    def _begin(self, batch: Batch, file: StoredFile, held_lock: Lock) -> OpenBatch:
        (name,) = file.pieces
        storage = self._files.storage
        entry = storage.entry(name)
        if entry is None:
            raise NotFoundError(f"The content of the file {file.id} no longer exists.", param="input_file_id")
        input_file = SourceFile(storage, name, entry.size, entry.modified_s, public_name=file.id)
        source = Dataset((input_file,), "openai")
        index = index_rows(source, LAYOUT)
        spec = JobSpec(
            made_from=self._made_from,
            # By id instead of path, since the storage may have moved.
            input=[{"name": file.id, "size": file.bytes, **index.digests[0]}],
            input_format=source.format,
            form=FORM,
            num_rows=index.num_rows,
        )
        output = self._batches.output(batch.id)
        existing = JobRun.read(output)
        given_up = None
        if existing is not None and (changes := spec.differences(existing.spec)):
            said = f"The server was restarted with other settings: {'; '.join(changes)}."
            logger.error("%s fails. %s", batch.id, said)
            advice = "Send the lines that were not answered in a new batch."
            given_up = plain_error("settings_changed", f"{said} {advice}")
        ledger = Ledger.open(output, spec, resume="force" if given_up else "yes", held_lock=held_lock)
        return OpenBatch(batch, held_lock, ledger, index, RowReader(source, LAYOUT), given_up)

    def _fail(self, batch: Batch, errors: JsonObject) -> Batch:
        failed = batch.moved("failed", errors=errors)
        self._batches.save(failed)
        logger.info("%s has failed: %s", batch.id, redact_values(errors["data"][0]["message"]))
        return failed


@dataclass(slots=True)
class Validation:
    """`model` is the first line's; errors are OpenAI's BatchError objects."""

    num_lines: int = 0
    model: str | None = None
    errors: list[JsonObject] = field(default_factory=list)


def validate_lines(file: pa.NativeFile, endpoint: str, models: Sequence[str], max_lines: int) -> Validation:
    found = Validation()
    seen: set[str] = set()
    with io.BufferedReader(file) as lines:  # type: ignore[arg-type]  # it has RawIOBase's methods
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            found.num_lines += 1
            if found.num_lines > max_lines:
                said = f"The file has more than {max_lines} lines (max_batch_lines); split it into several."
                found.errors.append(_error("too_many_requests", said, number))
                return found
            code, said, param = _line_error(line, endpoint, models, seen, found)
            if code:
                found.errors.append(_error(code, said, number, param))
            if len(found.errors) == MAX_ERRORS:
                return found
    if not found.num_lines:
        said = "The input file is empty: give a line of JSON for each request."
        found.errors.append(_error("empty_file", said))
    return found


def plain_error(code: str, message: str) -> JsonObject:
    return _errors_list([_error(code, message)])


def _errors_list(errors: Sequence[JsonObject]) -> JsonObject:
    return {"object": "list", "data": list(errors)}


def _line_error(
    line: bytes, endpoint: str, models: Sequence[str], seen: set[str], found: Validation
) -> tuple[str, str, str | None]:
    """Return code, message and param of a line's error; an empty code for none."""
    try:
        record = loads(line)
    except orjson.JSONDecodeError as error:
        return "invalid_json_line", f"This line is not valid JSON: {error}.", None
    if not isinstance(record, Mapping):
        return "invalid_json_line", "This line is not a JSON object.", None
    missing = "missing_required_parameter"
    custom_id, body = record.get("custom_id"), record.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        return missing, "custom_id is missing: give each line a unique string.", "custom_id"
    if len(custom_id) > MAX_CUSTOM_ID_CHARS:
        said = f"custom_id has {len(custom_id)} characters; at most {MAX_CUSTOM_ID_CHARS} are kept."
        return "invalid_custom_id", said, "custom_id"
    if custom_id in seen:
        said = f"custom_id={brief(custom_id)} is also used by another line: each line needs a unique one."
        return "duplicate_custom_id", said, "custom_id"
    seen.add(custom_id)
    if record.get("method") != "POST":
        return "invalid_method", f'method={brief(record.get("method"))} must be "POST".', "method"
    if record.get("url") != endpoint:
        said = f"url={brief(record.get('url'))} is not the batch's endpoint, {endpoint}."
        return "mismatched_endpoint", said, "url"
    if not isinstance(body, Mapping):
        return missing, "body is missing: give the request as a JSON object.", "body"
    model = body.get("model", models[0])
    if model not in models:
        said = f"The model {brief(model)} is not served here. Served: {', '.join(models)}."
        return "model_not_found", said, "body.model"
    found.model = found.model or model
    return "", "", None


def _error(code: str, message: str, line: int | None = None, param: str | None = None) -> JsonObject:
    return {"code": code, "message": message, "line": line, "param": param}
