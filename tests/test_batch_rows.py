"""Records become requests: ids, sampling fields, seeds; files become sources; results become parts."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from manta.actors.batch.answering import WIRE_SCHEMA
from manta.actors.batch.rows import Layout, parse_line, read_request, row_id, row_seed
from manta.actors.batch.source import check_columns, open_source, read_results
from manta.actors.batch.survey import survey
from manta.actors.http.defaults import GenerationDefaults
from manta.actors.http.protocol import ChatRequest, CompletionRequest
from manta.cluster.errors import ConfigError, DatasetError, RequestError
from manta.jobs.batch.sink import LOCK, Sink

DATASET = Layout()
OPENAI = Layout(kind="openai", lines=True)
NO_DEFAULTS = GenerationDefaults()


def openai_line(**changes: object) -> dict[str, object]:
    line: dict[str, object] = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    }
    return line | changes


def test_a_prompt_is_a_completion_and_messages_are_a_chat() -> None:
    completion = read_request({"prompt": "def f("}, DATASET, NO_DEFAULTS)
    assert isinstance(completion.body, CompletionRequest)
    assert completion.body.prompt == ["def f("]
    chat = read_request({"messages": [{"role": "user", "content": "hi", "name": None}]}, DATASET, NO_DEFAULTS)
    assert isinstance(chat.body, ChatRequest)
    ids = read_request({"prompt": [1, 2, 3]}, DATASET, NO_DEFAULTS)
    assert isinstance(ids.body, CompletionRequest)
    assert ids.body.prompt == [[1, 2, 3]]


def test_fields_of_the_row_win_over_flags_and_empty_ones_do_not() -> None:
    layout = Layout(defaults={"temperature": 0.5, "max_tokens": 9})
    row = {"prompt": "x", "temperature": 0.0, "max_tokens": None, "top_p": float("nan")}
    params = read_request(row, layout, NO_DEFAULTS).params
    assert (params.temperature, params.max_tokens, params.top_p) == (0.0, 9, 1.0)


def test_a_row_without_a_seed_gets_one_from_the_job_and_its_id_alone() -> None:
    first, again = ({"id": 7, "prompt": text} for text in ("x", "another"))
    layout = Layout(seed=3)
    seeds = [read_request(row, layout, NO_DEFAULTS).params.seed for row in (first, again)]
    assert seeds == [row_seed(3, "7")] * 2
    assert row_seed(3, "7") != row_seed(4, "7")
    assert read_request({"prompt": "x", "seed": 5}, layout, NO_DEFAULTS).params.seed == 5


def test_ids_come_from_the_row_or_from_its_content() -> None:
    assert row_id({"custom_id": "c", "id": "i"}, DATASET) == "c"
    assert row_id({"id": 4}, DATASET) == "4"
    assert row_id({"key": "k", "id": "i"}, Layout(id_column="key")) == "k"
    hashed = row_id({"prompt": "x", "n": 1}, DATASET)
    assert hashed == row_id({"n": 1, "prompt": "x"}, DATASET)
    assert hashed != row_id({"n": 1, "prompt": "y"}, DATASET)


@pytest.mark.parametrize(
    ("record", "layout", "param"),
    [
        ({"text": "x"}, DATASET, "messages or prompt"),
        ({"prompt": 5}, DATASET, "prompt"),
        ({"prompt": ["a", "b"]}, DATASET, "prompt"),
        ({"prompt": "x", "temperature": -1}, DATASET, "temperature"),
        ({"prompt": "x", "temperature": "warm"}, DATASET, "temperature"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, DATASET, "messages.0.role"),
        (openai_line(url="/v1/embeddings"), OPENAI, "url"),
        (openai_line(body="x"), OPENAI, "body"),
        (openai_line(custom_id=None), OPENAI, "custom_id"),
        (
            openai_line(body={"messages": [{"role": "user", "content": "x"}], "stream": True}),
            OPENAI,
            "body.stream",
        ),
        (
            openai_line(body={"messages": [{"role": "user", "content": "x"}], "logprobs": True}),
            OPENAI,
            "logprobs",
        ),
    ],
)
def test_a_bad_record_is_refused_with_the_name_of_its_field(
    record: dict[str, object], layout: Layout, param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        read_request(record, layout, NO_DEFAULTS)
    assert refused.value.param == param


def test_openai_lines_keep_openais_limits() -> None:
    chat = read_request(openai_line(), OPENAI, NO_DEFAULTS)
    assert chat.params.max_tokens is None
    line = openai_line(url="/v1/completions", body={"prompt": "x", "n": 2})
    completion = read_request(line, OPENAI, NO_DEFAULTS)
    assert (completion.params.max_tokens, completion.params.n) == (16, 2)


def test_malformed_lines_are_refused() -> None:
    for line in ("{", "[1]", '"text"'):
        with pytest.raises(RequestError):
            parse_line(line)


def write_lines(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def test_the_format_is_found_from_suffix_and_content(tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", ["{broken", {"prompt": "x"}, ""])
    source = open_source([rows])
    assert (source.format, source.lines) == ("jsonl", True)
    assert open_source([write_lines(tmp_path / "o.jsonl", [openai_line()])]).format == "openai"
    pq.write_table(pa.table({"prompt": ["a", "b"]}), tmp_path / "rows.parquet")
    source = open_source([tmp_path / "rows.parquet"])
    assert (source.format, source.lines) == ("parquet", False)


def test_an_unreadable_dataset_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "table.tsv").write_text("prompt\nx\n")
    (tmp_path / "folder").mkdir()
    for name, said in (
        ("nowhere.jsonl", "cannot be read"),
        ("broken.parquet", "not a readable Parquet"),
        ("latin.jsonl", "not UTF-8"),
        ("empty.jsonl", "no rows"),
        ("table.tsv", ".tsv"),
        ("folder", "files"),
        (".", "--input-format"),
    ):
        with pytest.raises(DatasetError, match=said) as refused:
            source = open_source([tmp_path / name])
            survey(source, DATASET, duplicates="number")
        assert refused.value.param == "input"


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    source = open_source([write_lines(tmp_path / "rows.jsonl", [{"question": "x", "key": 1}])])
    for layout, param in (
        (DATASET, "prompt_column"),
        (Layout(prompt_column="ask"), "prompt_column"),
        (Layout(prompt_column="question", id_column="uid"), "id_column"),
    ):
        with pytest.raises(DatasetError, match="question") as refused:
            check_columns(source, layout)
        assert refused.value.param == param
    check_columns(source, Layout(prompt_column="question", id_column="key"))


def result(row: str, **fields: object) -> dict[str, object]:
    return {"id": row, "begin_s": 1.0, "end_s": 2.0, **fields}


def results() -> pa.Table:
    error = {"type": "BadRequestError", "message": "m", "param": "prompt"}
    good = result("a", text="hi", token_ids=[1, 2], response=json.dumps({"id": "cmpl-1", "choices": []}))
    return pa.Table.from_pylist([good, result("b", error=error, input="{")], schema=WIRE_SCHEMA)


def test_parts_hold_answers_and_error_rows(tmp_path: Path) -> None:
    for form in ("parquet", "jsonl"):
        sink = Sink(tmp_path / form, form)  # type: ignore[arg-type]
        sink.add(results())
        sink.finish({"rows": 2}, {"model": "m"})
        sink.close()
        good, bad = read_results(tmp_path / form)
        assert (good["id"], good["text"], good["token_ids"], good["error"]) == ("a", "hi", [1, 2], None)
        assert (bad["id"], bad["error"]["param"], bad["input"]) == ("b", "prompt", "{")
        manifest = json.loads((tmp_path / form / "manifest.json").read_text())
        assert [part["rows"] for part in manifest["parts"]] == [2]
        assert (tmp_path / form / "_SUCCESS").exists()


def test_openai_answers_and_errors_go_to_files_of_their_own(tmp_path: Path) -> None:
    sink = Sink(tmp_path / "out", "openai")
    sink.add(results())
    sink.finish({}, {})
    (part,) = (tmp_path / "out").glob("part-*.jsonl")
    (errors,) = (tmp_path / "out").glob("errors-*.jsonl")
    good, bad = json.loads(part.read_text()), json.loads(errors.read_text())
    assert (good["custom_id"], good["response"]["status_code"], good["error"]) == ("a", 200, None)
    assert (bad["custom_id"], bad["response"], bad["error"]["code"]) == ("b", None, "BadRequestError")
    assert bad["input"] == "{"


def test_results_are_not_overwritten_unless_asked(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with Sink(folder, "jsonl") as sink:
        sink.add(results())
        sink.finish({}, {})
    (folder / "notes.txt").write_text("mine")
    before = {path.name for path in folder.iterdir()}
    with pytest.raises(ConfigError, match="--overwrite") as refused:
        Sink(folder, "jsonl")
    assert refused.value.param == "output"
    with Sink(folder, "jsonl", overwrite=True):
        pass  # a job that has no row leaves what was there
    assert {path.name for path in folder.iterdir()} == before
    with Sink(folder, "jsonl", overwrite=True) as sink:
        sink.add(results())
        sink.flush()
        left = {path.name for path in folder.iterdir()} - {LOCK}
    assert len(left - before) == 1
    assert left & before == {"notes.txt"}


def test_a_folder_without_success_is_what_a_stopped_job_leaves(tmp_path: Path) -> None:
    with Sink(tmp_path / "out", "jsonl") as sink:
        sink.add(results())
        sink.flush()
    names = [path.name for path in (tmp_path / "out").iterdir()]
    assert len(names) == 1
    assert names[0].startswith("part-")
