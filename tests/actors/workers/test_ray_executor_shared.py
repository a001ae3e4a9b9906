"""A short `benchmarks shared-drafter`: engines in their own processes and one drafter for all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.engine.engine_hosts import Turn
from benchmarks.engine.shared_drafter import SharedDrafterOptions, measure, print_point, run_shared_drafter
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError
from manta.cluster.step.scheduler_output import DrafterUse


def test_results_are_sums_over_engines_and_medians_over_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    """Two engines run three rounds of ten seconds; in the second one an engine gets half."""
    requested: list[tuple[str, int, int, float]] = []

    def answering(side: str, drafter: DrafterUse, tokens: int):
        def run(engines: int, requests: int, seconds: float) -> list[Turn]:
            number = sum(name == side for name, *_ in requested)  # 0 is the warm-up
            requested.append((side, engines, requests, seconds))
            halves = [1, 2 if number == 2 else 1]
            return [Turn(seconds, tokens // h, 200, 100, 0.5, drafter) for h in halves[:engines]]

        return run

    runs = {
        "shared": answering("shared", DrafterUse(80, 0.4, 3.2), 1000),
        "colocated": answering("colocated", DrafterUse(), 1600),
    }
    options = SharedDrafterOptions(engines=(2,), concurrency=(4,), rounds=3, seconds=10.0)
    (point,) = measure(runs, options)
    assert [name for name, *_ in requested[:2]] == ["shared", "colocated"], "a turn that does not count"
    order = ["shared", "colocated", "colocated", "shared", "shared", "colocated"]
    assert [name for name, *_ in requested[2:]] == order, "who begins moves on"
    assert all(turn[1:] == (2, 4, 10.0) for turn in requested)
    shared, colocated = point["sides"]
    assert shared["rounds_tokens_per_s"] == [100.0, 75.0, 100.0] and shared["tokens_per_s"] == 100.0
    assert colocated["ratio"] == 1.0 and shared["ratio"] == 0.625
    assert shared["tokens_per_step"] == pytest.approx(5500 / 1200, abs=1e-4)
    assert shared["draft_ms"] == 5.0 and colocated["drafter"] is None
    assert shared["drafter"] == {"drafted": 0.8, "queue_ms": 4.0, "served_ms": 32.0, "busy": 0.64}
    assert shared["fairness"] == 1.0, "the median of 1, 0.5 and 1"
    print_point(point)
    assert "2 engine(s), 4 request(s) at each" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_engines_share_a_drafter_and_its_queue_is_reported(speculative: EngineConfig, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": str(i), "prompt": list(range(3, 8 + i))}) + "\n" for i in range(4)]
    prompts.write_text("".join(lines))
    config = replace(speculative, max_num_seqs=2, max_model_len=128, num_pages=32)
    options = SharedDrafterOptions(
        prompts=prompts,
        concurrency=(2,),
        engines=(1, 2),
        sides=("shared",),
        rounds=1,
        seconds=0.3,
        max_tokens=24,
        output=tmp_path / "figures.json",
    )
    run_shared_drafter(config, options)
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["provenance"]["cores"] and [point["engines"] for point in written["points"]] == [1, 2]
    for point in written["points"]:
        (side,) = point["sides"]
        assert side["tokens_per_s"] > 0 < side["drafter"]["drafted"] <= 1.0 and side["ratio"] is None
        assert side["tokens_per_step"] >= 1.0
        assert side["drafter"]["served_ms"] > 0 <= side["drafter"]["queue_ms"]
        assert 0 < side["fairness"] <= 1.0
    assert written["points"][0]["sides"][0]["fairness"] == 1.0, "an engine alone is as well off as itself"


def test_unmeasurable_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="side='shred' is not known"):
        SharedDrafterOptions(sides=("shred",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"engines=\(0,\)"):
        SharedDrafterOptions(engines=(0,))
    with pytest.raises(ConfigError, match="seconds=0"):
        SharedDrafterOptions(seconds=0.0)
    with pytest.raises(ConfigError, match="Set --spec-model") as caught:
        run_shared_drafter(EngineConfig(model="t"), SharedDrafterOptions())
    assert caught.value.param == "speculative_config"
