"""What rows cost, counted: figures that add up over rows, parts, engines and runs of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import pyarrow as pa

from ...cluster.acceptance import mean_acceptance_length
from ..files import rounded

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
