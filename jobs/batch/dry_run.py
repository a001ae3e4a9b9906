"""`manta batch --dry-run`: what a job would do, shown and not done.

Which files in which format, how rows become prompts, the first prompt as the model would see it, where
results would go, and from a few rows spread over all how many tokens there are. No Ray, no weights, nothing
written.
Called by the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...actors.batch.reading import RowReader
from ...actors.batch.rows import PROMPT_COLUMNS, Layout
from ...actors.batch.source import Source
from ...actors.batch.survey import Duplicates, survey
from ...cluster.config import EngineConfig
from ...cluster.errors import RequestError
from ...cluster.row_ranges import of_rows
from ..tables import print_table
from .checking import PromptLengthError, RowChecker

ROWS_TRIED = 64
FILES_SHOWN = 5
PROMPT_CHARS_SHOWN = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What a job would do.

    Attributes:
        files: names of all files.
        num_numbered: rows whose id an earlier row has, and that get a number behind it.
        num_tried: rows that were made requests of, spread evenly; `num_failed` of them would fail.
        mean_prompt_tokens, mean_max_completion_tokens: of those that would not; None without any.
        first_prompt: of the first row, or why it has none.
    """

    files: tuple[str, ...]
    num_bytes: int
    format: str
    num_rows: int
    num_numbered: int
    prompt: str
    num_tried: int
    num_failed: int
    mean_prompt_tokens: float | None
    mean_max_completion_tokens: float | None
    first_prompt: str


def dry_run(source: Source, layout: Layout, config: EngineConfig, *, duplicates: Duplicates) -> DryRun:
    """Try a few rows. Raises what a job would before it starts: DatasetError, ConfigError.

    Args:
        duplicates: of the survey.
    """
    checker = RowChecker(layout, config)
    rows = survey(source, layout, duplicates=duplicates)
    num_tried = min(ROWS_TRIED, rows.num_rows)
    reader = RowReader(source, layout)
    tried = reader.read(rows.work(of_rows(i * rows.num_rows // num_tried for i in range(num_tried))))
    reader.close()
    checked, first_prompt = [], ""
    for row in tried:
        try:
            checked.append(checker.check(row))
            shown = checked[-1].prompt.text or str(list(checked[-1].prompt.token_ids))
        except (RequestError, PromptLengthError) as error:
            shown = f"(fails: {error.message})"
        first_prompt = first_prompt or shown
    return DryRun(
        files=tuple(str(file) for file in source.files),
        num_bytes=sum(file.size for file in source.files),
        format=source.format,
        num_rows=rows.num_rows,
        num_numbered=len(rows.numbered.rows),
        prompt=_prompt_from(layout),
        num_tried=num_tried,
        num_failed=num_tried - len(checked),
        mean_prompt_tokens=_mean([row.num_prompt_tokens for row in checked]),
        mean_max_completion_tokens=_mean([row.max_completion_tokens for row in checked]),
        first_prompt=first_prompt,
    )


def print_dry_run(plan: DryRun, output: str, settings: Mapping[str, Any]) -> None:
    """The plan on standard output.

    Args:
        output: where results would go.
        settings: further lines: the models, how many engines, sampling ... (Any: what has a text).
    """
    more = [f"and {len(plan.files) - FILES_SHOWN} more"] if len(plan.files) > FILES_SHOWN else []
    num_good = plan.num_rows * (plan.num_tried - plan.num_failed) / plan.num_tried
    tokens_in, tokens_out = (
        "unknown: all rows that were tried would fail" if mean is None else f"about {mean * num_good:,.0f}"
        for mean in (plan.mean_prompt_tokens, plan.mean_max_completion_tokens)
    )
    lines = {
        "input": "\n".join([*plan.files[:FILES_SHOWN], *more]),
        "format": f"{plan.format}, {plan.num_bytes:,} bytes",
        "rows": f"{plan.num_rows:,}",
        "ids numbered": f"{plan.num_numbered:,}",
        "prompt": plan.prompt,
        "rows tried": f"{plan.num_tried}, of which {plan.num_failed} would fail",
        "tokens in": tokens_in,
        "tokens out at most": tokens_out,
        "time": "unknown: no speed is measured for this pair here; --sample N measures it on N rows",
        "output": output,
        **{name: str(value) for name, value in settings.items()},
        "first prompt": plan.first_prompt[:PROMPT_CHARS_SHOWN],
    }
    print_table(
        "dry run: nothing is answered or written",
        ["what", ""],
        [[*line] for line in lines.items()],
        num_left=2,
    )


def _prompt_from(layout: Layout) -> str:
    if layout.kind == "openai":
        return "the bodies of OpenAI batch lines"
    if layout.template is not None:
        return f"template {layout.template!r}"
    return f"column {layout.prompt_column or ' or '.join(PROMPT_COLUMNS)}"


def _mean(values: list[int]) -> float | None:
    return sum(values) / len(values) if values else None
