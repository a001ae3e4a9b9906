"""`manta batch`: a dataset through engines on Ray, row by row, into a folder.

    files -> spans -> engine actors (`run.py`) -> driver -> part files (`sink.py`)

The driver takes results as they come and is the only writer. However the job ends, what is answered is on
disk before anything else is done.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...actors.batch.figures import RowFigures
from ...actors.batch.rows import Layout
from ...actors.batch.source import InputFormat, OutputFormat, Source, check_columns, open_source
from ...actors.batch.storage import URL
from ...actors.batch.survey import survey
from ...actors.targets.loading.plan import plan_load
from ...cluster.config import EngineConfig
from ...cluster.errors import ConfigError, DatasetError, OutputError
from ..stop import Stopped, StopSignals
from .progress import ProgressView
from .run import EngineRun, Phase
from .sink import Sink


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """What a batch job does, beside the engine's settings.

    Attributes:
        input: a file or a folder of files of one format.
        output: folder for the results.
        input_format: found from suffix and content if absent.
        output_format: the input's if absent.
        overwrite: replace an earlier job's results in `output`.
        concurrency: engines.
        prompt_column, id_column: found by name if absent.
        sampling: fields for rows that bring none.
        model_name: in OpenAI responses; the engine's `model` if absent.
    """

    input: Path
    output: Path
    input_format: InputFormat | None = None
    output_format: OutputFormat | None = None
    overwrite: bool = False
    concurrency: int = 1
    prompt_column: str | None = None
    id_column: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    model_name: str | None = None

    def __post_init__(self) -> None:
        local_path(self.input, "input")
        local_path(self.output, "output")
        if self.concurrency < 1:
            raise ConfigError(f"concurrency={self.concurrency} must be at least 1.", param="concurrency")


def local_path(where: str | Path, field: str) -> Path:
    """The path; a URL is refused, as no job writes one."""
    if found := URL.match(str(where)):
        kind = DatasetError if field == "input" else ConfigError
        raise kind(
            f"{field}: {where} is a URL ({found[1]}), and batch jobs read and write folders only. Give a "
            "path that all nodes see: mount the bucket, or copy from and to it.",
            param=field,
        )
    return Path(where)


def run_batch(config: EngineConfig, options: BatchOptions, signals: StopSignals | None = None) -> RowFigures:
    """Answer every row of the input; returns the job's figures. Failed rows do not fail the job.

    Args:
        signals: end the job with `Stopped`; without them the caller's handlers stand.
    """
    started_s = time.monotonic()
    source = open_source([options.input], options.input_format)
    layout = _layout(source, config, options)
    check_columns(source, layout)
    rows = survey(source, layout, duplicates="number")
    _check_models(config)
    output_format = _output_format(source, options)
    figures, signals = RowFigures(), signals or StopSignals()
    with Sink(options.output, output_format, overwrite=options.overwrite) as sink:
        run = EngineRun(source, rows, layout, config, options.concurrency, options.model_name or config.model)
        with ProgressView(rows.num_rows) as view, signals.told_to(run.tell):
            run.start()
            try:
                _collect(run, sink, figures, view, signals)
                report = {**figures.as_json(), "total_s": round(time.monotonic() - started_s, 3)}
                sink.finish(report, _manifest(source, rows.num_rows, layout, config, options))
            except BaseException as error:
                if words := _keep(error, sink, rows.num_rows):
                    view.say(words)
                raise
            finally:
                run.stop()
    return figures


def check_answered(figures: RowFigures, options: BatchOptions) -> None:
    """Raise DatasetError when no row at all was answered: something is wrong with all of them."""
    if figures.failed and figures.failed == figures.rows:
        raise DatasetError(
            f"All {figures.rows} rows failed, the first with: {figures.first_error} The rows' errors and "
            f"inputs are in {options.output}.",
            param="input",
        )


def _collect(
    run: EngineRun, sink: Sink, figures: RowFigures, view: ProgressView, signals: StopSignals
) -> None:
    """Take what the run has to tell until all rows are answered."""
    while (event := run.next_event()) is not Phase.ANSWERED:
        if isinstance(event, pa.Table):
            figures.add(event)
            sink.add(event)
            view.update(figures)
        elif isinstance(event, str):
            view.say(event)
        elif isinstance(event, Phase):
            signals.take_back()
        else:
            raise Stopped(event) if isinstance(event, signal.Signals) else event


def _keep(error: BaseException, sink: Sink, total: int) -> str | None:
    """Write what is answered before the job ends early; what there is, in words."""
    with contextlib.suppress(OutputError):  # the counts below say it
        sink.flush()
    lost = f", {sink.num_pending} answered rows could not be written" if sink.num_pending else ""
    there = f"{sink.num_rows} of {total} rows are in {sink.folder}{lost}"
    if sink.num_rows:
        there += "; without _SUCCESS: a new run answers all of them, elsewhere or with --overwrite"
    if isinstance(error, Stopped):
        error.told = True
        return f"{error}: {there}"
    return there if sink.num_rows else None


def _check_models(config: EngineConfig) -> None:
    """Check the checkpoints before Ray starts. What the engines compute with is another node's matter."""
    if config.device != "cpu":
        config = replace(config, device="cpu", attention_backend="auto")
    plan_load(config)


def _layout(source: Source, config: EngineConfig, options: BatchOptions) -> Layout:
    return Layout(
        kind="openai" if source.format == "openai" else "dataset",
        lines=source.lines,
        prompt_column=options.prompt_column,
        id_column=options.id_column,
        defaults=dict(options.sampling),
        seed=config.seed or 0,
    )


def _output_format(source: Source, options: BatchOptions) -> OutputFormat:
    if options.output_format == "openai" and source.format != "openai":
        raise ConfigError(
            "output_format=openai answers OpenAI batch lines; choose parquet or jsonl.", param="output_format"
        )
    own: OutputFormat = "jsonl" if source.format in ("csv", "text") else source.format
    return options.output_format or own


def _manifest(
    source: Source, num_rows: int, layout: Layout, config: EngineConfig, options: BatchOptions
) -> dict[str, Any]:  # Any: JSON
    """What the results were made from. The drafter is not part of the fingerprint: it changes no answer."""
    made_from = {
        "model": config.model,
        "tokenizer": config.tokenizer,
        "dtype": config.dtype,
        "sampling": dict(layout.defaults),
        "seed": layout.seed,
        "prompt_column": layout.prompt_column,
        "id_column": layout.id_column,
    }
    text = json.dumps(made_from, sort_keys=True, default=str)
    spec = config.speculative_config
    return {
        "fingerprint": hashlib.sha256(text.encode()).hexdigest(),
        **made_from,
        "drafter": None if spec is None else spec.model,
        "input": [str(file) for file in source.files],
        "input_format": source.format,
        "output_format": _output_format(source, options),
        "rows": num_rows,
    }
