"""Writing results: segments immediately, parts in time, nothing lost or duplicated while writes fail."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from manta.actors.batch.dataset import storage as storages
from manta.actors.batch.dataset.storage import Storage
from manta.actors.batch.ledger import row_writer as writers
from manta.actors.batch.ledger.row_writer import RowWriter
from manta.actors.system import atomic_files as files
from manta.cluster.batch.row_ranges import from_rows
from manta.cluster.errors import ConfigError, OutputError
from support.jobs.batch_outputs import JobRuns, form, numbers_in, parts, result, results, rows_in, spec
from support.paths import TESTS


@pytest.fixture(autouse=True)
def parts_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write parts of many rows only: whether a minute has passed depends on the machine."""
    monkeypatch.setattr(writers, "PART_INTERVAL_S", 1e9)


def writer_of(output: Storage, given: Any = "jsonl", name: str = "w", **changes: Any) -> RowWriter:
    return RowWriter(output, form(given, **changes), run=1, shard=3, writer=name)


def segments(output: Storage) -> list[str]:
    return [entry.name for entry in output.entries("_manta/pending", recursive=True)]


def test_rows_are_written_to_segments_immediately_and_to_a_part_when_there_are_enough(
    output: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "ROWS_PER_PART", 5)
    writer = writer_of(output)
    writer.add(results([4, 2]))
    assert (writer.num_pending, parts(output)) == (2, [])
    assert writer.flush() == from_rows([2, 4])
    assert (writer.num_pending, segments(output), parts(output)) == (0, ["_manta/pending/w/000000.arrow"], [])
    assert writer.flush() == ()
    writer.add(results([9, 0, 1], failed=[0]))
    assert writer.flush() == from_rows([0, 1, 9])
    assert segments(output) == []
    shapes = [re.sub("-[0-9a-f]{8}", "-*", name) for name in parts(output)]
    assert shapes == ["_errors/errors-000003-00002-*.jsonl", "part-000003-00001-*.jsonl"]
    assert numbers_in(output, parts(output)) == [0, 1, 2, 4, 9]
    assert writer.close() == ()


def test_rows_do_not_wait_for_a_part_longer_than_a_minute(
    output: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_of(output)
    writer.add(results([1]))
    writer.flush()
    assert parts(output) == []
    monkeypatch.setattr(writers, "PART_INTERVAL_S", 0.0)
    writer.flush()
    assert numbers_in(output, parts(output)) == [1]


def test_with_preserved_order_a_part_is_a_shard(output: Storage) -> None:
    writer = writer_of(output, ordered=True)
    for shard, rows in ((1, [12, 10]), (0, [3, 1]), (1, [11]), (0, [0, 2])):
        writer.add(results(rows), shard=shard)
        writer.flush()
    assert parts(output) == []
    writer.end_shard(1)
    writer.flush()
    assert numbers_in(output, parts(output)) == [10, 11, 12]
    writer.close()
    assert numbers_in(output, parts(output)) == [0, 1, 2, 3, 10, 11, 12]


def test_parquet_and_jsonl_have_the_passed_through_columns_and_openai_output_its_own(output: Storage) -> None:
    for name in ("parquet", "jsonl", "openai"):
        writer = writer_of(output.subfolder(name), name)
        writer.add(results(range(4), failed=[1]))
        writer.close()
        rows = list(rows_in(output.subfolder(name), parts(output.subfolder(name))))
        failed, first, *_ = rows
        if name == "openai":
            assert [row["custom_id"] for row in rows] == ["id-1", "id-0", "id-2", "id-3"]
            assert first["response"] == {"status_code": 200, "request_id": "cmpl-0", "body": {"id": "cmpl-0"}}
            assert first["error"] is None and failed.keys() == first.keys()
            assert failed["error"] == {"code": "BadRequestError", "message": "too long"}
            assert len({row["id"] for row in rows}) == 4
        else:
            assert [row["id"] for row in rows] == ["id-1", "id-0", "id-2", "id-3"]
            assert (first["category"], first["score"], failed["category"]) == ("even", 0.0, "odd")
            assert (first["text"], first["error"], failed["text"]) == ("answer 0\u2028\r", None, None)
            assert (failed["error"]["message"], failed["input"]) == ("too long", '{"prompt": "1"}')
            assert not {"row", "begin_s"} & first.keys()
            assert first["response"] == ('{"id": "cmpl-0"}' if name == "parquet" else {"id": "cmpl-0"})
    folder = Path(output.path("parquet"))
    assert pq.read_table(folder).num_rows == 3
    assert pq.read_table(folder).schema == pq.read_table(folder / "_errors").schema == form("parquet").written


def test_an_input_column_named_like_a_result_column_is_refused() -> None:
    with pytest.raises(ConfigError, match="columns: row, text cannot be passed through"):
        form(columns=pa.schema([("text", pa.string()), ("mine", pa.string()), ("row", pa.int64())]))


def test_an_answer_takes_precedence_over_a_failure_of_the_same_row(output: Storage) -> None:
    writer = writer_of(output)
    writer.add(results([0, 1], failed=[0]))
    writer.add(results([1, 0, 2], failed=[1, 2]))
    writer.close()
    found = {name.partition("-")[0]: numbers_in(output, [name]) for name in parts(output)}
    assert found == {"part": [0, 1], "_errors/errors": [2]}


def test_only_rows_in_no_part_are_adopted_from_a_dead_writers_segment(output: Storage) -> None:
    died, heir = writer_of(output, name="died"), writer_of(output, name="heir")
    died.add(results(range(4)))
    died.flush()
    assert heir.take_over("died", from_rows([1, 2])) == from_rows([0, 3])
    heir.close()
    assert sorted(numbers_in(output, parts(output))) == [0, 3]
    assert segments(output) == []


class FailingDisk:
    """A disk with failing writes from the `nth` on, until there is space again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._write = files.write_atomically
        monkeypatch.setattr(storages, "write_atomically", self)
        monkeypatch.setattr(writers, "RETRY_S", 0.0)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= 1
        self._write(*args, **kwargs)


@pytest.mark.parametrize("given", ["parquet", "jsonl", "openai"])
def test_rows_whose_write_failed_are_written_later_and_none_twice(
    given: Any, output: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any write may fail: of a segment, a record, a part."""
    monkeypatch.setattr(writers, "ROWS_PER_PART", 3)
    for room in itertools.count():
        each = output.subfolder(f"{room}")
        disk = FailingDisk(monkeypatch, room)
        writer = writer_of(each, given)
        writer.add(results(range(3), failed=[1]))
        first = writer.flush()
        failed = writer.failing_since_s is not None
        assert (first, writer.num_pending) == (((0, 3),), 0) if room else ((), 3)
        if failed and room:
            assert len(segments(each)) == 1, "durable rows stay in their segment until all parts are there"
        writer.add(results([3]))
        disk.room = 99
        assert writer.close() == (((3, 4),) if room else ((0, 4),))
        assert writer.failing_since_s is None
        assert sorted(numbers_in(each, parts(each))) == [0, 1, 2, 3]
        assert segments(each) == []
        assert len(each.entries("_manta/records")) == len(parts(each))
        if not failed:
            break
    assert room == 5  # a segment, two records and two parts had failed before


def test_an_output_that_stays_full_ends_the_job_and_reports_the_durable_rows(
    output: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    FailingDisk(monkeypatch, 1)
    writer = writer_of(output)
    writer.add(results([0, 1]))
    assert writer.flush() == ((0, 2),)
    writer.add(results([2]))
    assert writer.flush() == ()
    assert writer.failing_since_s is not None
    monkeypatch.setattr(writers, "GIVE_UP_S", -1.0)
    for give_up in (writer.flush, writer.close):
        with pytest.raises(OutputError) as given:
            give_up()
        said = "No space left on device): 2 rows of this engine are durable, 1 could not be written"
        assert said in given.value.message
        assert "run the same command again: it resumes" in given.value.message


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """A disk of 1 MiB. Skips the test if none can be mounted."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("no disk may be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_rows_wait_for_space_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "RETRY_S", 0.0)
    with small_disk(tmp_path / "disk") as disk:
        output = Storage.open(str(disk / "out"), field="output")
        runs, ballast = JobRuns(output), disk / "ballast"
        ledger = runs.open(spec(200))
        ballast.write_bytes(bytes(900 * 1024))
        writer, durable = runs.writer("w"), 0
        for begin in range(0, 200, 10):
            writer.add(results(range(begin, begin + 10)))
            durable += sum(end - begin for begin, end in writer.flush())
        assert writer.failing_since_s is not None
        assert 0 < durable < 200
        assert writer.num_pending == 200 - durable
        ballast.unlink()
        writer.close()
        ledger.finish({})
        runs.close()
        assert sorted(numbers_in(output, parts(output))) == list(range(200))


def test_an_output_that_becomes_read_only_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "RETRY_S", 0.0)
    with small_disk(tmp_path / "disk") as disk:
        output = Storage.open(str(disk / "out"), field="output")
        runs = JobRuns(output)
        runs.open(spec(4))
        writer = runs.write("w", results([0, 1]), ends=False)
        runs.close()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        writer.add(results([2, 3]))
        assert (writer.flush(), writer.num_pending) == ((), 2)
        with pytest.raises(ConfigError, match="cannot be written: Read-only file system"):
            runs.open(spec(4))
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert writer.close() == ((2, 4),)
        runs.finish(spec(4))
        assert sorted(numbers_in(output, parts(output))) == [0, 1, 2, 3]


def test_a_reader_finds_only_complete_files_at_any_time(output: Storage, runs: JobRuns) -> None:
    """A large Parquet file is written meanwhile; pathlib's globs match names that begin with a dot."""
    folder, done, faults = Path(output.root), threading.Event(), list[object]()
    has_read = threading.Event()
    ledger = runs.open(spec(24_000, form("parquet")))

    def look() -> None:
        while not done.is_set():
            for path in [*folder.glob("*.parquet"), *folder.rglob("*.json")]:
                try:
                    _ = pq.read_table(path) if path.suffix == ".parquet" else json.loads(path.read_text())
                    has_read.set()
                except Exception as error:
                    faults.append((path.name, error))

    reader = threading.Thread(target=look)
    reader.start()
    assert has_read.wait(600)
    writer = runs.writer("w")
    for begin in range(0, 24_000, 4_000):
        writer.add(results(range(begin, begin + 4_000)))
        writer.flush()
    writer.close()
    ledger.finish({})
    done.set()
    reader.join()
    assert not faults


WRITE = """
import sys
sys.path.insert(0, sys.argv[2])
from support.jobs.batch_outputs import form, results
from manta.actors.batch.dataset.storage import Storage
from manta.actors.batch.ledger.row_writer import RowWriter
writer = RowWriter(Storage.open(sys.argv[1], field="output"), form(), run=1, shard=0, writer=sys.argv[3])
for row in range(int(sys.argv[4]), 100000):
    writer.add(results([row]))
    writer.flush()
    print(row, flush=True)
"""


def test_flushed_rows_survive_a_sigkill(output: Storage, runs: JobRuns) -> None:
    """Writer processes are killed while they write; no row that they reported is missing."""
    ledger = runs.open(spec(100_000))
    for name, begin in (("a", 0), ("b", 50_000)):
        command = [sys.executable, "-c", WRITE, output.where, str(TESTS), name, str(begin)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            reported = [int(process.stdout.readline()) for _ in range(150)]
            process.kill()
            reported += [int(line) for line in process.stdout.read().split("\n")[:-1]]
        ledger.refresh(name)
        durable = ledger.durable(name)
        assert durable[0][0] == begin
        assert durable[0][1] > reported[-1]
    heir = runs.writer("heir")
    taken = [heir.take_over(name, ledger.already_merged(name)) for name in ledger.orphans]
    heir.close()
    ledger.refresh()
    assert ledger.answered == tuple(each[0] for each in taken)
    assert len(numbers_in(output, parts(output))) == sum(end - begin for begin, end in ledger.answered)


def test_a_truncated_segment_is_skipped(output: Storage, runs: JobRuns) -> None:
    """A segment as a power cut may leave it: its rows are answered again."""
    ledger = runs.open(spec(4))
    writer = writer_of(output)
    for row in range(3):
        writer.add([result(row)])
        writer.flush()
    torn = Path(output.path(segments(output)[1]))
    os.truncate(torn, torn.stat().st_size // 2)
    ledger.refresh()
    assert ledger.durable("w") == from_rows([0, 2])
    heir = writer_of(output, name="heir")
    assert heir.take_over("w", ()) == from_rows([0, 2])
    assert segments(output) == ["_manta/pending/heir/000000.arrow"]


def test_a_flush_does_not_wait_for_the_disk_but_a_part_does(
    output: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few rows every quarter of a second: about half a millisecond as measured, without a sync."""
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    writer = writer_of(output)
    writer.add(results(range(20)))
    writer.flush()
    assert not synced
    writer.close()
    assert len(synced) == 4  # the record, the part, and their folders
