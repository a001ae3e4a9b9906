"""What comes in: files found, surveyed, and read in whatever spans, in every format, each row once."""

from __future__ import annotations

import csv
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.actors.batch import reading
from manta.actors.batch import survey as surveying
from manta.actors.batch.reading import Row, RowReader, id_of, record_of
from manta.actors.batch.rows import Layout
from manta.actors.batch.source import Source, open_source
from manta.actors.batch.survey import survey
from manta.cluster.row_ranges import of_rows

FORMATS = ("parquet", "jsonl", "openai", "csv", "text")
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=12)


def write(folder: Path, format: str, files: list[list[str]], rows_per_group: int = 7) -> Source:
    """Rows with these prompts, in so many files."""
    folder.mkdir(exist_ok=True)
    suffix = {"openai": "jsonl", "text": "txt"}.get(format, format)
    for number, prompts in enumerate(files):
        path = folder / f"{number:03d}.{suffix}"
        rows = [{"id": f"{number}/{i}", "prompt": prompt} for i, prompt in enumerate(prompts)]
        if format == "parquet":
            schema = pa.schema([("id", pa.string()), ("prompt", pa.string())])
            pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=rows_per_group)
        elif format == "csv":
            out = io.StringIO(newline="")
            writer = csv.DictWriter(out, ["id", "prompt"])
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
    return open_source([folder], format)  # type: ignore[arg-type]


def layout_of(source: Source) -> Layout:
    return Layout(kind="openai" if source.format == "openai" else "dataset", lines=source.lines)


def prompt_of(row: Row, layout: Layout) -> Any:
    record = record_of(row, layout)
    return record["body"]["prompt"] if layout.kind == "openai" else record["prompt"]


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=25)
@given(data=st.data())
def test_rows_come_back_once_and_as_they_were_whatever_is_asked(
    format: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = TEXT.filter(lambda t: bool(t.strip()) and "\n" not in t) if format == "text" else TEXT
    files = data.draw(st.lists(st.lists(text, max_size=40), min_size=1, max_size=4))
    prompts = [prompt for file in files for prompt in file]
    if not prompts:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "ROWS_PER_READ", 5)
        patch.setattr(reading, "BLOCK_BYTES", data.draw(st.integers(1, 300)))
        patch.setattr(reading, "OPEN_FILES", 2)
        patch.setattr(surveying, "MARK_EVERY", 4)
        source = write(tmp_path_factory.mktemp("rows"), format, files)
        layout = layout_of(source)
        found = pickle.loads(pickle.dumps(survey(source, layout, duplicates="refuse")))
        assert found.num_rows == len(prompts)
        reader = RowReader(pickle.loads(pickle.dumps(source)), layout)
        for _ in range(3):
            asked = data.draw(st.sets(st.integers(0, len(prompts) - 1), max_size=30))
            rows = reader.read(found.work(of_rows(asked)))
            assert [row.number for row in rows] == sorted(asked)
            assert [prompt_of(row, layout) or "" for row in rows] == [prompts[i] for i in sorted(asked)]
        everything = reader.read(found.work(((0, len(prompts)),)))
        assert [prompt_of(row, layout) or "" for row in everything] == prompts
        assert len({id_of(row, layout) for row in everything}) == len(prompts)
