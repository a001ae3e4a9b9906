"""What a batch job writes: whole under its final name, once, and by one job at a time."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from manta.actors import files
from manta.actors.batch.answering import WIRE_SCHEMA
from manta.actors.batch.figures import RowFigures
from manta.actors.batch.source import read_results
from manta.cluster.errors import ConfigError, OutputError
from manta.jobs.batch import sink as batch_sink
from manta.jobs.batch.progress import ProgressView
from manta.jobs.batch.sink import Sink


def results(*names: str, failed: tuple[str, ...] = ()) -> pa.Table:
    error = {"type": "BadRequestError", "message": "m", "param": "prompt"}
    times = {"begin_s": 1.0, "end_s": 2.0}
    good = [{"id": name, "text": "hi", "response": '{"id": "cmpl-1"}', **times} for name in names]
    bad = [{"id": name, "error": error, "input": "{", **times} for name in failed]
    return pa.Table.from_pylist([*good, *bad], schema=WIRE_SCHEMA)


class _FullDisk:
    """Writes fail from the `nth` on, until there is room again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
        self.room = nth
        self._write = files.write_whole
        monkeypatch.setattr(batch_sink, "write_whole", self)

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= 1
        return self._write(*args, **kwargs)


@pytest.mark.parametrize("form", ["parquet", "jsonl", "openai"])
@pytest.mark.parametrize("nth", [0, 1])
def test_rows_that_could_not_be_written_are_written_later_and_none_twice(
    form: Any, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = _FullDisk(monkeypatch, nth)
    with Sink(tmp_path, form) as sink:
        sink.add(results("a", "b", failed=("c",)))
        if nth == 0 or form == "openai":
            with pytest.raises(OutputError, match=rf"No space.*: {nth} rows are on disk, {3 - nth} could"):
                sink.flush()
            assert (sink.num_rows, sink.num_pending) == (nth, 3 - nth)
        sink.add(results("d"))
        disk.room = 9
        sink.finish({}, {})
        assert (sink.num_rows, sink.num_pending) == (4, 0)
    ids = [row.get("custom_id", row.get("id")) for row in read_results(tmp_path)]
    assert sorted(ids) == ["a", "b", "c", "d"]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert sum(part["rows"] for part in manifest["parts"]) == 4


def test_a_folder_that_stays_full_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_sink, "PART_INTERVAL_S", -1.0)
    monkeypatch.setattr(batch_sink, "RETRY_S", -1.0)
    _FullDisk(monkeypatch, 0)
    with Sink(tmp_path, "jsonl") as sink:
        sink.add(results("a"))  # tried again with the next
        monkeypatch.setattr(batch_sink, "GIVE_UP_S", -1.0)
        with pytest.raises(OutputError, match="0 rows are on disk, 2 could not be written"):
            sink.add(results("b"))


def test_earlier_results_stay_until_there_is_something_in_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Sink(tmp_path, "jsonl") as sink:
        sink.add(results("old"))
        sink.finish({}, {})
    real = files.write_whole

    def full(path: Path, write: Any, before: Any = None) -> str:
        def failing(_: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        return real(path, failing, before)

    monkeypatch.setattr(batch_sink, "write_whole", full)
    with Sink(tmp_path, "jsonl", overwrite=True) as sink:
        sink.add(results("new"))
        with pytest.raises(OutputError):
            sink.flush()
        assert [row["id"] for row in read_results(tmp_path)] == ["old"]
        monkeypatch.setattr(batch_sink, "write_whole", real)
        sink.flush()
        assert [row["id"] for row in read_results(tmp_path)] == ["new"]
        assert not (tmp_path / "_SUCCESS").exists()


def test_a_reader_that_looks_at_any_time_finds_only_whole_files(tmp_path: Path) -> None:
    """Also while a Parquet file of some size is written; pathlib's globs find names with a dot in front."""
    done, faults, seen = threading.Event(), [], 0

    def look() -> None:
        nonlocal seen
        while not done.is_set():
            for path in [*tmp_path.glob("*.parquet"), *tmp_path.glob("*.json")]:
                try:
                    _ = pq.read_table(path) if path.suffix == ".parquet" else json.loads(path.read_text())
                    seen += 1
                except Exception as error:
                    faults.append((path.name, error))

    reader = threading.Thread(target=look)
    reader.start()
    with Sink(tmp_path, "parquet") as sink:
        for i in range(12):
            sink.add(results(*(f"{i}-{j}" for j in range(4000))))
            sink.flush()
        sink.finish({"rows": 1}, {})
    done.set()
    reader.join()
    assert (faults, seen > 0) == ([], True)


HOLD = """
import sys, time
from pathlib import Path
from manta.jobs.batch.sink import Sink
sink = Sink(Path(sys.argv[1]), "jsonl", overwrite=True)
print("held", flush=True)
time.sleep(60)
"""


def test_two_jobs_do_not_share_a_folder_and_a_killed_one_leaves_it_free(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        for overwrite in (False, True):
            with pytest.raises(ConfigError, match=rf"another job \(process {first.pid}\)") as refused:
                Sink(tmp_path / "out", "jsonl", overwrite=overwrite)
            assert refused.value.param == "output"
        first.kill()
    with Sink(tmp_path / "out", "jsonl") as sink:
        sink.add(results("a"))
        sink.finish({}, {})
    assert sorted(p.name.split("-")[0] for p in (tmp_path / "out").iterdir()) == [
        "_SUCCESS",
        "manifest.json",
        "part",
        "report.json",
    ]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", Path("/proc/manta")):
        with pytest.raises(ConfigError, match=f"output: {path} cannot be written"):
            Sink(path, "jsonl")


def test_words_reach_the_user_whatever_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressView(3) as view:
        view.say("waiting for 2 CPU; 0 of 2 are free")
        view.update(RowFigures())
    assert capsys.readouterr().err.splitlines()[1] == "waiting for 2 CPU; 0 of 2 are free"
