"""What a batch job tells its user: a progress bar or plain lines, a table at the end."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

from ...actors.batch.figures import RowFigures
from ..tables import decimals, print_table

PLAIN_INTERVAL_S = 10.0


class ProgressView:
    """Rows and figures while a job runs: a bar on a terminal, else a plain line now and then."""

    def __init__(self, total_rows: int, console: Console | None = None) -> None:
        self.total = total_rows
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._started_s = time.monotonic()
        self._printed_s = self._started_s - PLAIN_INTERVAL_S  # the first rows are news at once
        if self._console.is_terminal:
            columns = (
                SpinnerColumn(),
                MofNCompleteColumn(),
                TextColumn("rows"),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.add_task("loading the models", total=total_rows)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        else:
            print(f"{self.total} rows; loading the models", file=sys.stderr, flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str) -> None:
        """A line that stays, whatever the bar shows."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def update(self, figures: RowFigures) -> None:
        text = (
            f"{figures.prompt_tokens} tokens in, {figures.completion_tokens} out, "
            f"{figures.tokens_per_s:.0f} tokens/s, "
            f"mean acceptance length {decimals(figures.mean_acceptance_length)}, "
            f"{figures.failed} failed"
        )
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=figures.rows, description=text)
            return
        now_s = time.monotonic()
        if now_s - self._printed_s < PLAIN_INTERVAL_S:
            return
        self._printed_s = now_s
        left_s = (now_s - self._started_s) * (self.total - figures.rows) / max(figures.rows, 1)
        print(f"{figures.rows}/{self.total} rows, {text}, {left_s:.0f} s left", file=sys.stderr, flush=True)


def print_job(figures: RowFigures, output: str) -> None:
    """The final report of a batch job."""
    print_table(
        f"results in {output}",
        ["rows", "failed", "tokens in", "tokens out", "seconds", "tokens/s", "mean acceptance length"],
        [
            [
                str(figures.rows),
                str(figures.failed),
                str(figures.prompt_tokens),
                str(figures.completion_tokens),
                f"{figures.wall_s:.1f}",
                f"{figures.tokens_per_s:.1f}",
                decimals(figures.mean_acceptance_length),
            ]
        ],
    )
