"""How a batch job goes: from figures of rows and of engines to what can be said of it now.

Pure but for the clock: `ProgressView` shows what comes of it, and `gauges.py` gives it to Ray.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ...actors.batch.figures import EngineFigures, RowFigures

NOW_S = 10.0  # "now"
LATELY_S = 60.0  # what the time that is left goes by
SAMPLE_S = 0.5


@dataclass(frozen=True, slots=True)
class Progress:
    """A moment of a job.

    Attributes:
        rows, total: done and in the dataset, those of earlier runs among them; `failed`: of those done.
        prompt_tokens, completion_tokens: of all runs; tokens of running rows are in.
        tokens_per_s, mean_tokens_per_s: tokens out, now and since the first row of this run.
        left_s: until all rows are done; None while too few of them are to tell.
        mean_acceptance_length: of this run, or of earlier ones before its first step.
        speedup: against the plain sample; None unless it was measured.
        engines: that live.
        answering: whether a row has been begun in this run.
    """

    rows: int
    total: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    tokens_per_s: float
    mean_tokens_per_s: float
    left_s: float | None
    mean_acceptance_length: float | None
    speedup: float | None
    engines: int
    answering: bool


class Pace:
    """Keeps what it takes to tell a rate.

    Args:
        total: rows of the dataset.
        left: of them to be done in this run; None: those that the first figures do not count.
        clock: seconds, monotonic.
    """

    def __init__(self, total: int, left: int | None = None, clock: Callable[[], float] = time.monotonic):
        self._total = total
        self._left = left
        self._clock = clock
        self._earlier: tuple[int, int, int] | None = None  # rows, tokens in and out before this run
        self._samples: deque[tuple[float, int]] = deque()  # time, tokens out in this run
        self._begin_s: float | None = None  # when the first row of this run was seen

    def look(self, figures: RowFigures, live: EngineFigures, engines: int) -> Progress:
        """The job now.

        Args:
            figures: of all rows that are counted: of earlier runs, and those of this run that are durable.
            live: of all engines of this run, those that are gone among them.
            engines: that live.
        """
        if self._earlier is None:
            self._earlier = figures.rows, figures.prompt_tokens, figures.completion_tokens
            self._left = self._total - figures.rows if self._left is None else self._left
        rows, tokens_in, tokens_out = self._earlier
        durable_rows, durable_tokens = figures.rows - rows, figures.completion_tokens - tokens_out
        done, tokens = max(durable_rows, live.rows_done), max(durable_tokens, live.completion_tokens)
        assert self._left is not None
        left = max(0, self._left - done)
        answering = bool(done or tokens or live.rows_running)
        self._sample(tokens, answering)
        left_s = None
        if durable_rows and done >= live.rows_running:  # before, only short rows are done
            left_s = self._left_s(
                left, durable_tokens / durable_rows, tokens - durable_tokens, done - durable_rows
            )
        comparison = live.comparison or figures.comparison
        return Progress(
            rows=self._total - left,
            total=self._total,
            failed=figures.failed,
            prompt_tokens=tokens_in + max(figures.prompt_tokens - tokens_in, live.prompt_tokens),
            completion_tokens=tokens_out + tokens,
            tokens_per_s=self._rate(NOW_S),
            mean_tokens_per_s=self._mean_rate(tokens),
            left_s=left_s,
            mean_acceptance_length=live.mean_acceptance_length or figures.mean_acceptance_length,
            speedup=None if comparison is None else comparison.speedup,
            engines=engines,
            answering=answering,
        )

    def _sample(self, tokens: int, answering: bool) -> None:
        now_s = self._clock()
        if answering and self._begin_s is None:
            self._begin_s = now_s
        if not answering or (
            self._samples and tokens < self._samples[-1][1]
        ):  # an engine's counters are gone
            self._samples.clear()
        if len(self._samples) > 1 and now_s - self._samples[-2][0] < SAMPLE_S:
            self._samples.pop()  # the one before is near enough
        self._samples.append((now_s, tokens))
        while len(self._samples) > 2 and self._samples[1][0] <= now_s - LATELY_S:
            self._samples.popleft()

    def _rate(self, seconds: float) -> float:
        """Tokens per second over the last seconds, or over less at the start."""
        now_s, tokens = self._samples[-1]
        then_s, then = now_s, tokens
        for sample_s, sampled in reversed(self._samples):
            then_s, then = sample_s, sampled
            if sample_s <= now_s - seconds:
                break
        return (tokens - then) / (now_s - then_s) if now_s > then_s else 0.0

    def _mean_rate(self, tokens: int) -> float:
        elapsed_s = 0.0 if self._begin_s is None else self._samples[-1][0] - self._begin_s
        return tokens / elapsed_s if elapsed_s > 0 else 0.0

    def _left_s(self, left: int, tokens_per_row: float, unstored: int, unstored_rows: int) -> float | None:
        """Time until the rows that are left are done, by their tokens.

        Args:
            left: rows, the running ones among them.
            tokens_per_row: of rows that are done.
            unstored: tokens that are there and not of durable rows.
            unstored_rows: how many rows, done and not durable, have a part in them.
        """
        if not left:
            return 0.0
        rate = self._rate(LATELY_S)
        begun = max(0.0, unstored - unstored_rows * tokens_per_row)  # of running rows
        return max(0.0, left * tokens_per_row - begun) / rate if rate > 0 else None
