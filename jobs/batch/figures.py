"""What a batch job tells its user: figures that add up, a progress bar or plain lines, a table at the end."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

from ...actors.files import rounded
from ...cluster.acceptance import mean_acceptance_length
from ..tables import decimals, print_table

PLAIN_INTERVAL_S = 10.0


@dataclass(slots=True)
class JobFigures:
    """Counts over results. `begin_s`, `end_s` (Unix time) span the rows' work, not the start of Ray."""

    rows: int = 0
    failed: int = 0
    first_error: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    begin_s: float = 0.0
    end_s: float = 0.0

    def add(self, results: pa.Table) -> None:
        """Count a table of results (`answering.WIRE_SCHEMA`)."""
        if not results.num_rows:
            return
        self.rows += results.num_rows
        errors = [error for error in results["error"].to_pylist() if error]
        self.failed += len(errors)
        if errors:
            self.first_error = self.first_error or errors[0]["message"]
        for name in (
            "prompt_tokens",
            "completion_tokens",
            "num_steps",
            "num_draft_tokens",
            "num_accepted_tokens",
        ):
            setattr(self, name, getattr(self, name) + sum(filter(None, results[name].to_pylist())))
        begin_s, end_s = min(results["begin_s"].to_pylist()), max(results["end_s"].to_pylist())
        self.begin_s = min(self.begin_s, begin_s) if self.begin_s else begin_s
        self.end_s = max(self.end_s, end_s)

    @property
    def wall_s(self) -> float:
        return self.end_s - self.begin_s

    @property
    def tokens_per_s(self) -> float:
        return self.completion_tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def mean_acceptance_length(self) -> float | None:
        return mean_acceptance_length(self.num_steps, self.num_accepted_tokens)

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "rows": self.rows,
            "failed": self.failed,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "wall_s": round(self.wall_s, 3),
            "tokens_per_s": round(self.tokens_per_s, 2),
            "mean_acceptance_length": rounded(self.mean_acceptance_length),
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
        }


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

    def update(self, figures: JobFigures) -> None:
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


def print_job(figures: JobFigures, output: str) -> None:
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
