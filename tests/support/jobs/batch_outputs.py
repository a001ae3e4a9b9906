"""Results, job specs and outputs of batch jobs, made by hand for tests; and all rows of an output read
back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from manta.actors.batch.dataset.source import ERRORS
from manta.actors.batch.dataset.storage import Storage
from manta.actors.batch.ledger.job_spec import JobSpec
from manta.actors.batch.ledger.output_index import results_in
from manta.actors.batch.ledger.output_parts import PART_NAME, OutputForm
from manta.actors.batch.row_answerer import Result

COLUMNS = pa.schema([("category", pa.string()), ("score", pa.float64())])
ERROR = {"type": "BadRequestError", "message": "too long", "param": "prompt"}


def result(row: int, *, failed: bool = False, text: str = "answer") -> Result:
    columns = {"category": "even" if row % 2 == 0 else "odd", "score": row / 2}
    both = {
        "row": row,
        "id": f"id-{row}",
        **columns,
        "counted_as": columns["category"],
        "begin_s": 1.0 + row,
        "end_s": 2.0 + row,
    }
    if failed:
        return both | {"error": ERROR, "input": f'{{"prompt": "{row}"}}'}
    tokens = {"prompt_tokens": 3, "completion_tokens": 2, "token_ids": [row, row]}
    return both | tokens | {"text": f"{text} {row}\u2028\r", "response": json.dumps({"id": f"cmpl-{row}"})}


def results(rows: Iterable[int], failed: Iterable[int] = ()) -> list[Result]:
    bad = set(failed)
    return [result(row, failed=row in bad) for row in rows]


def form(format: Any = "jsonl", *, ordered: bool = False, columns: pa.Schema = COLUMNS) -> OutputForm:
    return OutputForm(format, columns, ordered)


def spec(num_rows: int, given: OutputForm | None = None, **changes: Any) -> JobSpec:
    made_from = {"model": "tiny", "seed": 0}
    input = [{"name": "rows.jsonl", "size": 1203, "modified": 1.0}]
    values = {"made_from": made_from, "input": input, "input_format": "jsonl", "num_rows": num_rows}
    return JobSpec(**{**values, "form": given or form(), **changes})


def parts(output: Storage) -> list[str]:
    """The names of all files that a reader would take for results."""
    return sorted(entry.name for entry in results_in(output) if PART_NAME.fullmatch(entry.name))


def rows_in(output: Storage, names: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    """Rows of parts, in their order."""
    for name in names:
        content = output.read(name)
        if name.endswith(".parquet"):
            yield from pq.read_table(pa.BufferReader(content)).to_pylist()
        else:
            yield from map(json.loads, content.decode().split("\n")[:-1])


def numbers_in(output: Storage, names: Iterable[str]) -> list[int]:
    """The row numbers of parts, by the ids of `result`."""
    rows = rows_in(output, names)
    return [int(str(row.get("custom_id", row["id"])).removeprefix("id-")) for row in rows]


def manifest(output: Storage) -> dict[str, Any]:
    return json.loads(output.read("_manifest.json"))


def read_results(folder: Storage | Path) -> list[dict[str, Any]]:
    """All rows of an output, with the failed ones, in the order of their ids."""
    where = str(folder)
    storage = (
        folder if isinstance(folder, Storage) else Storage.open(where, field="output", follows_links=True)
    )
    entries = (*storage.entries(), *storage.entries(ERRORS))
    names = [entry.name for entry in entries if entry.name.startswith(("part-", f"{ERRORS}/"))]
    return sorted(map(dict, rows_in(storage, names)), key=lambda row: str(row.get("id")))
