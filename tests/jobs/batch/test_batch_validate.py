"""`--validate-only`: which rows are wrong, and how long prompts are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manta.actors.batch.dataset.row_requests import RowSchema
from manta.actors.batch.dataset.source import open_source
from manta.cluster.config import EngineConfig
from manta.cluster.errors import CheckpointError, DatasetError
from manta.jobs.batch.preflight import DRY_RUN_ROWS, histogram, preflight, print_dry_run, print_validation
from support.checkpoints.chat_pairs import HERMES

LINES = RowSchema(lines=True)


@pytest.fixture(scope="module")
def config(pair: tuple[Path, Path]) -> EngineConfig:
    return EngineConfig(model=str(pair[0]), max_model_len=64, device="cpu")


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_every_row_is_validated_and_bad_ones_are_shown_with_their_place(
    config: EngineConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Any] = [
        {"prompt": [1, 2, 3], "max_tokens": 5, "temprature": 1, "topic": "x"},
        "",
        {"prompt": [1] * 60, "logprobs": 1, "n": 2},
        {"prompt": [1] * 64},
        {"prompt": [1] * 100},
        {"prompt": [9999]},
        "{broken",
        {"prompt": "x", "temperature": -1},
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    ]
    source = open_source([write(tmp_path / "rows.jsonl", rows)])
    report = preflight(source, LINES, config, duplicates="refuse")
    assert (report.num_checked, report.num_rows, report.num_bad, report.num_too_long) == (8, 8, 5, 2)
    places = [(row.number, row.place.rpartition(", ")[2]) for row in report.bad]
    assert places == [(number, f"line {number + 2}") for number in range(2, 7)]
    assert "64 tokens" in report.bad[0].why
    assert report.lengths[:4].tolist() == [3, 60, 64, 100]
    assert report.max_completion_tokens == 5 + 2 * 4 + 1
    assert report.ignored.named == {"temprature": 1, "topic": 1}
    print_validation(report)
    said = capsys.readouterr().out
    for word in ("temprature", "line 7", "64 to 127", "9999"):
        assert word in said
    good = open_source([write(tmp_path / "good.jsonl", rows[:3])])
    assert preflight(good, LINES, config, duplicates="refuse").num_bad == 0


def test_bodies_of_openai_lines_are_validated(config: EngineConfig, tmp_path: Path) -> None:
    body = {"model": "m", "prompt": [1, 2], "tempereture": 1, "user": "u", "max_tokens": 3, "n": 2}
    lines = [{"custom_id": f"{i}", "url": "/v1/completions", "body": body} for i in range(2)]
    source = open_source(
        [write(tmp_path / "b.jsonl", [*lines, {"custom_id": "c", "url": "/v1/x", "body": 3}])]
    )
    report = preflight(source, RowSchema(kind="openai", lines=True), config, duplicates="refuse")
    assert (report.num_bad, report.max_completion_tokens) == (1, 12)
    assert report.ignored.named == {"tempereture": 2}


@pytest.mark.parametrize("template", [None, HERMES], ids=["without tools", "Hermes"])
def test_options_without_effect_are_counted_and_tools_that_the_model_cannot_see_refused(
    config: EngineConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str | None
) -> None:
    loose = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": loose}}}
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    row = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    rows = [{**row, "reasoning_effort": "high"}, {**row, **tools}]
    source = open_source([write(tmp_path / "rows.jsonl", rows)])
    if template is not None:
        (tmp_path / "template.jinja").write_text(template)
        config = replace(config, chat_template=str(tmp_path / "template.jinja"))
    report = preflight(source, LINES, config, duplicates="refuse")
    unenforced = {"tools.f.parameters.properties.a.uniqueItems": 1} if template else {}
    assert report.ignored.named == {"reasoning_effort": 1, **unenforced}
    assert ["chat template does not support tools" in each.why for each in report.bad] == [True] * (
        not template
    )
    print_dry_run(report, LINES, "out", {})
    assert "reasoning_effort" in capsys.readouterr().out


def test_a_histograms_rows_are_powers_of_two() -> None:
    rows = histogram(np.array([1, 4, 5, 7, 8]))
    assert [row[0] for row in rows] == ["1 to 1", "2 to 3", "4 to 7", "8 to 15"]
    assert [row[2] for row in rows] == ["1", "0", "3", "1"]
    assert [len(row[1]) for row in rows] == [14, 0, 40, 14]


def test_a_dry_run_prints_what_would_be_done_and_does_nothing(
    config: EngineConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"a": "x" * (i % 7), "b": i} for i in range(200)]
    source = open_source([write(tmp_path / "rows.jsonl", rows)])
    row_schema = RowSchema(lines=True, template="{b}: {a}", defaults={"max_tokens": 5})
    plan = preflight(source, row_schema, config, duplicates="refuse", num_rows=DRY_RUN_ROWS)
    assert (plan.num_rows, plan.num_checked, plan.num_bad, plan.first_prompt) == (200, 64, 0, "0: ")
    assert plan.max_completion_tokens == 5 * 64
    before = sorted(path.name for path in tmp_path.iterdir())
    print_dry_run(plan, row_schema, "s3://bucket/out", {"model": config.model})
    said = capsys.readouterr().out
    for word in ("rows.jsonl", "s3://bucket/out", "'{b}: {a}'", "1,000", "--sample"):
        assert word in said
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_errors_that_would_stop_a_job_stop_its_validation(config: EngineConfig, tmp_path: Path) -> None:
    source = open_source([write(tmp_path / "rows.jsonl", [{"id": 1, "prompt": "x"}] * 2)])
    with pytest.raises(DatasetError, match="occurs twice"):
        preflight(source, LINES, config, duplicates="refuse")
    with pytest.raises(CheckpointError):
        preflight(source, LINES, EngineConfig(model="/nowhere"), duplicates="number")
