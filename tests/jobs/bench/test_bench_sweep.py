"""A sweep runs every side under the same load, and its figures are those of the raw events."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from benchmarks.arrivals import Arrivals
from benchmarks.engine.policy_sweep import HOSTILE, MixedSource, run_policy_sweep, shuffled
from benchmarks.engine.starts import StartsOptions, hold, run_starts
from benchmarks.options import PolicySweepOptions
from hypothesis import given
from hypothesis import strategies as st
from manta.actors.engine.uniproc_executor import make_executor
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine_core import SequenceUpdate
from manta.cluster.errors import ConfigError
from manta.jobs.bench.common.engine_passes import PromptRow
from manta.jobs.bench.common.request_source import RequestSource
from manta.jobs.bench.sweep.engines import Driver, parse_methods
from manta.jobs.bench.sweep.load_records import RequestLatencies, Sums, describe
from manta.jobs.bench.sweep.sweep_run import SweepOptions, sweep_curves, sweep_pictures
from safetensors.torch import load_file

ROWS = [PromptRow(str(i), "even" if i % 2 == 0 else "odd", tuple(range(3, 8 + i))) for i in range(6)]


def config(target: Path, drafter: Path, **spec: Any) -> EngineConfig:
    return EngineConfig.from_dict(
        {
            "model": str(target),
            "speculative_config": {"model": str(drafter), **spec},
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "max_num_seqs": 4,
            "max_model_len": 128,
            "num_threads": 1,
            "dtype": "float32",
        }
    )


class Recorded(Driver):
    """A driver that records its engine's updates before they are counted."""

    def __init__(self, of: EngineConfig) -> None:
        super().__init__(of, make_executor(of))
        self.updates: list[SequenceUpdate] = []
        step = self.engine.step

        def recorded() -> list[SequenceUpdate]:
            found = step()
            self.updates += found
            return found

        self.engine.step = recorded  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def driver(tiny_qwen3: Path, tiny_drafter: Path) -> Any:
    made = Recorded(config(tiny_qwen3, tiny_drafter, adaptive=False, num_speculative_tokens=3))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> None:
    if "driver" in request.fixturenames:
        request.getfixturevalue("driver").updates.clear()


def test_a_closed_loop_is_always_full_and_counts_the_engines_updates(driver: Recorded) -> None:
    source = RequestSource(ROWS, 8, 0.0)
    done = driver.closed(source, range(5), at_once=3)
    requested = {answer.number: answer for answer in done.answers}
    assert set(range(5)) <= set(requested) and all(requested[i].ended_s is not None for i in range(5))
    assert sorted(requested) == list(range(len(requested))), "behind the last come the next numbers"
    assert max(requested) == max(answer.number for answer in done.answers if answer.number >= 5), (
        "to keep it full"
    )
    mine = [update for update in driver.updates if update.request_id in {str(number) for number in requested}]
    open_ids = {str(number) for number, answer in requested.items() if answer.ended_s is None}
    counted = Counter[str]()
    for update in mine:
        counted[update.request_id] += len(update.token_ids)
    for number, answer in requested.items():
        reported = counted[str(number)]
        assert len(answer.token_ids) == reported or str(number) in open_ids, (
            "one that left may get tokens in flight"
        )
        if answer.ended_s is not None:
            assert reported == source[number].max_tokens
    assert done.tokens == sum(len(answer.token_ids) for answer in done.answers)
    spans = [(a.requested_s, done.end_s if a.ended_s is None else a.ended_s) for a in done.answers]
    for at_s in {block.at_s for answer in done.answers for block in answer.blocks}:
        assert sum(begin_s <= at_s <= end_s for begin_s, end_s in spans) == 3, "always as many"
    assert done.request_seconds == pytest.approx(sum(end_s - begin_s for begin_s, end_s in spans))
    assert done.user_tokens_per_s == pytest.approx(done.tokens / done.request_seconds)
    assert 0 == done.num_skipped < done.num_steps, "without copies no pass is left out"
    assert not driver.engine.has_unfinished
    driver.engine.check_invariants()


def test_positions_are_counted_from_the_updates(driver: Recorded) -> None:
    done = driver.closed(RequestSource(ROWS, 12, 0.0), range(4), at_once=4)
    ended = {str(answer.number) for answer in done.answers if answer.ended_s is not None}
    sums = Sums.of([b for a in done.answers if a.ended_s is not None for b in a.blocks])
    reported = [update for update in driver.updates if update.request_id in ended]
    assert sums.num_blocks == len(reported) and sums.num_verified == sum(u.num_drafted > 0 for u in reported)
    for place in range(3):
        assert sums.drafted[place] == sum(u.num_drafted > place for u in reported)
        assert sums.accepted[place] == sum(u.num_accepted > place for u in reported)
    drafted = [update for update in reported if update.num_drafted]
    assert sums.mean_acceptance_length == pytest.approx(
        1 + sum(u.num_accepted for u in drafted) / len(drafted)
    )
    assert sums.tokens_per_step == pytest.approx(sum(len(u.token_ids) for u in reported) / len(reported))


def test_a_change_of_load_is_reported_separately(driver: Recorded) -> None:
    first, second = hold(driver, RequestSource(ROWS, 64, 0.0), (3, 1), 0.3)
    assert first.seconds >= 0.3 and second.begin_s >= first.end_s
    last = [answer for answer in second.answers if answer.ended_s is None]
    assert len(last) <= 1, "those that were too many have left; the last step may have ended the other one"
    assert first.tokens + second.tokens <= sum(len(update.token_ids) for update in driver.updates)
    assert min(first.tokens, second.tokens) > 0
    assert not driver.engine.has_unfinished


def test_all_sides_get_the_same_requests_with_different_lengths() -> None:
    plain, mixed = RequestSource(ROWS, 100, 0.5), MixedSource(ROWS, 100, 0.5)
    lengths = [plain[number].max_tokens for number in range(200)]
    assert min(lengths) >= 50 and max(lengths) <= 150 and np.mean(lengths) == pytest.approx(100, abs=1)
    assert plain[7] == RequestSource(ROWS, 100, 0.5)[7] and plain[7].seed != plain[7 + len(ROWS)].seed
    assert {plain[number].category for number in range(6)} == {"even", "odd"}
    assert [mixed[number].category == HOSTILE for number in range(4)] == [False, True, False, True]
    assert sorted(mixed[1].prompt) == sorted(plain[1].prompt) and mixed[2] == plain[2]


@given(st.floats(0.5, 50.0))
def test_arrivals_keep_their_rate(rate: float) -> None:
    offsets_s = Arrivals(rate).offsets_s(4000, seed=1)
    gaps = np.diff([0.0, *offsets_s])
    assert (gaps >= 0).all() and gaps.mean() * rate == pytest.approx(1.0, rel=0.15)
    assert gaps.var() * rate**2 == pytest.approx(1.0, rel=0.35), "an exponential distribution's"


def test_latencies_are_those_of_vllm_bench() -> None:
    waits = [RequestLatencies.of(10.0, [10.2, 10.3, 10.7], 7), RequestLatencies.of(11.0, [11.1], 1)]
    reported = describe(waits)
    assert waits[0].tpot_s == pytest.approx(0.5 / 6) and waits[1].tpot_s is None
    assert reported["ttft_ms"]["mean"] == pytest.approx(150) and reported["itl_ms"]["count"] == 2
    assert (
        reported["itl_ms"]["p50"] == pytest.approx(median([100, 400])) and reported["tpot_ms"]["count"] == 1
    )
    assert reported["e2el_ms"]["p99"] == pytest.approx(np.percentile([700, 100], 99))


def test_a_shuffled_drafter_has_the_same_values_in_another_order(tiny_drafter: Path, tmp_path: Path) -> None:
    folder = shuffled(tiny_drafter, tmp_path)
    (file,) = folder.glob("*.safetensors")
    ours, theirs = load_file(file), load_file(tiny_drafter / file.name)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].flatten().sort().values.equal(tensor.flatten().sort().values)
    assert any(not ours[name].equal(tensor) for name, tensor in theirs.items())


def test_wrong_loads_are_refused_with_their_remedy() -> None:
    with pytest.raises(ConfigError):
        Arrivals(0.0)
    mtp_mixed = {"method": "mtp", "suffix_drafts": True}
    assert parse_methods(["ngram", "eagle3=x/y", "mixed", json.dumps(mtp_mixed)]) == {
        "ngram": {"method": "ngram"},
        "eagle3": {"method": "eagle3", "model": "x/y"},
        "mixed": {},
        "mtp mixed": mtp_mixed,
    }
    with pytest.raises(ConfigError, match="method"):
        parse_methods(['{"model": 1}'])
    with pytest.raises(ConfigError, match="minutes"):
        SweepOptions(minutes=0)


@pytest.mark.slow
def test_a_sweep_compares_all_sides_and_judges_every_bar(
    tiny_qwen3: Path, tiny_drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = ({"id": row.name, "category": row.category, "prompt": row.prompt} for row in ROWS)
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "sweep.json"
    options = PolicySweepOptions(
        prompts=prompts,
        concurrency=(1, 3),
        mixed=(3,),
        temperatures=(0.0, 1.0),
        rounds=2,
        max_tokens=6,
        minutes=0.02,
        methods=parse_methods(['{"method": "no-such-method", "model": "x"}', "mixed"]),
        output=output,
    )
    run_policy_sweep(config(tiny_qwen3, tiny_drafter, num_speculative_tokens=3), options)
    figures = json.loads(output.read_text())
    assert figures["complete"]
    assert set(figures["refused"]) == {"no-such-method"}
    names = ["adaptive", "plain", "dflash-1", "dflash-3", "mixed", "random"]
    closed = figures["points"]
    assert [(p["temperature"], p["requests"]) for p in closed] == [(0, 1), (0, 3), (1, 1), (1, 3)]
    assert [point["requests"] for point in figures["mixed"]] == [3]
    for point in (*closed, *figures["mixed"]):
        assert list(point["sides"]) == names and all(side["identical"] for side in point["sides"].values())
        plain, best = point["sides"]["plain"], point["sides"][point["best"]]
        assert plain["ratio_to_plain"] == best["ratio_to_best"] == 1.0 and point["best"] in names[1:4]
        assert plain["mean_acceptance_length"] is None and plain["tokens_per_step"] == 1.0
        for side in point["sides"].values():
            assert len(side["rounds_tokens_per_s"]) == 2
            assert side["ratio_to_plain"] == pytest.approx(median(side["rounds_ratio_to_plain"]), abs=1e-3)
            assert side["ttft_ms"]["p50"] <= side["e2el_ms"]["p99"]
        assert {"draft", "verify"} <= set(point["sides"]["dflash-3"]["step_seconds"])
    judged = Counter(one["bar"] for one in figures["verdicts"])
    assert judged == {"adaptive to the best": 5, "adaptive to plain": 5, "random drafter to plain": 4}
    for one in figures["verdicts"]:
        assert one["met"] == (one["measured"] >= one["least"])
    said = capsys.readouterr()
    assert "no-such-method was refused" in said.out and "round 2/2" in said.err

    curves = sweep_curves(figures)
    assert list(curves) == [f"{name}, T = {t}" for t in (0, 1) for name in ("plain", "dflash", "mixed")]
    side = closed[1]["sides"]["adaptive"]
    assert curves["dflash, T = 0"][1] == {
        "requests": 3,
        **{name: side[name] for name in ("user_tokens_per_s", "tokens_per_s")},
    }
    pictures = [picture.name for picture in sweep_pictures(figures)]
    assert pictures == ["pareto", "speedup-by-load", "speedup-by-load-t1"]


def test_starts_are_measured_at_each_load_and_after_a_change(
    tiny_qwen3: Path, tiny_drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": row.name, "prompt": row.prompt}) + "\n" for row in ROWS))
    options = StartsOptions(prompts=prompts, concurrency=(1, 3), max_tokens=6, window_s=0.15)
    found = run_starts(config(tiny_qwen3, tiny_drafter, num_speculative_tokens=3), options)["points"]
    assert [(start["requests"], start["then"]) for start in found] == [(1, 3), (3, 1)]
    assert all(start[when]["ratio"] > 0 for start in found for when in ("start", "change"))
    assert "after a change of load" in capsys.readouterr().out
