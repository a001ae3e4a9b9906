"""Statistical test whether a candidate drafter is better than the current one, on live traffic.

Tokens do not depend on the drafter, so a trial changes no answer. It compares the accepted drafts per
decoding step of a request, including steps that verified none. Each request is assigned one of the two
drafters at random. In a shadow trial, finished answers are instead decoded again by both, and no request
waits for that.

Checking a difference repeatedly until it looks significant inflates false positives, so the evidence is an
*e-process*, which may be checked and stopped at any time. It is a bettor's wealth that starts at 1 and does
not grow in expectation unless the candidate is better; the probability that it ever reaches 1 / alpha is at
most alpha (Ville 1939). The bets are those of Waudby-Smith and Ramdas, "Estimating means of bounded random
variables by betting" (JRSS-B 86, 2024), on the importance-weighted estimate of the difference, as in
Waudby-Smith et al., "Anytime-valid off-policy inference for contextual bandits" (2024). A second bettor bets
that the candidate is worse. The wealths of replicas with independent assignments are multiplied; the product
is again a wealth.

    request i   arm T_i (1: candidate, with prob. p)       score d_i = (y_i - m_i) / (4 s_i), within [-1, 1]
    bet         x_i = d_i              if T_i              wealth x (1 + c x_i)   for "better", c in (0, 1)
                      -d_i p / (1-p)   else                wealth x (1 - c x_i)   for "worse"   (p <= 1/2)

y_i is the accepted drafts per step, m_i and s_i are mean and deviation over earlier requests. If the drafters
are equal, x_i has mean 0 whatever m_i, s_i and the traffic are. Requests count in the order in which they
*began*: in the order of their ends, quick ones with good drafts would come first.

Knows neither a clock nor engines. Used by `actors/serve/drafter_canary.py`.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..errors import ConfigError

# Result of a trial. better: it would be promoted, but auto_promote is off.
Verdict = Literal["promoted", "better", "rolled_back", "undecided"]
Role = Literal["incumbent", "candidate"]

# shares of the wealth that are bet; each share gets a fifth of the wealth, as the best one is unknown
_BETS = (0.05, 0.1, 0.2, 0.4, 0.8)
_OUTLIER = 4.0  # deviations beyond which a score is clipped
_WARM_UP = 20  # requests that only estimate mean and deviation
_WINDOW = 64  # requests over which mean and deviation are averaged
# tracked requests, including finished ones after one that has not; further ones take no part
_MAX_OPEN = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRules:
    """Parameters of a trial.

    Attributes:
        fraction: share of requests for which the candidate drafts, above 0 and at most 0.5; in a shadow
            trial, share of the answers that both decode again.
        shadow: the candidate drafts for no live request.
        auto_promote: a better candidate replaces the drafter automatically.
        alpha: the probability of promoting a candidate that is not better, and of dropping one that is not
            worse.
        min_requests: requests of the candidate before any verdict.
        max_duration_s: the candidate is dropped after this many seconds without a verdict.
    """

    fraction: float = 0.1
    shadow: bool = False
    auto_promote: bool = False
    alpha: float = 0.01
    min_requests: int = 50
    max_duration_s: float = 86_400.0

    def __post_init__(self) -> None:
        for name, minimum, maximum in (
            ("fraction", 0.0, 0.5),
            ("alpha", 0.0, 0.5),
            ("max_duration_s", 0.0, math.inf),
        ):
            value, upper_bound = (
                getattr(self, name),
                "" if maximum == math.inf else f" and at most {maximum:g}",
            )
            ok = _is_number(value, float) and minimum < value <= maximum
            _require(ok, name, value, f"a number above {minimum:g}{upper_bound}")
        ok = _is_number(self.min_requests, int) and self.min_requests >= 1
        _require(ok, "min_requests", self.min_requests, "an integer of at least 1")
        for name in ("shadow", "auto_promote"):
            value = getattr(self, name)
            _require(isinstance(value, bool), name, value, "true or false")


class ArmStats(NamedTuple):
    requests: int = 0
    steps: int = 0
    accepted: int = 0

    @property
    def tokens_per_step(self) -> float | None:
        """Mean over all steps, including the target's own token; None without steps."""
        return 1.0 + self.accepted / self.steps if self.steps else None

    def plus(self, other: ArmStats) -> ArmStats:
        return ArmStats(*(a + b for a, b in zip(self, other, strict=True)))


NOTHING = ArmStats()


@dataclass(frozen=True, slots=True)
class Evidence:
    """The state of a trial, as replicas send it: logarithms of the bettors' wealths, counts by drafter."""

    log_better: float = 0.0
    log_worse: float = 0.0
    incumbent: ArmStats = NOTHING
    candidate: ArmStats = NOTHING

    @staticmethod
    def pooled(each: Iterable[Evidence]) -> Evidence:
        """Combine the evidence of replicas with independent assignments."""
        every = list(each)
        return Evidence(
            sum(one.log_better for one in every),
            sum(one.log_worse for one in every),
            _sum(one.incumbent for one in every),
            _sum(one.candidate for one in every),
        )


NO_EVIDENCE = Evidence()


def decide(rules: TrialRules, evidence: Evidence, age_s: float) -> Verdict | None:
    """Return the result of a trial that is `age_s` seconds old; None if it goes on. Call at any time."""
    if evidence.candidate.requests >= rules.min_requests:
        enough = -math.log(rules.alpha)
        if evidence.log_worse >= enough:
            return "rolled_back"
        if evidence.log_better >= enough:
            return "promoted" if rules.auto_promote else "better"
    return "undecided" if age_s >= rules.max_duration_s else None


@dataclass(slots=True, eq=False)
class Assignment:
    """A request's part in a trial; `stats` is None while it runs."""

    role: Role
    stats: ArmStats | None = None


class CanaryTrial:
    """One engine's part in a trial; `draw` gives random numbers for the assignments."""

    def __init__(self, rules: TrialRules, draw: random.Random | None = None) -> None:
        self.rules = rules
        self._draw = draw or random.SystemRandom()
        self._open: deque[Assignment] = deque()  # in the order in which they began
        self._scale = _Scale()
        self._better, self._worse = _Wealth(), _Wealth()
        self._tallies: dict[Role, ArmStats] = {"incumbent": NOTHING, "candidate": NOTHING}

    @property
    def evidence(self) -> Evidence:
        return Evidence(self._better.log, self._worse.log, **self._tallies)

    def begin(self) -> Assignment | None:
        """Assign a drafter to a request that begins; None if it takes no part and the incumbent drafts."""
        if self.rules.shadow or len(self._open) >= _MAX_OPEN:
            return None
        ticket = Assignment("candidate" if self._draw.random() < self.rules.fraction else "incumbent")
        self._open.append(ticket)
        return ticket

    def end(self, ticket: Assignment, stats: ArmStats) -> None:
        ticket.stats = stats
        while self._open and (first := self._open[0].stats) is not None:
            self._count(self._open.popleft().role, first)

    def compare(self, incumbent: ArmStats, candidate: ArmStats) -> None:
        """Record an answer that both drafters decoded in a shadow trial."""
        self._add_stats("incumbent", incumbent)
        self._add_stats("candidate", candidate)
        if not (incumbent.steps and candidate.steps):
            return
        gain = candidate.accepted / candidate.steps - incumbent.accepted / incumbent.steps
        self._bet(self._scale.of_difference(gain))
        self._scale.learn(gain)

    def _count(self, role: Role, stats: ArmStats) -> None:
        if not stats.steps:  # no information
            return
        self._add_stats(role, stats)
        value, fraction = stats.accepted / stats.steps, self.rules.fraction
        score = self._scale.of_value(value)
        self._bet(score if role == "candidate" else -score * fraction / (1.0 - fraction))
        self._scale.learn(value)

    def _add_stats(self, role: Role, tally: ArmStats) -> None:
        self._tallies[role] = self._tallies[role].plus(tally)

    def _bet(self, x: float) -> None:
        self._better.bet(x)
        self._worse.bet(-x)


@dataclass(slots=True)
class _Wealth:
    logs: list[float] = field(default_factory=lambda: [0.0] * len(_BETS))

    def bet(self, x: float) -> None:
        """Bet on a value in [-1, 1] with a mean of at most 0 if the hypothesis is wrong."""
        assert -1.0 <= x <= 1.0, "a bet may lose at most the whole wealth"
        self.logs = [log + math.log1p(size * x) for log, size in zip(self.logs, _BETS, strict=True)]

    @property
    def log(self) -> float:
        maximum = max(self.logs)
        return maximum + math.log(sum(math.exp(log - maximum) for log in self.logs) / len(self.logs))


@dataclass(slots=True)
class _Scale:
    """Mean and variance of earlier values, with old values discounted, as traffic drifts."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def learn(self, value: float) -> None:
        self.count += 1
        rate = max(1.0 / self.count, 1.0 / _WINDOW)
        before, self.mean = self.mean, self.mean + rate * (value - self.mean)
        self.variance += rate * ((value - before) * (value - self.mean) - self.variance)

    def of_value(self, value: float) -> float:
        """Return the distance from the mean, scaled and clipped to [-1, 1]."""
        return self._score(value - self.mean, self.variance)

    def of_difference(self, value: float) -> float:
        """Return the distance from 0, scaled and clipped to [-1, 1]."""
        return self._score(value, self.variance + self.mean**2)

    def _score(self, distance: float, variance: float) -> float:
        unit = _OUTLIER * math.sqrt(variance)
        if self.count < _WARM_UP or not distance:
            return 0.0
        return max(-1.0, min(1.0, distance / unit)) if unit else math.copysign(1.0, distance)


def _sum(tallies: Iterable[ArmStats]) -> ArmStats:
    total = NOTHING
    for tally in tallies:
        total = total.plus(tally)
    return total


def _is_number(value: object, kind: type[int] | type[float]) -> bool:
    return isinstance(value, (int, kind)) and not isinstance(value, bool)


def _require(ok: bool, name: str, value: object, wanted: str) -> None:
    if not ok:
        param = f"user_config.candidate.{name}"
        raise ConfigError(f"{param}={value!r} is not allowed: it must be {wanted}.", param=param)
