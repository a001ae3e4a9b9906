"""Columns handed on from the input to the results: which, of what type, and values brought into it.

Parquet knows its types. Lines of JSON show theirs while they are surveyed: integers, numbers, truth values
and text stay what they are, all else (or a mixture) becomes JSON text. Fields of CSV are text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from ...cluster.errors import DatasetError
from .rows import ID_COLUMNS, Layout, Record

PLAIN: Mapping[type, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
}
OTHER = "json"  # an Arrow field's mark: its text is the JSON of the value


class ColumnTypes:
    """Gathers the types of columns over records.

    Args:
        wanted: `Layout.columns`.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._seen: dict[str, set[type]] = {}
        self._wanted = None if layout.columns == "all" else frozenset(layout.columns)

    def add(self, record: Record) -> None:
        for name in record if self._wanted is None else self._wanted & record.keys():
            value = record[name]
            seen = self._seen.setdefault(name, set())
            if value is not None:
                seen.add(type(value) if not _is_large(value) else dict)

    def schema(self) -> pa.Schema:
        """Raises DatasetError for a column that no record has, or that results cannot have."""
        types = pa.schema([_field(name, seen) for name, seen in self._seen.items()])
        return chosen(types, self._layout)


def chosen(schema: pa.Schema, layout: Layout) -> pa.Schema:
    """The columns of a dataset that are handed on. Raises DatasetError."""
    if layout.columns == "all":
        id_columns = (layout.id_column,) if layout.id_column else ID_COLUMNS
        own_id = next((name for name in id_columns if name in schema.names), None)
        names = [name for name in schema.names if name not in (own_id, "seed")]  # results have these anyway
    else:
        names = list(layout.columns)
    if unknown := next((name for name in names if name not in schema.names), None):
        raise DatasetError(
            f"columns: no column {unknown!r} in the data. It has: {', '.join(schema.names)}.", param="columns"
        )
    return pa.schema([_plain(schema.field(name)) for name in names])


def of_parquet(schemas: Iterable[pa.Schema], layout: Layout) -> pa.Schema:
    """Those of Parquet files, whose types may differ as far as one holds the other."""
    try:
        return chosen(pa.unify_schemas(list(schemas), promote_options="permissive"), layout)
    except pa.ArrowException as error:
        raise DatasetError(f"columns: the files' columns differ: {error}.", param="columns") from None


def handed_on(record: Record, schema: pa.Schema) -> dict[str, Any]:
    """The record's values of the columns, as the schema wants them."""
    return {field.name: _fit(record.get(field.name), field) for field in schema}


def _field(name: str, seen: set[type]) -> pa.Field:
    if seen == {int, float}:
        seen = {float}
    if not seen or (len(seen) == 1 and next(iter(seen)) in PLAIN):
        return pa.field(name, PLAIN[next(iter(seen), str)])
    return pa.field(name, pa.string(), metadata={OTHER: "1"})


def _plain(field: pa.Field) -> pa.Field:
    """Dictionaries and extensions are how values are kept, not what they are."""
    kind = field.type
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    kept = {OTHER: "1"} if OTHER.encode() in (field.metadata or {}) else None
    return pa.field(field.name, kind, metadata=kept)


def _fit(value: Any, field: pa.Field) -> Any:
    if value is None:
        return None
    if field.metadata:
        return json.dumps(value, ensure_ascii=False)
    return float(value) if pa.types.is_float64(field.type) else value


def _is_large(value: object) -> bool:
    return isinstance(value, int) and not -(2**63) <= value < 2**63
