"""Segments: finished rows that are in no part yet, kept so that a kill loses none of them.

Arrow files of a writer's own folder, whole under their names at once. Not synced: they outlive the death of
any process, and what a power cut takes of them is answered again; parts are synced. Written and adopted by
`writer.py`, counted by `contents.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from ...cluster.row_ranges import RowRanges, of_rows
from .parts import PENDING
from .storage import Storage


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment as it is read back. `rows` are in the order of the table."""

    name: str
    run: int
    shard: int
    table: pa.Table

    @property
    def rows(self) -> RowRanges:
        return of_rows(rows_in(self.table))


def rows_in(table: pa.Table) -> list[int]:
    """The row numbers of results."""
    return table["row"].to_pylist()


def segment_folder(writer: str) -> str:
    return f"{PENDING}/{writer}"


def writer_of(name: str) -> str:
    """The writer of a segment."""
    return name.removeprefix(f"{PENDING}/").partition("/")[0]


def write_segment(output: Storage, name: str, table: pa.Table, *, run: int, shard: int) -> None:
    """Raises OSError."""
    schema = table.schema.with_metadata({b"run": str(run).encode(), b"shard": str(shard).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as file:
        file.write_table(table.cast(schema))
    output.write(name, sink.getvalue(), synced=False)


def read_segment(output: Storage, name: str, *, only_rows: bool = False) -> Segment | None:
    """A segment; None if it is gone, or torn by a power cut. Raises OSError.

    Args:
        only_rows: read the row numbers, not the results.
    """
    try:
        content = output.read(name)
        options = pa.ipc.IpcReadOptions(included_fields=[0] if only_rows else None)
        table = pa.ipc.open_file(pa.BufferReader(content), options=options).read_all()
    except (FileNotFoundError, pa.ArrowInvalid):
        return None
    metadata = table.schema.metadata
    return Segment(name, int(metadata[b"run"]), int(metadata[b"shard"]), table.replace_schema_metadata())
