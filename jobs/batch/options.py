"""Options of a batch job besides the engine's settings. Validated before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ...cluster.batch.engine_pool_size import Concurrency
from ...cluster.config import EngineConfig
from ...cluster.errors import ConfigError
from ...cluster.flag import NO_FLAG, Flag

if TYPE_CHECKING:  # they import pyarrow, for which `--help` does not wait
    from ...actors.batch.dataset.row_requests import RowSchema
    from ...actors.batch.dataset.source import Dataset, OutputFormat
    from ...actors.batch.dataset.storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Options of a batch job.

    Attributes:
        input: file, folder, pattern or URL (s3://, gs://, abfs://, hf://); may be repeated, in one format.
        output: folder or URL for the results.
        input_format: format of the input; by default detected from suffix and content.
        output_format: format of the results; by default the input's, or JSONL; OpenAI batch lines get
            OpenAI's form.
        overwrite: replace earlier results in the output.
        resume: "no" refuses an output that is not empty; "force" continues although settings or input differ.
        retry_failed: answer the failed rows again.
        preserve_order: the parts, sorted by name, have the rows in the input's order.
        sample: answer N rows only, drawn by --seed.
        duplicate_ids: refuse rows with the same id, or number them.
        limit_time_s: end after this time, keeping what is answered (exit code 3).
        concurrency: engines at once; 1:4 grows and shrinks.
        prompt_column: column with text, token ids or messages; by default `messages`, `prompt`,
            `conversations` or `conversation`.
        template: template that makes the prompt of columns: "Translate {text} to {language}."
        chat: send texts of --prompt-column, --template and text files as messages of a user, through the
            model's chat template, or complete them as they are. By default as messages if the model has a
            chat template; texts of a column `prompt` are completed, as in OpenAI's API.
        system: system message of chats that have none; texts are then chats.
        id_column: column with the row's id; by default `custom_id`, `id`, or a hash of the row's content.
        pass_through: column to copy to the results; may be repeated; * copies all.
        sampling: fields for rows that have none.
        model_name: in OpenAI responses; the engine's `model` if absent.
        category_column: count rows by the values of this column in the report.
        price_per_gpu_hour: price for the report, in any currency; not applied to CPU cores.
    """

    # Strings, because a Path drops the second slash of a URL. URLs may hold secrets.
    input: Annotated[tuple[str, ...], Flag("-i --input-file --input")] = field(repr=False)
    output: Annotated[str, Flag("-o")] = field(repr=False)
    input_format: Literal["parquet", "jsonl", "csv", "tsv", "openai", "text"] | None = None
    output_format: Literal["parquet", "jsonl", "openai"] | None = None
    overwrite: bool = False
    resume: Annotated[Literal["yes", "no", "force"], NO_FLAG] = "yes"
    retry_failed: bool = False
    preserve_order: bool = False
    sample: Annotated[int | None, Flag(metavar="N")] = None
    duplicate_ids: Literal["refuse", "number"] = "refuse"
    limit_time_s: Annotated[float | None, Flag("--limit-time", metavar="SECONDS")] = None
    concurrency: Annotated[Concurrency, Flag(metavar="N|MIN:MAX", parser=Concurrency.parse)] = field(
        default_factory=Concurrency
    )
    prompt_column: str | None = None
    template: str | None = None
    chat: Annotated[bool | None, Flag("--chat/--raw")] = None
    system: str | None = None
    id_column: str | None = None
    pass_through: tuple[str, ...] = ()
    sampling: Annotated[Mapping[str, Any], NO_FLAG] = field(default_factory=dict)
    model_name: Annotated[str | None, NO_FLAG] = None
    category_column: str | None = None
    price_per_gpu_hour: Annotated[float | None, Flag(metavar="PRICE")] = None

    def __post_init__(self) -> None:
        if not self.input:
            raise ConfigError("input is missing: name a file, a folder or a pattern.", param="input")
        for name in ("sample", "limit_time_s"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ConfigError(f"{name}={value} must be more than 0.", param=name)
        if (price := self.price_per_gpu_hour) is not None and price < 0:
            raise ConfigError(
                f"price_per_gpu_hour={price} must not be less than 0.", param="price_per_gpu_hour"
            )
        if self.system is not None and self.chat is False:
            raise ConfigError("system is a message of chats, and raw sends none. Give one.", param="system")
        if self.overwrite and (self.retry_failed or self.resume == "force"):
            other = "retry_failed" if self.retry_failed else "force_resume"
            raise ConfigError(
                f"overwrite starts again, and {other} continues; give only one.", param="overwrite"
            )

    def row_schema(self, source: Dataset, config: EngineConfig) -> RowSchema:
        from ...actors.batch.dataset.row_requests import RowSchema

        return RowSchema(
            kind="openai" if source.format == "openai" else "dataset",
            lines=source.lines,
            prompt_column=self.prompt_column,
            template=self.template,
            chat=bool(self.chat),
            system=self.system,
            id_column=self.id_column,
            columns="all" if "*" in self.pass_through else self.pass_through,
            defaults=dict(self.sampling),
            seed=config.seed or 0,
            category_column=self.category_column,
        )

    def continued(
        self, row_schema: RowSchema, source: Dataset, config: EngineConfig, output: Storage
    ) -> RowSchema:
        """Return the schema with the defaults of the job that has begun in the output, or else today's."""
        from ...actors.batch.ledger.job_runs import JobRun
        from ...actors.tokenization.prompts import has_chat_template

        begun: Mapping[str, Any] | None = None  # Any: JSON
        if not self.overwrite and self.resume != "no":
            with suppress(OSError, ValueError):  # opening the ledger reports them
                begun = (job := JobRun.read(output)) and job.spec["made_from"]
        if row_schema.kind == "openai":
            return row_schema
        if begun is not None:
            chat = begun.get("chat", False) if self.chat is None else self.chat
            return replace(row_schema, chat=chat, version=begun.get("row_version", 1))
        wanted = "system" if self.system is not None else "chat" if self.chat else None
        if wanted is not None and not has_chat_template(config):
            raise ConfigError(
                f"{wanted}: the model has no chat template. Leave --{wanted} out, or give --chat-template.",
                param=wanted,
            )
        chat = self.chat
        if chat is None:
            named = row_schema.prompt_column or row_schema.template or wanted or source.format == "text"
            chat = bool(named) and has_chat_template(config)
        return replace(row_schema, chat=chat)

    def format(self, source: Dataset) -> OutputFormat:
        if self.output_format == "openai" and source.format != "openai":
            raise ConfigError(
                "output_format=openai answers OpenAI batch lines; choose parquet or jsonl.",
                param="output_format",
            )
        if self.output_format is not None:
            return self.output_format
        return source.format if source.format in ("parquet", "openai") else "jsonl"
