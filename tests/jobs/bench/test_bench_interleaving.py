"""Sides alternate over the same prompts in adjacent turns, and the first side rotates."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st
from manta.jobs.bench.common.engine_passes import (
    MIN_GROUPS,
    Pass,
    SteppedPass,
    joined,
    prompts_per_turn,
    ratios,
    run_rounds,
    split_evenly,
)

sizes = st.integers(1, 60)


@given(count=sizes, requests=st.integers(1, 9), speed=st.floats(0.1, 1e5), max_tokens=st.integers(1, 512))
def test_turns_cover_all_prompts_in_full_groups(
    count: int, requests: int, speed: float, max_tokens: int
) -> None:
    per_turn = prompts_per_turn(requests, speed, max_tokens)
    assert per_turn % requests == 0 and per_turn >= MIN_GROUPS * requests
    turns = split_evenly(count, per_turn, requests)
    assert [i for turn in turns for i in range(count)[turn]] == list(range(count))
    lengths = [len(range(count)[turn]) for turn in turns]
    assert min(lengths) >= min(per_turn, count)
    assert all(length % requests == 0 for length in lengths[:-1])


def test_turns_last_a_fraction_of_a_second_unless_many_run_at_once() -> None:
    assert prompts_per_turn(1, tokens_per_s=1280, max_tokens=128) == 5
    assert prompts_per_turn(1, tokens_per_s=10, max_tokens=128) == 2
    assert prompts_per_turn(8, tokens_per_s=1280, max_tokens=128) == 16


def test_the_first_side_rotates_over_turns_and_rounds() -> None:
    order: list[tuple[str, int]] = []

    def run(name: str, part: slice) -> Pass:
        order.append((name, part.start))
        return Pass(seconds=1.0, tokens=part.stop - part.start, token_ids=[[part.start]])

    sides = {name: partial(run, name) for name in "abc"}
    passes = run_rounds(sides, [slice(0, 2), slice(2, 5)], rounds=2, title="a title")
    names = "".join(name for name, _ in order)
    assert names == "abcbcabcacab"
    assert [start for _, start in order] == [0] * 3 + [2] * 3 + [0] * 3 + [2] * 3
    assert passes["a"] == [Pass(seconds=2.0, tokens=5, token_ids=[[0], [2]])] * 2
    assert ratios(passes["a"], passes["b"]) == [1.0, 1.0]


def test_a_round_counts_all_of_its_turns() -> None:
    first = SteppedPass(1.0, 8, [[1]], num_steps=2, num_accepted=6, step_seconds={"draft": 0.5})
    second = SteppedPass(
        3.0, 8, [[2]], num_steps=6, num_accepted=2, step_seconds={"draft": 0.5, "verify": 1.0}
    )
    whole = joined([first, second])
    assert (whole.tokens_per_s, whole.mean_acceptance_length, whole.token_ids) == (4.0, 2.0, [[1], [2]])
    assert whole.step_seconds == {"draft": 1.0, "verify": 1.0}
    untold = joined([Pass(1.0, 4, [[1]]), Pass(1.0, 4, None)])
    assert untold.token_ids is None and untold.mean_acceptance_length is None
