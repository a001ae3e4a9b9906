"""A short `benchmarks batch` and soak: real jobs over the same rows, and their figures."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from benchmarks.batch.batch import BatchBenchOptions, run_batch_bench
from benchmarks.batch.soak_batch import ENGINE_BYTES, check_rows, run_soak
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError, MantaError
from support.checkpoints.text_pair import make_text_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_text_pair(tmp_path_factory.mktemp("pair"))


def config(pair: tuple[Path, Path]) -> EngineConfig:
    settings = {"model": str(pair[0]), "speculative_config": {"model": str(pair[1])}, "num_threads": 1}
    return EngineConfig.from_dict(
        {**settings, "dtype": "float32", "device": "cpu", "max_num_seqs": 8, "max_model_len": 256}
    )


@pytest.mark.slow
def test_all_sides_answer_the_same_rows(pair: tuple[Path, Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": str(i), "prompt": f"def f{i}("}) + "\n" for i in range(5)))
    options = BatchBenchOptions(
        prompts=prompts,
        rows=24,
        rounds=1,
        max_tokens=6,
        sides=("job", "llm", "generate"),
        output=tmp_path / "figures.json",
    )
    run_batch_bench(config(pair), options)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["provenance"]["command"] and figures["options"]["rows"] == 24
    (point,) = figures["points"]
    job, llm, generate = point["sides"]
    assert job["tokens"] == llm["tokens"] == 24 * 6
    assert job["identical"] is True and job["ratio"] == 1.0
    assert generate["rows"] == 16 and generate["tokens"] == 16 * 6
    assert 0 < job["first_row_s"] < 120
    assert llm["ratio"] == pytest.approx(job["tokens_per_s"] / llm["tokens_per_s"], abs=0.01)


def test_an_unknown_side_is_refused() -> None:
    with pytest.raises(ConfigError, match="side='htp' is not known"):
        BatchBenchOptions(sides=("htp",))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_short_soak_counts_its_rows_and_its_memory(pair: tuple[Path, Path], tmp_path: Path) -> None:
    found = run_soak(pair[0], 1000, 1, tmp_path)
    assert found["rows"] == 1000
    assert 50 * 2**20 < found["engine_bytes"] < ENGINE_BYTES


def test_a_missing_or_duplicate_row_fails_the_soak(tmp_path: Path) -> None:
    for ids in (["0", "1"], ["0", "1", "2", "2"]):
        pq.write_table(pa.table({"id": ids}), tmp_path / "part-0.parquet")
        with pytest.raises(MantaError, match="row 2 is there"):
            check_rows(tmp_path, 3)
