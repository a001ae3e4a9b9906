"""Batch jobs with any model: formats, order, samples, retries, time limits, scaling.

Real Ray, real files, real engine actors over an executor that only sleeps; `test_batch.py` has the models.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
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
from support.jobs.batch_outputs import read_results
from support.jobs.chaos_job import ChaosJob, MakeJob
from support.waiting import WAIT_S

pytestmark = pytest.mark.usefixtures("ray_session")


def run(job: ChaosJob, **options: Any) -> RowStats:
    """Run a job whose output has the format of its input."""
    changed = replace(job.options, **{"output_format": None, **options})
    return run_batch(job.config, changed, make=job.make).stats


def test_text_input_is_answered_with_default_flags(make_job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("first line\nsecond line\n")
    job = make_job(tmp_path / "lines.txt")
    run_batch(job.config, BatchOptions(input=(job.input,), output=str(job.out)), make=job.make)
    rows = read_results(job.out)
    assert len(rows) == 2
    assert all(row["error"] is None and row["text"] is not None for row in rows)
    assert list(job.out.glob("part-*.jsonl"))


def test_templates_make_prompts_columns_pass_through_and_duplicate_ids_are_refused_or_numbered(
    make_job: MakeJob, write_lines: Callable[..., Path]
) -> None:
    rows = [{"id": "a", "word": "house", "language": "French", "n": 1.0}]
    job = make_job(write_lines([*rows, {"id": "a", "word": "tree", "language": ["Dutch"]}]))
    flags = {"template": "{word} in {language}", "pass_through": ("language", "n")}
    with pytest.raises(DatasetError, match="'a'"):
        run(job, **flags)
    figures = run(job, duplicate_ids="number", **flags)
    assert (figures.rows, figures.failed) == (2, 0)
    french, dutch = read_results(job.out)
    assert (french["id"], french["language"], french["n"]) == ("a", "French", 1.0)
    assert (dutch["id"], dutch["language"], "n" in dutch) == ("a-2", ["Dutch"], False)


def test_texts_of_a_named_column_are_chats_by_default_and_a_begun_job_keeps_its_default(
    make_job: MakeJob, write_lines: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(write_lines({"id": f"{i}", "question": f"how {i}?", "source": "s"} for i in range(20)))
    lengths: dict[object, list[int]] = {}
    for chat in (None, True, False):
        named = {"prompt_column": "question", "chat": chat, "sample": 10}
        figures = run(job, output=str(job.out / str(chat)), **named)
        said = " ".join(capsys.readouterr().err.split())
        assert (
            "texts in question are completed" if chat is False else "texts in question are sent as"
        ) in said
        assert figures.ignored.named == {"source": 10}
        rows = read_results(job.out / str(chat))
        lengths[chat] = sorted(row["prompt_tokens"] for row in rows if row["error"] is None)
    assert lengths[None] == lengths[True] > lengths[False]
    report = json.loads((job.out / "None/_report.json").read_text())
    assert (report["ignored"], report["job"]["chat"], report["job"]["row_version"]) == (
        {"source": 10},
        True,
        2,
    )
    with pytest.raises(ConfigError, match="raw sends none"):
        run(job, chat=False, system="s", output=str(job.out / "system"))
    # A job of version 0.2, which completed all texts.
    begun = job.out / "False/_manta/job.json"
    record = json.loads(begun.read_text())
    del record["spec"]["made_from"]["row_version"]
    begun.write_text(json.dumps(record))
    again = {"prompt_column": "question", "output": str(job.out / "False")}
    with pytest.raises(ConfigError, match="chat: none before, True now"):
        run(job, chat=True, **again)
    assert run(job, **again).rows == 20
    assert max(row["prompt_tokens"] for row in read_results(job.out / "False")) < min(lengths[True])


def test_parts_in_order_of_their_names_preserve_the_input_order_on_request(make_job: MakeJob) -> None:
    job = make_job(200, preserve_order=True, concurrency="2")
    job.run()
    parts = sorted(job.out.glob("part-*"))
    ids = [name for path in parts for name in pq.read_table(path)["id"].to_pylist()]
    assert ids == [f"r{i}" for i in range(200)]


def test_a_sample_can_be_completed_and_a_finished_job_is_not_repeated(
    make_job: MakeJob, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(60)
    assert run(job, sample=10).rows == 10
    first = {row["id"]: row["token_ids"] for row in read_results(job.out)}
    assert len(first) == 10
    assert run(job).rows == 60
    parts = {path.name: path.stat().st_mtime_ns for path in job.out.glob("part-*")}
    rows = {row["id"]: row["token_ids"] for row in read_results(job.out)}
    assert len(rows) == 60
    assert all(rows[name] == tokens for name, tokens in first.items())
    capsys.readouterr()
    assert run(job).rows == 60
    assert "nothing is left to do" in capsys.readouterr().err
    assert parts == {path.name: path.stat().st_mtime_ns for path in job.out.glob("part-*")}
    with pytest.raises(ConfigError, match="sampling"):
        run(job, sampling={"max_tokens": 3})
    with pytest.raises(ConfigError, match="not empty"):
        run(job, resume="no")


def test_failed_rows_are_retried_on_request_and_written_once(make_job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('id,prompt,kind,temperature\ngood,"a, b",x,\nbad,c,x,-1\n')
    job = make_job(tmp_path / "rows.csv")
    for retry_failed in (False, True):
        figures = run(job, retry_failed=retry_failed, category_column="kind")
        assert (figures.rows, figures.failed) == (2, 1)
        report = json.loads((job.out / "_report.json").read_text())
        assert (report["ok"], report["failed"]) == (1, 1)
        assert [error["rows"] for error in report["errors"].values()] == [1]
        counted = report["acceptance"]["by_category"]["x"]
        assert (counted["rows"], counted["failed"]) == (2, 1)
        assert [row["id"] for row in read_results(job.out)] == ["bad", "good"]
    manifest = json.loads((job.out / "_manifest.json").read_text())
    assert [each["run"] for each in manifest["runs"]] == [1, 2]


def test_a_time_limit_keeps_the_answers_and_the_next_run_completes_the_job(
    make_job: MakeJob, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(100, slow_from=200)  # which it does not end with
    with pytest.raises(TimeUp) as ended:
        run(job, limit_time_s=3.0)
    assert (ended.value.exit_code, ended.value.is_reported) == (3, True)
    kept = len(read_results(job.out))
    assert f"stopped by its time limit of 3 s: {kept} of 100 rows are in" in capsys.readouterr().err
    assert kept < 100
    job.release()
    assert run(job).rows == 100
    assert len({row["id"] for row in read_results(job.out)}) == 100


def test_engines_start_while_many_rows_remain_and_stop_when_none_are_left(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first engine is slow until the second has rows."""
    monkeypatch.setattr(pool_size, "MIN_SOON_S", 0.5)
    monkeypatch.setattr(pool_size.PoolSize, "record_startup", lambda self, seconds: None)  # it appears quick
    job, figures = make_job(300, slow_from=100), list[RowStats]()

    def answer() -> None:
        figures.append(run(job, output_format="parquet", concurrency=Concurrency(1, 3)))

    thread = threading.Thread(target=answer)
    thread.start()
    job.wait_until_slow(2, thread.is_alive)
    job.release()
    thread.join(WAIT_S)
    assert [each.rows for each in figures] == [300]
    assert len({row["id"] for row in read_results(job.out)}) == 300
    assert len({path.name.split("-")[1] for path in job.out.glob("part-*")}) > 1  # shards of engines
