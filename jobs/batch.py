"""`manta batch`: a dataset through engine actors, with Ray Data distributing the rows.

    files -> Ray Data blocks -> BatchEngine actors (one engine each) -> driver -> part files

The driver takes results as they come and is the only writer. With RAY_ADDRESS set (`ray job submit ... --
manta batch ...` sets it) the job joins that cluster, else it starts a Ray of its own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import ray.data

from ..actors.target.load_plan import plan_load
from ..cluster.config import EngineConfig
from ..cluster.errors import ConfigError, MantaError
from ..cluster.placement import Topology
from .batch_engine import BatchEngine
from .batch_io import InputFormat, OutputFormat, Sink, Source, check_columns, open_source
from .batch_rows import Layout
from .report import JobFigures, ProgressView
from .serve import OBJECT_STORE_BYTES

MAX_ROWS_PER_BLOCK = 16
MAX_BLOCKS = 8192


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
        if self.concurrency < 1:
            raise ConfigError(f"concurrency={self.concurrency} must be at least 1.", param="concurrency")


def run_batch(config: EngineConfig, options: BatchOptions) -> JobFigures:
    """Answer every row of the input; returns the job's figures. Failed rows do not fail the job."""
    started_s = time.monotonic()
    source = open_source(options.input, options.input_format)
    layout = _layout(source, config, options)
    check_columns(source, layout)
    _check_models(config)
    sink = Sink(options.output, _output_format(source, options), overwrite=options.overwrite)
    figures = JobFigures()
    try:
        with _ray(), ProgressView(source.num_rows) as view:
            for results in _results(source, layout, config, options):
                figures.add(results)
                sink.add(results)
                view.update(figures)
    finally:
        sink.flush()  # what is answered stays, also when the job does not end well
    total_s = time.monotonic() - started_s
    sink.finish(
        {**figures.as_json(), "total_s": round(total_s, 3)}, _manifest(source, layout, config, options)
    )
    return figures


def _results(
    source: Source, layout: Layout, config: EngineConfig, options: BatchOptions
) -> Iterator[pa.Table]:
    """Tables of results as engines finish them; errors of the actors as what they were."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.raise_original_map_exception = True
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # it prints every error that it raises
    num_blocks = _num_blocks(source, config, options)
    rows_per_block = -(-source.num_rows // num_blocks)
    # Enough rows in flight to fill the engine while others are on their way.
    calls = max(2, math.ceil(1.25 * config.max_num_seqs / rows_per_block))
    config, resources = _place(config, options.concurrency)
    answered = source.read(num_blocks).map_batches(
        BatchEngine,
        fn_constructor_args=(config, layout, options.model_name or config.model),
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(
            size=options.concurrency,
            max_tasks_in_flight_per_actor=calls + 1,
            max_concurrent_calls_per_actor=calls,
        ),
        **resources,
    )
    try:
        yield from answered.iter_batches(batch_size=None, batch_format="pyarrow")
    except Exception as error:  # Ray wraps what an actor raised; a user wants the reason, not the layers
        raise _reason(error) from error


def _num_blocks(source: Source, config: EngineConfig, options: BatchOptions) -> int:
    """Rows come back in blocks: small ones, so that they come soon, but not more than Ray Data likes."""
    wanted = -(-source.num_rows // min(MAX_ROWS_PER_BLOCK, config.max_num_seqs))
    return max(len(source.files), min(MAX_BLOCKS, max(options.concurrency, wanted)))


def _place(config: EngineConfig, concurrency: int) -> tuple[EngineConfig, dict[str, Any]]:
    """What an engine actor claims. With workers of its own it claims nothing: they have a placement group."""
    cluster = ray.cluster_resources()
    topology = Topology.of(config, cluster)
    if config.needs_ray:
        return config, {"num_cpus": 0}
    if topology.device == "cuda":
        return config, {"num_cpus": 1, "num_gpus": 1}
    threads = config.num_threads or max(1, int(cluster.get("CPU", 1)) // concurrency)
    return replace(config, num_threads=threads), {"num_cpus": min(threads, cluster.get("CPU", 1))}


@contextmanager
def _ray() -> Iterator[None]:
    """A Ray to run on: the one that is there, the one RAY_ADDRESS names, or a local one for this job."""
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    if address and (Path.home() / ".ray" / "auth_token").is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # an explicit address does not look for it
    # Ray Data's actors make Ray complain at its error level about what is of no consequence here.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        ray.init(address=address, **quiet)
    else:
        ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
    try:
        yield
    finally:
        ray.shutdown()


def _check_models(config: EngineConfig) -> None:
    """Check the checkpoints before Ray starts; this node may lack the GPUs of the others."""
    plan_load(replace(config, device="cpu"))


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
    return options.output_format or source.format


def _manifest(
    source: Source, layout: Layout, config: EngineConfig, options: BatchOptions
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
        "rows": source.num_rows,
    }


def _reason(error: BaseException) -> BaseException:
    """The error of our own tree inside Ray's wrappings, else the error itself."""
    seen: set[int] = set()
    inner: BaseException | None = error
    while inner is not None and id(inner) not in seen:
        if isinstance(inner, MantaError):
            return inner
        seen.add(id(inner))
        inner = getattr(inner, "cause", None) or inner.__cause__ or inner.__context__
    return error
