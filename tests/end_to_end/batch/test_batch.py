"""Batch jobs on a real local Ray: every row has an answer or an error, with any drafter.

The Ray declares this machine's own cores, as a user's does: a job that needs one core more hangs.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from manta import LLM, SamplingParams
from manta.actors.batch.dataset.row_requests import row_seed
from manta.actors.batch.row_stats import ErrorCount, RowStats
from manta.cluster.batch.engine_pool_size import Concurrency
from manta.cluster.config import EngineConfig
from manta.cluster.errors import CheckpointError, ConfigError, DatasetError, PlacementError
from manta.jobs.batch import placement
from manta.jobs.batch.job import check_answered, run_batch
from manta.jobs.batch.options import BatchOptions
from manta.jobs.batch.report import Report
from ray.util.placement_group import placement_group, remove_placement_group
from support.checkpoints.text_pair import NOT_A_NUMBER, make_pair_with_nan
from support.engines.small_ray import small_ray
from support.jobs.batch_outputs import read_results

pytestmark = pytest.mark.usefixtures("own_cores")
Pair: TypeAlias = tuple[Path, Path]
CORES = os.cpu_count() or 1


@pytest.fixture(scope="module")
def own_cores() -> Iterator[None]:
    # The GPU is an entry in a book: what runs there finds no CUDA and computes on the CPU.
    with small_ray(CORES, num_gpus=1):
        yield


def config(pair: Pair, *, speculate: bool = True, **settings: Any) -> EngineConfig:
    target, drafter = pair
    spec = {"model": str(drafter), "adaptive": False} if speculate else None
    small = {"dtype": "float32", "device": "cpu", "max_num_seqs": 8, "max_model_len": 256}
    return EngineConfig.from_dict({"model": str(target), "speculative_config": spec, **small, **settings})


ROWS = [
    {"id": "greedy", "prompt": "def main(", "temperature": 0.0, "max_tokens": 12},
    {"id": "warm", "prompt": "import ", "temperature": None, "max_tokens": None},
    {"id": "cold", "prompt": "x", "temperature": -1.0, "max_tokens": None},
    {"id": "long", "prompt": "word " * 400, "temperature": None, "max_tokens": None},
    {"id": "none", "prompt": None, "temperature": None, "max_tokens": None},
    *({"id": f"row{i}", "prompt": f"row {i}", "temperature": 0.9, "max_tokens": 5 + i} for i in range(12)),
]


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


@pytest.fixture
def one_row(write_lines: Callable[..., Path]) -> Path:
    return write_lines([{"id": "a", "prompt": "x", "max_tokens": 2}])


def options(source: Path, output: Path, **more: Any) -> BatchOptions:
    return BatchOptions(input=(str(source),), output=str(output), **more)


def answers(folder: Path) -> list[tuple[Any, ...]]:
    return [(r["id"], r["token_ids"], r["text"], r["finish_reason"]) for r in read_results(folder)]


Answered = tuple[Path, Report]


@pytest.fixture(scope="module")
def answered(pair: Pair, parquet: Path, tmp_path_factory: pytest.TempPathFactory) -> Answered:
    """Run the rows with speculation; return folder and report."""
    output = tmp_path_factory.mktemp("answered") / "out"
    job = options(parquet, output, sampling={"max_tokens": 16})
    return output, run_batch(config(pair), job)


def test_a_row_with_nan_logits_is_an_error_row(write_lines: Callable[..., Path], tmp_path: Path) -> None:
    pair, output = make_pair_with_nan(tmp_path / "pair"), tmp_path / "out"
    prompts = {"good": "def main(", "bad": f"x{NOT_A_NUMBER}y", "last": "import "}
    rows = write_lines({"id": name, "prompt": text} for name, text in prompts.items())
    run_batch(config(pair), options(rows, output, sampling={"max_tokens": 4, "temperature": 0.0}))
    found = {row["id"]: row for row in read_results(output)}
    assert {name for name, row in found.items() if row["error"] is None} == {"good", "last"}
    assert "not numbers" in found["bad"]["error"]["message"] and found["bad"]["error"]["attempts"] == 1
    assert "NaN" not in "".join(path.read_text() for path in output.rglob("*.jsonl")).replace("(NaN or", "")


def test_a_job_reads_the_prompts_beginning_that_an_earlier_job_has_computed(
    pair: Pair, write_lines: Callable[..., Path], tmp_path: Path
) -> None:
    rules = "What every row of these jobs begins with. " * 4
    rows = write_lines({"id": f"row {i}", "prompt": f"{rules}{i}"} for i in range(6))
    tokens, cached = dict[str, list[Any]](), dict[str, int]()
    for name, tier in (("plain", None), ("first", str(tmp_path / "kv")), ("second", str(tmp_path / "kv"))):
        job = options(rows, tmp_path / name, sampling={"max_tokens": 8, "temperature": 0.0})
        cached[name] = run_batch(config(pair, kv_tier_path=tier), job).stats.cached_prompt_tokens
        tokens[name] = sorted((row["id"], row["token_ids"]) for row in read_results(tmp_path / name))
    assert tokens["second"] == tokens["first"] == tokens["plain"]
    num_rows, page = 6, 16
    assert cached["second"] >= cached["first"] + page and cached["second"] >= num_rows * page


def test_rows_are_answered_as_llm_decodes_them_plainly(pair: Pair, answered: Answered) -> None:
    folder, made = answered
    rows = {row["id"]: row for row in read_results(folder) if row["error"] is None}
    assert len(rows) == len(ROWS) - 3 and made.stats.num_draft_tokens > 0
    requested = [row for row in ROWS if row["id"] in rows]
    params = [
        SamplingParams(
            max_tokens=row["max_tokens"] or 16,
            seed=row_seed(0, row["id"]),
            **({} if row["temperature"] is None else {"temperature": row["temperature"]}),
        )
        for row in requested
    ]
    settings = {"dtype": "float32", "num_threads": 1, "max_model_len": 256}
    with LLM(str(pair[0]), speculative_config=None, **settings) as llm:
        wanted = llm.generate([row["prompt"] for row in requested], params)
    for row, output in zip(requested, wanted, strict=True):
        found, plain = rows[row["id"]], output.outputs[0]
        assert (found["token_ids"], found["text"]) == (plain.token_ids, plain.text)


def test_every_row_has_an_answer_or_an_error(answered: Answered) -> None:
    folder, made = answered
    figures = made.stats
    assert (figures.rows, figures.failed) == (len(ROWS), 3)
    rows = {row["id"]: row for row in read_results(folder)}
    assert set(rows) == {row["id"] for row in ROWS}
    assert {name: rows[name]["error"]["param"] for name in ("cold", "long", "none")} == {
        "cold": "temperature",
        "long": "prompt",
        "none": "messages or prompt",
    }
    assert json.loads(rows["cold"]["input"])["temperature"] == -1.0
    report = json.loads((folder / "_report.json").read_text())
    assert report["completion_tokens"] == sum(row["completion_tokens"] or 0 for row in rows.values())


def test_figures_add_up_and_a_repeated_command_prints_them_again(
    pair: Pair, parquet: Path, answered: Answered
) -> None:
    folder, first = answered
    assert first.device == "core" and first.device_s > 0
    assert first.tokens_per_device_s == pytest.approx(first.stats.completion_tokens / first.device_s)
    assert first.loading_s > 0 and first.stats.device_s == first.device_s + first.loading_s
    again = run_batch(config(pair), options(parquet, folder, sampling={"max_tokens": 16}))
    assert again.lines() == first.lines() and again.as_json() == first.as_json()


def test_openai_lines_get_openai_answers_and_bad_lines_go_to_the_errors(
    pair: Pair, write_lines: Callable[..., Path], tmp_path: Path
) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "n": 2, "temperature": 1}
    broken = {**chat, "chat_template_kwargs": {"add_generation_prompt": False}}
    bodies = {
        "chat": ("/v1/chat/completions", chat),
        "text": ("/v1/completions", {"prompt": "a"}),
        "embed": ("/v1/embeddings", {"input": "a"}),
        "template": ("/v1/chat/completions", broken),
    }
    lines = [
        {"custom_id": name, "method": "POST", "url": url, "body": body}
        for name, (url, body) in bodies.items()
    ]
    job = options(write_lines([*lines, "{broken"]), tmp_path / "out", model_name="small")
    figures = run_batch(config(pair), job).stats
    assert (figures.rows, figures.failed) == (5, 3)
    by_id = {row["custom_id"]: row for row in read_results(tmp_path / "out")}
    body = by_id["chat"]["response"]["body"]
    assert (body["object"], body["model"], len(body["choices"])) == ("chat.completion", "small", 2)
    assert body["choices"][1]["message"]["role"] == "assistant"
    assert body["usage"]["completion_tokens"] <= 16
    assert by_id["text"]["response"]["body"]["object"] == "text_completion"
    errors = {name: row["response"]["body"].get("error") for name, row in by_id.items()}
    assert errors["embed"]["param"] == "url"
    assert errors["template"]["param"] == "chat_template_kwargs.add_generation_prompt"
    (broken,) = (row for row in by_id.values() if row.get("input") == "{broken")
    assert broken["response"]["status_code"] == 400
    assert ["input" in by_id[name] for name in ("embed", "chat")] == [False, False]
    assert len(list((tmp_path / "out").glob("_errors/errors-*.jsonl"))) == 1


def test_a_wrong_job_ends_before_anything_is_written(pair: Pair, parquet: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    wrong: list[tuple[type[Exception], str, EngineConfig, dict[str, Any]]] = [
        (DatasetError, "nowhere", config(pair), {"input": tmp_path / "nowhere.parquet"}),
        (DatasetError, "prompt_column: no column 'ask'", config(pair), {"prompt_column": "ask"}),
        (CheckpointError, "/nowhere", EngineConfig(model="/nowhere"), {}),
        (ConfigError, "OpenAI batch lines", config(pair), {"output_format": "openai"}),
    ]
    for kind, said, engine, changes in wrong:
        with pytest.raises(kind, match=said):
            run_batch(engine, options(changes.pop("input", parquet), out, **changes))
        assert not out.exists()


def test_errors_of_an_engine_actor_keep_their_type(pair: Pair, parquet: Path, tmp_path: Path) -> None:
    engine = config(pair, tokenizer=str(pair[1]))  # the drafter's folder has no tokenizer.json
    job = options(parquet, tmp_path / "out")
    with pytest.raises(CheckpointError, match="holds neither tokenizer"):
        run_batch(engine, job)
    assert not (tmp_path / "out" / "_SUCCESS").exists()


@pytest.mark.slow  # its engine runs in the interpreter
def test_a_batch_job_on_a_gpu_uses_gpu_kernels(pair: Pair, one_row: Path, tmp_path: Path) -> None:
    engine = config(pair, speculate=False, device="auto", attention_backend="triton")
    report = run_batch(engine, options(one_row, tmp_path / "out"))
    assert (report.stats.rows, report.stats.failed) == (1, 0)
    assert dict(report.lines())["mean acceptance length"] == "-"


@contextmanager
def taken(cpus: float) -> Iterator[None]:
    """Hold CPUs of the cluster, as another job would."""
    group = placement_group([{"CPU": cpus}])
    assert group.wait(600)
    yield
    remove_placement_group(group)


@pytest.fixture
def second_by_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let waiting for a placement take a second for every look at the clock, on any machine."""
    seconds = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)), time=time.time)
    monkeypatch.setattr(placement, "time", clock)


@pytest.mark.usefixtures("second_by_second")
def test_a_job_without_resources_says_what_it_waits_for_and_gives_up(
    pair: Pair,
    parquet: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "PLACEMENT_TIMEOUT_S", 20.0)
    job = options(parquet, tmp_path / "out")
    with taken(CORES), pytest.raises(PlacementError, match=r"within 20 s.*`ray status`"):
        run_batch(config(pair), job)
    assert f"waiting for {CORES} CPU; 0 of {CORES} are free" in capsys.readouterr().err
    assert read_results(tmp_path / "out") == []


@pytest.mark.slow
@pytest.mark.skipif(CORES < 2, reason="needs a core that can be taken")
def test_a_job_uses_the_free_cores(
    pair: Pair,
    one_row: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "REPORT_INTERVAL_S", 0.5)
    with taken(CORES - 1):
        figures = run_batch(config(pair), options(one_row, tmp_path / "out")).stats
    assert (figures.rows, figures.failed) == (1, 0)
    assert "an engine takes 1 CPU in place of" in capsys.readouterr().err


def test_jobs_that_can_never_fit_are_refused_before_anything_starts(
    pair: Pair, parquet: Path, tmp_path: Path
) -> None:
    wrong: list[tuple[str, dict[str, Any], int]] = [
        (r"2 GPU on one node", {"device": "cuda", "tensor_parallel_size": 2}, 1),
        (r"Lower concurrency to 1", {"device": "cuda"}, 2),
    ]
    for said, settings, engines in wrong:
        job = options(parquet, tmp_path / "out", concurrency=Concurrency(engines, engines))
        with pytest.raises(PlacementError, match=said):
            run_batch(config(pair, **settings), job)


@pytest.mark.slow
def test_two_engines_with_separate_workers_are_placed(
    pair: Pair, parquet: Path, tmp_path: Path, answered: Answered
) -> None:
    _, drafter = pair
    split = {"speculative_config": {"model": str(drafter), "placement": "split"}}
    for name, engine, engines in (("split", config(pair, **split), 1), ("two", config(pair), 2)):
        both = Concurrency(engines, engines)
        run_batch(engine, options(parquet, tmp_path / name, sampling={"max_tokens": 16}, concurrency=both))
        assert answers(tmp_path / name) == answers(answered[0])


def test_a_job_whose_rows_all_failed_has_failed() -> None:
    job = BatchOptions(input=("rows.jsonl",), output="out")
    error = ErrorCount(1, "temperature=-1 must be at least 0.")
    with pytest.raises(DatasetError, match=r"All 1 rows failed, the first with: temperature=-1"):
        check_answered(RowStats(rows=1, failed=1, errors={"BadRequestError": error}), job)
    check_answered(RowStats(rows=2, failed=1), job)
