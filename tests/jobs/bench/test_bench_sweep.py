"""A sweep runs every side under the same load, and its figures are those of the raw events."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from manta.actors.engine.uniproc_executor import make_executor
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine_core import SequenceUpdate
from manta.cluster.errors import ConfigError
from manta.jobs.bench.common.engine_passes import PromptRow
from manta.jobs.bench.common.request_source import RequestSource
from manta.jobs.bench.sweep.engines import Driver, parse_methods
from manta.jobs.bench.sweep.load_records import RequestLatencies, Sums, describe
from manta.jobs.bench.sweep.sweep_run import SweepOptions

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


def test_all_sides_get_the_same_requests_with_different_lengths() -> None:
    plain = RequestSource(ROWS, 100, 0.5)
    lengths = [plain[number].max_tokens for number in range(200)]
    assert min(lengths) >= 50 and max(lengths) <= 150 and np.mean(lengths) == pytest.approx(100, abs=1)
    assert plain[7] == RequestSource(ROWS, 100, 0.5)[7] and plain[7].seed != plain[7 + len(ROWS)].seed
    assert {plain[number].category for number in range(6)} == {"even", "odd"}


def test_latencies_are_those_of_vllm_bench() -> None:
    waits = [RequestLatencies.of(10.0, [10.2, 10.3, 10.7], 7), RequestLatencies.of(11.0, [11.1], 1)]
    reported = describe(waits)
    assert waits[0].tpot_s == pytest.approx(0.5 / 6) and waits[1].tpot_s is None
    assert reported["ttft_ms"]["mean"] == pytest.approx(150) and reported["itl_ms"]["count"] == 2
    assert (
        reported["itl_ms"]["p50"] == pytest.approx(median([100, 400])) and reported["tpot_ms"]["count"] == 1
    )
    assert reported["e2el_ms"]["p99"] == pytest.approx(np.percentile([700, 100], 99))


def test_wrong_loads_are_refused_with_their_remedy() -> None:
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
