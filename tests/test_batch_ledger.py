"""The ledger of a batch job's output: every row once, whatever dies and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from batch_outputs import form, manifest, numbers_in, paper, parts, results
from manta.actors.batch.ledger import Ledger
from manta.actors.batch.storage import Storage
from manta.actors.batch.writer import RowWriter


@pytest.mark.parametrize("format", ["parquet", "jsonl", "openai"])
def test_what_a_dead_writer_made_durable_is_adopted_and_the_job_ends_with_every_row_once(
    format: Any, tmp_path: Path
) -> None:
    output = Storage.open(str(tmp_path / "out"), field="output")
    job = paper(100, form(format))
    ledger = Ledger.open(output, job)
    died = RowWriter(output, job.form, run=ledger.run, shard=0, writer="died")
    died.add(results(range(0, 100, 2), failed=range(0, 100, 10)))
    died.flush()
    ledger.close()

    ledger = Ledger.open(output, job)
    assert (ledger.run, ledger.orphans, ledger.answered) == (2, ("died",), ())
    heir = RowWriter(output, job.form, run=ledger.run, shard=0, writer="heir")
    assert heir.adopt("died", ledger.known("died")) == ledger.durable("died")
    heir.add(results(range(1, 100, 2)))
    heir.close()
    ledger.finish({"rows": 100})
    ledger.close()
    assert sorted(numbers_in(output, parts(output))) == list(range(100))
    assert [part["file"] for part in manifest(output)["parts"]] == parts(output)
    assert (ledger.figures.rows, ledger.figures.failed) == (100, 10)
