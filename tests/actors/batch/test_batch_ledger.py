"""The ledger of a batch job's output: every row once, whatever dies and when."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from manta.actors.batch import row_answerer as answering
from manta.actors.batch.dataset import storage as storages
from manta.actors.batch.dataset.row_requests import id_hash
from manta.actors.batch.dataset.storage import Storage
from manta.actors.batch.ledger import ledger as ledgers
from manta.actors.batch.ledger import output_parts as part_files
from manta.actors.batch.ledger.ledger import Ledger
from manta.actors.batch.ledger.output_parts import make_part, put
from manta.cluster.batch.row_ranges import count, from_rows
from manta.cluster.errors import ConfigError, OutputError
from pyarrow.dataset import dataset
from support.jobs.batch_outputs import (
    COLUMNS,
    JobRuns,
    form,
    manifest,
    numbers_in,
    parts,
    result,
    results,
    rows_in,
    spec,
)


@pytest.mark.parametrize("format", ["parquet", "jsonl", "openai"])
def test_durable_rows_of_a_dead_writer_are_adopted_and_every_row_is_written_once(
    format: Any, output: Storage, runs: JobRuns
) -> None:
    job = spec(100, form(format))
    runs.open(job)
    runs.write("died", results(range(0, 100, 2), failed=range(0, 100, 10)), ends=False)
    ledger = runs.open(job)
    assert (ledger.run, ledger.orphans, ledger.answered) == (2, ("died",), ())
    heir = runs.writer("heir")
    assert heir.take_over("died", ledger.already_merged("died")) == ledger.durable("died")
    heir.add(results(range(1, 100, 2)))
    heir.close()
    ledger.finish({"rows": 100})
    assert sorted(numbers_in(output, parts(output))) == list(range(100))
    assert [part["file"] for part in manifest(output)["parts"]] == parts(output)
    assert (ledger.stats.rows, ledger.stats.failed) == (100, 10)


def texts(output: Storage) -> dict[str, str]:
    return {row["id"]: row["text"] for row in rows_in(output, parts(output))}


def test_a_finished_output_lists_its_parts_and_another_run_has_nothing_to_do(
    output: Storage, runs: JobRuns
) -> None:
    job = spec(6, about={"drafter": "one"})
    assert runs.answer(job, range(6), failed=[2]).failed == ((2, 3),)
    runs.finish(job)
    said = manifest(output)
    assert (said["rows"], said["failed"], said["fingerprint"]) == (6, 1, job.fingerprint)
    assert [(part["kind"], part["rows"]) for part in said["parts"]] == [("failed", 1), ("answered", 5)]
    for part in said["parts"]:
        content = output.read(part["file"])
        assert (len(content), hashlib.sha256(content).hexdigest()) == (part["bytes"], part["sha256"])
    assert json.loads(output.read("_report.json")) == {"rows": 5}
    assert [run["run"] for run in said["runs"]] == [1, 2]
    ledger = runs.open(spec(6, about={"drafter": "another"}))
    assert (ledger.complete, ledger.unanswered, ledger.failed) == (True, (), ((2, 3),))
    assert output.entry("_SUCCESS") is not None


def test_a_finished_folder_is_a_dataset_of_its_answers(output: Storage, runs: JobRuns) -> None:
    """All files have one schema, even if a column has no value in one; DuckDB and Spark see it, too."""
    ledger = runs.open(spec(8, form("parquet", columns=pa.schema([*COLUMNS, ("note", pa.string())]))))
    for rows, note in ((range(4), None), (range(4, 8), "x")):
        runs.write(f"{note}", [{**each, "note": note} for each in results(rows, failed=[2])])
    ledger.finish({"rows": 8})
    wanted = {f"id-{row}" for row in range(8) if row != 2}
    assert set(pd.read_parquet(output.root)["id"]) == wanted
    found = dataset(output.root, format="parquet")
    assert set(found.to_table()["id"].to_pylist()) == wanted
    files = sorted(Path(output.root).glob("*.parquet"))
    assert sorted(map(Path, found.files)) == files and len(files) == 2
    assert {pq.read_schema(path).field("note").type for path in files} == {pa.string()}
    others = [path.name for path in Path(output.root).iterdir() if path not in files]
    assert all(name.startswith("_") for name in others)


@pytest.mark.parametrize(("again", "left"), [([1, 3, 5], [5]), ([3, 5], [1, 5])])
@pytest.mark.parametrize("ordered", [False, True])
def test_failed_rows_that_are_answered_later_are_removed_from_errors_and_figures(
    again: list[int], left: list[int], ordered: bool, output: Storage, runs: JobRuns
) -> None:
    job = spec(8, form(ordered=ordered))
    runs.answer(job, range(8), failed=[1, 3, 5])
    runs.finish(job)
    ledger = runs.open(job)
    ledger.reopen()
    assert output.entry("_SUCCESS") is None
    runs.write("again", results(again, failed=[5]))
    ledger.refresh()
    check_figures(ledger, left)  # as the report is made of them
    ledger.finish({})
    check_figures(ledger, left)
    check_figures(runs.open(job), left)
    errors = [name for name in parts(output) if name.startswith("_errors/")]
    assert (sorted(numbers_in(output, errors)), manifest(output)["failed"]) == (left, len(left))
    assert sorted(numbers_in(output, parts(output))) == list(range(8))


def check_figures(ledger: Ledger, failed: list[int]) -> None:
    """Eight rows, four per category; the odd ones failed at first."""
    figures = ledger.stats
    assert (figures.rows, figures.failed) == (8, len(failed))
    assert {kind: each.rows for kind, each in figures.errors.items()} == {"BadRequestError": len(failed)}
    categories = figures.categories.named
    assert {name: (each.rows, each.failed) for name, each in categories.items()} == {
        "even": (4, 0),
        "odd": (4, len(failed)),
    }
    assert sum(figures.output_lengths) == 8 - len(failed)


def test_a_dead_writers_answer_to_an_earlier_failed_row_is_adopted(runs: JobRuns) -> None:
    job = spec(4)
    runs.answer(job, range(4), failed=[1, 3])
    runs.finish(job)
    runs.open(job).reopen()
    runs.write("died", results([1]), ends=False)
    ledger = runs.open(job)
    ledger.merge_orphans()
    assert (ledger.failed, count(ledger.answered)) == (from_rows([3]), 3)


def test_rows_left_by_dead_writers_are_counted_correctly(runs: JobRuns) -> None:
    runs.open(spec(8))
    runs.write("died", results(range(6), failed=[1, 3]), ends=False)
    ledger = runs.open(spec(8))
    ledger.merge_orphans()
    assert (ledger.orphans, ledger.failed, count(ledger.answered)) == ((), from_rows([1, 3]), 4)
    assert ledger.unanswered == ((6, 8),)


@pytest.mark.parametrize("given", ["parquet", "jsonl"])
@pytest.mark.parametrize("ordered", [False, True])
def test_an_output_of_an_earlier_version_is_continued(
    given: Any, ordered: bool, output: Storage, runs: JobRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version wrote no log probabilities and less about failed rows."""
    job = spec(8, form(given, ordered=ordered))
    with monkeypatch.context() as earlier:
        columns = [column for column in answering.RESULT_SCHEMA if column.name != "logprobs"]
        wire = [column for column in answering.WIRE_SCHEMA if column.name != "logprobs"]
        earlier.setattr(part_files, "RESULT_SCHEMA", pa.schema(columns))
        earlier.setattr(answering, "WIRE_SCHEMA", pa.schema(wire))
        earlier.setattr(part_files, "failures_in", lambda table: ())
        runs.open(job)
        runs.write("whole", results([0, 2, 3], failed=[3]))
        runs.write("died", results([4]), ends=False)
    names = [name for name in parts(output) if name.startswith("part-")]
    assert all("logprobs" not in row for row in rows_in(output, names))
    ledger, writer = runs.open(job), runs.writer("later")
    assert writer.take_over("died", ledger.already_merged("died")) == from_rows([4])
    reported = [{"logprob": -1.0, "rank": 1, "top_token_ids": [5], "top_logprobs": [-1.0]}]
    rows = [each | {"logprobs": reported} for each in results([1, 5, 6, 7])]
    writer.add(rows, shard=0 if ordered else None)
    writer.close()
    ledger.finish({})
    assert (ledger.stats.rows, ledger.stats.failed) == (8, 1)
    found = {row["id"]: row for row in rows_in(output, parts(output))}
    assert set(found) == {f"id-{i}" for i in range(8)}
    assert {name for name, row in found.items() if row.get("logprobs")} == {"id-1", "id-5", "id-6", "id-7"}
    assert found["id-1"]["logprobs"] == reported
    if given == "parquet" and ordered:  # all answers are one part
        (name,) = (name for name in parts(output) if name.startswith("part-"))
        assert pq.read_table(pa.BufferReader(output.read(name))).schema.names == job.form.written.names


def test_rows_that_move_into_a_part_during_a_scan_are_found(
    runs: JobRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = runs.open(spec(4))
    writer = runs.write("w", results(range(4)), ends=False)
    real = Storage.entries
    moving = iter([writer.close])

    def entries(*args: Any, **kwargs: Any) -> Any:
        listed = real(*args, **kwargs)
        for move in moving:
            move()
        return listed

    monkeypatch.setattr(Storage, "entries", entries)
    ledger.refresh()
    assert ledger.durable("w") == ((0, 4),)


def test_an_abandoned_engine_writes_no_part_after_the_end(output: Storage, runs: JobRuns) -> None:
    job = spec(4)
    runs.answer(job, range(4))
    ledger = runs.open(job)
    given_up = runs.writer("given up")
    given_up.add(results([1, 2]))
    ledger.finish({})
    runs.close()
    with pytest.raises(OutputError, match="not written by run 2 any more: it has ended"):
        given_up.close()
    assert sorted(numbers_in(output, parts(output))) == list(range(4))
    assert runs.open(job).complete


def test_a_part_that_appears_after_the_end_is_removed_by_the_next_run(output: Storage, runs: JobRuns) -> None:
    """The writer is given up between its last check of the run and its part."""
    job = spec(4)
    runs.answer(job, range(4))
    runs.finish(job)
    name, table = "part-000009-00001-0123abcd.jsonl", job.form.table(results([1, 2]))
    put(output, *make_part(name, table, job.form, run=1, writer="late"))
    ledger = runs.open(job)
    assert (ledger.complete, ledger.unanswered) == (False, ())
    ledger.finish({})
    assert sorted(numbers_in(output, parts(output))) == list(range(4))
    assert runs.open(job).complete


def test_a_finish_that_is_killed_anywhere_is_repeated_and_counts_no_work_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parts of a shard become one: at some moments all three exist."""
    job = spec(4, form(ordered=True))
    for place in itertools.count():
        output = Storage.open(str(tmp_path / f"{place}"), field="output")
        runs = JobRuns(output)
        ledger = runs.open(job)
        for name, rows in (("a", [0, 2]), ("b", [1, 3])):
            runs.write(name, results(rows))
        with monkeypatch.context() as patched:
            steps = itertools.count()
            for name in ("_remove", "write"):
                patched.setattr(Storage, name, killed_at(place, steps, getattr(Storage, name)))
            try:
                ledger.finish({})
            except KeyboardInterrupt:
                killed = True
            else:
                killed = False
        ledger = runs.open(job)
        assert (ledger.stats.rows, ledger.stats.completion_tokens) == (4, 8)
        ledger.finish({})
        runs.close()
        assert numbers_in(output, parts(output)) == [0, 1, 2, 3]
        assert (ledger.stats.rows, ledger.stats.completion_tokens) == (4, 8)
        if not killed:
            break
    assert place == 10


def killed_at(place: int, steps: Iterator[int], work: Callable[..., Any]) -> Callable[..., Any]:
    def killed(*args: Any, **kwargs: Any) -> Any:
        if next(steps) == place:
            raise KeyboardInterrupt
        return work(*args, **kwargs)

    return killed


def test_a_job_with_missing_rows_is_no_success(output: Storage, runs: JobRuns) -> None:
    runs.answer(spec(5), [0, 1, 4])
    with pytest.raises(OutputError, match=r"2 rows are in no part of .* Run the same command again"):
        runs.open(spec(5)).finish({})
    assert output.entry("_SUCCESS") is None
    assert runs.finish(spec(5, sample=((0, 2), (4, 5)))).unanswered == ()
    ledger = runs.open(spec(5))  # the others too, now
    assert (ledger.complete, ledger.unanswered) == (False, ((2, 4),))


def test_a_job_with_other_settings_is_refused_with_the_changes(output: Storage, runs: JobRuns) -> None:
    first = {"model": "tiny", "seed": 0, "sampling": {"top_p": 0.5, "n": 1}}
    runs.answer(spec(3, made_from=first), [0])
    changed = {"model": "other", "seed": 0, "template": "{x}", "sampling": {"top_p": 0.9, "n": 1}}
    with pytest.raises(ConfigError) as refused:
        runs.open(spec(3, made_from=changed))
    said = "model: tiny before, other now; sampling.top_p: 0.5 before, 0.9 now; "
    for words in (said, "template: none before, {x} now. Use the same", "--force-resume", "--overwrite"):
        assert words in refused.value.message
    assert runs.open(spec(3, made_from=changed), resume="force").unanswered == ((1, 3),)
    assert json.loads(output.read("_manta/job.json"))["spec"]["made_from"] == changed


def rows_file(size: int = 1203, modified: float = 1.0, **hashes: str) -> dict[str, Any]:
    return {"name": "rows.jsonl", "size": size, "modified": modified, **hashes}


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (rows_file(), [rows_file(1300)], "rows.jsonl: 1,203 bytes before, 1,300 now"),
        (
            rows_file(),
            [rows_file(modified=61.0)],
            "rows.jsonl: modified 1970-01-01 00:00:01 UTC before, 1970-01-01 00:01:01 UTC now",
        ),
        (
            rows_file(sha256="a" * 64),
            [rows_file(sha256="b" * 64)],
            "other content of the same size (SHA-256 aaaaaaaaaaaa... before, bbbbbbbbbbbb... now)",
        ),
        (
            rows_file(),
            [{"name": f"{i}.jsonl", "size": 1, "modified": 1.0} for i in range(4)],
            "0.jsonl: new; 1.jsonl: new; 2.jsonl: new; 2 other files",
        ),
    ],
)
def test_a_changed_input_is_refused_with_the_changes(
    before: dict[str, Any], now: list[dict[str, Any]], words: str, runs: JobRuns
) -> None:
    runs.answer(spec(3, input=[before]), [0])
    with pytest.raises(ConfigError, match=re.escape(f"{words}. Use the same settings")):
        runs.open(spec(3, input=now))


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (rows_file(sha256="a"), rows_file(modified=9.0, sha256="a")),  # copied, or touched
        (rows_file(), rows_file(sha256="a")),  # begun by an earlier version
        (rows_file(sampled="a"), rows_file(sampled="a")),
    ],
)
def test_an_input_with_the_same_content_is_continued(
    before: dict[str, Any], now: dict[str, Any], runs: JobRuns
) -> None:
    runs.answer(spec(3, input=[before]), [0])
    assert runs.open(spec(3, input=[now])).unanswered == ((1, 3),)


def test_an_output_of_another_format_is_refused_even_by_force(runs: JobRuns) -> None:
    runs.answer(spec(3), [0])
    for given, words in (
        (spec(3, form("parquet")), "output format: jsonl before, parquet now"),
        (spec(3, form(ordered=True)), "output ordered: False before, True now"),
    ):
        with pytest.raises(ConfigError, match=words):
            runs.open(given, resume="force")


def test_rows_of_a_changed_input_are_found_by_their_ids(output: Storage, runs: JobRuns) -> None:
    """Rows in segments at the time of the kill are found too; removed ids leave the output."""
    job = spec(6)
    runs.answer(job, [0, 1, 3], failed=[1])
    runs.open(job)
    runs.write("killed", results([4]), ends=False)
    ids = ["id-4", "id-9", "id-1", "id-0"]
    hashes = np.array([id_hash(each) for each in ids], dtype=np.uint64)
    ledger = runs.open(spec(4, input=[rows_file(7, 2.0)]), resume="force", id_hashes=lambda: hashes)
    assert (ledger.answered, ledger.failed, ledger.unanswered) == (((0, 1), (3, 4)), ((2, 3),), ((1, 2),))
    runs.write("last", [result(9) | {"row": 1}])
    ledger.finish({})
    assert sorted(texts(output)) == sorted(ids)


def test_without_resume_an_output_that_is_not_empty_is_refused_and_left_unchanged(
    output: Storage, runs: JobRuns
) -> None:
    older = "part-00000-0123abcd.jsonl"  # an older Manta's, which kept no records
    output.write(older, b"{}\n")
    with pytest.raises(ConfigError, match=rf"is not empty \({older}\).*--overwrite"):
        runs.open(spec(3))
    assert [path.name for path in Path(output.root).iterdir()] == [older]
    output.remove(older)
    runs.open(spec(3))
    with pytest.raises(ConfigError, match=r"is not empty .*--overwrite"):
        runs.open(spec(3), resume="no")


def test_parts_without_a_record_and_changed_parts_are_refused(output: Storage, runs: JobRuns) -> None:
    job = spec(3)
    runs.answer(job, [0, 1])
    (ours,) = parts(output)
    content = output.read(ours)
    foreign = "part-000000-00001-0123abcd.jsonl"
    output.write(foreign, content)
    with pytest.raises(ConfigError, match=f"{foreign} in .* was not written by this job. Move it away"):
        runs.open(job)
    output.remove(foreign)
    output.write(ours, content[:-1])
    with pytest.raises(ConfigError, match=f"{ours} in .* Remove it: its rows are answered again"):
        runs.open(job)
    output.remove(ours)
    output.write("notes.txt", b"mine")  # an existing job may have other files next to it
    assert runs.open(job).unanswered == ((0, 3),)


def test_earlier_results_stay_until_new_ones_replace_them(output: Storage, runs: JobRuns) -> None:
    job, new = spec(2), spec(2, made_from={"model": "new"})
    runs.answer(job, [0, 1])
    runs.finish(job)
    output.write("notes.txt", b"mine")
    before = parts(output)
    ledger = runs.open(new, overwrite=True)
    assert (ledger.run, ledger.unanswered, parts(output)) == (3, ((0, 2),), before)
    assert output.entry("_SUCCESS") is not None
    ledger = runs.open(new)  # it was killed before it had answered anything
    assert (ledger.complete, ledger.unanswered, parts(output)) == (False, ((0, 2),), before)
    writer = runs.write("new", [result(row, text="new") for row in range(2)], ends=False)
    assert parts(output) == before
    writer.close()
    assert output.entry("_SUCCESS") is None
    assert set(texts(output).values()) == {"new 0\u2028\r", "new 1\u2028\r"}
    ledger.finish({})
    assert [part["file"] for part in manifest(output)["parts"]] == parts(output)
    assert len(output.entries("_manta/records")) == 1
    assert output.read("notes.txt") == b"mine"


@pytest.mark.parametrize("broken", [b"{", b'{"version": 7}', b'{"version": 1}'])
def test_an_unreadable_job_file_is_named_and_may_be_overwritten(
    broken: bytes, output: Storage, runs: JobRuns
) -> None:
    job = spec(2)
    runs.answer(job, [0, 1])
    output.write("_manta/job.json", broken)
    with pytest.raises(ConfigError, match=r"cannot be used .*--overwrite"):
        runs.open(job)
    runs.answer(job, [0, 1], overwrite=True)
    runs.finish(job)
    assert sorted(numbers_in(output, parts(output))) == [0, 1]


def test_finishing_waits_for_an_output_that_fails_temporarily(
    output: Storage, runs: JobRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = spec(2)
    runs.answer(job, [0, 1])
    ledger = runs.open(job)
    writes = itertools.count()
    real = storages.write_atomically

    def failing(*args: Any, **kwargs: Any) -> None:
        if next(writes) in (0, 2, 5, 9):  # each attempt gets one write further
            raise OSError(errno.EROFS, "Read-only file system")
        real(*args, **kwargs)

    monkeypatch.setattr(storages, "write_atomically", failing)
    monkeypatch.setattr(ledgers, "RETRY_S", 0.0)
    ledger.finish({})
    assert output.entry("_SUCCESS") is not None
    assert next(writes) == 14


def test_an_output_of_a_million_rows_opens_with_few_requests(
    output: Storage, runs: JobRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = spec(1_000_000)
    runs.answer(job, [0])
    (made,) = parts(output)
    content = output.read(made)
    record = json.loads(output.read(f"_manta/records/{made}.json"))
    for i in range(1, 260):
        begin = i * 3840
        name = f"part-000000-{i:05d}-{i:08x}.jsonl"
        # in the order in which rows end: runs, with gaps that are in the next part
        rows = [[begin + 30 * j, begin + 30 * j + 29] for j in range(128)]
        text = json.dumps(record | {"part": name, "rows": rows})
        output.write(f"_manta/records/{name}.json", text.encode(), synced=False)
        output.write(name, content, synced=False)
    listings = []
    real = Storage.entries
    monkeypatch.setattr(
        Storage, "entries", lambda *args, **kwargs: (listings.append(args), real(*args, **kwargs))[1]
    )
    ledger = runs.open(job)
    assert count(ledger.answered) == 1 + 259 * 128 * 29
    assert len(listings) == 6  # results and failed rows before anything, and again; segments; records
