"""Acceptance by slice: which slices lose, how many tokens, and which causes are named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from manta.cluster.records.acceptance_slices import (
    AcceptanceReport,
    BlockGroup,
    Dimension,
    context_label,
    expected_accepted,
    report_acceptance,
)
from manta.cluster.records.confidence_intervals import RatioEstimate
from manta.cluster.records.low_acceptance import PairEvidence, TapTrial, likely_causes

DRAFTS = 7
CARD = tuple(0.8**i for i in range(1, DRAFTS + 1))
Labels = Mapping[Dimension, str]


def simulated(
    draws: np.random.Generator,
    name: str,
    chance: float,
    labels: Labels,
    drafts: int = DRAFTS,
    blocks: int = 25,
) -> BlockGroup:
    """Return the blocks of a request that accepts each draft with a probability of about `chance`."""
    own = draws.beta(20 * chance, 20 * (1 - chance))
    accepted = np.minimum(draws.geometric(1 - own, size=blocks) - 1, drafts)
    return BlockGroup(name, labels, Counter((drafts, int(each)) for each in accepted))


def report_of(groups: list[BlockGroup], control: Sequence[BlockGroup] = ()) -> AcceptanceReport:
    report = report_acceptance(groups, CARD, control)
    assert report is not None and report.has_card
    return report


def test_the_slices_that_lose_are_named_with_their_lost_tokens() -> None:
    draws = np.random.default_rng(0)
    german, english = (0.5, {"language": "german"}), (0.8, {"language": "english"})
    groups = [simulated(draws, str(i), *(english if i % 3 else german)) for i in range(30)]
    report = report_of(groups)
    (german,) = report.losing
    assert (german.dimension, german.value, german.num_requests) == ("language", "german", 10)
    assert german.rest is not None and german.relative.value < 0.6 < german.rest
    assert german.lost_share > 0.8
    lost = sum(expected_accepted(each, CARD) - each.num_accepted for each in groups)
    assert report.num_lost_tokens == pytest.approx(lost)
    (cause,) = likely_causes(report, PairEvidence())
    assert cause.cause == "language" and "german" in cause.evidence


def test_equal_slices_are_rarely_called_losing() -> None:
    """Requests differ, and their steps are correlated; slices mean nothing."""
    draws, wrong, names = np.random.default_rng(1), 0, ("a", "b", "c")
    for _ in range(300):
        groups = [simulated(draws, str(i), 0.7, {"tenant": names[i % 3]}) for i in range(24)]
        wrong += len(report_of(groups).losing)
    assert wrong / 900 < 0.05


def test_slices_with_fewer_drafts_do_not_lose_for_that() -> None:
    """An engine that drafts less at a higher temperature, and accepts as many of those drafts."""
    draws = np.random.default_rng(2)
    groups = [simulated(draws, f"a{i}", 0.8, {"temperature": "0"}) for i in range(15)]
    groups += [simulated(draws, f"b{i}", 0.8, {"temperature": "1"}, drafts=2) for i in range(15)]
    report = report_of(groups)
    assert not report.losing
    short = next(each for each in report.slices if each.value == "1")
    assert short.tokens_per_block < 3.0 and short.relative.value > 0.85


def test_too_few_requests_are_not_judged() -> None:
    draws = np.random.default_rng(3)
    groups = [simulated(draws, str(i), 0.8, {"tenant": "big"}) for i in range(10)]
    groups += [simulated(draws, f"s{i}", 0.2, {"tenant": "small"}) for i in range(2)]
    report = report_acceptance(groups, None)
    assert report is not None and not report.has_card and not report.losing


def test_the_cards_prompts_show_what_all_of_the_traffic_lacks() -> None:
    draws = np.random.default_rng(4)
    control = [simulated(draws, f"c{i}", 0.8, {"temperature": "0", "language": "english"}) for i in range(10)]
    groups = [simulated(draws, str(i), 0.4, {"temperature": "2", "language": "english"}) for i in range(10)]
    assert not report_of(groups).losing, "nothing to compare with"
    compared = report_of(groups, control)
    assert [each.dimension for each in compared.losing] == ["temperature"]
    (cause,) = likely_causes(compared, PairEvidence())
    assert cause.cause == "temperature" and cause.lost_share > 0.8


def test_positions_sum_up_to_all_lost_tokens() -> None:
    draws = np.random.default_rng(5)
    groups = [simulated(draws, str(i), 0.4, {}) for i in range(10)]
    positions = report_of(groups).positions
    assert sum(each.lost_share for each in positions) == pytest.approx(1.0)
    num_reached = [each.num_reached for each in positions]
    assert num_reached == sorted(num_reached, reverse=True)
    assert positions[0].reference == 0.8


def test_a_slice_that_another_one_explains_is_no_cause() -> None:
    """Prose loses because a third of it is German; of all hot traffic, each slice loses against the card."""
    draws = np.random.default_rng(8)
    labels: list[dict[Dimension, str]] = [
        {"content": "code"},
        {"content": "prose", "language": "english"},
        {"content": "prose", "language": "german"},
    ]
    groups = [
        simulated(draws, f"{n}-{i}", 0.3 if n == 2 else 0.8, labels[n]) for n in range(3) for i in range(12)
    ]
    report = report_of(groups)
    explained = {each.value: each.explained_by for each in report.losing}
    assert explained == {"german": "", "prose": "language german"}
    assert [each.cause for each in likely_causes(report, PairEvidence())] == ["language"]
    control = [simulated(draws, f"c{i}", 0.8, {"temperature": "0", **labels[i % 3]}) for i in range(24)]
    hot = [simulated(draws, f"h{i}", 0.3, {"temperature": "2", **labels[0]}) for i in range(24)]
    explained = {each.value: each.explained_by for each in report_of(hot, control).losing}
    assert explained == {"2": "", "code": "temperature 2"}


def test_slices_that_occur_together_are_all_causes() -> None:
    draws = np.random.default_rng(9)
    both: tuple[dict[Dimension, str], ...] = (
        {"tenant": "a", "language": "english"},
        {"tenant": "b", "language": "german"},
    )
    groups = [simulated(draws, f"{n}-{i}", 0.8 - n / 2, both[n]) for n in range(2) for i in range(12)]
    assert {each.cause for each in likely_causes(report_of(groups), PairEvidence())} == {"tenant", "language"}


LOW, HIGH = RatioEstimate(0.5, 0.4, 0.6, 8, 0.04), RatioEstimate(1.0, 0.9, 1.1, 8, 0.04)
FEWER, SAME = RatioEstimate(0.8, 0.7, 0.9, 8, 0.04), RatioEstimate(1.0, 0.9, 1.1, 8, 0.04)  # blocks


@pytest.mark.parametrize(
    ("evidence", "cause"),
    [
        (PairEvidence(texts=LOW, taps=TapTrial((1, 2), HIGH, FEWER)), "wrong taps"),
        (PairEvidence(texts=LOW, taps=TapTrial((1, 2), HIGH, SAME)), "other fine-tune"),
        (PairEvidence(texts=LOW, taps=TapTrial((1, 2), LOW, SAME)), "other fine-tune"),
        (PairEvidence(texts=LOW, taps=TapTrial((1, 2), LOW, SAME), quantization="awq"), "quantized target"),
        (PairEvidence(texts=HIGH, chats=LOW), "chat template"),
        (PairEvidence(chats=LOW), "other fine-tune"),
        (PairEvidence(texts=HIGH, chats=HIGH, quantization="awq"), None),
        (PairEvidence(), None),
    ],
)
def test_the_cards_prompts_judge_the_pair(evidence: PairEvidence, cause: str | None) -> None:
    draws = np.random.default_rng(6)
    groups = [simulated(draws, str(i), 0.5, {"prompt": "chat" if i % 2 else "text"}) for i in range(10)]
    found = likely_causes(report_of(groups), evidence)
    assert [each.cause for each in found] == ([] if cause is None else [cause])


@pytest.mark.parametrize(
    ("dimension", "lower", "higher", "named"),
    [("temperature", "0", "0.9", False), ("context", "256", "1024", False), ("tenant", "a", "b", True)],
)
def test_a_plain_value_that_loses_is_no_cause(
    dimension: Dimension, lower: str, higher: str, named: bool
) -> None:
    draws = np.random.default_rng(7)
    groups = [simulated(draws, f"l{i}", 0.4, {dimension: lower}) for i in range(10)]
    groups += [simulated(draws, f"h{i}", 0.8, {dimension: higher}) for i in range(10)]
    report = report_of(groups)
    assert [each.value for each in report.losing] == [lower]
    assert bool(likely_causes(report, PairEvidence())) is named


def test_contexts_are_grouped_by_powers_of_two() -> None:
    assert [context_label(n) for n in (1, 256, 257, 512, 5000)] == ["256", "256", "512", "512", "8192"]


def test_a_short_context_is_no_cause_even_if_no_other_occurs() -> None:
    draws = np.random.default_rng(10)
    groups = [simulated(draws, str(i), 0.4, {"context": "256"}) for i in range(10)]
    control = [simulated(draws, f"c{i}", 0.8, {"context": "512"}) for i in range(10)]
    report = report_of(groups, control)
    assert [each.value for each in report.losing] == ["256"]
    assert not likely_causes(report, PairEvidence())
