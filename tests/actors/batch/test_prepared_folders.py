"""Hostile folders with links to other places, and several writers of one name."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from manta.actors.batch.dataset.storage import Storage
from manta.actors.batch.ledger.job_runs import earlier, remove_earlier
from manta.actors.batch.ledger.row_writer import RowWriter
from manta.actors.batch.openai.batch_store import Batch, BatchStore
from manta.actors.batch.openai.file_store import FileStore
from manta.actors.capture.writer_process import SegmentRing
from manta.actors.system.atomic_files import write_atomically
from manta.cluster.errors import ConfigError, MantaError, NotFoundError, OutputError
from manta.cluster.request.caller import SERVER
from support.jobs.batch_outputs import JobRuns, results, spec

NUM_ROWS = 20
MINE = "nobody else's"
OUTSIDE = (
    *("../victim", "../victim/notes.txt", "/etc/passwd", "a/../../victim", "_manta/job.json"),
    *("part-000000-00001-0123abcd.parquet/..", "", ".", "..", "victim\0.jsonl", "manifest.json\n"),
    *(7, None, ["manifest.json"]),
)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Another user's folder next to the output."""
    folder = tmp_path / "victim"
    (folder / "records").mkdir(parents=True)
    for name in ("notes.txt", "records/notes.txt", ".manta-tmp-notes"):
        (folder / name).write_text(MINE)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An output with rows in parts; its job has started."""
    runs = JobRuns(Storage.open(str(tmp_path / "out"), field="output"))
    runs.answer(spec(NUM_ROWS), range(NUM_ROWS // 2))
    return tmp_path / "out"


def untouched(victim: Path) -> bool:
    files = [path for path in victim.rglob("*") if path.is_file()]
    return len(files) == 3 and all(path.read_text() == MINE for path in files)


def resume(folder: Path) -> None:
    """Run the job once more, to its end."""
    with closing(JobRuns(Storage.open(str(folder), field="output"))) as runs:
        ledger = runs.open(spec(NUM_ROWS))
        runs.write("second", results(range(NUM_ROWS // 2, NUM_ROWS)))
        ledger.finish({"rows": NUM_ROWS})


def test_a_list_of_earlier_results_cannot_remove_other_files(folder: Path, victim: Path) -> None:
    first_run = json.loads((folder / "_manta/job.json").read_text())["first_run"]
    output = Storage.open(str(folder), field="output")
    for name, run in itertools.product(OUTSIDE, (first_run, first_run + 7)):  # the job's own list, another's
        (folder / "_manta/earlier.json").write_text(json.dumps({"run": run, "names": [name]}))
        with pytest.raises(OutputError, match=r"earlier\.json"):
            remove_earlier(output)
        with pytest.raises(OutputError, match=r"earlier\.json"):
            earlier(output, first_run)
    writer = RowWriter(output, spec(NUM_ROWS).form, run=1, shard=0, writer="w")
    writer.add(results([15]))
    with pytest.raises(OutputError, match=r"earlier\.json"):
        writer.close()
    with pytest.raises(OutputError, match=r"earlier\.json"):
        resume(folder)
    assert untouched(victim) and (folder / "_manta/job.json").exists()


def test_a_part_record_can_only_name_a_part_of_its_output(folder: Path, victim: Path) -> None:
    (record,) = (folder / "_manta/records").iterdir()
    content = json.loads(record.read_text())
    changes = [change for name in OUTSIDE for change in ({"part": name}, {"replaces": [name]})]
    for changed in ({}, *(content | change for change in changes)):
        record.write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=rf"{record.name} is no record of a part"):
            resume(folder)
    assert untouched(victim)


def linked(at: str, to: str) -> Callable[[Path, Path], None]:
    def prepare(folder: Path, victim: Path) -> None:
        path = folder / at
        if path.is_dir():
            path.rename(folder.parent / "moved")
        path.unlink(missing_ok=True)
        path.symlink_to(victim / to, target_is_directory=(victim / to).is_dir())

    return prepare


def hard_lock(folder: Path, victim: Path) -> None:
    (folder / "_manta/lock").hardlink_to(victim / "notes.txt")


def fifo(at: str) -> Callable[[Path, Path], None]:
    def prepare(folder: Path, victim: Path) -> None:
        (folder / at).unlink(missing_ok=True)
        os.mkfifo(folder / at)

    return prepare


@pytest.mark.parametrize(
    "prepare",
    [
        *(linked(f"_manta/{name}", "notes.txt") for name in ("lock", "job.json", "run.json", "earlier.json")),
        *(linked(name, "") for name in ("_manta", "_manta/records", "_manta/pending", "_errors")),
        *(linked(name, "notes.txt") for name in ("_manifest.json", "_report.json", "_SUCCESS")),
        *(fifo(f"_manta/{name}") for name in ("lock", "job.json", "run.json")),
        hard_lock,
    ],
    ids=lambda prepare: prepare.__qualname__.partition(".")[0],
)
def test_a_link_in_an_output_is_refused_and_not_followed(
    prepare: Callable[[Path, Path], None], folder: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(folder, victim)
    monkeypatch.setattr("manta.actors.batch.ledger.row_writer.GIVE_UP_S", 0.0)
    monkeypatch.setattr("manta.actors.batch.ledger.row_writer.RETRY_S", 0.0)
    monkeypatch.setattr("manta.actors.batch.ledger.ledger.GIVE_UP_S", 0.0)
    with pytest.raises(MantaError, match="is a link, or no regular file"):
        resume(folder)
    assert untouched(victim)


def test_a_part_that_is_a_link_is_not_read_for_a_file(tmp_path: Path, victim: Path) -> None:
    files = FileStore(Storage.open(str(tmp_path / "store"), field="batch_storage"))
    file = files.upload("in.jsonl", "batch", b"{}\n")
    (tmp_path / "store" / file.pieces[0]).unlink()
    (tmp_path / "store" / file.pieces[0]).symlink_to(victim / "notes.txt")
    with pytest.raises(OSError, match="is a link"):
        list(files.chunks(file))
    with pytest.raises(OSError, match="is a link"):
        files.delete(file)
    assert untouched(victim)


def test_a_stored_file_can_only_name_pieces_of_its_storage(tmp_path: Path, victim: Path) -> None:
    files = FileStore(Storage.open(str(tmp_path / "store"), field="batch_storage"))
    file = files.upload("in.jsonl", "batch", b"{}\n")
    path = tmp_path / f"store/files/{file.id}.json"
    reported = json.loads(path.read_text())
    for piece in (*OUTSIDE, "files/../../victim/notes.txt", "work/batch_1/out/../x.jsonl"):
        path.write_text(json.dumps({**reported, "pieces": [piece]}))
        with pytest.raises(ValueError, match="does not name a file"):
            files.get(file.id, SERVER)
    path.write_text(json.dumps({**reported, "id": "file-../../victim"}))
    with pytest.raises(ValueError, match="is not the object"):
        files.get(file.id, SERVER)
    assert untouched(victim)


@pytest.mark.parametrize(
    "given", ["../../etc/passwd", "..%2f..%2fetc", "a\0b", "ü", "x" * 300, "", ".", "a/b", "1\n"]
)
def test_an_id_cannot_be_a_path(given: str, tmp_path: Path) -> None:
    storage = Storage.open(str(tmp_path), field="batch_storage")
    for find, prefix in ((FileStore(storage).get, "file-"), (BatchStore(storage).get, "batch_")):
        for named in (given, prefix + given):
            with pytest.raises(NotFoundError):
                find(named, SERVER)


def test_writers_of_one_name_do_not_conflict(tmp_path: Path, victim: Path) -> None:
    (tmp_path / ".manta-tmp-one.part").symlink_to(victim / "notes.txt")
    (tmp_path / "one").symlink_to(victim / "notes.txt")  # replaced, not followed
    starting = threading.Barrier(8)

    def write(number: int) -> None:
        starting.wait()
        for _ in range(40):
            write_atomically(tmp_path / "one", partial(Path.write_bytes, data=str(number).encode() * 1000))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    content = (tmp_path / "one").read_text()
    assert len(content) == 1000 and len(set(content)) == 1
    assert untouched(victim)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".manta-tmp-one.part", "one", "victim"]


def test_concurrent_cancels_of_a_batch_all_succeed(tmp_path: Path) -> None:
    batches = BatchStore(Storage.open(str(tmp_path), field="batch_storage"))
    facts = {"endpoint": "/v1/completions", "input_file_id": "file-1", "completion_window": "24h"}
    batch = Batch(**facts, created_at=0, expires_at=2**40)
    batches.create(batch)
    with ThreadPoolExecutor(16) as pool:
        reported = list(pool.map(partial(batches.cancel, caller=SERVER), [batch.id] * 48))
    assert {each.status for each in reported} == {"cancelling"}


def test_captured_traffic_is_written_through_no_link(tmp_path: Path, victim: Path) -> None:
    folder = tmp_path / "traffic"
    folder.mkdir(mode=0o700)
    (folder / ".lock").symlink_to(victim / "notes.txt")
    with pytest.raises(OSError, match=r"link|Too many"):
        SegmentRing(folder, 2**20).append(b"{}\n")
    assert untouched(victim)
