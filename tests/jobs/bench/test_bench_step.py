"""`manta bench step`: random pairs of any shape run the engine's own steps; acceptance follows a curve."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from manta.actors.targets.runners.cpu_runner import CpuModelRunner
from manta.cluster.errors import CheckpointError, ConfigError
from manta.cluster.step.scheduler_output import SchedulerOutput, StepResult, StepTimings
from manta.drafter.compute.memory.kv_cache import PagedKVCache
from manta.drafter.step.inputs.draft_trees import DraftTrees
from manta.drafter.step.inputs.row_layout import StepRows
from manta.drafter.step.request_states import RequestStates
from manta.jobs.bench.common.device_rates import find_device
from manta.jobs.bench.common.options import StepOptions, parse_rates
from manta.jobs.bench.common.random_weights import QWEN3_8B, PairShape, z_lab_drafter
from manta.jobs.bench.step_cost import TURN_STEPS, WARM_UP_STEPS, Memory, bench_step
from manta.jobs.cli import main
from support.jobs.absent import NEITHER_RAY_NOR_HTTP, run_without

RATES = "20,0.5"


def options(model: Path | None, **changes: object) -> StepOptions:
    """Measure one tiny point on the CPU."""
    few = {"batches": (2,), "contexts": (20,), "steps": 2, "device_rates": RATES, "device": "cpu"}
    fixed = {"model": None if model is None else str(model), "dtype": "float32"}
    return StepOptions(**{**fixed, **few, **changes})  # type: ignore[arg-type]


@pytest.fixture
def config_file(tiny_qwen3: Path, tmp_path: Path) -> Path:
    file = tmp_path / "shape" / "config.json"
    file.parent.mkdir()
    file.write_text((tiny_qwen3 / "config.json").read_text())
    return file


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[SchedulerOutput, StepResult]]:
    seen: list[tuple[SchedulerOutput, StepResult]] = []
    execute = CpuModelRunner.execute

    def spy(self: CpuModelRunner, plan: SchedulerOutput) -> StepResult:
        result = execute(self, plan)
        seen.append((plan, result))
        return result

    monkeypatch.setattr(CpuModelRunner, "execute", spy)
    return seen


def test_a_config_without_weights_gives_steps_with_their_lower_bounds(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out" / "step.json"
    bench_step(options(config_file, batches=(1, 2), contexts=(20, 50), output=output))
    figures = json.loads(output.read_text())
    assert [(p["context"], p["batch"]) for p in figures["points"]] == [(20, 1), (20, 2), (50, 1), (50, 2)]
    assert "versions" in figures["provenance"] and figures["does_not_fit"] == []
    for point in figures["points"]:
        drafting, plain = point["drafting"], point["plain"]
        assert all(drafting[part]["ms"] > 0 for part in ("draft", "verify", "sample", "inject", "step"))
        assert all(drafting[part]["floor_ms"] > 0 for part in ("draft", "verify", "inject", "step"))
        assert drafting["of_floor"] == pytest.approx(
            drafting["step"]["floor_ms"] / drafting["step"]["ms"], rel=0.2, abs=5e-5
        )  # four decimals: on a busy machine all but one are zero
        assert set(plain) == {"verify", "sample", "host_gap", "step", "of_floor"}
        assert 0 < plain["step"]["floor_ms"] < drafting["step"]["floor_ms"]
        assert point["idleness"]["seconds"] > 0
    said = capsys.readouterr().out
    assert "a step with 15 drafts" in said and "no draft is accepted" in said


def test_neither_ray_nor_http_nor_transformers_is_needed(config_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "step.json"
    flags = f"bench step --model {config_file} --batch 1 --context 20 --steps 1 --device cpu --dtype float32"
    more = f"--device-rates {RATES} -o {output}"
    done = run_without(NEITHER_RAY_NOR_HTTP, [*flags.split(), *more.split()], TRITON_INTERPRET="")
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(output.read_text())
    versions = figures["provenance"]["versions"]
    assert figures["points"] and versions["torch"] and versions["ray"] is versions["transformers"] is None


def test_steps_are_the_engines_own_after_full_contexts(
    config_file: Path,
    plans: list[tuple[SchedulerOutput, StepResult]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    positions: list[list[int]] = []
    rows = RequestStates.lay_out_rows

    def spy(self: RequestStates, plan: SchedulerOutput, trees: DraftTrees | None = None) -> StepRows:
        found = rows(self, plan, trees)
        if plan.num_computed.tolist() == [-1] * 3:
            positions.append(found.positions_N.tolist())
        return found

    monkeypatch.setattr(RequestStates, "lay_out_rows", spy)
    bench_step(options(config_file, batches=(3,), contexts=(37,), steps=4))
    mine = [plan for plan, _ in plans if plan.num_requests == 3]
    admissions, steps = mine[::2], mine[1::2]
    for plan in admissions:
        assert [len(request.token_ids) for request in plan.admitted] == [37] * 3
        assert plan.num_computed.tolist() == [36] * 3
        assert len(set(plan.page_ids.tolist())) == len(plan.page_ids) == 3 * 4
    for plan in steps:
        assert not plan.admitted and plan.num_computed.tolist() == [-1] * 3  # so it is 37, as they say
    drafts = [plan.num_drafts.tolist() for plan in steps]
    kinds = [15] * 3 + [0] * 3 + [15] * 5 + [0] * 5  # three of each, then turns: one and the four that count
    assert drafts == [[kind] * 3 for kind in kinds]
    assert positions == [list(range(37, 37 + kind + 1)) * 3 for kind in kinds]


def test_steps_with_and_without_drafts_alternate(
    config_file: Path, plans: list[tuple[SchedulerOutput, StepResult]]
) -> None:
    bench_step(options(config_file, batches=(1,), steps=TURN_STEPS + 2))
    drafts = [int(plan.num_drafts[0]) for plan, _ in plans if plan.num_computed.tolist() == [-1]]
    first, second = 1 + TURN_STEPS, 1 + 2
    turns = [15] * first + [0] * first + [0] * second + [15] * second
    assert drafts[2 * WARM_UP_STEPS :] == turns


def test_both_models_pages_hold_random_contexts(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    new_cache, execute = PagedKVCache.__init__, CpuModelRunner.execute
    caches: dict[int, PagedKVCache] = {}  # by number of layers

    def keep(self: PagedKVCache, *arguments: object, **scales: object) -> None:
        new_cache(self, *arguments, **scales)  # type: ignore[arg-type]
        caches[self.num_layers] = self

    def spy(self: CpuModelRunner, plan: SchedulerOutput) -> StepResult:
        if plan.num_computed[0] < 0:
            pools = [caches[num_layers].kv for num_layers in (4, 5)]
            shares.extend(kv.count_nonzero().item() / kv.numel() for kv in pools)
        return execute(self, plan)

    monkeypatch.setattr(PagedKVCache, "__init__", keep)
    monkeypatch.setattr(CpuModelRunner, "execute", spy)
    bench_step(options(config_file, batches=(1,), contexts=(200,)))
    assert shares and min(shares) > 0.99


def test_the_acceptance_length_depends_on_the_acceptance_curve_alone(config_file: Path) -> None:
    def measured(*rates: float) -> dict[str, float]:
        figures = bench_step(options(config_file, num_drafts=2, acceptance_rates=rates))
        assert figures["acceptance"]["mean_acceptance_length"] == 1.0 + sum(rates)
        (point,) = figures["points"]
        ms, plain_ms = point["drafting"]["step"]["ms"], point["plain"]["step"]["ms"]
        assert point["tokens_per_s"] == pytest.approx(2 * (1 + sum(rates)) / ms * 1000, rel=0.01, abs=0.01)
        assert point["speedup"] == pytest.approx((1 + sum(rates)) * plain_ms / ms, rel=0.01, abs=1e-3)
        return point

    never, always = measured(0.0, 0.0), measured(1.0, 0.5)
    assert never["floor_best_rows"] == 1 and always["floor_best_rows"] > 1
    assert always["floor_speedup"] == pytest.approx(2.5 * never["floor_speedup"], rel=0.01)


def test_the_first_steps_do_not_count(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durations = {15: [9.0, 9.0, 9.0, 9.0, 0.001, 0.003], 0: [9.0, 9.0, 9.0, 9.0, 0.005, 0.007]}
    execute = CpuModelRunner.execute

    def reported(self: CpuModelRunner, plan: SchedulerOutput) -> StepResult:
        result = execute(self, plan)
        if plan.num_computed[0] >= 0:
            return result
        return replace(result, timings=StepTimings(verify_s=durations[int(plan.num_drafts[0])].pop(0)))

    monkeypatch.setattr(CpuModelRunner, "execute", reported)
    (point,) = bench_step(options(config_file, steps=2))["points"]
    assert (point["drafting"]["verify"]["ms"], point["plain"]["verify"]["ms"]) == (2.0, 6.0)


def test_points_that_do_not_fit_are_reported_and_not_measured(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Memory, "fits", lambda self, point: point.batch < 2)
    figures = bench_step(options(config_file, batches=(1, 2)))
    assert figures["does_not_fit"] == [{"batch": 2, "context": 20}]
    assert "does not fit into memory: batch 2, context 20" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--batch"):
        bench_step(options(config_file, batches=(2,)))


def test_a_drafter_of_a_given_shape_is_measured(config_file: Path, tiny_drafter: Path) -> None:
    figures = bench_step(options(config_file, spec_model=str(tiny_drafter / "config.json"), num_drafts=3))
    assert figures["drafter"]["num_hidden_layers"] == 2 and figures["num_drafts"] == 3


def test_the_default_pair_is_qwen3_8b_with_z_labs_drafter() -> None:
    shape = PairShape.read(None, None)
    assert shape.drafter.target_layer_ids == (1, 9, 17, 25, 33)
    assert (shape.drafter.num_layers, shape.drafter.block_size, shape.drafter.hidden_size) == (5, 16, 4096)
    assert shape.num_params() == pytest.approx(9.24e9, rel=0.01)  # 8.19e9 and 1.05e9
    small = z_lab_drafter({**QWEN3_8B, "num_hidden_layers": 2})
    assert all(0 <= tap < 2 for tap in small["dflash_config"]["target_layer_ids"])


def test_a_cpu_must_be_given_a_model() -> None:
    with pytest.raises(ConfigError, match=r"Qwen3-8B.*Give --model"):
        bench_step(options(None))


def test_shapes_that_cannot_be_read_or_do_not_fit_name_the_setting(
    config_file: Path, tmp_path: Path, shipped_pair: tuple[Path, Path]
) -> None:
    with pytest.raises(CheckpointError, match=r"model='.*nowhere'"):
        bench_step(options(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="hidden_size"):
        bench_step(options(config_file, spec_model=str(shipped_pair[1])))


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"batches": (0,)}, "batches"),
        ({"contexts": ()}, "contexts"),
        ({"steps": 0}, "steps"),
        ({"acceptance_rates": (0.5, 0.6)}, "synthetic_acceptance_rates"),
        ({"device_rates": "fast"}, "device_rates"),
        ({"num_drafts": 16}, "speculative_config.num_speculative_tokens"),
    ],
)
def test_wrong_options_are_refused_by_name(config_file: Path, changes: dict[str, object], param: str) -> None:
    with pytest.raises(ConfigError) as refused:
        bench_step(options(config_file, **changes))
    assert refused.value.param == param


def test_device_rates_are_numbers_separated_by_commas() -> None:
    assert parse_rates("0.9, 0.8,0") == (0.9, 0.8, 0.0)
    with pytest.raises(ConfigError, match="comma-separated"):
        parse_rates("0.9;0.8")


def test_a_cpu_whose_rates_are_not_stated_is_measured() -> None:
    found = find_device(torch.device("cpu"), torch.float32, None)
    assert found.bytes_per_s > 1e8 and found.flops > 1e8 and "measured" in found.name


def test_the_command_line_reaches_every_option(config_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "step.json"
    flags = f"--model {config_file} --spec-tokens 2 --batch 1 --batch 3 --context 30 --context 1K --steps 1"
    more = f"--device cpu --dtype float32 --page-size 32 --attention-backend torch -o {output}"
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "bench",
                "step",
                "--synthetic-acceptance-rates",
                "0.7,0.2",
                "--device-rates",
                RATES,
                *flags.split(),
                *more.split(),
            ]
        )
    assert ended.value.code in (0, None)
    given = json.loads(output.read_text())["options"]
    assert (given["batches"], given["contexts"], given["page_size"]) == ([1, 3], [30, 1024], 32)
    assert (given["acceptance_rates"], given["num_drafts"], given["steps"]) == ([0.7, 0.2], 2, 1)
