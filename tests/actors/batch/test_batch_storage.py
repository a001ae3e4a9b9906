"""Every kind of storage behaves the same: a folder on a disk, and a bucket of a real S3 server."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from manta.actors.batch.dataset import row_reader
from manta.actors.batch.dataset.row_reader import RowReader
from manta.actors.batch.dataset.row_requests import RowSchema
from manta.actors.batch.dataset.source import open_source
from manta.actors.batch.dataset.storage import Storage
from manta.actors.batch.row_index import index_rows
from manta.cluster.errors import ConfigError, DatasetError
from moto.server import DomainDispatcherApplication, create_backend_app
from support.jobs.batch_outputs import read_results
from support.jobs.s3_outputs import S3Server
from support.published.hub_standin import hub_with
from werkzeug.serving import make_server


@pytest.fixture(params=["disk", "s3"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "disk":
        return str(tmp_path / "a b" / "out")
    return request.getfixturevalue("s3").url(f"bucket/a b/{request.node.name[:20]}")


def test_written_files_are_read_and_listed_on_every_file_system(where: str) -> None:
    storage = pickle.loads(pickle.dumps(Storage.open(where, field="output")))
    assert (storage.entries(), storage.entry("a"), storage.kind) == ([], None, None)
    storage.write("b/c.json", b"old")
    storage.write("b/c.json", b"content")
    storage.write("a é.txt", b"")
    assert [(entry.name, entry.size) for entry in storage.entries(recursive=True)] == [
        ("a é.txt", 0),
        ("b/c.json", 7),
    ]
    assert [entry.name for entry in storage.entries()] == ["a é.txt"]
    assert [entry.name for entry in storage.entries("b")] == ["b/c.json"]
    assert storage.read("b/c.json") == storage.subfolder("b").read("c.json") == b"content"
    assert (entry := storage.entry("b/c.json")) is not None
    assert abs(entry.modified_s - time.time()) < 300
    assert (storage.kind, storage.subfolder("b", "c.json").kind) == ("folder", "file")
    assert (storage.subfolder("b").parent.root, storage.subfolder("b").name) == (storage.root, "b")
    assert storage.subfolder("b").parent.where == storage.where
    storage.remove("b/c.json", "b/c.json")
    assert storage.entry("b/c.json") is None
    with pytest.raises(FileNotFoundError):
        storage.read("b/c.json")


def test_a_file_is_written_to_a_bucket_with_one_put(s3: S3Server) -> None:
    storage = Storage.open(s3.url("bucket/puts"), field="output")
    before = len(s3.requests("(?:PUT|POST)"))
    storage.write("part", b"x" * 3_000_000)
    assert s3.requests("(?:PUT|POST)")[before:] == ["/bucket/puts/part"]


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_rows_of_a_bucket_are_indexed_and_read_in_few_requests(
    format: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"id": f"{i}", "prompt": f"row {i} " * 40} for i in range(3000)]
    storage = Storage.open(s3.url(f"bucket/in {format}"), field="input")
    for name, part in (("a", rows[:2000]), ("b", rows[2000:])):
        if format == "parquet":
            sink = pa.BufferOutputStream()
            pq.write_table(pa.Table.from_pylist(part), sink)
            storage.write(f"{name}.parquet", sink.getvalue())
        else:
            storage.write(f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in part).encode())
    storage.write("notes.md", b"mine")
    monkeypatch.setattr(row_reader, "BUFFER_BYTES", 2**18)
    for place in (f"bucket/in {format}", f"bucket/in {format}/*.{format}", f"bucket/in*/*.{format}"):
        source = pickle.loads(pickle.dumps(open_source([s3.url(place)])))
        assert [file.name.rpartition("/")[2] for file in source.files] == [f"a.{format}", f"b.{format}"]
        assert all(str(file).startswith("s3://bucket/") for file in source.files)
    row_schema = RowSchema(lines=source.lines)
    found, reader = index_rows(source, row_schema, duplicates="refuse"), RowReader(source, row_schema)
    before = len(s3.requests("GET"))
    read = [row for begin in range(0, 3000, 50) for row in reader.read(found.spans(((begin, begin + 50),)))]
    records = [json.loads(row.record["text"]) if source.lines else row.record for row in read]
    assert records == rows
    assert len(s3.requests("GET")) - before <= 16


def test_results_are_read_back_from_every_file_system(where: str) -> None:
    storage = Storage.open(where, field="output")
    storage.write("_errors/errors-000000-00001-aa.jsonl", b'{"id": "b", "error": {"type": "x"}}\n')
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([{"id": "c"}, {"id": "a"}]), sink)
    storage.write("part-000000-00001-bb.parquet", sink.getvalue())
    storage.write("_report.json", b"{}")
    assert [row["id"] for row in read_results(storage)] == ["a", "b", "c"]


def test_an_unreadable_bucket_is_named_with_the_reason(s3: S3Server) -> None:
    for path, said in (
        ("nobucket/rows.jsonl", "s3://nobucket/rows.jsonl cannot be read: there is no such file or folder"),
        ("nobucket/*.jsonl", r"no file matches s3://nobucket/\*.jsonl"),
        ("bucket/none", "s3://bucket/none cannot be read: there is no such file or folder"),
    ):
        with pytest.raises(DatasetError, match=said) as refused:
            open_source([s3.url(path)])
        assert refused.value.param == "input"
    s3.post("/moto-api/reset-auth", b"0")  # from here on credentials must be known
    try:
        with pytest.raises(DatasetError, match=r"(?i)access.?key") as refused:
            open_source([s3.url("bucket/x*")])
        assert refused.value.param == "input"
    finally:
        s3.post("/moto-api/reset-auth", b"inf")


SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>"


@contextmanager
def throttled_s3(share: float) -> Iterator[str]:
    """A server that answers a share of its requests with 503, as S3 does; yields its address."""
    served, dice = DomainDispatcherApplication(create_backend_app), random.Random(1)

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        if dice.random() >= share or environ["REQUEST_METHOD"] == "POST":
            return served(environ, start)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start("503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", str(len(SLOW_DOWN)))])
        return [SLOW_DOWN]

    server = make_server("127.0.0.1", 0, answer, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()


def test_a_store_that_asks_for_fewer_requests_loses_nothing(s3: S3Server) -> None:
    with throttled_s3(0.4) as address:
        settings = f"scheme=http&endpoint_override={address}&region=us-east-1&allow_bucket_creation=true"
        storage = Storage.open(f"s3://bucket/throttled?{settings}", field="output")
        storage.filesystem.create_dir("bucket")
        contents = {f"{i}": b"x" * (1 << i) for i in range(12)}  # also smaller than the answer
        for name, content in contents.items():
            storage.write(name, content)
        assert {name: storage.read(name) for name in contents} == contents
        assert {entry.name for entry in storage.entries()} == contents.keys()


def test_secrets_of_a_url_are_not_shown() -> None:
    storage = Storage.open("s3://key:secret@bucket/x?region=eu-west-1", field="input")
    assert (storage.where, storage.root) == ("s3://key@bucket/x", "bucket/x")
    lake = Storage.open("abfs://container@account.dfs.core.windows.net/x", field="input")
    assert (lake.where, lake.root) == ("abfs://container@account.dfs.core.windows.net/x", "container/x")
    assert Storage.open("gs://anonymous@bucket/x", field="input").root == "bucket/x"
    hub = pickle.loads(pickle.dumps(Storage.open("hf://datasets/someone/some@main/data", field="input")))
    assert (hub.root, hub.local) == ("datasets/someone/some@main/data", False)
    with pytest.raises(ConfigError, match=r"ftp:// URL\. Known: file, s3") as refused:
        Storage.open("ftp://host/x", field="output")
    assert refused.value.param == "output"


def test_a_process_that_used_a_bucket_ends_immediately(s3: S3Server) -> None:
    """Arrow's S3 threads must neither delay the exit nor complain."""
    Storage.open(s3.url("bucket/ends"), field="output").write("a.jsonl", b'{"prompt": "x"}\n')
    code = f"""
from manta.actors.batch.dataset.source import open_source
print(open_source([{s3.url("bucket/ends")!r}]))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert "a.jsonl" in done.stdout


READ_HUB = """
from manta.actors.batch.dataset.row_reader import RowReader
from manta.actors.batch.dataset.row_requests import RowSchema
from manta.actors.batch.dataset.source import open_source
from manta.actors.batch.row_index import index_rows
source, row_schema = open_source(["hf://datasets/me/some/data/*.jsonl"]), RowSchema(lines=True)
found = index_rows(source, row_schema, duplicates="refuse")
rows = RowReader(source, row_schema).read(found.spans(((2, 5),)))
print(found.num_rows, [row.record["text"] for row in rows])
"""


def test_rows_are_read_from_the_hub() -> None:
    files = {"data/a.jsonl": b'{"id": 0}\n{"id": 1}\n{"id": 2}\n{"id": 3}\n', "data/b.jsonl": b'{"id": 4}\n'}
    with hub_with("me/some", files) as address:
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", READ_HUB]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == """5 ['{"id": 2}', '{"id": 3}', '{"id": 4}']\n"""
