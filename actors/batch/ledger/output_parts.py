"""Parts, the files of an output that its user reads: names, contents, and their records.

The rows of a part are sorted by number, so its record's ranges map each row to a row of the dataset. Failed
rows have separate parts in a folder named `_...`, which readers of datasets skip.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ....cluster.batch.row_ranges import RowRanges, count, from_rows
from ....cluster.errors import ConfigError
from ....cluster.request.caller import new_id
from ....cluster.safe_file_names import inner_name
from ..dataset.passthrough_columns import is_member
from ..dataset.row_requests import CONTENT_ID
from ..dataset.source import ERRORS, OutputFormat
from ..dataset.storage import Storage
from ..row_answerer import RESULT_SCHEMA, Result, wire_schema
from ..row_stats import Failures, RowStats, failures_in

FOLDER = "_manta"
RECORDS = f"{FOLDER}/records"
PENDING = f"{FOLDER}/pending"
SUCCESS = "_SUCCESS"
MANIFEST, REPORT = "_manifest.json", "_report.json"
PART_NAME = re.compile(rf"(?:{ERRORS}/)?(part|errors)-(?:(\d+)-)?(\d+)-[0-9a-f]{{8}}\.(parquet|jsonl)")
_OTHERS = (SUCCESS, MANIFEST, REPORT, "_report.html")  # the last one is of version 0.2
RESULT_NAME = re.compile("|".join((PART_NAME.pattern, *map(re.escape, _OTHERS))))

Kind = Literal["part", "errors"]  # answered rows, failed rows
Json = dict[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True)
class OutputForm:
    format: OutputFormat
    # columns of the input that are passed through (`RowIndex.columns`)
    columns: pa.Schema = field(default_factory=lambda: pa.schema([]))
    ordered: bool = False  # parts contain complete shards of consecutive rows

    def __post_init__(self) -> None:
        if not len(self.columns):
            return
        ours = OutputForm(self.format).wire.names
        if taken := sorted(set(self.columns.names) & set(ours)):
            raise ConfigError(
                f"columns: {', '.join(taken)} cannot be passed through: results have columns of that name. "
                "Leave them out, or rename them in the input.",
                param="columns",
            )

    @property
    def wire(self) -> pa.Schema:
        return wire_schema(self.columns)

    @property
    def written(self) -> pa.Schema:
        """The columns of parts, except for OpenAI's lines."""
        return pa.schema([*RESULT_SCHEMA, *self.columns])

    @property
    def suffix(self) -> str:
        return "parquet" if self.format == "parquet" else "jsonl"

    def table(self, results: Sequence[Result]) -> pa.Table:
        return pa.Table.from_pylist(list(results), schema=self.wire)

    def as_json(self) -> Json:
        columns = {each.name: "json" if is_member(each) else str(each.type) for each in self.columns}
        return {"format": self.format, "columns": columns, "ordered": self.ordered}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Metadata of a part. Written before its part, and ignored until the part exists.

    Attributes:
        run, writer: which run and writer made the part.
        numbering: row numbers refer to the input as of this run.
        replaces: parts that this one replaces.
        stats: `RowStats.to_json()`.
        failures: for a part of failed rows, which rows failed in the same way.
    """

    part: str
    run: int
    writer: str
    numbering: int
    rows: RowRanges
    num_bytes: int
    sha256: str
    stats: Mapping[str, Any]  # Any: JSON
    failures: tuple[Failures, ...] = ()
    replaces: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        return "errors" if self.part.startswith(ERRORS) else "part"

    @property
    def shard(self) -> int:
        name = PART_NAME.fullmatch(self.part)
        assert name is not None, f"{self.part} is not the name of a part"
        return int(name[2])

    @property
    def name(self) -> str:
        return f"{RECORDS}/{self.part.removeprefix(f'{ERRORS}/')}.json"

    def encoded(self) -> bytes:
        content = {
            "part": self.part,
            "run": self.run,
            "writer": self.writer,
            "numbering": self.numbering,
            "num_rows": count(self.rows),
            "rows": self.rows,
            "bytes": self.num_bytes,
            "sha256": self.sha256,
            "replaces": self.replaces,
            "figures": self.stats,
            "failures": [asdict(each) for each in self.failures],
        }
        return json.dumps(content, ensure_ascii=False).encode()

    @classmethod
    def decoded(cls, content: bytes) -> Self:
        record = json.loads(content)
        return cls(
            part=inner_name(record["part"], PART_NAME),
            run=record["run"],
            writer=record["writer"],
            numbering=record["numbering"],
            rows=tuple((begin, end) for begin, end in record["rows"]),
            num_bytes=record["bytes"],
            sha256=record["sha256"],
            stats=record["figures"],
            failures=tuple(map(Failures.from_json, record.get("failures", ()))),
            replaces=tuple(inner_name(part, PART_NAME) for part in record["replaces"]),
        )

    def row_stats(self) -> RowStats:
        return RowStats.from_json(self.stats)


def part_of(record: str) -> str:
    return _in_folder(record.removeprefix(f"{RECORDS}/").removesuffix(".json"))


def part_name(kind: str, shard: int, seq: int, form: OutputForm) -> str:
    return _in_folder(f"{kind}-{shard:06d}-{seq:05d}-{uuid.uuid4().hex[:8]}.{form.suffix}")


def _in_folder(part: str) -> str:
    return f"{ERRORS}/{part}" if part.startswith("errors-") else part


def make_part(
    name: str, table: pa.Table, form: OutputForm, *, run: int, writer: str
) -> tuple[Record, bytes | pa.Buffer]:
    """Return record and content of a part. `table`: all answered or all failed, sorted by row."""
    content = part_content(name, table, form)
    stats = RowStats()
    stats.add(table)
    record = Record(
        part=name,
        run=run,
        writer=writer,
        numbering=run,
        rows=from_rows(table["row"].to_pylist()),
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        stats=stats.to_json(),
        failures=failures_in(table),
    )
    return record, content


def put(output: Storage, record: Record, content: bytes | pa.Buffer) -> None:
    """Write the record, then its part. Raises OSError; may be repeated."""
    output.write(record.name, record.encoded())
    output.write(record.part, content)


def part_content(name: str, table: pa.Table, form: OutputForm) -> bytes | pa.Buffer:
    if form.format == "openai":
        return _lines(map(_openai_line, table.to_pylist()))
    schema = form.written
    written = pa.table([table[name] for name in schema.names], schema=schema)
    if form.format == "parquet":
        return _parquet(written)
    members = [column.name for column in form.columns if is_member(column)]
    return _lines(written.to_pylist(), ["response", *members])


def merge_rows(contents: Sequence[bytes], order: Sequence[int] | np.ndarray, form: OutputForm) -> Any:
    """Return a part of rows of others. `order`: indices of the rows to take, counted over all contents."""
    if form.suffix == "jsonl":
        lines = [line for content in contents for line in content.splitlines(keepends=True)]
        return b"".join(lines[place] for place in order)
    # A part written by another version may have fewer columns.
    tables = [form.written.empty_table(), *(pq.read_table(pa.BufferReader(each)) for each in contents)]
    return _parquet(pa.concat_tables(tables, promote_options="default").take(pa.array(order)))


def ids_in(content: bytes, form: OutputForm) -> list[str]:
    if form.suffix == "parquet":
        return pq.read_table(pa.BufferReader(content), columns=["id"])["id"].to_pylist()
    name = "custom_id" if form.format == "openai" else "id"
    return [json.loads(line)[name] for line in content.splitlines()]


def _parquet(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue()


def _lines(rows: Iterable[Json], members: Sequence[str] = ()) -> bytes:
    return "".join(map(partial(_line, members=members), rows)).encode()


def _line(row: Json, members: Sequence[str]) -> str:
    """`members`: columns that contain JSON (`passthrough_columns.MEMBER`)."""
    texts = {name: row.pop(name) for name in members}
    line = json.dumps(row, ensure_ascii=False, default=str)
    further = (f", {json.dumps(name, ensure_ascii=False)}: {text}" for name, text in texts.items() if text)
    return f"{line[:-1]}{''.join(further)}}}\n"


def _openai_line(row: Mapping[str, Any]) -> Json:
    """Return the endpoint's response, or the error of a row without one."""
    error, response = row["error"], None
    if row["response"] is not None:
        body = json.loads(row["response"])
        status, request_id = (200, body["id"]) if error is None else (body["error"]["code"], new_id("req_"))
        response = {"status_code": status, "request_id": request_id, "body": body}
    why = {"code": error["type"], "message": error["message"]} if error and response is None else None
    line = {"id": new_id("batch_req_"), "custom_id": row["id"], "response": response, "error": why}
    return line | {"input": row["input"]} if error and CONTENT_ID.fullmatch(row["id"]) else line
