"""What a batch job tells its user while it runs: a bar on a terminal, else a plain line now and then.

The lines go to standard error, which is what `ray job logs` and Ray's dashboard show of a job. What is said
is worked out in `pace.py`; at the end comes `report.py`.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from ...actors.batch.figures import EngineFigures, RowFigures
from ..progress import spell_time
from ..tables import decimals
from .pace import Pace, Progress

PLAIN_INTERVAL_S = 10.0


class ProgressView:
    """Rows and figures while a job runs.

    Args:
        total_rows: of the dataset.
        left: of them to be done in this run; None: those that the first figures do not count.
        compares: whether the job measures what speculation is worth.
    """

    def __init__(
        self,
        total_rows: int,
        console: Console | None = None,
        *,
        left: int | None = None,
        compares: bool = True,
    ) -> None:
        self.total = total_rows
        self._pace = Pace(total_rows, left)
        self._compares = compares
        self._console = console or Console(stderr=True)
        self._printed_s = time.monotonic()
        self._awaited: int | None = None  # rows before the first of this run
        self._told = False  # of a row of this run
        self._bar: Bar | None = None
        self._words = Text("loading the models", style="dim")
        if self._console.is_terminal:
            columns = (SpinnerColumn(), MofNCompleteColumn(), TextColumn("rows"), BarColumn(None))
            self._bar = Bar(*columns, TaskProgressColumn(), TextColumn("{task.description}"), expand=True)
            self._bar.add_task("", total=total_rows)
            self._live = Live(Group(self._bar, self._words), console=self._console, transient=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._live.start()
        else:
            print(f"{self.total} rows; loading the models", file=sys.stderr, flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        """A line that stays, whatever the bar shows."""
        if self._bar is not None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def update(
        self, figures: RowFigures, live: EngineFigures | None = None, engines: int | None = None
    ) -> Progress:
        """Show how far the job is. Costs little: call it every second or so.

        Args:
            figures: of all rows that are counted: of earlier runs, and those of this run that are durable.
            live: of all engines of this run together, those that are gone among them.
            engines: that live.
        """
        now = self._pace.look(figures, live or EngineFigures(), engines or 0)
        if self._bar is not None:
            left = "" if not now.left_s else f"about {spell_time(now.left_s)} left"
            self._bar.update(self._bar.task_ids[0], completed=now.rows, description=left)
            self._words.plain = "; ".join(self._figures(now))
        elif time.monotonic() - self._printed_s >= PLAIN_INTERVAL_S or self._news(now.rows):
            self._printed_s = time.monotonic()
            print(self._line(now), file=sys.stderr, flush=True)
        return now

    def _news(self, rows: int) -> bool:
        """Whether these are the first rows of this run."""
        if self._awaited is None:
            self._awaited = rows
        if self._told or rows == self._awaited:
            return False
        self._told = True
        return True

    def _line(self, now: Progress) -> str:
        share = f" ({100 * now.rows / now.total:.0f} %)" if now.total else ""
        left = () if not now.left_s else (f"about {spell_time(now.left_s)} left",)
        return "; ".join((f"{now.rows}/{now.total} rows{share}", *self._figures(now), *left))

    def _figures(self, now: Progress) -> list[str]:
        """What is said beside rows and time."""
        engines = [f"{now.engines} engine" + "s" * (now.engines != 1)] if now.engines else []
        if not now.answering:
            return [*engines, "loading the models"]
        speedup = []
        if now.speedup is not None:
            speedup = [f"{now.speedup:.2f} x plain decoding"]
        elif self._compares:
            speedup = ["speed-up not measured yet"]
        return [
            f"{now.failed} failed",
            f"{now.prompt_tokens} tokens in, {now.completion_tokens} out",
            f"{now.tokens_per_s:.0f} tokens/s now, {now.mean_tokens_per_s:.0f} on average",
            f"{decimals(now.mean_acceptance_length)} tokens per step",
            *speedup,
            *engines,
        ]
