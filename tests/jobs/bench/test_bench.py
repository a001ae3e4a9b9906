"""The benchmark measures both modes on the same prompts and compares their outputs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from manta import LLM
from manta.actors.tokenization.prompts import Chat
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError, DatasetError
from manta.jobs.bench.common import engine_passes as passes
from manta.jobs.bench.common.engine_passes import open_engines, read_prompts
from manta.jobs.bench.spec_on_off import BenchOptions, run_bench


def test_each_engine_on_a_shared_gpu_gets_a_share(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's budget ends at its share of the device; memory of earlier engines counts."""
    opened: list[EngineConfig] = []

    class Engine:
        def __init__(self, given: EngineConfig) -> None:
            opened.append(given)

        def close(self) -> None: ...

    monkeypatch.setattr(passes, "open_llm", Engine)
    with open_engines(replace(config, gpu_memory_utilization=0.8), 4, ("bfloat16",)) as engines:
        assert list(engines) == [("on", "bfloat16"), ("off", "bfloat16")]
    assert [engine.gpu_memory_utilization for engine in opened] == [0.4, 0.8]
    assert [engine.speculative_config is None for engine in opened] == [False, True]


def test_both_modes_are_measured_and_their_outputs_compared(
    config: EngineConfig, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, plot = tmp_path / "out" / "bench.json", tmp_path / "out" / "speedup.svg"
    options = BenchOptions(
        prompts=prompts, num_prompts=5, concurrency=(1, 3), rounds=2, max_tokens=8, output=output, plot=plot
    )
    run_bench(config, options)
    figures = json.loads(output.read_text())
    assert [point["requests"] for point in figures["points"]] == [1, 3]
    for point in figures["points"]:
        assert point["identical"] == {"float32": True}
        assert point["on"]["tokens"] == point["off"]["tokens"] == 5 * 8
        assert point["on"]["mean_acceptance_length"] >= 1.0
        assert point["off"]["mean_acceptance_length"] is None
        assert set(point["on"]["step_seconds"]) >= {"draft", "verify"}
        assert len(point["on"]["rounds_tokens_per_s"]) == len(point["rounds_speedup"]) == 2
        for ratio, on, off in zip(
            point["rounds_speedup"],
            point["on"]["rounds_tokens_per_s"],
            point["off"]["rounds_tokens_per_s"],
            strict=True,
        ):
            assert ratio == pytest.approx(on / off, rel=1e-2, abs=1e-3)
        assert point["speedup"] == pytest.approx(sum(point["rounds_speedup"]) / 2, rel=1e-2, abs=2e-3)
        assert point["turns"] >= 1 and point["idleness"]["seconds"] > 0
    assert {"command", "cpu", "cores", "versions", "git_sha"} <= set(figures["provenance"])
    assert plot.read_text().lstrip().startswith("<?xml")
    assert "float32: yes" in " ".join(capsys.readouterr().out.split())


def test_without_a_trial_the_engine_chooses_its_dtype(
    pair: tuple[Path, Path], config: EngineConfig, prompts: Path
) -> None:
    options = BenchOptions(
        prompts=prompts, num_prompts=2, concurrency=(1,), rounds=1, max_tokens=4, trial=False
    )
    (point,) = run_bench(replace(config, dtype="auto"), options)["points"]
    with LLM(str(pair[0]), speculative_config={"model": str(pair[1])}, num_threads=1) as llm:
        assert point["on"]["dtype"] == point["off"]["dtype"] == llm.info.dtype
    assert point["identical"] == {llm.info.dtype: True} and len(point["trial_tokens_per_s"]) == 2


def test_prompts_are_chosen_from_the_whole_file(prompts: Path) -> None:
    assert [name for name, _ in read_prompts(prompts, 5)] == ["0", "2", "4", "6", "8"]
    assert len(read_prompts(prompts, 50)) == 10
    assert isinstance(read_prompts(prompts, 10)[-1][1], Chat)


def test_wrong_options_are_refused_before_anything_loads(config: EngineConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="speculative_config"):
        run_bench(replace(config, speculative_config=None), BenchOptions())
    with pytest.raises(DatasetError, match="nowhere"):
        run_bench(config, BenchOptions(prompts=tmp_path / "nowhere.jsonl"))
    for wrong in ({"rounds": 0}, {"concurrency": ()}, {"concurrency": (0,)}, {"num_prompts": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            BenchOptions(**wrong)
