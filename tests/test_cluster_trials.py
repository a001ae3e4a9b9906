"""Poison rows are found over the deaths of the engines that had them, and no other row is blamed."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from manta.cluster.row_ranges import RowRanges, both, count, minus, of_rows, rows_of, union
from manta.cluster.trials import ATTEMPTS, Trials

NUM_ROWS = 40


@given(
    poison=st.sets(st.integers(0, NUM_ROWS - 1), max_size=3),
    kills=st.lists(st.booleans(), max_size=ATTEMPTS - 1),
    partly=st.randoms(use_true_random=False),
    most=st.integers(1, 16),
)
def test_every_row_is_answered_or_poison_though_engines_die(
    poison: set[int], kills: list[bool], partly: object, most: int
) -> None:
    trials, done, blamed, deaths = Trials(), (), (), 0
    everything: RowRanges = ((0, NUM_ROWS),)
    while left := minus(everything, union(done, blamed)):
        trials, rows = trials.begin(minus(left, trials.flight), most)
        assert rows and not both(rows, union(done, blamed))
        trials = Trials.from_json(json.loads(json.dumps(trials.as_json())))
        bad = both(rows, of_rows(poison))
        if bad or (kills and kills.pop()):
            deaths += 1
            answered = [row for row in rows_of(minus(rows, bad)) if partly.random() < 0.5]  # type: ignore[attr-defined]
            done = union(done, of_rows(answered))
            trials, found = trials.after_death(done)
            blamed = union(blamed, found)
        else:
            done = union(done, rows)
            trials = trials.after_flight(done)
        assert not both(trials.suspects, union(done, blamed))
    assert set(rows_of(blamed)) == poison
    assert deaths <= (len(poison) + 1) * (ATTEMPTS + 12) and count(done) == NUM_ROWS - len(poison)
