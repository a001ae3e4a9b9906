"""The report of a batch job as JSON and tables: what was answered, its cost, the acceptance.

It is computed from stats that are stored with the results (`RowStats`, of all runs), so running the same
command again reports the same. Nothing is estimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...actors.batch.row_stats import Category, Device, NameCounts, RowStats, length_range
from ...actors.system.atomic_files import rounded
from ...cluster.speculation.acceptance_length import acceptance_by_position
from ..common.tables import NO_FIGURE, decimals, print_table


@dataclass(frozen=True, slots=True)
class Report:
    """`price_per_gpu_hour` is not applied to CPU cores."""

    stats: RowStats
    device: Device
    about: Mapping[str, Any]  # Any: JSON
    price_per_gpu_hour: float | None = None

    @property
    def _hourly_price(self) -> float | None:
        return None if self.device == "core" else self.price_per_gpu_hour

    @property
    def device_s(self) -> float:
        """Device-seconds from each engine's first row to its last one, in every run."""
        return self.stats.open_s

    @property
    def loading_s(self) -> float:
        """Device-seconds that engines were held before their first row."""
        return max(0.0, self.stats.device_s - self.stats.open_s)

    @property
    def tokens_per_device_s(self) -> float | None:
        return self.stats.completion_tokens / self.device_s if self.device_s else None

    @property
    def busy_share(self) -> float | None:
        """Return the share of the engines' time from first to last row in which a row ran."""
        return self.stats.busy_s / self.stats.open_s if self.stats.open_s else None

    @property
    def price(self) -> float | None:
        price = self._hourly_price
        return None if price is None else price * (self.device_s + self.loading_s) / 3600

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        stats = self.stats
        return {
            **stats.summary(),
            "ok": stats.rows - stats.failed,
            "device": self.device,
            "device_s": round(self.device_s, 3),
            "loading_device_s": round(self.loading_s, 3),
            "busy_share": rounded(self.busy_share),
            "tokens_per_device_s": rounded(self.tokens_per_device_s),
            "price_per_gpu_hour": self._hourly_price,
            "price": rounded(self.price),
            "acceptance": {
                "histogram": stats.acceptance,
                "by_position": [round(share, 4) for share in acceptance_by_position(stats.acceptance)],
                "by_category": {name: _category_json(sums) for name, sums in stats.categories.ranked()},
            },
            "lengths": {
                "prompt": _lengths_json(stats.prompt_lengths),
                "output": _lengths_json(stats.output_lengths),
            },
            "ignored": dict(stats.ignored.ranked()),
            "stretches": stats.stretches.times,
            "errors": {
                kind: {"rows": count.rows, "example": count.example} for kind, count in stats.errors.items()
            },
            "job": dict(self.about),
        }

    def print(self) -> None:
        where = self.about.get("output")
        print_table(
            "batch job" if where is None else f"results in {where}",
            ["", "figure"],
            [[name, value] for name, value in self.lines()],
            num_left=2,
        )
        if self.stats.errors:
            print_table(
                "errors",
                ["error", "rows", "for example"],
                [[kind, str(count.rows), count.example] for kind, count in self.stats.ranked_errors()],
                num_left=3,
            )
        print_ignored(self.stats.ignored)

    def lines(self) -> list[tuple[str, str]]:
        stats, unit = self.stats, self.device
        mean = stats.mean_acceptance_length
        lines = [
            ("rows answered", f"{stats.rows - stats.failed} of {stats.rows}"),
            ("rows failed", str(stats.failed)),
            ("rows retried", str(stats.retried)),
            ("tokens in", str(stats.prompt_tokens)),
            ("tokens out", str(stats.completion_tokens)),
            ("time", f"{stats.wall_s:.1f} s"),
            ("tokens/s", f"{stats.tokens_per_s:.1f}"),
            (f"{unit}-seconds", f"{self.device_s:.1f}" if self.device_s else NO_FIGURE),
            (f"{unit}-seconds loading", f"{self.loading_s:.1f}" if self.device_s else NO_FIGURE),
            (f"tokens/s/{unit}", decimals(self.tokens_per_device_s)),
            ("engines busy", NO_FIGURE if self.busy_share is None else f"{100 * self.busy_share:.1f} %"),
            ("mean acceptance length", f"{decimals(mean)} tokens per step" if mean else NO_FIGURE),
        ]
        if (price := self.price) is not None:
            lines.append(("price", f"{price:.2f}"))
        return lines


def print_ignored(ignored: NameCounts) -> None:
    if ranked := ignored.ranked():
        rows = [[name, str(count)] for name, count in ranked]
        print_table("not read", ["column or field without effect", "rows"], rows)


def _category_json(sums: Category) -> dict[str, Any]:  # Any: JSON
    return {
        "rows": sums.rows,
        "failed": sums.failed,
        "completion_tokens": sums.completion_tokens,
        "mean_acceptance_length": rounded(sums.mean_acceptance_length),
    }


def _lengths_json(histogram: list[int]) -> list[dict[str, int]]:
    return [
        {"from": first, "to": last, "rows": rows}
        for place, rows in enumerate(histogram)
        for first, last in (length_range(place),)
        if rows
    ]
