"""Columns passed through from the input to the results (`--pass-through`).

Results in JSONL repeat each value as its line writes it. Results in Parquet need one type per column, which
is collected over all lines of JSON: integers, floats, booleans or text. A column of other or of several types
holds each value's JSON text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from ....cluster.errors import DatasetError
from .row_requests import ID_COLUMNS, Record, RowSchema

PLAIN: Mapping[type, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
}
# Metadata of an Arrow field whose text is JSON. "text": a column of Parquet, where null means no value.
# "member": the text is copied into a line of JSON; null means that the line has no such key.
MARK, TEXT, MEMBER = b"json", b"text", b"member"
EXACT = 2**53  # every smaller integer is a float64 too
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],:]|[^\s"{}\[\],:]+')


class _Wide(int):
    """Marks integers of 64 bits that a float64 may not represent."""


class ColumnTypes:
    def __init__(self, row_schema: RowSchema) -> None:
        self._row_schema = row_schema
        self._seen: dict[str, set[type]] = {}
        self._wanted = None if row_schema.columns == "all" else frozenset(row_schema.columns)

    def add(self, record: Record) -> None:
        for name in record if self._wanted is None else self._wanted & record.keys():
            value = record[name]
            seen = self._seen.setdefault(name, set())
            if value is not None:
                seen.add(_kind(value))

    def schema(self) -> pa.Schema:
        """Return the columns to pass through. Raises DatasetError for a column that no record has."""
        types = pa.schema([_field(name, seen) for name, seen in self._seen.items()])
        return chosen(types, self._row_schema)


def chosen(schema: pa.Schema, row_schema: RowSchema) -> pa.Schema:
    """Return the columns of a dataset to pass through. Raises DatasetError."""
    if row_schema.columns == "all":
        id_columns = (row_schema.id_column,) if row_schema.id_column else ID_COLUMNS
        own_id = next((name for name in id_columns if name in schema.names), None)
        names = [name for name in schema.names if name not in (own_id, "seed")]  # results have these anyway
    else:
        names = list(row_schema.columns)
    if unknown := next((name for name in names if name not in schema.names), None):
        raise DatasetError(
            f"columns: no column {unknown!r} in the data. It has: {', '.join(schema.names)}.", param="columns"
        )
    return pa.schema([_readable(schema.field(name)) for name in names])


def of_parquet(schemas: Iterable[pa.Schema], row_schema: RowSchema) -> pa.Schema:
    """Return the columns of Parquet files to pass through; types may differ where one can hold the other."""
    plain = [pa.schema(map(_plain, schema)) for schema in schemas]
    try:
        return chosen(pa.unify_schemas(plain, promote_options="permissive"), row_schema)
    except pa.ArrowException as error:
        raise DatasetError(f"columns: the files' columns differ: {error}.", param="columns") from None


def as_members(columns: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(name, pa.string(), metadata={MARK: MEMBER}) for name in columns.names])


def is_member(field: pa.Field) -> bool:
    return (field.metadata or {}).get(MARK) == MEMBER


def passed_through(record: Record, schema: pa.Schema, line: str | None = None) -> dict[str, Any]:
    texts = members(line) if line is not None and any(field.metadata for field in schema) else {}
    return {field.name: _fit(record.get(field.name), texts.get(field.name), field) for field in schema}


def members(line: str) -> dict[str, str]:
    """Return the JSON text of each value of the object in a line, which is valid JSON, by its key."""
    found: dict[str, str] = {}
    depth, begin, key = 0, 0, None
    for token in _TOKEN.finditer(line):
        mark = token[0]
        depth += (mark in ("{", "[")) - (mark in ("}", "]"))
        if depth == 1 and key is None and mark.startswith('"'):
            key = mark
        elif depth == 1 and mark == ":":
            begin = token.end()
        elif key is not None and (depth == 0 or (depth == 1 and mark == ",")):
            text = line[begin : token.start()].strip()
            found[json.loads(key)] = text.replace("\r", " ")  # some readers end lines at \r
            key = None
    return found


def _kind(value: object) -> type:
    if type(value) is not int or abs(value) <= EXACT:
        return type(value)
    return _Wide if -(2**63) <= value < 2**63 else dict


def _field(name: str, seen: set[type]) -> pa.Field:
    if seen == {int, float}:
        seen = {float}
    elif seen in ({_Wide}, {_Wide, int}):
        seen = {int}
    if not seen or (len(seen) == 1 and next(iter(seen)) in PLAIN):
        return pa.field(name, PLAIN[next(iter(seen), str)])
    return pa.field(name, pa.string(), metadata={MARK: TEXT})


def _plain(field: pa.Field) -> pa.Field:
    """Replace dictionary and extension types by the type of their values."""
    kind = field.type
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.field(field.name, kind)


def _readable(field: pa.Field) -> pa.Field:
    """Give columns without values the type text: many readers of Parquet have no null type."""
    return field.with_type(pa.string()) if pa.types.is_null(field.type) else field


def _fit(value: Any, text: str | None, field: pa.Field) -> Any:
    if value is None:
        return text if is_member(field) else None
    if field.metadata:  # a column of the file's folder is in no line
        return text if text is not None else json.dumps(value, ensure_ascii=False)
    return float(value) if pa.types.is_float64(field.type) else value
