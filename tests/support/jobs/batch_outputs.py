"""Results, job specs and outputs of batch jobs, made by hand for tests; and all rows of an output read
back."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from manta.actors.batch.dataset.source import ERRORS
from manta.actors.batch.dataset.storage import Storage
from manta.actors.batch.ledger.job_spec import JobSpec
from manta.actors.batch.ledger.ledger import Ledger
from manta.actors.batch.ledger.output_index import results_in
from manta.actors.batch.ledger.output_parts import PART_NAME, OutputForm
from manta.actors.batch.ledger.row_writer import RowWriter
from manta.actors.batch.row_answerer import Result
from manta.cluster.batch.row_ranges import count

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


class JobRuns:
    """Runs of jobs on one output. Opening a run ends the one before, as the system does after a kill."""

    def __init__(self, output: Storage) -> None:
        self._output = output
        self._ledger: Ledger | None = None

    def open(self, job: JobSpec, **how: Any) -> Ledger:
        self.close()
        self._ledger, self._job = Ledger.open(self._output, job, **how), job
        return self._ledger

    def writer(self, name: str) -> RowWriter:
        """Return a new writer of the run."""
        assert self._ledger is not None, "open() a run first"
        return RowWriter(self._output, self._job.form, run=self._ledger.run, shard=0, writer=name)

    def write(self, name: str, rows: Iterable[Result], *, ends: bool = True) -> RowWriter:
        """Write rows with a new writer of the run: to parts if it ends, else to segments."""
        writer = self.writer(name)
        writer.add(list(rows), shard=0 if self._job.form.ordered else None)
        _ = writer.close() if ends else writer.flush()
        return writer

    def answer(self, job: JobSpec, rows: Iterable[int], failed: Iterable[int] = (), **how: Any) -> Ledger:
        """Answer some rows in a run that ends without a report."""
        ledger = self.open(job, **how)
        self.write(uuid.uuid4().hex, results(rows, failed))
        ledger.refresh()
        self.close()
        return ledger

    def finish(self, job: JobSpec) -> Ledger:
        """Open a run and finish the job in it."""
        ledger = self.open(job)
        ledger.finish({"rows": count(ledger.answered)})
        self.close()
        return ledger

    def close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()


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


def num_durable(folder: Path) -> int:
    """Rows of an output's folder that survive a kill now: those in segments and in parts."""
    try:
        found = [
            pa.ipc.open_file(path).read_all().num_rows for path in folder.glob("_manta/pending/*/*.arrow")
        ]
    except FileNotFoundError:  # they became a part meanwhile
        return num_durable(folder)
    found += [pq.read_metadata(path).num_rows for path in folder.glob("part-*.parquet")]
    found += [len(path.read_bytes().splitlines()) for path in folder.glob("part-*.jsonl")]
    return sum(found)


def read_results(folder: Storage | Path) -> list[dict[str, Any]]:
    """All rows of an output, with the failed ones, in the order of their ids."""
    where = str(folder)
    storage = (
        folder if isinstance(folder, Storage) else Storage.open(where, field="output", follows_links=True)
    )
    entries = (*storage.entries(), *storage.entries(ERRORS))
    names = [entry.name for entry in entries if entry.name.startswith(("part-", f"{ERRORS}/"))]
    return sorted(map(dict, rows_in(storage, names)), key=lambda row: str(row.get("id")))
