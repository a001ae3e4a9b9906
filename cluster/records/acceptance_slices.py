"""Acceptance by slice of the traffic: by temperature, language, context length, tenant and so on.

A *slice* is all verified blocks with one value of one dimension, for example temperature 1. Blocks differ in
their number of drafts n, which the engine chooses, so accepted drafts are compared with those that a
reference curve expects for the same n:

    expected(n) = survival_1 + .. + survival_n        relative acceptance = accepted / expected

The curve is that of the drafter's card, or else that of the better half of the requests. A slice *loses* if
its relative acceptance is lower than that of all other blocks: by a tenth at least, with the 95 % interval of
the difference below zero, over at least `MIN_REQUESTS` requests and `MIN_BLOCKS` blocks. Requests are the
sampling units (`confidence_intervals.py`). Its *lost tokens* are the accepted drafts it would have at the
relative acceptance of the other blocks. Slices of different dimensions overlap; their shares do not add up.
A losing slice is *explained* by another one if its blocks in the other slice lose against its remaining ones,
and those do not lose: prose loses because its German part does.

Called for `/explain` and by `jobs/drafters/explain/`. `low_acceptance.py` names causes for both.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from .confidence_intervals import RatioEstimate, ratio_of_sums, student_t

# prompt: a chat, or text without a chat template; content: code or prose; context: tokens before the block.
Dimension = Literal[
    "temperature",
    "thinking",
    "language",
    "content",
    "context",
    "prompt",
    "grammar",
    "prefix_cache",
    "tenant",
]
MIN_REQUESTS = 3  # of a slice and of the other blocks
MIN_BLOCKS = 20
MIN_LOSS = 0.1  # smallest relative difference that is reported
MIN_CONTEXT = 256
Survival = Sequence[float]  # [i]: probability that drafts 0..i are all accepted


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Verified blocks of one request with the same labels.

    `counts` is the number of blocks by (verified drafts, accepted drafts).
    """

    request_id: str
    labels: Mapping[Dimension, str]
    counts: Mapping[tuple[int, int], int]

    @property
    def num_blocks(self) -> int:
        return sum(self.counts.values())

    @property
    def num_accepted(self) -> int:
        return sum(accepted * count for (_, accepted), count in self.counts.items())


@dataclass(frozen=True, slots=True)
class SliceReport:
    """One slice. `rest` is the relative acceptance of all other blocks; None if there are too few.

    `explained_by` names the slice that explains why this one loses, "" if none does.
    """

    dimension: Dimension
    value: str
    num_requests: int
    num_blocks: int
    tokens_per_block: float
    relative: RatioEstimate
    rest: float | None
    loses: bool
    num_lost_tokens: float
    lost_share: float
    explained_by: str = ""

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "dimension": self.dimension,
            "value": self.value,
            "requests": self.num_requests,
            "blocks": self.num_blocks,
            "tokens_per_block": round(self.tokens_per_block, 4),
            "relative_acceptance": self.relative.as_json(),
            "relative_acceptance_of_rest": None if self.rest is None else round(self.rest, 4),
            "loses": self.loses,
            "lost_tokens": round(self.num_lost_tokens, 1),
            "lost_share": round(self.lost_share, 4),
            "explained_by": self.explained_by,
        }


@dataclass(frozen=True, slots=True)
class PositionReport:
    """One draft of a block: accepted share of the blocks that accepted all drafts before it."""

    position: int
    num_reached: int
    acceptance: float
    reference: float
    lost_share: float

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "position": self.position,
            "reached": self.num_reached,
            "acceptance": round(self.acceptance, 4),
            "reference": round(self.reference, 4),
            "lost_share": round(self.lost_share, 4),
        }


@dataclass(frozen=True, slots=True)
class AcceptanceReport:
    """Acceptance of some traffic. `slices` are sorted by lost tokens, largest first.

    Attributes:
        has_card: the reference is a card's; otherwise it is the better half of the requests.
        num_expected: accepted drafts that the reference expects.
        num_lost_tokens: those that were not accepted; 0 if the traffic is better than the reference.
    """

    has_card: bool
    num_requests: int
    num_blocks: int
    tokens_per_block: RatioEstimate
    relative: RatioEstimate
    num_expected: float
    num_lost_tokens: float
    slices: tuple[SliceReport, ...]
    positions: tuple[PositionReport, ...]

    @property
    def losing(self) -> list[SliceReport]:
        return [each for each in self.slices if each.loses]

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "reference": "card" if self.has_card else "better half of the requests",
            "requests": self.num_requests,
            "blocks": self.num_blocks,
            "tokens_per_block": self.tokens_per_block.as_json(),
            "relative_acceptance": self.relative.as_json(),
            "lost_tokens": round(self.num_lost_tokens, 1),
            "slices": [each.as_json() for each in self.slices],
            "positions": [each.as_json() for each in self.positions],
        }


def report_acceptance(
    groups: Sequence[BlockGroup], card: Survival | None, control: Sequence[BlockGroup] = ()
) -> AcceptanceReport | None:
    """Compare the slices of `groups`; None if no block has a draft that the reference expects to be accepted.

    Args:
        card: survival curve of the drafter's card; None compares with the better half of the requests.
        control: blocks of the card's own prompts. They count as other blocks for every slice that they are
            not in, so that a slice which is all of the traffic can be compared, too.
    """
    survival = tuple(card) if card is not None else _better_half(groups)
    relative = relative_acceptance(groups, survival)
    blocks, accepted = [each.num_blocks for each in groups], [each.num_accepted for each in groups]
    length = ratio_of_sums(
        *_by_request(groups, [n + a for n, a in zip(blocks, accepted, strict=True)], blocks)
    )
    if relative is None or length is None:
        return None
    num_expected = sum(expected_accepted(each, survival) for each in groups)
    num_lost = max(num_expected - sum(accepted), 0.0)
    found = [
        _slice(dimension, value, groups, control, survival, num_lost)
        for dimension, value in dict.fromkeys(pair for each in groups for pair in each.labels.items())
    ]
    slices = _explained([each for each in found if each is not None], (*groups, *control), survival)
    return AcceptanceReport(
        has_card=card is not None,
        num_requests=len({each.request_id for each in groups}),
        num_blocks=sum(blocks),
        tokens_per_block=length,
        relative=relative,
        num_expected=num_expected,
        num_lost_tokens=num_lost,
        slices=tuple(sorted(slices, key=lambda each: (not each.loses, -each.num_lost_tokens))),
        positions=_positions(groups, survival, num_lost),
    )


def expected_accepted(group: BlockGroup, survival: Survival) -> float:
    """Return the accepted drafts that the curve expects of a group's blocks."""
    sums = [0.0, *accumulate(survival)]
    return sum(sums[min(drafted, len(survival))] * count for (drafted, _), count in group.counts.items())


def relative_acceptance(groups: Sequence[BlockGroup], survival: Survival) -> RatioEstimate | None:
    """Return accepted drafts divided by expected ones; None if none are expected."""
    expected = [expected_accepted(each, survival) for each in groups]
    return ratio_of_sums(*_by_request(groups, [each.num_accepted for each in groups], expected), minimum=0.0)


def survival_of(groups: Sequence[BlockGroup]) -> Survival:
    """Return the observed survival curve; a position's blocks are those that had a draft there."""
    made, hits = _position_counts(groups)
    shares = [hit / num for hit, num in zip(hits, made, strict=True)]
    return tuple(accumulate(shares, min))


def context_label(num_tokens: int) -> str:
    """Return the power of two, at least `MIN_CONTEXT`, that bounds the number of tokens."""
    return str(max(MIN_CONTEXT, 1 << max(num_tokens - 1, 0).bit_length()))


def differs(one: RatioEstimate, other: RatioEstimate) -> bool:
    """Return whether `one` is lower than `other`: by MIN_LOSS at least, and the 95 % interval is below 0."""
    if one.error is None or other.error is None:
        return False
    reach = student_t(max(min(one.num_units, other.num_units) - 1, 2)) * math.hypot(one.error, other.error)
    return one.value < (1.0 - MIN_LOSS) * other.value and one.value + reach < other.value


def _slice(
    dimension: Dimension,
    value: str,
    groups: Sequence[BlockGroup],
    control: Sequence[BlockGroup],
    survival: Survival,
    num_lost: float,
) -> SliceReport | None:
    """Return the report of the blocks with one value of a dimension; None if no draft of theirs was verified.

    They are compared with all other blocks and with `control` (prompts of the card); `num_lost` are the lost
    drafts of all traffic.
    """
    inside = [each for each in groups if each.labels.get(dimension) == value]
    others = [each for each in (*groups, *control) if each.labels.get(dimension) != value]
    relative, rest = relative_acceptance(inside, survival), relative_acceptance(others, survival)
    if relative is None:
        return None
    num_blocks, accepted = sum(each.num_blocks for each in inside), sum(each.num_accepted for each in inside)
    if not (_is_enough(inside, relative) and _is_enough(others, rest)):
        rest = None
    expected = sum(expected_accepted(each, survival) for each in inside)
    lost = 0.0 if rest is None else max(rest.value * expected - accepted, 0.0)
    return SliceReport(
        dimension=dimension,
        value=value,
        num_requests=len({each.request_id for each in inside}),
        num_blocks=num_blocks,
        tokens_per_block=1.0 + accepted / num_blocks,
        relative=relative,
        rest=None if rest is None else rest.value,
        loses=rest is not None and differs(relative, rest),
        num_lost_tokens=lost,
        lost_share=lost / max(num_lost, lost) if lost else 0.0,
    )


def _is_enough(groups: Sequence[BlockGroup], relative: RatioEstimate | None) -> bool:
    num_blocks = sum(each.num_blocks for each in groups)
    return relative is not None and relative.num_units >= MIN_REQUESTS and num_blocks >= MIN_BLOCKS


def _explained(
    slices: Sequence[SliceReport], groups: Sequence[BlockGroup], survival: Survival
) -> list[SliceReport]:
    """Set `explained_by` of losing slices, the mildest first; a slice that is explained explains no other."""
    causes = sorted((each for each in slices if each.loses), key=lambda each: -each.relative.value)
    names: dict[tuple[Dimension, str], str] = {}
    for each in list(causes):
        others = (other for other in causes if other.dimension != each.dimension)
        if (cause := next((o for o in others if _explains(o, each, groups, survival)), None)) is not None:
            names[each.dimension, each.value] = f"{cause.dimension} {cause.value}"
            causes.remove(each)
    return [replace(each, explained_by=names.get((each.dimension, each.value), "")) for each in slices]


def _explains(
    cause: SliceReport, loser: SliceReport, groups: Sequence[BlockGroup], survival: Survival
) -> bool:
    """Return whether `loser` loses in `cause` but not elsewhere; False if there is too little elsewhere."""
    parts: dict[tuple[bool, bool], list[BlockGroup]] = defaultdict(list)
    for each in groups:
        in_loser, in_cause = (each.labels.get(s.dimension) == s.value for s in (loser, cause))
        parts[in_loser, in_cause].append(each)
    both, without, others = parts[True, True], parts[True, False], parts[False, False]
    found = [relative_acceptance(part, survival) for part in (both, without, others)]
    if not all(_is_enough(part, each) for part, each in zip((both, without, others), found, strict=True)):
        return False
    within, elsewhere, rest = found
    assert within is not None and elsewhere is not None and rest is not None, "there are enough blocks"
    return differs(within, elsewhere) and not differs(elsewhere, rest)


def _better_half(groups: Sequence[BlockGroup]) -> Survival:
    """Return the survival curve of the better half of the requests, by relative acceptance."""
    pooled, of_request = survival_of(groups), defaultdict[str, list[BlockGroup]](list)
    for each in groups:
        of_request[each.request_id].append(each)

    def quality(some: Sequence[BlockGroup]) -> float:
        expected = sum(expected_accepted(each, pooled) for each in some)
        return sum(each.num_accepted for each in some) / expected if expected else 0.0

    ranked = sorted(of_request.values(), key=quality, reverse=True)
    return survival_of([each for some in ranked[: (len(ranked) + 1) // 2] for each in some])


def _positions(
    groups: Sequence[BlockGroup], survival: Survival, num_lost: float
) -> tuple[PositionReport, ...]:
    """Return acceptance by position in the block, and each position's share of the slice's lost drafts.

    A position is reached by blocks that have a draft there and accepted all before it. `survival` is the
    reference.
    """
    made, hits = _position_counts(groups)
    found: list[PositionReport] = []
    for place, (num, hit) in enumerate(zip(made, hits, strict=True)):
        reached = sum(
            count
            for each in groups
            for (drafted, accepted), count in each.counts.items()
            if drafted > place and accepted >= place
        )
        here, before = (survival[i] if i < len(survival) else 0.0 for i in (place, place - 1))
        before = 1.0 if place == 0 else before
        lost = max(here * num - hit, 0.0)
        found.append(
            PositionReport(
                position=place + 1,
                num_reached=reached,
                acceptance=hit / reached if reached else 0.0,
                reference=here / before if before else 0.0,
                lost_share=lost / max(num_lost, lost) if lost else 0.0,
            )
        )
    return tuple(found)


def _position_counts(groups: Sequence[BlockGroup]) -> tuple[list[int], list[int]]:
    """Return, by position, the blocks with a draft there and those that accepted it and all before it."""
    longest = max((drafted for each in groups for drafted, _ in each.counts), default=0)
    made, hits = [0] * longest, [0] * longest
    for each in groups:
        for (drafted, accepted), count in each.counts.items():
            for place in range(drafted):
                made[place] += count
                hits[place] += count * (place < accepted)
    return made, hits


def _by_request(
    groups: Sequence[BlockGroup], above: Sequence[float], below: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Sum both over the groups of each request, which is the sampling unit."""
    sums = defaultdict[str, list[float]](lambda: [0.0, 0.0])
    for each, over, under in zip(groups, above, below, strict=True):
        sums[each.request_id][0] += over
        sums[each.request_id][1] += under
    return [over for over, _ in sums.values()], [under for _, under in sums.values()]
