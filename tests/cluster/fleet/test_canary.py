"""The sequential test of a drafter trial keeps its error rate when evaluated after every request."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.cluster.errors import ConfigError
from manta.cluster.fleet.canary import ArmStats, Assignment, CanaryTrial, Evidence, TrialRules, decide

STEPS = 40  # of a request
RULES = TrialRules(fraction=0.5, auto_promote=True, alpha=0.05, min_requests=1, max_duration_s=math.inf)


def first_verdict(rules: TrialRules, rng: random.Random, gain: float, maximum: int) -> tuple[str | None, int]:
    """Return the verdict of a trial that is evaluated after every request, and the number of requests.

    Requests differ widely, and the traffic drifts; the candidate's steps have (1 + gain) times as many
    tokens.
    """
    trial = CanaryTrial(rules, rng)
    for i in range(1, maximum + 1):
        ticket = trial.begin()
        assert ticket is not None
        tokens = 1.0 + rng.gammavariate(9.0, 0.25) * (1.0 + 0.5 * math.sin(i / 150))
        better = 1 + gain if ticket.role == "candidate" else 1.0
        trial.end(ticket, ArmStats(1, STEPS, round(STEPS * (tokens * better - 1.0))))
        if (found := decide(rules, trial.evidence, 0.0)) is not None:
            return found, i
    return None, maximum


@pytest.mark.parametrize(("fraction", "gain"), [(0.5, 0.0), (0.1, 0.0), (0.5, -0.03)])
def test_few_of_a_thousand_equal_candidates_are_promoted(fraction: float, gain: float) -> None:
    rules = TrialRules(
        fraction=fraction, auto_promote=True, alpha=0.05, min_requests=1, max_duration_s=math.inf
    )
    rng = random.Random(1)
    ends = [first_verdict(rules, rng, gain, 120)[0] for _ in range(1000)]
    assert ends.count("promoted") <= 50 + 3 * math.sqrt(50)
    if gain == 0.0:
        assert ends.count("rolled_back") <= 50 + 3 * math.sqrt(50)


@pytest.mark.parametrize(("fraction", "maximum"), [(0.5, 1500), (0.1, 4000)])
def test_a_candidate_a_tenth_better_is_promoted_and_one_a_tenth_worse_is_removed(
    fraction: float, maximum: int
) -> None:
    rules = TrialRules(
        fraction=fraction, auto_promote=True, alpha=0.05, min_requests=20, max_duration_s=math.inf
    )
    rng = random.Random(2)
    for gain, wanted in ((0.1, "promoted"), (-0.1, "rolled_back")):
        ends = [first_verdict(rules, rng, gain, maximum) for _ in range(20)]
        assert sum(end == wanted for end, _ in ends) >= 18
        assert not any(end not in (wanted, None) for end, _ in ends)


def test_shadow_pairs_decide_with_few_answers() -> None:
    rng, needed = random.Random(3), list[int]()
    for gain in (1.1, 1.0, 0.9):
        for _ in range(40):
            trial, found = CanaryTrial(RULES, rng), None
            for i in range(400):
                length = rng.gammavariate(9.0, 0.25)
                mine, its = (
                    ArmStats(1, STEPS, round(STEPS * length * how * rng.gauss(1, 0.1))) for how in (1.0, gain)
                )
                trial.compare(mine, its)
                if (found := decide(RULES, trial.evidence, 0.0)) is not None:
                    needed.append(i)
                    break
            if gain != 1.0:
                assert found == ("promoted" if gain > 1 else "rolled_back")
    assert np.median(needed) < 120


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=60), st.floats(0.01, 0.5))
def test_a_bet_is_fair_after_any_history(past: list[tuple[int, bool]], fraction: float) -> None:
    """Assignment is random over the same drafts, so that either drafter may have made them."""

    def played(*more: tuple[int, bool]) -> Evidence:
        trial = CanaryTrial(TrialRules(fraction=fraction), random.Random(0))
        for accepted, is_candidate in (*past, *more):
            ticket = trial.begin()
            assert ticket is not None
            ticket.role = "candidate" if is_candidate else "incumbent"
            trial.end(ticket, ArmStats(1, 10, accepted))
        return trial.evidence

    for accepted in (0, 7, 40):
        wins, loses = played((accepted, True)), played((accepted, False))
        for field in ("log_better", "log_worse"):
            mean = fraction * math.exp(getattr(wins, field)) + (1 - fraction) * math.exp(
                getattr(loses, field)
            )
            assert mean == pytest.approx(math.exp(getattr(played(), field)), rel=1e-9)


def test_requests_count_in_the_order_of_their_starts() -> None:
    trial = CanaryTrial(RULES, random.Random(4))
    slow, quick, aborted = (trial.begin() for _ in range(3))
    assert isinstance(slow, Assignment) and isinstance(quick, Assignment) and isinstance(aborted, Assignment)
    trial.end(quick, ArmStats(1, 3, 5))
    trial.end(aborted, ArmStats(1))
    assert trial.evidence == Evidence()
    trial.end(slow, ArmStats(1, 2, 1))
    reported = trial.evidence
    assert reported.incumbent.requests + reported.candidate.requests == 2
    assert reported.incumbent.plus(reported.candidate) == ArmStats(2, 5, 6)


def test_an_unfinished_request_delays_a_bounded_number_of_others() -> None:
    trial = CanaryTrial(RULES, random.Random(5))
    tickets = [trial.begin() for _ in range(5000)]
    assert None in tickets and tickets[0] is not None
    for ticket in tickets:
        if ticket is not None:
            trial.end(ticket, ArmStats(1, 1, 1))
    assert trial.begin() is not None


def test_a_verdict_needs_a_minimum_of_requests_or_the_time_limit() -> None:
    rules = TrialRules(alpha=0.01, min_requests=10, max_duration_s=60.0)
    better, worse = Evidence(9.0, -9.0, candidate=ArmStats(10)), Evidence(-9.0, 9.0, candidate=ArmStats(10))
    assert decide(rules, Evidence(9.0, candidate=ArmStats(9)), 0.0) is None
    assert decide(rules, better, 0.0) == "better"
    assert decide(TrialRules(min_requests=10, auto_promote=True), better, 0.0) == "promoted"
    assert decide(rules, worse, 0.0) == "rolled_back"
    assert decide(rules, Evidence(), 59.9) is None and decide(rules, Evidence(), 60.0) == "undecided"
    halves = [Evidence(2.5, -1.0, candidate=ArmStats(5, 3, 2))] * 2
    assert Evidence.pooled(halves) == Evidence(5.0, -2.0, candidate=ArmStats(10, 6, 4))
    assert decide(rules, Evidence.pooled(halves), 0.0) == "better"


@pytest.mark.parametrize(
    "wrong",
    [{"fraction": 0.0}, {"fraction": 0.6}, {"alpha": 1.0}, {"min_requests": 0}, {"max_duration_s": 0}],
)
def test_invalid_rules_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=rf"user_config\.candidate\.{next(iter(wrong))}"):
        TrialRules(**wrong)  # type: ignore[arg-type]
