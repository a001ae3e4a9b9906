"""Requests under which replicas died: suspects, poison requests, and when they are forgotten."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.cluster.fleet.poison_requests import MAX_DEATHS, MAX_POISONOUS, TTL_S, DeathRecords

A, B = b"a", b"b"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def records(clock: Clock) -> DeathRecords:
    return DeathRecords(clock)


def died(records: DeathRecords, digest: bytes, replica: str, *, alone: bool = False) -> str:
    return records.record_death(digest, replica, alone=alone, lived_s=1.0)


def test_a_second_death_decides_only_if_the_suspect_was_alone(records: DeathRecords) -> None:
    assert died(records, A, "r0") == died(records, B, "r0") == "suspect"
    assert died(records, B, "r1") == "suspect", "it was there by chance"
    assert died(records, A, "r1", alone=True) == "poisonous"
    assert records.status_of(A) == "poisonous" and records.status_of(B) == "suspect"


def test_a_death_that_its_killer_explains_counts_for_no_other(
    records: DeathRecords,
) -> None:
    for replica in ("r0", "r1"):
        assert died(records, A, replica) == died(records, B, replica) == "suspect"
    assert died(records, B, "r2", alone=True) == "poisonous"
    assert died(records, A, "r2") == "suspect", "noticed later"
    assert died(records, A, "r2", alone=True) == "suspect", "sent once more to the dead replica"
    assert records.record_death(A, "r3", alone=False, lived_s=1.0, has_culprit=True) == "suspect"
    assert died(records, A, "r4") == "poisonous" and MAX_DEATHS == 3
    assert died(records, b"d", "r5") == died(records, b"d", "r6") == "suspect"
    assert died(records, b"e", "r5", alone=True) == "poisonous"
    assert died(records, b"d", "r7") == "suspect", "noticed before"


def test_a_suspect_that_survived_a_death_is_a_suspect_again_after_the_next(
    records: DeathRecords,
) -> None:
    died(records, A, "r0")
    records.clear_suspicion(A)
    assert records.status_of(A) == "clear"
    assert died(records, A, "r1") == "suspect"
    records.clear_suspicion(A)
    assert died(records, A, "r2") == "poisonous" and MAX_DEATHS == 3
    died(records, B, "r0")
    records.complete(B)
    assert records.status_of(B) == "clear" and died(records, B, "r1") == died(records, B, "r2") == "suspect"


def test_equal_requests_on_one_replica_see_one_death(records: DeathRecords) -> None:
    for _ in range(2 * MAX_DEATHS):
        assert died(records, A, "r0") == "suspect"


def test_a_suspect_that_was_sent_once_more_to_the_dead_replica_has_not_killed_another(
    records: DeathRecords,
) -> None:
    """Its last heartbeat may arrive after its death was noticed, and it is chosen once more."""
    assert died(records, A, "r0") == died(records, A, "r0", alone=True) == "suspect"
    assert died(records, A, "r1", alone=True) == "poisonous"


def test_suspects_are_forgotten_after_a_time(records: DeathRecords, clock: Clock) -> None:
    died(records, A, "r0")
    died(records, B, "r0", alone=True)
    clock.now_s = TTL_S - 1.0
    assert (records.status_of(A), records.status_of(B)) == ("suspect", "poisonous")
    clock.now_s = TTL_S + 1.0
    assert records.status_of(A) == records.status_of(B) == "clear" and not records


def killed(records: DeathRecords, key: str | None, digest: int, replica: str, *, alone: bool) -> str:
    return records.record_death(digest.to_bytes(2), replica, alone=alone, lived_s=1.0, key=key)


def test_a_key_whose_requests_differ_each_time_is_suspect_and_then_refused(
    records: DeathRecords, clock: Clock
) -> None:
    found: list[str] = []
    for digest in range(MAX_POISONOUS):
        killed(records, "key", digest, f"r{digest}", alone=True)
        found.append(records.status_of_key("key"))
    assert found == ["suspect"] * (MAX_POISONOUS - 1) + ["poisonous"]
    assert records.status_of_key("other") == records.status_of_key(None) == "clear"
    clock.now_s = TTL_S + 1.0
    assert records.status_of_key("key") == "clear"


def test_a_key_is_suspect_after_deaths_under_requests_that_no_trial_cleared(records: DeathRecords) -> None:
    for digest in range(10):
        killed(records, "key", digest, "r0", alone=False)
    assert records.status_of_key("key") == "clear", "all of them saw the same death"
    for digest in range(10, 10 + MAX_DEATHS):
        killed(records, "key", digest, f"r{digest}", alone=False)
        killed(records, None, 100 + digest, f"r{digest}", alone=False)
    assert records.status_of_key("key") == "suspect" and records.status_of_key(None) == "clear"
    for digest in range(11):
        records.complete(digest.to_bytes(2))
    assert records.status_of_key("key") == "clear", "two deaths are left"


steps = st.lists(
    st.tuples(
        st.binary(min_size=1, max_size=1), st.integers(0, 9), st.booleans(), st.floats(0.0, 2.0 * TTL_S)
    )
)


@given(steps)
def test_records_are_bounded_in_number_and_age(
    steps: list[tuple[bytes, int, bool, float]],
) -> None:
    clock = Clock()
    records = DeathRecords(clock, max_records=5)
    last_s: dict[bytes, float] = {}
    for number, (digest, replica, alone, wait_s) in enumerate(steps):
        clock.now_s += wait_s
        found = died(records, digest, f"new {number}" if alone else str(replica), alone=alone)
        assert found == records.status_of(digest) and (found == "poisonous" or not alone)
        last_s[digest] = clock.now_s
        known = [each for each in last_s if records.status_of(each) != "clear"]
        assert len(known) <= 10
        assert all(clock.now_s - last_s[each] <= TTL_S for each in known)
