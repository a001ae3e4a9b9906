"""What speculation is worth, measured in a job: some of its own rows, answered plainly.

Answers do not depend on speculation, so a few rows can be answered without it and count as any others. Which
rows, and what of the time is comparable, is decided here; who starts rows asks and tells (`EngineMeter`).
Pure: times and the engine's token counter are given.

    rows started   speculated ......... | plain ................   | speculated .............
    rows running   speculated ......... | both . | plain alone . | both . | speculated ......
    counted            [<-- before -->]          [<-- plain -->]          [<-- after -->]

Time counts only while the engine is full and all of its rows are of one kind. The speculated time is as long
before the plain rows as after them, and at most as long as theirs, so that a drift (rows ordered by length)
falls out. Plain rows are started until half of `num_rows` were while no speculated one ran: that takes about
`num_rows`, and up to twice as many where they are so fast that speculated ones outlast them. A sample that
does not come to its end, or that was over in no time, says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from .errors import ConfigError

ROWS_PER_SEAT = 2  # the first fill the engine, the second keep it full while the first are answered
STRETCH = 2  # what a sample may take at most, of what it is to take
LEAST_S = 1.0  # of each kind of time; less than that is noise
MAX_SHARE = 0.05  # of a job's rows, where nobody asked


def num_plain_rows(num_rows: int, max_num_seqs: int, asked: int | None = None) -> int:
    """How many rows of a job are answered plainly to measure what speculation is worth; 0: none.

    Args:
        num_rows: of the job.
        max_num_seqs: of an engine.
        asked: by the user; None: as many as it takes, where that is a small share of the rows.

    Raises:
        ConfigError: `asked` is too few to measure anything.
    """
    needed = ROWS_PER_SEAT * max_num_seqs
    if asked is None:
        return needed if needed <= MAX_SHARE * num_rows else 0
    if asked and asked < needed:
        raise ConfigError(
            f"plain_sample={asked} is too few rows to measure with: an engine of max_num_seqs={max_num_seqs} "
            f"must stay full of plain rows for a while. Ask for {needed} or more, or for 0 (none).",
            param="plain_sample",
        )
    return asked


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tokens that came out of a full engine in two kinds of time (seconds)."""

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
        """How many times as fast speculation was."""
        return self.drafted_tokens_per_s / self.plain_tokens_per_s


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Time between two events."""

    seconds: float
    tokens: float

    def first(self, seconds: float) -> _Stretch:
        """At most that much of it; its tokens came evenly."""
        if self.seconds <= seconds:
            return self
        return _Stretch(seconds, self.tokens * seconds / self.seconds)


class _Phase(Enum):
    BEFORE = auto()
    PLAIN = auto()  # plain rows are being started
    AFTER = auto()
    DONE = auto()


class PlainSample:
    """The sample of one engine.

    Args:
        num_rows: how many rows are about to be answered plainly; see `num_plain_rows`.
        full: with that many rows in it the engine is full.
    """

    def __init__(self, num_rows: int, full: int) -> None:
        self._num_rows = num_rows
        self._full = full
        self._phase = _Phase.BEFORE if num_rows else _Phase.DONE
        self._num_running = {True: 0, False: 0}  # by whether they are speculated
        self._num_warm = 0  # speculated rows answered before the sample
        self._num_started = 0  # plain rows
        self._num_alone = 0  # of them, while no speculated row ran
        self._event_s: float | None = None
        self._event_tokens = 0
        self._before: list[_Stretch] = []
        self._plain: list[_Stretch] = []
        self._after: list[_Stretch] = []
        self._comparison: Comparison | None = None

    @property
    def comparison(self) -> Comparison | None:
        """What was measured; None until the sample is whole."""
        return self._comparison

    def start(self, now_s: float, num_tokens: int) -> bool:
        """A row goes to the engine. Returns whether it is to be speculated.

        Args:
            now_s: of any clock that only grows.
            num_tokens: that the engine has brought out so far.
        """
        self._count(now_s, num_tokens)
        if self._phase is _Phase.BEFORE and self._warm:
            self._phase = _Phase.PLAIN
        elif self._phase is _Phase.PLAIN and self._enough:
            self._phase = _Phase.AFTER if _seconds(self._plain) >= LEAST_S else _Phase.DONE
        speculate = self._phase is not _Phase.PLAIN
        if not speculate:
            self._num_started += 1
            self._num_alone += not self._num_running[True]
        self._num_running[speculate] += 1
        return speculate

    def end(self, now_s: float, num_tokens: int, speculate: bool) -> None:
        """A row has left the engine; `speculate` is what `start` said of it."""
        self._count(now_s, num_tokens)
        self._num_running[speculate] -= 1
        self._num_warm += self._phase is _Phase.BEFORE
        assert min(self._num_running.values()) >= 0, "more rows ended than were started"

    @property
    def _warm(self) -> bool:
        """Enough speculated rows went before, and the one that is starting fills the engine."""
        return (
            self._num_warm >= self._num_rows
            and sum(self._num_running.values()) + 1 >= self._full
            and _seconds(self._before) >= LEAST_S
        )

    @property
    def _enough(self) -> bool:
        """No more plain rows are to be started."""
        if self._num_started >= STRETCH * self._num_rows:
            return True
        return 2 * self._num_alone >= self._num_rows and _seconds(self._plain) >= LEAST_S

    def _count(self, now_s: float, num_tokens: int) -> None:
        """Take the time since the last event for what it was."""
        if self._phase is _Phase.DONE:
            return
        if self._event_s is not None:
            stretch = _Stretch(now_s - self._event_s, num_tokens - self._event_tokens)
            drafted, plain = self._num_running[True], self._num_running[False]
            if drafted + plain >= self._full and not (drafted and plain):
                self._file(stretch, drafted=drafted > 0)
        self._event_s, self._event_tokens = now_s, num_tokens

    def _file(self, stretch: _Stretch, drafted: bool) -> None:
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
            self._comparison = Comparison(
                plain_tokens, _seconds(self._plain), drafted_tokens, before.seconds + after.seconds
            )
        self._phase = _Phase.DONE


def _seconds(stretches: Iterable[_Stretch]) -> float:
    return sum(stretch.seconds for stretch in stretches)


def _until(seconds: float, stretches: Iterable[_Stretch]) -> _Stretch:
    """The first so many seconds of the stretches, in one."""
    tokens, left_s = 0.0, seconds
    for stretch in stretches:
        taken = stretch.first(left_s)
        tokens += taken.tokens
        left_s -= taken.seconds
        if left_s <= 0:
            break
    return _Stretch(seconds, tokens)
