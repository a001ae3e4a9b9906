"""What rows cost, counted: figures that add up over rows, parts, engines and runs of a job.

`RowFigures` are made of results and are stored beside every part, so they are what a job's report is made
of, whoever was killed meanwhile. `EngineFigures` are what living engines say, for progress; they end with
their engines, and what must last of them is stamped on results (`metering.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import pyarrow as pa

from ...cluster.acceptance import mean_acceptance_length
from ..files import rounded

# What an engine stamps on a result: what it spent since the result before. Times in device-seconds (an engine
# of 4 GPUs spends 4 a second): held at all, with rows to be answered, with a row running; then both sides of
# its plain sample (`cluster/plain_sample.py`), on the result with which the comparison ended.
SPENT = (
    *("device_s", "open_s", "busy_s"),
    *("plain_tokens", "plain_s", "drafted_tokens", "drafted_s"),
)
SUMMED = ("prompt_tokens", "completion_tokens", "num_steps", "num_draft_tokens", "num_accepted_tokens")


@dataclass(slots=True)
class RowFigures:
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
        for name in SUMMED:
            setattr(self, name, getattr(self, name) + sum(filter(None, results[name].to_pylist())))
        self._span(min(results["begin_s"].to_pylist()), max(results["end_s"].to_pylist()))

    def merge(self, other: RowFigures) -> None:
        """Count what another has counted."""
        if not other.rows:
            return
        for name in ("rows", "failed", *SUMMED):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first_error = self.first_error or other.first_error
        self._span(other.begin_s, other.end_s)

    def counts(self) -> dict[str, Any]:  # Any: JSON
        """All of it, for `from_counts`."""
        return asdict(self)

    @classmethod
    def from_counts(cls, counts: Mapping[str, Any]) -> Self:
        return cls(**counts)

    def _span(self, begin_s: float, end_s: float) -> None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """What one engine actor has done since it started, or several together. Cumulative; of this run only.

    Attributes:
        rows_done: answered or failed here.
        rows_running: started and not done.
        prompt_tokens, completion_tokens, num_steps, num_accepted_tokens: by the engine's counters, so those
            of running rows are in. `num_steps` are verified blocks, as in `RowFigures`.
        device_s: device-seconds since the engine began to load.
        open_s: device-seconds between the first row's start and the last row's end (or now, if rows run).
        busy_s: device-seconds in which a row was running.
        loose_s: of `device_s`, those since the last row ended: no row's figures have them yet.
        first_row_s, last_row_s: Unix time of the first row's start and the last one's end; 0 until then.
        num_devices: GPUs, or CPU cores.
        plain_tokens, plain_s, drafted_tokens, drafted_s: the plain sample, once it is whole.
    """

    rows_done: int = 0
    rows_running: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_steps: int = 0
    num_accepted_tokens: int = 0
    device_s: float = 0.0
    open_s: float = 0.0
    busy_s: float = 0.0
    loose_s: float = 0.0
    first_row_s: float = 0.0
    last_row_s: float = 0.0
    num_devices: float = 0
    plain_tokens: int = 0
    plain_s: float = 0.0
    drafted_tokens: int = 0
    drafted_s: float = 0.0

    def merge(self, other: EngineFigures) -> EngineFigures:
        """Both together."""
        both: dict[str, Any] = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        starts = [start_s for start_s in (self.first_row_s, other.first_row_s) if start_s]
        both["first_row_s"] = min(starts, default=0.0)
        both["last_row_s"] = max(self.last_row_s, other.last_row_s)
        return EngineFigures(**both)
