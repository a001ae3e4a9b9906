"""Measures the speed-up of speculation within a batch job, by answering some of its rows plainly.

Answers do not depend on speculation, so a few rows can be answered without it and count like any others. This
module decides which rows, and which times are comparable; the code that starts rows calls it (`EngineMeter`).
Times and the engine's token counter are arguments.

    rows started   speculated ......... | plain ................   | speculated .............
    rows running   speculated ......... | both . | plain alone . | both . | speculated ......
    counted            [<-- before -->]          [<-- plain -->]          [<-- after -->]

Time counts only while the engine is full and all of its rows are of one kind. The speculated time before the
plain rows equals that after them, and is at most theirs, so that a drift (rows ordered by length) cancels
out. Plain rows are started until half of `num_rows` were started while no speculated row ran. That takes
about `num_rows`, and up to twice as many if they finish before the speculated ones. A sample that does not
complete, or took too little time, gives no result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from ..errors import ConfigError

ROWS_PER_SEQ = 2  # the first fill the engine, the second keep it full while the first are answered
STRETCH = 2  # most plain rows, as a multiple of `num_rows`
MIN_S = 1.0  # of each kind of time; less is noise
MAX_SHARE = 0.05  # of a job's rows, unless the user requests a sample


def num_plain_rows(num_rows: int, max_num_seqs: int, requested: int | None = None) -> int:
    """Return how many rows of a job to answer plainly; by default as needed, within a small share."""
    needed = ROWS_PER_SEQ * max_num_seqs
    if requested is None:
        return needed if needed <= MAX_SHARE * num_rows else 0
    if requested and requested < needed:
        raise ConfigError(
            f"plain_sample={requested} is too few rows to measure with: an engine of "
            f"max_num_seqs={max_num_seqs} "
            f"must stay full of plain rows for a while. Set it to {needed} or more, or to 0 (none).",
            param="plain_sample",
        )
    return requested


@dataclass(frozen=True, slots=True)
class BaselineComparison:
    """Tokens that a full engine generated in plain and in speculated time (seconds)."""

    plain_tokens: int
    plain_s: float
    drafted_tokens: int
    drafted_s: float

    @property
    def plain_tokens_per_s(self) -> float:
        return self.plain_tokens / self.plain_s

    @property
    def drafted_tokens_per_s(self) -> float:
        return self.drafted_tokens / self.drafted_s

    @property
    def speedup(self) -> float:
        return self.drafted_tokens_per_s / self.plain_tokens_per_s


@dataclass(frozen=True, slots=True)
class _Interval:
    seconds: float
    tokens: float

    def first(self, seconds: float) -> _Interval:
        """Return at most the first `seconds` of it, assuming evenly distributed tokens."""
        if self.seconds <= seconds:
            return self
        return _Interval(seconds, self.tokens * seconds / self.seconds)


class _Phase(Enum):
    BEFORE = auto()
    PLAIN = auto()  # plain rows are being started
    AFTER = auto()
    DONE = auto()


class BaselineSample:
    """The sample of one engine, which is full with `full` rows; see `num_plain_rows`."""

    def __init__(self, num_rows: int, full: int) -> None:
        self._num_rows = num_rows
        self._full = full
        self._phase = _Phase.BEFORE if num_rows else _Phase.DONE
        self._num_running = {True: 0, False: 0}  # by whether they are speculated
        self._num_warm = 0  # speculated rows answered before the sample
        self._num_started = 0  # plain rows
        self._num_alone = 0  # plain rows that were started while no speculated row ran
        self._event_s: float | None = None
        self._event_tokens = 0
        self._before: list[_Interval] = []
        self._plain: list[_Interval] = []
        self._after: list[_Interval] = []
        self._comparison: BaselineComparison | None = None

    @property
    def comparison(self) -> BaselineComparison | None:
        return self._comparison

    def start(self, now_s: float, num_tokens: int) -> bool:
        """Record a row that goes to the engine (`num_tokens` so far); return whether it speculates."""
        self._add_elapsed(now_s, num_tokens)
        if self._phase is _Phase.BEFORE and self._is_warm:
            self._phase = _Phase.PLAIN
        elif self._phase is _Phase.PLAIN and self._has_enough:
            self._phase = _Phase.AFTER if _seconds(self._plain) >= MIN_S else _Phase.DONE
        speculate = self._phase is not _Phase.PLAIN
        if not speculate:
            self._num_started += 1
            self._num_alone += not self._num_running[True]
        self._num_running[speculate] += 1
        return speculate

    def end(self, now_s: float, num_tokens: int, speculate: bool) -> None:
        """Record a row that has left the engine; `speculate` is the result of its `start`."""
        self._add_elapsed(now_s, num_tokens)
        self._num_running[speculate] -= 1
        self._num_warm += self._phase is _Phase.BEFORE
        assert min(self._num_running.values()) >= 0, "more rows ended than were started"

    @property
    def _is_warm(self) -> bool:
        """Whether enough speculated rows have ended, and the one that is starting fills the engine."""
        return (
            self._num_warm >= self._num_rows
            and sum(self._num_running.values()) + 1 >= self._full
            and _seconds(self._before) >= MIN_S
        )

    @property
    def _has_enough(self) -> bool:
        """Whether no more plain rows are needed."""
        if self._num_started >= STRETCH * self._num_rows:
            return True
        return 2 * self._num_alone >= self._num_rows and _seconds(self._plain) >= MIN_S

    def _add_elapsed(self, now_s: float, num_tokens: int) -> None:
        if self._phase is _Phase.DONE:
            return
        if self._event_s is not None:
            stretch = _Interval(now_s - self._event_s, num_tokens - self._event_tokens)
            drafted, plain = self._num_running[True], self._num_running[False]
            if drafted + plain >= self._full and not (drafted and plain):
                self._record(stretch, drafted=drafted > 0)
        self._event_s, self._event_tokens = now_s, num_tokens

    def _record(self, stretch: _Interval, drafted: bool) -> None:
        if not drafted:
            self._plain.append(stretch)
        elif self._phase is _Phase.BEFORE:
            self._before.append(stretch)
        elif self._phase is _Phase.AFTER:
            self._after.append(stretch)
            self._compare()

    def _compare(self) -> None:
        """Compare, once there is as much time after the plain rows as before them."""
        wanted_s = min(_seconds(self._before), _seconds(self._plain))
        if _seconds(self._after) < wanted_s:
            return
        before, after = _until(wanted_s, reversed(self._before)), _until(wanted_s, self._after)
        drafted_tokens = round(before.tokens + after.tokens)
        plain_tokens = round(sum(stretch.tokens for stretch in self._plain))
        if drafted_tokens and plain_tokens:
            self._comparison = BaselineComparison(
                plain_tokens, _seconds(self._plain), drafted_tokens, before.seconds + after.seconds
            )
        self._phase = _Phase.DONE


def _seconds(stretches: Iterable[_Interval]) -> float:
    return sum(stretch.seconds for stretch in stretches)


def _until(seconds: float, stretches: Iterable[_Interval]) -> _Interval:
    tokens, left_s = 0.0, seconds
    for stretch in stretches:
        taken = stretch.first(left_s)
        tokens += taken.tokens
        left_s -= taken.seconds
        if left_s <= 0:
            break
    return _Interval(seconds, tokens)
