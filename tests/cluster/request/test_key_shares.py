"""Slots go to the keys in turn, and no key alone holds all; a budget is regained with time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.cluster.request.key_shares import KeyBudget, KeyTurns

KEYS = ("a", "b", "c")
Action = tuple[str, str]


def test_keys_take_turns_and_a_keys_items_keep_their_order() -> None:
    turns = KeyTurns[str](1)
    for item in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
        turns.add(item[0], item)
    order = list[str]()
    while (item := turns.take()) is not None:
        order.append(item)
        turns.release(item[0])
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_one_key_leaves_half_of_the_slots_to_others() -> None:
    def taken(turns: KeyTurns[str], key: str | None) -> int:
        for _ in range(9):
            turns.add(key, f"{key}")
        return sum(turns.take() == f"{key}" for _ in range(9))

    turns = KeyTurns[str](8, leaves_room=True)
    assert [taken(turns, key) for key in KEYS] == [4, 2, 1]
    assert taken(KeyTurns[str](8, leaves_room=True), None) == 8, "a server without keys uses all"


@given(
    st.lists(st.tuples(st.sampled_from(["add", "take", "remove", "release"]), st.sampled_from(KEYS))),
    st.integers(1, 6),
    st.booleans(),
)
def test_slots_are_neither_lost_nor_given_twice(
    actions: list[Action], num_slots: int, leaves_room: bool
) -> None:
    turns, waiting = KeyTurns[tuple[str, int]](num_slots, leaves_room=leaves_room), list[tuple[str, int]]()
    held = Counter[str]()
    for number, (action, key) in enumerate(actions):
        mine = [item for item in waiting if item[0] == key]
        match action:
            case "add":
                turns.add(key, (key, number))
                waiting.append((key, number))
            case "take":
                num_free = turns.num_free
                item = turns.take()
                if item is not None:
                    assert item == next(each for each in waiting if each[0] == item[0])
                    assert not leaves_room or held[item[0]] < num_free
                    waiting.remove(item)
                    held[item[0]] += 1
                elif num_free and not leaves_room:
                    assert not waiting
            case "remove":
                assert turns.remove(key, mine[-1] if mine else (key, -1)) == bool(mine)
                if mine:
                    waiting.remove(mine[-1])
            case _:
                if held[key]:
                    held[key] -= 1
                    turns.release(key)
        assert turns.num_free == num_slots - held.total() >= 0


def test_a_key_waits_until_it_has_regained_what_it_spent_beyond_its_budget() -> None:
    budget = KeyBudget(30.0)
    budget.spend("a", 29.0, 0.0)
    assert budget.wait_s("a", 0.0) == 0.0
    budget.spend("a", 11.0, 0.0)
    assert budget.wait_s("a", 0.0) == pytest.approx(20.0)
    assert budget.wait_s("a", 15.0) == pytest.approx(5.0)
    assert budget.wait_s("a", 20.0) == budget.wait_s("b", 0.0) == 0.0
    budget.spend("a", 29.0, 1000.0)
    assert budget.wait_s("a", 1000.0) == 0.0, "what was spent long ago is regained"
    budget.spend(None, 1e9, 0.0)
    assert budget.wait_s(None, 0.0) == 0.0
