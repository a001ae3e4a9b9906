"""The report of a batch job as JSON and tables: what was answered, its cost, the effect of speculation.

It is computed from stats that are stored with the results (`RowStats`, of all runs), so running the same
command again reports the same. Nothing is estimated. `report_html.py` makes a page of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from ...actors.batch.dataset.row_reader import RowReader, record_of
from ...actors.batch.dataset.row_requests import RowSchema, read_request
from ...actors.batch.dataset.source import Dataset
from ...actors.batch.row_index import RowIndex
from ...actors.batch.row_stats import Category, Device, RowStats, length_range
from ...actors.http.protocol.chat_completion import ChatRequest
from ...actors.system.atomic_files import rounded
from ...actors.tokenization.generation_config import GenerationDefaults
from ...cluster.batch.baseline_sample import BaselineComparison
from ...cluster.batch.row_ranges import from_rows
from ...cluster.errors import MantaError
from ...cluster.speculation.acceptance_length import acceptance_by_position
from ..common.tables import NO_FIGURE, decimals, print_table

NOT_MEASURED = "not measured in a job of so few rows; `manta bench` compares with plain decoding"
OFF = "off"
MAX_PROMPT = 600  # characters; only the end of a longer prompt is shown


@dataclass(frozen=True, slots=True)
class Sample:
    """A row of the dataset. `prompt` is empty where it is not text or cannot be read any more."""

    id: str
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Report:
    stats: RowStats
    about: Mapping[str, Any]  # Any: JSON
    device: Device
    price_per_gpu_hour: float | None
    samples: Sequence[Sample] = ()

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
    def comparison(self) -> BaselineComparison | None:
        return self.stats.comparison

    @property
    def saved_s(self) -> float | None:
        found = self.comparison
        return None if found is None else self.stats.busy_s * (found.speedup - 1)

    def price(self, device_s: float | None) -> float | None:
        price = self.price_per_gpu_hour
        return None if price is None or device_s is None else price * device_s / 3600

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
            "price_per_gpu_hour": self.price_per_gpu_hour,
            "price": rounded(self.price(self.device_s + self.loading_s)),
            "speculation": self._speculation(),
            "acceptance": {
                "histogram": stats.acceptance,
                "by_position": [round(share, 4) for share in acceptance_by_position(stats.acceptance)],
                "by_category": {name: _category_json(sums) for name, sums in stats.categories.ranked()},
            },
            "lengths": {
                "prompt": _lengths_json(stats.prompt_lengths),
                "output": _lengths_json(stats.output_lengths),
            },
            "throughput": {
                "width_s": stats.timeline.width_s,
                "tokens": {
                    bucket * stats.timeline.width_s: tokens
                    for bucket, tokens in sorted(stats.timeline.tokens.items())
                },
            },
            "stretches": stats.stretches.times,
            "errors": {
                kind: {"rows": count.rows, "example": count.example} for kind, count in stats.errors.items()
            },
            "job": dict(self.about),
        }

    def _speculation(self) -> dict[str, Any]:  # Any: JSON
        found = self.comparison
        if found is None:
            return {"measured": False, "why": self.speculation_in_words()}
        return {
            "measured": True,
            "speedup": round(found.speedup, 4),
            "plain_tokens_per_s": round(found.plain_tokens_per_s, 3),
            "tokens_per_s": round(found.drafted_tokens_per_s, 3),
            "plain_tokens": found.plain_tokens,
            "plain_s": round(found.plain_s, 3),
            "tokens": found.drafted_tokens,
            "seconds": round(found.drafted_s, 3),
            "device_s_saved": rounded(self.saved_s, 3),
            "price_saved": rounded(self.price(self.saved_s)),
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
            ("speculation", self.speculation_in_words()),
        ]
        if self.saved_s is not None:
            lines.append((f"{unit}-seconds saved", f"{self.saved_s:.1f}"))
        if (price := self.price(self.device_s + self.loading_s)) is not None:
            saved = self.price(self.saved_s)
            lines.append(("price", f"{price:.2f}" + ("" if saved is None else f" ({saved:.2f} saved)")))
        return lines

    def speculation_in_words(self) -> str:
        found = self.comparison
        if found is None:
            return NOT_MEASURED if self.stats.num_draft_tokens else OFF
        return (
            f"{found.speedup:.2f} x plain decoding: {found.drafted_tokens_per_s:.1f} tokens/s over "
            f"{found.drafted_s:.1f} s, {found.plain_tokens_per_s:.1f} without it over {found.plain_s:.1f} s"
        )


def make_report(
    stats: RowStats,
    device: Device,
    about: Mapping[str, Any],
    *,
    price_per_gpu_hour: float | None = None,
    samples: Sequence[Sample] = (),
) -> Report:
    price = None if device == "core" else price_per_gpu_hour
    return Report(stats, about, device, price, samples)


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


def samples(stats: RowStats, source: Dataset, layout: RowSchema, index: RowIndex) -> list[Sample]:
    numbers = sorted(row for row, _, _ in stats.samples)
    prompts = dict(zip(numbers, _prompts(numbers, source, layout, index), strict=False))
    return [Sample(row_id, prompts.get(row, ""), answer) for row, row_id, answer in stats.samples]


def _prompts(rows: Sequence[int], source: Dataset, layout: RowSchema, index: RowIndex) -> Iterator[str]:
    try:
        with closing(RowReader(source, layout)) as reader:
            found = reader.read(index.spans(from_rows(rows)))
        for row in found:
            request = read_request(record_of(row, layout), layout, GenerationDefaults(), row.id).body
            chat = isinstance(request, ChatRequest)
            prompt = request.messages[-1].content if chat else request.prompt[0]
            text = prompt if isinstance(prompt, str) else ""
            yield text if len(text) <= MAX_PROMPT else f"... {text[-MAX_PROMPT:]}"
    except MantaError:
        return
