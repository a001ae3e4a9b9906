"""Simulations behind Manta's policies: adaptive and fixed lengths, a fleet, an engine and its simulation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.cli import main
from benchmarks.simulate.measured_cost import MeasuredCost
from benchmarks.simulate.validate import ValidateOptions, run_validate
from manta.cluster.config import EngineConfig, SpeculativeConfig
from manta.cluster.hardware.gpu_specs import find_gpu
from manta.cluster.step.dummy_steps import dummy_step
from manta.jobs.simulate.methods import Method
from manta.jobs.simulate.node_engines import DraftAssumptions, Workload, node_engines, read_shapes
from support.paths import ROOT

PAIR = ROOT / "docs/benchmarks/qwen3-8b"
PAIR_FLAGS = ["-m", str(PAIR / "target"), "--drafter", str(PAIR / "drafter")]


def run(*arguments: str) -> int | str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int | str)
    return ended.value.code


def test_adaptive_lengths_are_compared_with_every_fixed_length_by_load_and_context(tmp_path: Path) -> None:
    output, command = tmp_path / "policy.json", ["simulate-policy", *PAIR_FLAGS]
    loads = ["--concurrency", "1", "--concurrency", "8", "--context", "1000", "--output-tokens", "24"]
    assert run(*command, *loads, "-o", str(output)) == 0
    figures = json.loads(output.read_text())
    assert [cell["requests"] for cell in figures["cells"]] == [1, 8]
    for cell in figures["cells"]:
        rates = cell["tokens_per_s"]
        assert list(rates) == ["plain", *(f"dflash-{n}" for n in (1, 3, 5, 7, 11, 15))]
        assert rates[cell["best"]] == max(rates.values()) > 2 * rates["plain"]
        assert cell["to_best"] == pytest.approx(cell["adaptive_tokens_per_s"] / max(rates.values()), abs=1e-3)
    assert figures["worst"]["to_best"] == min(cell["to_best"] for cell in figures["cells"])
    assert "--drafter" in str(run(*command, "-m", "another")), "which has no drafter"


def test_a_measured_table_is_interpolated_linearly_between_its_points() -> None:
    grid = np.arange(8.0).reshape(2, 2, 2)
    cost = MeasuredCost((1, 4), (0, 2), (100, 300), grid, 10 * grid, (1, 101), np.array([1.0, 3.0]))

    def at(batch: int, drafts: int, context: int) -> tuple[float, float]:
        found = cost(dummy_step([context] * batch, [1 + drafts] * batch, [drafts] * batch))
        return found.draft_s, found.verify_s

    assert at(1, 0, 100) == (0.0, 0.0) and at(4, 2, 300) == (7.0, 70.0)
    assert at(4, 1, 200) == (5.5, 55.0) and at(9, 2, 900) == (7.0, 70.0)
    prompt = dummy_step([300] * 4 + [0], [1] * 4 + [51], [0] * 5)
    assert cost(prompt).verify_s == pytest.approx(50.0 + 2.0 - 1.0), "beside four that decode"
    assert cost(dummy_step([0], [51], [0])).verify_s == 2.0, "alone"


def test_an_engine_and_its_simulation_get_the_same_requests(shipped_pair: tuple[Path, Path]) -> None:
    """The steps of the shipped pair are real; whether drafts pay depends on their times."""
    target, drafter = shipped_pair
    spec = SpeculativeConfig(model=str(drafter), adaptive=False)
    config = EngineConfig(model=str(target), speculative_config=spec, num_pages=256)
    options = ValidateOptions(
        prompts=target.parent / "prompts.jsonl", num_prompts=4, concurrency=(2,), requests=3, max_tokens=16
    )
    figures = run_validate(config, options)
    (point,) = figures["points"]
    measured, simulated = point["measured"], point["simulated"]
    assert measured["requests"] >= 3 and simulated["requests"] >= 3
    assert simulated["mean_acceptance_length"] > 1.0 and measured["mean_acceptance_length"] > 1.0
    survival = figures["survival"]
    assert 0.5 < survival[0] < 1.0 and sorted(survival, reverse=True) == list(survival)
    cost = figures["cost"]
    plain, all_of = np.array(cost["rest_BDC"])[-1, 0], np.array(cost["rest_BDC"])[-1, -1]
    assert (plain > 0.0).all() and (all_of > 0.0).all() and cost["host_s"] > 0.0
    assert np.array(cost["draft_BDC"])[:, 1:].min() > 0.0
    assert set(point["error"]) == {"tokens_per_s", "ttft_p50_s", "ttft_p95_s", "tpot_p50_s", "tpot_p95_s"}


def test_a_fleet_of_such_engines_is_simulated(tmp_path: Path) -> None:
    output = tmp_path / "fleet.json"
    day = ["--hours", "0.2", "--peak", "6", "--max-num-seqs", "6", "--output-tokens", "60"]
    day += ["--gpu", "h200", "--target-ongoing-requests", "4"]
    assert run("simulate-fleet", *PAIR_FLAGS, *day, "-o", str(output)) == 0
    figures = json.loads(output.read_text())
    replica = figures["replica"]
    assert len(replica["step_s"]) == 6 and sorted(replica["step_s"]) == replica["step_s"]
    assert min(replica["step_tokens"]) > 2.0, "it drafts"
    pair = read_shapes(str(PAIR / "target"), str(PAIR / "drafter"), None).pair
    (alone,) = node_engines(
        pair, find_gpu("h200"), 1, (1,), [Method.parse("dflash")], DraftAssumptions(), Workload()
    )
    assert replica["step_s"][0] == pytest.approx(alone.times.round(1, 16, 900).total_s, rel=0.1)
    assert figures["policies"][0]["failed"] == 0
