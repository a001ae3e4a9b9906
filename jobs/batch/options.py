"""What a batch job is asked to do, beside the engine's settings. Checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...actors.batch.rows import Layout
from ...actors.batch.source import InputFormat, OutputFormat, Source
from ...cluster.config import EngineConfig
from ...cluster.errors import ConfigError
from ...cluster.pool_size import Concurrency


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """See the module's text.

    Attributes:
        input: files, folders, patterns and URLs, of one format together.
        output: folder or URL for the results.
        input_format: found from suffix and content if absent.
        output_format: the input's if results can be of it, else JSONL.
        overwrite: replace what an earlier job has left in `output`.
        resume: "no" refuses an output that is not empty; "force" goes on though settings or input differ.
        retry_failed: answer rows again that stand as failed.
        preserve_order: parts, read by name, give the rows in the input's order.
        sample: answer that many rows only, drawn by `seed`.
        duplicate_ids: what to do about rows with an id that an earlier row has.
        limit_time_s: end after that long, keeping what is answered.
        concurrency: engines at once.
        prompt_column, id_column: found by name if absent.
        template: makes the prompt of several columns, in place of a column.
        pass_through: columns handed on to the results; ("*",) is all of them.
        sampling: fields for rows that bring none.
        model_name: in OpenAI responses; the engine's `model` if absent.
        category_column: rows are counted by its values in the report.
        plain_sample: rows answered without speculation, to measure what it is worth; by itself as many as
            that takes, where that is a small share of the job's.
        price_per_gpu_hour: in any currency, for the report; not applied to cores.
    """

    input: tuple[str, ...] = field(repr=False)  # URLs may hold secrets
    output: str = field(repr=False)
    input_format: InputFormat | None = None
    output_format: OutputFormat | None = None
    overwrite: bool = False
    resume: Literal["yes", "no", "force"] = "yes"
    retry_failed: bool = False
    preserve_order: bool = False
    sample: int | None = None
    duplicate_ids: Literal["refuse", "number"] = "refuse"
    limit_time_s: float | None = None
    concurrency: Concurrency = field(default_factory=Concurrency)
    prompt_column: str | None = None
    template: str | None = None
    id_column: str | None = None
    pass_through: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    model_name: str | None = None
    category_column: str | None = None
    plain_sample: int | None = None
    price_per_gpu_hour: float | None = None

    def __post_init__(self) -> None:
        if not self.input:
            raise ConfigError("input is missing: name a file, a folder or a pattern.", param="input")
        for name in ("sample", "limit_time_s"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ConfigError(f"{name}={value} must be more than 0.", param=name)
        for name in ("plain_sample", "price_per_gpu_hour"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ConfigError(f"{name}={value} must not be less than 0.", param=name)
        if self.overwrite and (self.retry_failed or self.resume == "force"):
            other = "retry_failed" if self.retry_failed else "force_resume"
            raise ConfigError(f"overwrite begins anew, and {other} goes on; give one.", param="overwrite")

    def layout(self, source: Source, config: EngineConfig) -> Layout:
        """How the rows of the input are read."""
        return Layout(
            kind="openai" if source.format == "openai" else "dataset",
            lines=source.lines,
            prompt_column=self.prompt_column,
            template=self.template,
            id_column=self.id_column,
            columns="all" if "*" in self.pass_through else self.pass_through,
            defaults=dict(self.sampling),
            seed=config.seed or 0,
            category_column=self.category_column,
        )

    def format(self, source: Source) -> OutputFormat:
        """Of the results. Raises ConfigError."""
        if self.output_format == "openai" and source.format != "openai":
            raise ConfigError(
                "output_format=openai answers OpenAI batch lines; choose parquet or jsonl.",
                param="output_format",
            )
        if self.output_format is not None:
            return self.output_format
        return source.format if source.format in ("parquet", "openai") else "jsonl"
