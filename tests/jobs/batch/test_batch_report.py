"""Costs of rows add up in any order; the report as JSON and tables."""

from __future__ import annotations

import asyncio
import json
import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.actors.batch.dataset.row_reader import Row
from manta.actors.batch.dataset.row_requests import RowSchema
from manta.actors.batch.engine_meter import EngineMeter
from manta.actors.batch.row_answerer import WIRE_SCHEMA, RowAnswerer
from manta.actors.batch.row_stats import (
    MAX_INTERVALS,
    MAX_NAMES,
    Categories,
    Category,
    EngineTotals,
    RowStats,
    length_histogram,
    length_range,
)
from manta.actors.engine.async_engine import AsyncEngine
from manta.actors.tokenization.generation_config import GenerationDefaults
from manta.cluster.config import EngineConfig
from manta.cluster.speculation.acceptance_length import acceptance_by_position
from manta.jobs.batch.report import Report

HOSTILE = """<script>document.title="owned"</script>'"><img src=x onerror=alert(1)>&amp;"""


def answered(at_s: float, category: str | None = None, **fields: Any) -> dict[str, Any]:
    tokens = {
        "prompt_tokens": 100,
        "completion_tokens": 20,
        "num_draft_tokens": 35,
        "num_accepted_tokens": 15,
    }
    return {
        **{"id": "r", "num_steps": 5, "begin_s": at_s, "end_s": at_s + 2, "attempts": 1, **tokens},
        "counted_as": category,
        "acceptance_histogram": [1, 0, 1, 1, 1, 0, 1],
        "engine_spent": {"device_s": 0.5, "open_s": 0.5, "busy_s": 0.25},
        **fields,
    }


def failed(at_s: float, kind: str, message: str, category: str | None = None) -> dict[str, Any]:
    times = {"begin_s": at_s, "end_s": at_s}
    return {"id": "f", "error": {"type": kind, "message": message}, "counted_as": category, **times}


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=WIRE_SCHEMA)


def figures_of(*rows: dict[str, Any]) -> RowStats:
    figures = RowStats()
    figures.add(table(*rows))
    return figures


def synthetic_rows(seed: int, num_rows: int) -> list[dict[str, Any]]:
    """Make rows of two days, in more categories than are kept."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for _ in range(num_rows):
        at_s = rng.choice((1.0e9, 1.0e9 + 80_000)) + rng.randrange(768) / 4
        category = rng.choice((None, *(f"c{i}" for i in range(MAX_NAMES + 6))))
        if rng.random() < 0.2:
            rows.append(failed(at_s, rng.choice("AB"), rng.choice(("x", "y" * 900)), category))
            continue
        histogram = [rng.randrange(4) for _ in range(rng.randrange(9))]
        numbers = {"prompt_tokens": rng.randrange(5000), "completion_tokens": rng.randrange(300)}
        row = answered(at_s, category, **numbers, acceptance_histogram=histogram, attempts=rng.randint(1, 2))
        rows.append(row)
    return rows


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), num_rows=st.integers(1, 400), cuts=st.lists(st.integers(0, 400)))
def test_figures_of_parts_add_up_to_those_of_the_whole_in_any_order(
    seed: int, num_rows: int, cuts: list[int]
) -> None:
    rows = synthetic_rows(seed, num_rows)
    whole = figures_of(*rows)
    random.Random(seed).shuffle(rows)
    edges = [0, *sorted(min(cut, num_rows) for cut in cuts), num_rows]
    parts = [figures_of(*rows[a:b]) for a, b in pairwise(edges)]
    random.Random(seed + 1).shuffle(parts)
    total = RowStats()
    for part in parts:
        stored = json.loads(json.dumps(part.to_json()))
        assert len(json.dumps(stored)) < 8192, "a part's record stays small"
        total.merge(RowStats.from_json(stored))
    assert total == whole
    assert sum(whole.prompt_lengths) == sum(whole.output_lengths) == whole.rows - whole.failed
    categories = [sums for _, sums in whole.categories.ranked()]
    assert sum(c.rows for c in categories) == sum(row["counted_as"] is not None for row in rows)
    assert len(whole.categories.named) <= MAX_NAMES


def test_a_table_is_counted_by_its_rows() -> None:
    figures = figures_of(
        answered(1000, "code", attempts=3),
        answered(1001, "code", prompt_tokens=0, completion_tokens=1),
        answered(1002, "math", acceptance_histogram=[2, 1]),
        failed(1003, "BadRequestError", "too long", "math"),
        failed(1003, "BadRequestError", "cannot be read"),
        {"id": "killed its engines", "error": {"type": "EngineDeadError", "message": "poison"}},
    )
    assert (figures.rows, figures.failed, figures.retried) == (6, 3, 1)
    assert figures.first_error == "cannot be read"
    errors = {kind: count.rows for kind, count in figures.errors.items()}
    assert errors == {"BadRequestError": 2, "EngineDeadError": 1}
    assert figures.acceptance == [4, 1, 2, 2, 2, 0, 2]
    assert figures.prompt_lengths == [1, 0, 0, 0, 0, 0, 0, 2]
    assert figures.output_lengths == [0, 1, 0, 0, 0, 2]
    assert figures.categories.named["math"] == Category(2, 1, 20, 5, 15)
    assert figures.stretches.times == [[1000, 1004]] and figures.wall_s == 4
    assert (figures.device_s, figures.busy_s) == (1.5, 0.75)


def test_pauses_between_runs_do_not_count_as_work() -> None:
    figures = figures_of(answered(1000), answered(1012), answered(1030))
    assert figures.stretches.times == [[1000, 1014], [1030, 1032]]
    assert figures.wall_s == 16 and figures.tokens_per_s == pytest.approx(60 / 16)
    many = figures_of(*(answered(100 * i + i**0.5) for i in range(4 * MAX_INTERVALS)))
    assert len(many.stretches.times) == MAX_INTERVALS
    # A part with few rows, far from each other, says nothing about pauses between the runs.
    many.merge(figures_of(answered(10**6)))
    assert many.stretches.times[-1] == [10**6, 10**6 + 2]


def test_lengths_are_counted_by_powers_of_two() -> None:
    import numpy as np

    counted = length_histogram(np.array([0, 1, 2, 3, 4, 7, 8, 1023, 1024, 2**40]))
    assert {place: rows for place, rows in enumerate(counted) if rows} == {
        **{0: 1, 1: 1, 2: 2, 3: 2, 4: 1},
        **{10: 1, 11: 1, 41: 1},
    }
    assert [length_range(place) for place in (0, 1, 2, 11)] == [(0, 0), (1, 1), (2, 3), (1024, 2047)]


def test_acceptance_by_position_counts_blocks_that_reached_the_position() -> None:
    assert acceptance_by_position([1, 1, 0, 2]) == [0.75, 0.5, 0.5]
    assert acceptance_by_position([]) == acceptance_by_position([0, 0]) == []


def test_long_category_names_are_truncated() -> None:
    categories = Categories()
    categories.add("x" * 500, Category(rows=1))
    (name,) = categories.named
    assert len(name) == 80 and name.endswith("…")


def measured() -> Report:
    """Report 100 rows: 3 failed, with categories, and text that looks like a script."""
    rows = [answered(1e9 + i, ("code", "math", HOSTILE)[i % 3]) for i in range(97)]
    rows[50]["engine_spent"] = {"device_s": 2.5, "open_s": 0.5, "busy_s": 0.25}
    rows += [failed(1e9 + i, kind, HOSTILE) for i, kind in enumerate(("A", "B", "A"))]
    about = {"output": f"s3://x/{HOSTILE}", "settings": {"model": HOSTILE, "seed": 0}, "input": [HOSTILE]}
    return Report(figures_of(*rows), "GPU", about, price_per_gpu_hour=3.6)


def test_the_report_shows_what_was_measured() -> None:
    report = json.loads(json.dumps(measured().as_json()))
    assert (report["rows"], report["ok"], report["failed"], report["retried"]) == (100, 97, 3, 0)
    assert (report["device"], report["device_s"], report["loading_device_s"]) == ("GPU", 97 * 0.5, 2)
    assert report["busy_share"] == 0.5
    assert report["tokens_per_device_s"] == pytest.approx(97 * 20 / 48.5, rel=1e-4)
    assert report["price"] == pytest.approx(50.5 * 3.6 / 3600, abs=1e-4)
    assert report["acceptance"]["by_position"] == [0.8, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert set(report["acceptance"]["by_category"]) == {"code", "math", HOSTILE}
    assert report["lengths"]["prompt"] == [{"from": 64, "to": 127, "rows": 97}]
    assert report["errors"]["A"] == {"rows": 2, "example": HOSTILE}
    assert report["job"]["settings"]["model"] == HOSTILE


def test_the_report_of_a_cpu_has_no_price(capsys: pytest.CaptureFixture[str]) -> None:
    figures = figures_of(answered(1000))
    report = Report(figures, "core", {"output": "out"}, price_per_gpu_hour=2.0)
    assert report.as_json()["price"] is None
    report.print()
    shown = capsys.readouterr().out
    assert "results in out" in shown and "core-seconds" in shown
    assert "GPU" not in shown and "price" not in shown


def test_a_job_without_a_row_has_a_report() -> None:
    report = Report(RowStats(), "device", {})
    assert report.as_json()["rows"] == 0
    report.print()


def test_rows_of_a_real_engine_are_counted_as_the_engine_counts(tiny_qwen3: Path, tiny_drafter: Path) -> None:
    spec = {"model": str(tiny_drafter), "adaptive": False}
    settings = {"model": str(tiny_qwen3), "speculative_config": spec, "dtype": "float32"}
    small = {"max_model_len": 128, "max_num_seqs": 4, "skip_tokenizer_init": True}
    config = EngineConfig.from_dict({**settings, **small})
    row_schema = RowSchema(category_column="kind", defaults={"max_tokens": 12, "temperature": 0.0})
    rng = random.Random(1)
    records: list[dict[str, Any]] = [
        {"prompt": [rng.randrange(3, 60) for _ in range(5 + i)], "kind": i % 3} for i in range(10)
    ]
    records.append({"prompt": [5] * 500, "kind": 0})  # too long

    async def run() -> tuple[RowStats, EngineTotals, Any]:
        began_s = time.monotonic()
        engine = AsyncEngine(config)
        await engine.start()
        try:
            meter = EngineMeter(engine.stats, "core", 2, began_s)
            answerer = RowAnswerer(engine, row_schema, GenerationDefaults(), "m")

            async def answer(row: Row) -> dict[str, Any]:
                meter.row_started()
                result = await answerer.answer(row)
                meter.row_ended(result)
                return result

            results = await asyncio.gather(*(answer(Row(*row)) for row in enumerate(records)))
            return figures_of(*results), meter.totals(), engine.stats()
        finally:
            engine.close()

    figures, live, stats = asyncio.run(run())
    assert (figures.rows, figures.failed, live.rows_done) == (11, 1, 11)
    assert sum(figures.acceptance) == figures.num_steps == stats.num_drafts > 0
    assert sum(a * n for a, n in enumerate(figures.acceptance)) == figures.num_accepted_tokens
    shares = acceptance_by_position(figures.acceptance)
    assert [round(share * figures.num_steps) for share in shares] == [n for n in stats.accepted_per_pos if n]
    assert live.completion_tokens == figures.completion_tokens == 120
    assert figures.open_s == pytest.approx(live.open_s) and figures.device_s <= live.device_s
    assert figures.busy_s == pytest.approx(live.busy_s) and 0 < figures.busy_s <= figures.open_s
    assert {name: sums.rows for name, sums in figures.categories.named.items()} == {"0": 5, "1": 3, "2": 3}
