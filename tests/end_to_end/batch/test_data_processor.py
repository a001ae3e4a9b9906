"""`manta.data.build_processor` on a real Ray with two CPUs: no hang, no leak."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import ray.cloudpickle
import ray.data
from manta import LLM, SamplingParams
from manta.actors.batch.dataset.row_requests import row_seed
from manta.cluster.errors import ConfigError, PlacementError, RequestError
from manta.data import MantaEngineProcessorConfig, build_processor
from manta.jobs.batch.processor import EngineGroups, plan_engines
from ray.util import placement_group_table
from support.engines.ray_engines import actor_pids
from support.engines.small_ray import small_ray
from support.waiting import wait_until

ENGINE = {"dtype": "float32", "device": "cpu", "max_num_seqs": 8, "max_model_len": 256, "num_pages": 256}
Pair: TypeAlias = tuple[Path, Path]
Rows: TypeAlias = dict[str, dict[str, Any]]  # by id
ROWS = [{"id": f"r{i}", "question": f"row {i}", "length": 4 + i % 5} for i in range(24)]


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test


@pytest.fixture(scope="module")
def two_cpus() -> Iterator[None]:
    with small_ray(2):
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield


def config(pair: Pair, *, speculate: bool = True, **changes: Any) -> MantaEngineProcessorConfig:
    drafter = {"method": "dflash", "model": str(pair[1]), "adaptive": False}
    spec = {"speculative_config": drafter} if speculate else {}
    settings = {**ENGINE, **spec, **changes.pop("engine_kwargs", {})}
    return MantaEngineProcessorConfig(model_source=str(pair[0]), engine_kwargs=settings, **changes)


def ask(row: dict[str, Any]) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": 0.9, "max_tokens": row["length"], "detokenize": False}
    if row["id"] == "r3":
        sampling["temperature"] = -1.0
    if row["id"] == "r4":
        sampling["temprature"] = 1.0
    prompt = None if row["id"] == "r5" else row["question"]
    return {"prompt": prompt, "sampling_params": sampling}


def answer(row: dict[str, Any]) -> dict[str, Any]:
    kept = ("id", "length", "generated_text", "generated_tokens", "num_generated_tokens", "num_draft_tokens")
    return {name: row[name] for name in kept}


@pytest.fixture(scope="module")
def answered(two_cpus: None, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Return rows read from Parquet and answered with speculation in small batches, by id."""
    folder = tmp_path_factory.mktemp("rows")
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet", row_group_size=10)
    processor = build_processor(config(pair, batch_size=5), ask, answer)
    rows = processor(ray.data.read_parquet(str(folder))).take_all()
    assert len(rows) == len(ROWS)
    return {row["id"]: row for row in rows}


def test_every_row_has_an_answer_or_an_error(answered: Rows) -> None:
    rows = answered
    assert set(rows) == {row["id"] for row in ROWS}
    errors = {name: row["__inference_error__"] for name, row in rows.items() if row["__inference_error__"]}
    assert set(errors) == {"r3", "r4", "r5"}
    assert "temperature=-1.0" in errors["r3"]
    assert "Did you mean sampling_params.temperature?" in errors["r4"]
    assert "no messages or prompt" in errors["r5"]
    assert rows["r3"]["question"] == "row 3", "an error row keeps its input and skips postprocess"
    good = rows["r6"]
    assert good["num_generated_tokens"] == len(good["generated_tokens"]) <= good["length"] == 5
    assert sum(row["num_draft_tokens"] or 0 for row in rows.values()) > 0


def test_answers_equal_plain_decoding_by_llm(pair: Pair, answered: Rows) -> None:
    good = [row for row in ROWS if not answered[row["id"]]["__inference_error__"]]
    wanted = [
        SamplingParams(temperature=0.9, max_tokens=row["length"], seed=row_seed(0, row["id"])) for row in good
    ]
    with LLM(str(pair[0]), **{**ENGINE, "num_threads": 1}) as llm:
        outputs = [output.outputs[0] for output in llm.generate([row["question"] for row in good], wanted)]
    for row, output in zip(good, outputs, strict=True):
        assert answered[row["id"]]["generated_tokens"] == output.token_ids
        assert answered[row["id"]]["generated_text"] == output.text


def test_conversations_and_token_ids_are_answered_and_columns_pass_through(
    two_cpus: None, pair: Pair
) -> None:
    rows = [
        {"kind": "chat", "prompt": None, "messages": [{"role": "user", "content": "hi"}], "seed": 7},
        {"kind": "ids", "prompt": [5, 6, 7], "messages": None, "seed": 8},
    ]
    sampling = {"max_tokens": 3, "ignore_eos": True, "temperature": 0.0, "logprobs": 2}
    processor = build_processor(config(pair, speculate=False, sampling_params=sampling))
    found = {row["kind"]: row for row in processor(ray.data.from_items(rows)).take_all()}
    assert found["ids"]["num_input_tokens"] == 3
    assert found["chat"]["num_input_tokens"] > 3
    for row in found.values():
        assert row["num_generated_tokens"] == 3 and row["__inference_error__"] == ""
        assert row["finish_reason"] == "length" and not row["num_draft_tokens"]
        likeliest = [place["top_token_ids"][0] for place in row["logprobs"]]
        assert likeliest == list(row["generated_tokens"]), "greedy"
        assert [len(place["top_logprobs"]) for place in row["logprobs"]] == [2, 2, 2]
    assert found["ids"]["seed"] not in (None, 8), "a column that is called like a sampling field is none"


@pytest.mark.slow
def test_a_bad_row_ends_the_dataset_on_request(
    two_cpus: None, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = build_processor(config(pair, should_continue_on_error=False), ask)
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # pytest would keep frames
    with pytest.raises(Exception, match="temperature=-1") as caught:  # in a wrapping of Ray Data's
        processor(ray.data.from_items(ROWS[3:4])).take_all()
    del caught
    processor(ray.data.from_items(ROWS))
    wait_until(lambda: ray.available_resources().get("CPU") == 2.0)


@pytest.mark.slow
def test_the_death_of_an_engines_worker_loses_no_row_and_no_resources(two_cpus: None, pair: Pair) -> None:
    """Two target ranks in a group with one of two CPUs; if it leaked, the next test would block."""
    settings = config(pair, engine_kwargs={"tensor_parallel_size": 2}, concurrency=(1, 2), batch_size=4)
    killed: list[int] = []

    def kill_a_worker() -> None:
        wait_until(lambda: len(actor_pids("TargetWorker")) == 2)
        killed.append(max(actor_pids("TargetWorker")))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_a_worker)
    killer.start()
    long = [{**row, "length": 100} for row in ROWS]
    rows = build_processor(settings, ask, answer)(ray.data.from_items(long)).take_all()
    killer.join()
    assert killed and {row["id"] for row in rows} == {row["id"] for row in ROWS}
    assert sum(not row["__inference_error__"] for row in rows) == len(ROWS) - 3
    wait_until(lambda: all(group["state"] == "REMOVED" for group in placement_group_table().values()))
    wait_until(lambda: ray.available_resources().get("CPU") == 2.0)


def test_an_unused_placement_group_is_used_for_the_next_engine(two_cpus: None) -> None:
    groups = EngineGroups([{"CPU": 0.5}], maximum=2)
    first, second = groups(), groups()
    assert first["name"] == second["name"], "Ray Data asks more often than it starts"

    @ray.remote(num_cpus=0)
    class Engine:
        pass

    engine = Engine.options(**first).remote()
    assert groups()["name"] != first["name"]
    full = EngineGroups([{"CPU": 0.5}], maximum=1)
    other = Engine.options(**full()).remote()
    assert full() == {}, "it asks though all engines run"
    ray.kill(engine)
    ray.kill(other)
    wait_until(lambda: all(group["state"] == "REMOVED" for group in placement_group_table().values()))


@pytest.mark.parametrize(("ranks", "maximum"), [(1, 4), (2, 1)])
def test_a_pool_grows_to_what_the_nodes_hold_besides_ray_data(
    two_cpus: None, pair: Pair, ranks: int, maximum: int
) -> None:
    settings = config(pair, engine_kwargs={"tensor_parallel_size": ranks})
    assert plan_engines(settings.engine_config(), 1, 8).most == maximum


def test_wrong_settings_are_reported_before_anything_runs(two_cpus: None, pair: Pair) -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("Did you mean max_num_seqs", {"engine_kwargs": {"max_num_seq": 4}}),
        ("named by model_source", {"engine_kwargs": {"model": "x"}}),
        ("concurrency=0", {"concurrency": 0}),
        (r"concurrency=\(3, 1\)", {"concurrency": (3, 1)}),
        ("batch_size=0", {"batch_size": 0}),
    ]
    for said, changes in wrong:
        with pytest.raises(ConfigError, match=said):
            config(pair, **changes)
    with pytest.raises(RequestError, match=r"Did you mean sampling_params\.max_tokens"):
        config(pair, sampling_params={"max_token": 4})
    greedy = config(pair, engine_kwargs={"tensor_parallel_size": 4})
    with pytest.raises(PlacementError, match="a CPU of every node is left to"):
        build_processor(greedy)(ray.data.from_items(ROWS))
