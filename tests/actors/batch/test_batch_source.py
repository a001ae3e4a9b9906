"""Reading the input: files are found, indexed and read in any spans and formats, each row once."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import pickle
import random
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.actors.batch import row_index
from manta.actors.batch.dataset import row_reader, text_records
from manta.actors.batch.dataset.compressed_file import CompressedFile
from manta.actors.batch.dataset.passthrough_columns import ColumnTypes, as_members, passed_through
from manta.actors.batch.dataset.row_reader import Row, RowReader, id_of, record_of
from manta.actors.batch.dataset.row_requests import RowSchema, content_id, id_hash, parse_line
from manta.actors.batch.dataset.source import Dataset, check_columns, open_source
from manta.actors.batch.ledger.output_parts import OutputForm, part_content
from manta.actors.batch.row_answerer import RESULT_SCHEMA, failure
from manta.actors.batch.row_index import RowIndex, index_rows
from manta.cluster.batch.row_ranges import from_rows
from manta.cluster.errors import DatasetError, RequestError
from support.paths import MODELS

PLAIN = ("parquet", "jsonl", "openai", "csv", "tsv", "text")
FORMATS = (*PLAIN, "jsonl.gz", "csv.zst", "text.bz2", "openai.lz4")
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=12)


def write(folder: Path, format: str, files: list[list[str]], rows_per_group: int = 7) -> Dataset:
    """Write rows with these prompts into a number of files."""
    folder.mkdir(exist_ok=True)
    format, _, codec = format.partition(".")
    suffix = {"openai": "jsonl", "text": "txt"}.get(format, format)
    for number, prompts in enumerate(files):
        path = folder / f"{number:03d}.{suffix}"
        rows = [{"id": f"{number}/{i}", "prompt": prompt} for i, prompt in enumerate(prompts)]
        if format == "parquet":
            schema = pa.schema([("id", pa.string()), ("prompt", pa.string())])
            pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=rows_per_group)
        elif format in ("csv", "tsv"):
            out = io.StringIO(newline="")
            writer = csv.DictWriter(out, ["id", "prompt"], delimiter="," if format == "csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
            path.write_bytes(out.getvalue().encode())
        elif format == "text":
            path.write_text("".join(f"{p}\n" for p in prompts), newline="")
        else:
            body = [{"custom_id": r["id"], "url": "/v1/completions", "body": r} for r in rows]
            lines = [json.dumps(r, ensure_ascii=False) for r in (body if format == "openai" else rows)]
            path.write_bytes(
                "".join(line + ("\r\n\n" if i % 2 else "\n") for i, line in enumerate(lines)).encode()
            )
        if codec:
            with pa.output_stream(f"{path}.{codec}", compression="detect") as stream:
                stream.write(path.read_bytes())
            path.unlink()
    return open_source([folder], format)  # type: ignore[arg-type]


def layout_of(source: Dataset) -> RowSchema:
    return RowSchema(kind="openai" if source.format == "openai" else "dataset", lines=source.lines)


def all_rows(source: Dataset, row_schema: RowSchema, **how: Any) -> tuple[RowIndex, list[Row]]:
    """Index a dataset and read all of it."""
    found = index_rows(source, row_schema, **how)
    return found, RowReader(source, row_schema).read(found.spans(((0, found.num_rows),)))


def prompt_of(row: Row, row_schema: RowSchema) -> Any:
    record = record_of(row, row_schema)
    return record["body"]["prompt"] if row_schema.kind == "openai" else record["prompt"]


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=25)
@given(data=st.data())
def test_rows_are_returned_once_and_unchanged_for_any_selection(
    format: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = TEXT.filter(lambda t: bool(t.strip()) and "\n" not in t) if format[:4] == "text" else TEXT
    files = data.draw(st.lists(st.lists(text, max_size=40), min_size=1, max_size=4))
    prompts = [prompt for file in files for prompt in file]
    if not prompts:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_reader, "ROWS_PER_READ", 5)
        patch.setattr(row_reader, "BUFFER_BYTES", data.draw(st.integers(1, 300)))
        patch.setattr(row_reader, "OPEN_FILES", 2)
        patch.setattr(row_index, "MARK_EVERY", 4)
        source = write(tmp_path_factory.mktemp("rows"), format, files)
        row_schema = layout_of(source)
        found = pickle.loads(pickle.dumps(index_rows(source, row_schema, duplicates="refuse")))
        assert found.num_rows == len(prompts)
        reader = RowReader(pickle.loads(pickle.dumps(source)), row_schema)
        for _ in range(3):
            requested = data.draw(st.sets(st.integers(0, len(prompts) - 1), max_size=30))
            rows = reader.read(found.spans(from_rows(requested)))
            assert [row.number for row in rows] == sorted(requested)
            assert [prompt_of(row, row_schema) or "" for row in rows] == [
                prompts[i] for i in sorted(requested)
            ]
        everything = reader.read(found.spans(((0, len(prompts)),)))
        assert [prompt_of(row, row_schema) or "" for row in everything] == prompts
        assert len({id_of(row, row_schema) for row in everything}) == len(prompts)


def names(source: Dataset) -> list[str]:
    return [Path(file.path).name for file in source.files]


def test_a_dataset_that_ships_is_found_in_any_folder_unless_there_is_one_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = open_source(["models/chats.jsonl"])
    assert [file.path for file in shipped.files] == [str(MODELS / "chats.jsonl")]
    own = tmp_path / "models/chats.jsonl"
    own.parent.mkdir()
    own.write_text('{"prompt": "a"}\n')
    assert [file.path for file in open_source(["models/chats.jsonl"]).files] == [str(own)]


def test_files_are_found_once_and_in_order_by_name_folder_and_pattern(tmp_path: Path) -> None:
    names_here = ("b.jsonl", "a.jsonl", "_old.jsonl", ".c.jsonl", "x.log", "[1].jsonl")
    for name in (*names_here, "deep/d.jsonl", "_out/e.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"prompt": "x"}\n')
    found = {
        (str(tmp_path),): ["[1].jsonl", "a.jsonl", "b.jsonl"],
        (f"{tmp_path}/b.jsonl", f"{tmp_path}/?.jsonl", f"file://{tmp_path}/a.jsonl"): ["a.jsonl", "b.jsonl"],
        (f"{tmp_path}/**/*.jsonl",): ["[1].jsonl", "a.jsonl", "b.jsonl", "d.jsonl"],
        (f"{tmp_path}/*/*.jsonl",): ["d.jsonl"],
        (f"{tmp_path}/[[]*.jsonl",): ["[1].jsonl"],
        (f"{tmp_path}/[1].jsonl",): ["[1].jsonl"],
        (f"{tmp_path}/_o*/e.jsonl",): ["e.jsonl"],
    }
    assert {where: names(open_source(where)) for where in found} == found
    with pytest.raises(DatasetError, match=r"no file matches .*q\*"):
        open_source([f"{tmp_path}/q*"])
    with pytest.raises(DatasetError, match=r"deep/\*\*/"):
        (tmp_path / "deep" / "d.jsonl").unlink()
        open_source([tmp_path / "deep"])


def write_ids(path: Path, ids: Sequence[str | int | None]) -> tuple[Dataset, RowSchema]:
    rows = [{"prompt": "same"} | ({} if name is None else {"id": name}) for name in ids]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source([path])
    return source, layout_of(source)


def numbered(ids: list[str]) -> list[str]:
    """Read the rows as the documentation's reader would by hand."""
    given, seen, result = set(ids), {}, []
    for name in ids:
        copy = seen.get(name, 0) + 1
        while copy > 1 and f"{name}-{copy}" in given:
            copy += 1
        seen[name] = copy
        result.append(name if copy == 1 else f"{name}-{copy}")
    return result


IDS = ("a", "a-2", "a-2-2", "a-3", "b", "é")
CONTENT = content_id(b'{"prompt":"same"}')


@pytest.mark.parametrize("weak", [False, True])
@settings(max_examples=40)
@given(ids=st.lists(st.sampled_from([None, *IDS]), min_size=1, max_size=30))
def test_later_rows_of_an_id_are_numbered_and_no_two_rows_share_one(
    weak: bool, ids: list[str | None], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """This holds even if ids of the data share their hash."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_index, "DUPLICATES_PER_READ", 3)
        if weak:
            patch.setattr(row_index, "id_hash", lambda name: id_hash(name) >> 62 * (name in IDS))
        source, row_schema = write_ids(tmp_path_factory.mktemp("ids") / "rows.jsonl", ids)
        found, rows = all_rows(source, row_schema, duplicates="number")
    final, theirs = [id_of(row, row_schema) for row in rows], [name or CONTENT for name in ids]
    assert len(set(final)) == len(ids)
    kept = [name == own for name, own in zip(final, theirs, strict=True)]
    assert kept == [own not in theirs[:row] for row, own in enumerate(theirs)]
    if not weak:  # else a number may be passed over
        assert final == numbered(theirs)
        assert found.id_hashes().tolist() == [id_hash(name) for name in final]


def test_a_duplicate_id_is_refused_with_both_places(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('id,prompt\na,"two\nlines"\n\nb,x\na,y\n')
    (tmp_path / "a.jsonl").write_text('{"id": 1, "prompt": "x"}\n\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "x"}\n{"prompt": "x"}\n\n{"id": "1", "prompt": "y"}\n')
    pq.write_table(pa.table({"id": ["p", "q", "q"], "prompt": ["x"] * 3}), tmp_path / "rows.parquet")
    for pattern, said in (
        ("rows.csv", r"'a' occurs twice: .*rows.csv, line 2, and .*rows.csv, line 6"),
        ("?.jsonl", r"'1' occurs twice: .*a.jsonl, line 1, and .*b.jsonl, line 4"),
        ("rows.parquet", r"'q' occurs twice: .*rows.parquet, row 2, and .*rows.parquet, row 3"),
    ):
        source = open_source([f"{tmp_path}/{pattern}"])
        with pytest.raises(DatasetError, match=said + r".*--duplicate-ids number") as refused:
            index_rows(source, layout_of(source), duplicates="refuse")
        assert refused.value.param == "duplicate_ids"
        found = index_rows(source, layout_of(source), duplicates="number")
        assert len(found.duplicates.rows) == (2 if pattern == "?.jsonl" else 1)


def test_a_malformed_row_is_a_row_and_keeps_its_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"id": "ok", "x": NaN}\n{broken\n[1]\n{"id": "half \\ud800", "x": NaN}\n'
    )
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfid,prompt\r\n1,x\r\n2,x,y\r\n3\r\n4,a\rb\r\n5,z\r\n")
    for name, good, faults in (
        ("a.jsonl", ["ok", "half \ufffd"], ["not valid JSON", "holds list"]),
        ("a.csv", ["1", "3", "5"], ["3 fields, the header 2", "carriage return"]),
    ):
        source = open_source([tmp_path / name])
        row_schema = layout_of(source)
        found, rows = all_rows(source, row_schema, duplicates="refuse")
        said, ids = [], []
        for row in rows:
            try:
                record_of(row, row_schema)
                ids.append(id_of(row, row_schema))
            except RequestError as error:
                said.append(error.message)
                assert id_of(row, row_schema).startswith("row-")
                assert row.record["text"]
        assert ids == good
        assert [fault in text for fault, text in zip(faults, said, strict=True)] == [True] * len(faults)
        assert [id_hash(id_of(row, row_schema)) for row in rows] == found.id_hashes().tolist()


def test_a_truncated_file_ends_the_index_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_records, "MAX_LINE_BYTES", 1000)
    good = b'{"prompt": "x"}\n'
    whole = tmp_path / "whole.parquet"
    pq.write_table(pa.table({"prompt": [f"{i}" for i in range(1000)]}), whole)
    files = {
        "latin.jsonl": (good * 70 + b'{"prompt": "caf\xe9"}\n', "latin.jsonl, line 71: it is not UTF-8"),
        "latin.txt": (b"one\n\ncaf\xe9\n", "latin.txt, line 3: it is not UTF-8"),
        "latin.csv": (b"prompt\nx\ncaf\xe9\n", "latin.csv, line 3: it is not UTF-8"),
        "open.csv": (b'prompt\nx\n"never\nends\n', "open.csv, line 3: a quoted field begins that never ends"),
        "twice.csv": (b"a,prompt,a\n1,2,3\n", 'names the column "a" twice'),
        "long.txt": (b"x\n" + b"y" * 5000, "long.txt, line 2: a line has more than"),
        "cut.parquet": (whole.read_bytes()[:-100], "cut.parquet is not a readable Parquet file"),
        "none.parquet": (b"", "none.parquet is not a readable Parquet file"),
        "empty.csv": (b"prompt\n", "holds no rows"),
    }
    for name, (content, said) in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DatasetError, match=re.escape(said)):
            source = open_source([tmp_path / name])
            index_rows(source, layout_of(source), duplicates="refuse")


def test_a_header_of_a_million_columns_is_compared_in_one_pass(tmp_path: Path) -> None:
    names = ",".join(map(str, range(10**6)))
    (tmp_path / "wide.csv").write_text(f"{names},7\nx\n")
    source = open_source([tmp_path / "wide.csv"])
    with pytest.raises(DatasetError, match='names the column "7" twice'):
        index_rows(source, layout_of(source), duplicates="refuse")


@pytest.mark.parametrize("format", ["parquet", "jsonl", "csv"])
def test_a_file_that_changed_is_not_read(format: str, tmp_path: Path) -> None:
    source = write(tmp_path, format, [["one", "two"]])
    row_schema, (path,) = layout_of(source), tmp_path.iterdir()
    found = index_rows(source, row_schema, duplicates="refuse")
    before = path.read_bytes()
    spans = found.spans(((1, 2),))
    modified_s = source.files[0].modified_s
    for content, time_s in ((before[:-3], modified_s), (before + b"\n", modified_s), (before, 1), (None, 0)):
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
            os.utime(path, (time_s, time_s))
        with pytest.raises(DatasetError, match="has changed while it was read"):
            RowReader(source, row_schema).read(spans)


def test_indexing_can_be_stopped(tmp_path: Path) -> None:
    for format in FORMATS:
        source = write(tmp_path / format, format, [["a", "b"], ["c"]])
        with pytest.raises(CancelledError):
            index_rows(source, layout_of(source), duplicates="refuse", stop=lambda: True)


def test_a_changed_file_has_another_identity(tmp_path: Path) -> None:
    source = write(tmp_path, "jsonl", [["one"], ["two"]])
    first, second = source.identity()
    assert (first["name"], first["size"]) == (str(tmp_path / "000.jsonl"), source.files[0].size)
    os.utime(tmp_path / "000.jsonl", (1, 1))
    assert open_source([tmp_path]).identity() == [first | {"modified": 1.0}, second]


@pytest.mark.parametrize("format", PLAIN)
def test_different_content_of_the_same_size_and_time_has_another_identity(
    tmp_path: Path, format: str
) -> None:
    found: list[Any] = []
    for text in ("one", "two", "one"):
        source = write(tmp_path, format, [["same", text]])
        for file in source.files:
            os.utime(file.path, (1, 1))
        source = open_source([tmp_path])
        found.append(source.identity(index_rows(source, layout_of(source)).digests))
    (first, other, again) = found
    assert first == again and len(first[0]["sha256"]) == 64
    assert first[0]["size"] == other[0]["size"] and first[0]["sha256"] != other[0]["sha256"]


def test_one_reader_serves_many_threads_and_keeps_few_files_open(tmp_path: Path) -> None:
    source = write(tmp_path, "jsonl", [[f"{f}-{i}" for i in range(50)] for f in range(8)])
    row_schema = layout_of(source)
    found, reader = index_rows(source, row_schema, duplicates="refuse"), RowReader(source, row_schema)

    def read(begin: int) -> list[str]:
        return [prompt_of(row, row_schema) for row in reader.read(found.spans(((begin, begin + 20),)))]

    with ThreadPoolExecutor(8) as threads:
        prompts = list(threads.map(read, range(0, 380, 7)))
    names = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
    assert 0 < sum(name.startswith(f"{tmp_path.resolve()}/") for name in names) <= row_reader.OPEN_FILES
    assert prompts == [[f"{i // 50}-{i % 50}" for i in range(b, b + 20)] for b in range(0, 380, 7)]
    reader.close()


def columns_of(where: Path, columns: Any, **row_schema: Any) -> dict[str, str]:
    source = open_source([where])
    found = index_rows(
        source, RowSchema(lines=source.lines, columns=columns, **row_schema), duplicates="number"
    )
    return {field.name: str(field.type) for field in found.columns}


def test_columns_that_are_passed_through_keep_the_types_of_the_data(tmp_path: Path) -> None:
    rows = [
        {"id": 1, "prompt": "x", "n": 1, "f": 1, "b": True, "s": "a", "mixed": 1, "list": [1]},
        {"id": 2, "prompt": "x", "n": None, "f": 0.5, "b": None, "s": "b", "mixed": "a", "list": []},
    ]
    rows[0] |= {"large": 2**64 + 1, "wide": 2**53 + 1, "wide_f": 2**53 + 1}
    rows[1] |= {"large": 1, "wide": 1, "wide_f": 0.5}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kinds = {"n": "int64", "f": "double", "b": "bool", "s": "string", "wide": "int64"}
    kinds |= dict.fromkeys(("mixed", "list", "large", "wide_f"), "string")
    assert columns_of(path, "all") == {"prompt": "string", **kinds}
    assert columns_of(path, ("s", "n")) == {"s": "string", "n": "int64"}
    source = open_source([path])
    schema = index_rows(source, RowSchema(lines=True, columns="all"), duplicates="number").columns
    kept = [passed_through(row, schema, json.dumps(row)) for row in rows]
    assert pa.Table.from_pylist(kept, schema).to_pylist() == kept
    assert [row["mixed"] for row in kept] == ["1", '"a"']
    assert [row["large"] for row in kept] == ["18446744073709551617", "1"]
    table = pa.table(
        {"prompt": ["x"], "day": [date(2026, 1, 2)], "kind": pa.array(["a"]).dictionary_encode()}
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    assert columns_of(tmp_path / "rows.parquet", ("kind", "day")) == {"kind": "string", "day": "date32[day]"}
    (tmp_path / "rows.csv").write_text("prompt,n\nx,1\n")
    assert columns_of(tmp_path / "rows.csv", "all") == {"prompt": "string", "n": "string"}


NUMBERS = ("1", "-0", "1.0", "1e400", "0.10", "1E5", "18446744073709551617", "9" * 400, "NaN")
SCALARS = ("null", "true", r'"\u00e9\\\"{[,:"', '""', '"\u2028\x85"', *NUMBERS)


def written(members: Mapping[Any, str]) -> str:
    """A JSON object with more whitespace than it needs."""
    return "{ " + ", ".join(f'"{key}"\t:{value}' for key, value in members.items()) + "\r}"


ODD = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda each: f"[ {' , '.join(each)}\r]")
        | st.dictionaries(st.sampled_from(("a", r"\u0061\n", '\\"', "")), inner, max_size=3).map(written)
    ),
    max_leaves=6,
)


def exactly(text: bytes | str) -> Any:
    """Parse a JSON line with its numbers as they are written."""
    return json.loads(text, parse_int=str, parse_float=str, parse_constant=str)


@settings(max_examples=60)
@given(st.lists(st.dictionaries(st.sampled_from(("kind", "n", r"k\u00e9\"y")), ODD), min_size=1, max_size=4))
def test_lines_of_results_repeat_the_values_of_their_lines(rows: list[dict[str, str]]) -> None:
    """The name of each column is known, whatever the other lines contain."""
    lines = [written({"prompt": '"x"', **row}) for row in rows]
    row_schema = RowSchema(lines=True, columns="all")
    types = ColumnTypes(row_schema)
    for line in lines:
        types.add(parse_line(line))
    form = OutputForm("jsonl", as_members(types.schema()))
    failed = [
        {**failure(Row(number, {"text": line}), RequestError("no"), row_schema, form.columns), "begin_s": 0.0}
        for number, line in enumerate(lines)
    ]
    content = part_content("errors-0", form.table(failed), form)
    assert b"\r" not in bytes(content)
    for line, result in zip(lines, bytes(content).splitlines(), strict=True):
        reported = exactly(result)
        assert {name: reported[name] for name in reported if name not in RESULT_SCHEMA.names} == exactly(line)


def test_ids_of_many_digits_are_distinguished(tmp_path: Path) -> None:
    ids = [2**70, 2**70 + 1]
    source, row_schema = write_ids(tmp_path / "rows.jsonl", ids)
    _, rows = all_rows(source, row_schema)
    assert [id_of(row, row_schema) for row in rows] == [*map(str, ids)]


def test_columns_that_results_cannot_hold_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"key": 1, "id": 2, "prompt": "x", "text": "y"}\n')
    for columns, row_schema, said in (
        (("text",), {}, "'text' of their own"),
        ("all", {}, "'text' of their own"),
        (("id",), {"id_column": "key"}, "'id' of their own"),
        (("txt",), {}, "no column 'txt' in the data. It has: "),
    ):
        with pytest.raises(DatasetError, match=said) as refused:
            columns_of(path, columns, **row_schema)
        assert refused.value.param == "columns"


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_folders_of_hives_partitions_are_columns_of_their_rows(format: str, tmp_path: Path) -> None:
    """As pyarrow and DuckDB read them; the rows' ids do not depend on them."""
    places = ("year=2025/lang=de", "year=2026/lang=a%20b", "year=2026/lang=__HIVE_DEFAULT_PARTITION__")
    for number, place in enumerate((*places, "other/x", "year=2026/_temporary")):
        path = tmp_path / place / f"rows.{format}"
        path.parent.mkdir(parents=True)
        row = {"prompt": f"p{number}", "lang": "the folder's counts"}
        path.write_text(json.dumps(row) + "\n")
        if format == "parquet":
            pq.write_table(pa.Table.from_pylist([row]), path)
    source = open_source([tmp_path])
    row_schema = RowSchema(lines=source.lines, columns=("year", "lang"), template="{prompt} {year}")
    assert {"prompt", "year", "lang"} == set(source.columns())
    check_columns(source, row_schema)
    with pytest.raises(DatasetError, match="id_column: year is in the names of folders"):
        check_columns(source, RowSchema(lines=source.lines, id_column="year"))

    def read(row_schema: RowSchema) -> tuple[pa.Schema, list[Row]]:
        found = index_rows(source, row_schema)
        return found.columns, RowReader(source, row_schema).read(found.spans(((0, found.num_rows),)))

    columns, rows = read(row_schema)
    records = [record_of(row, row_schema) for row in rows]
    expected = [("p0", 2025, "de"), ("p2", 2026, None), ("p1", 2026, "a b")]
    assert [(each["prompt"], each["year"], each["lang"]) for each in records] == expected
    columns = as_members(columns) if source.lines else columns
    assert [str(passed_through(each, columns, "{}")["year"]) for each in records] == ["2025", "2026", "2026"]
    _, earlier = read(RowSchema(lines=source.lines, version=1))
    assert [id_of(row, row_schema) for row in rows] == [id_of(row, row_schema) for row in earlier]
    assert not earlier[0].partition


def test_a_compressed_file_is_decompressed_once_and_no_further_than_it_is_read(tmp_path: Path) -> None:
    content = random.Random(5).randbytes(5 * 2**20)
    (tmp_path / "rows.txt.gz").write_bytes(gzip.compress(content[: 2**20]) + gzip.compress(content[2**20 :]))
    source = pa.OSFile(str(tmp_path / "rows.txt.gz"))
    with CompressedFile(source, "gzip") as file:
        assert file.read(10) == content[:10]
        assert source.tell() < 2 * 2**20
        for at in (3 * 2**20, 7, 2**20 - 5):
            file.seek(at)
            assert file.read(10) == content[at : at + 10]
        file.seek(0)
        assert file.read() == content
    assert source.closed
