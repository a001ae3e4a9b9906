"""Batch jobs with any model: formats, order, samples, retries, time limits, scaling.

Real Ray, real files, real engine actors over an executor that only sleeps; `test_batch.py` has the models.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from manta.actors.batch.row_stats import RowStats
from manta.cluster.batch import engine_pool_size as pool_size
from manta.cluster.batch.engine_pool_size import Concurrency
from manta.cluster.errors import ConfigError, DatasetError
from manta.jobs.batch.job import TimeUp, run_batch
from manta.jobs.batch.options import BatchOptions
from ray import cloudpickle
from support.checkpoints.text_pair import make_text_pair
from support.jobs import chaos_job
from support.jobs.batch_outputs import read_results
from support.jobs.chaos_job import ChaosJob, write_rows

cloudpickle.register_pickle_by_value(chaos_job)  # engines do not find tests

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_text_pair(tmp_path_factory.mktemp("pair"))[0])


def job(model: str, source: Path, output: Path) -> ChaosJob:
    return ChaosJob(model=model, input=str(source), output=str(output))


def run(model: str, source: Path, output: Path, **changes: Any) -> RowStats:
    this = job(model, source, output)
    options = replace(this.options, **{"output_format": None, **changes})
    return run_batch(this.config, options, make=this.make).stats


def ids_by_part(output: Path) -> list[str]:
    """The ids in the order of a reader that sorts parts by name."""
    return [name for path in sorted(output.glob("part-*")) for name in pq.read_table(path)["id"].to_pylist()]


def test_text_input_is_answered_with_default_flags(model: str, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("first line\nsecond line\n")
    output = tmp_path / "out"
    run_batch(
        job(model, tmp_path / "lines.txt", output).config,
        BatchOptions(input=(str(tmp_path / "lines.txt"),), output=str(output)),
        make=chaos_job.make_counting,
    )
    rows = read_results(output)
    assert len(rows) == 2
    assert all(row["error"] is None and row["text"] is not None for row in rows)
    assert list(output.glob("part-*.jsonl"))


def test_templates_make_prompts_columns_pass_through_and_duplicate_ids_are_refused_or_numbered(
    model: str, tmp_path: Path
) -> None:
    rows = [{"id": "a", "word": "house", "language": "French", "n": 1.0}]
    rows += [{"id": "a", "word": "tree", "language": ["Dutch"]}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {"template": "{word} in {language}", "pass_through": ("language", "n")}
    with pytest.raises(DatasetError, match="'a'"):
        run(model, path, tmp_path / "out", **flags)
    figures = run(model, path, tmp_path / "out", duplicate_ids="number", **flags)
    assert (figures.rows, figures.failed) == (2, 0)
    french, dutch = read_results(tmp_path / "out")
    assert (french["id"], french["language"], french["n"]) == ("a", "French", 1.0)
    assert (dutch["id"], dutch["language"], "n" in dutch) == ("a-2", ["Dutch"], False)


def test_parts_in_order_of_their_names_preserve_the_input_order_on_request(
    model: str, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", 200)
    order = [f"r{i}" for i in range(200)]
    run(
        model,
        tmp_path / "rows.jsonl",
        tmp_path / "out",
        preserve_order=True,
        output_format="parquet",
        concurrency=Concurrency(2, 2),
    )
    assert ids_by_part(tmp_path / "out") == order


def test_a_sample_can_be_completed_and_a_finished_job_is_not_repeated(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "rows.jsonl", 60)
    assert run(model, tmp_path / "rows.jsonl", tmp_path / "out", sample=10).rows == 10
    first = {row["id"]: row["token_ids"] for row in read_results(tmp_path / "out")}
    assert len(first) == 10
    assert run(model, tmp_path / "rows.jsonl", tmp_path / "out").rows == 60
    parts = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")}
    rows = {row["id"]: row["token_ids"] for row in read_results(tmp_path / "out")}
    assert len(rows) == 60
    assert all(rows[name] == tokens for name, tokens in first.items())
    capsys.readouterr()
    assert run(model, tmp_path / "rows.jsonl", tmp_path / "out").rows == 60
    assert "nothing is left to do" in capsys.readouterr().err
    assert parts == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")}
    with pytest.raises(ConfigError, match="sampling"):
        run(model, tmp_path / "rows.jsonl", tmp_path / "out", sampling={"max_tokens": 3})
    with pytest.raises(ConfigError, match="not empty"):
        run(model, tmp_path / "rows.jsonl", tmp_path / "out", resume="no")


def test_failed_rows_are_retried_on_request_and_written_once(model: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('id,prompt,kind,temperature\ngood,"a, b",x,\nbad,c,x,-1\n')
    for retry_failed in (False, True):
        figures = run(
            model,
            tmp_path / "rows.csv",
            tmp_path / "out",
            retry_failed=retry_failed,
            category_column="kind",
        )
        assert (figures.rows, figures.failed) == (2, 1)
        report = json.loads((tmp_path / "out" / "_report.json").read_text())
        assert (report["ok"], report["failed"]) == (1, 1)
        assert [error["rows"] for error in report["errors"].values()] == [1]
        counted = report["acceptance"]["by_category"]["x"]
        assert (counted["rows"], counted["failed"]) == (2, 1)
        assert [row["id"] for row in read_results(tmp_path / "out")] == ["bad", "good"]
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert [each["run"] for each in manifest["runs"]] == [1, 2]


def test_a_time_limit_keeps_the_answers_and_the_next_run_completes_the_job(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "rows.jsonl", 300)
    with pytest.raises(TimeUp) as ended:
        run(model, tmp_path / "rows.jsonl", tmp_path / "out", limit_time_s=2.0)
    assert (ended.value.exit_code, ended.value.is_reported) == (3, True)
    kept = len(read_results(tmp_path / "out"))
    assert f"stopped by its time limit of 2 s: {kept} of 300 rows are in" in capsys.readouterr().err
    assert kept < 300
    assert run(model, tmp_path / "rows.jsonl", tmp_path / "out").rows == 300
    assert len({row["id"] for row in read_results(tmp_path / "out")}) == 300


def test_engines_start_while_many_rows_remain_and_stop_when_none_are_left(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_size, "MIN_SOON_S", 0.5)
    monkeypatch.setattr(
        pool_size.PoolSize, "record_startup", lambda self, seconds: None
    )  # starts appear quick
    write_rows(tmp_path / "rows.jsonl", 900)
    begin_s = time.monotonic()
    figures = run(
        model,
        tmp_path / "rows.jsonl",
        tmp_path / "out",
        output_format="parquet",
        concurrency=Concurrency(1, 3),
    )
    assert figures.rows == 900, time.monotonic() - begin_s
    assert len({row["id"] for row in read_results(tmp_path / "out")}) == 900
    shards = {path.name.split("-")[1] for path in (tmp_path / "out").glob("part-*")}
    assert len(shards) > 1  # more than one engine wrote
