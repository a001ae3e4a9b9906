"""Where answers begin to repeat themselves."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.cluster.records.repetition import REPEATED_TOKENS, num_fresh_tokens, repeated_tokens


def test_all_tokens_of_the_second_occurrence_count_as_repeated() -> None:
    fresh = list(range(12))
    assert not repeated_tokens(fresh).any() and num_fresh_tokens(fresh) == 12
    again = [*fresh, *range(REPEATED_TOKENS), 99]
    assert repeated_tokens(again).tolist() == [False] * 12 + [True] * REPEATED_TOKENS + [False]
    assert num_fresh_tokens(again) == 12
    assert num_fresh_tokens(again, REPEATED_TOKENS + 1) == len(again), "no longer n-gram occurs twice"


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_a_loop_is_fresh_for_one_period(period: int) -> None:
    loop = [5, 6, *(list(range(100, 100 + period)) * 20)]
    assert num_fresh_tokens(loop) == 2 + period


def test_a_loop_with_a_counter_is_a_repetition() -> None:
    lines = [[1, 2, *map(int, str(number)), 3, 4] for number in range(10, 30)]
    text = list(chain.from_iterable(lines))
    assert num_fresh_tokens(text) == 10, "the second time that 3, 4 end a line and 1, 2 begin one"
    assert num_fresh_tokens(text, 8) == len(text), "which no n-gram of 8 tokens shows"


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 6))
def test_fresh_tokens_are_those_before_the_first_repeated_one(answer: list[int], num_tokens: int) -> None:
    fresh, repeated = num_fresh_tokens(answer, num_tokens), repeated_tokens(answer, num_tokens)
    assert not repeated[:fresh].any() and (fresh == len(answer) or repeated[fresh])
    grams = [tuple(answer[i : i + num_tokens]) for i in range(len(answer) - num_tokens + 1)]
    assert (fresh == len(answer)) == (len(set(grams)) == len(grams))
