"""`make soak-batch`: millions of rows through a batch job, and its memory. No model computes.

Everything is real except for the executor, which is simulated: files, survey, leases, engine actors on Ray,
scheduler, segments, parts, ledger. Prompts are token ids, so no tokenizer is needed. Every row must be in the
output exactly once, with at most 2 GB of memory in the driver and 1 GB in an engine actor.
"""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from manta.actors.system.atomic_files import write_json
from manta.cluster.batch.engine_pool_size import Concurrency
from manta.cluster.config import EngineConfig
from manta.cluster.errors import MantaError
from manta.cluster.simulation.simulated_executor import SimulatedExecutor
from manta.cluster.step.executor import Executor, ExecutorInfo
from manta.jobs.batch.job import run_batch
from manta.jobs.batch.options import BatchOptions
from manta.jobs.bench.common.engine_passes import Figures
from manta.jobs.bench.common.idle_check import PROC
from manta.jobs.bench.common.provenance import provenance
from manta.jobs.common.tables import print_table

from ..processes.process_clocks import command_of
from ..processes.process_tree import descendants, read_processes

DRIVER_BYTES = 2 * 2**30
ENGINE_BYTES = 1 * 2**30
ROWS_PER_GROUP = 65_536  # also the rows in memory while they are made
ROWS_PER_FILE = 1_000_000
PROMPT_TOKENS = 8
LOOK_EVERY_S = 0.5


@dataclass
class Memory:
    """Peak resident memory of processes in bytes (Linux's VmHWM).

    Attributes:
        engines: peaks of engine actors by process id.
    """

    driver: int = 0
    engines: dict[int, int] = field(default_factory=dict)


def run_soak(model: Path, rows: int, engines: int, folder: Path) -> Figures:
    """Make the rows, run the job and check its output.

    Args:
        model: a checkpoint for the job; its weights are not loaded.
        folder: folder for input and output, which must be missing or empty.

    Raises:
        MantaError: the job failed, or a row is missing or repeated.
    """
    make_rows(folder / "in", rows)
    config = EngineConfig(model=str(model), skip_tokenizer_init=True, device="cpu", max_num_seqs=256)
    options = BatchOptions(
        input=(str(folder / "in"),),
        output=str(folder / "out"),
        concurrency=Concurrency(engines, engines),
        sampling={"max_tokens": 2, "temperature": 0.0},
    )
    begin_s = time.monotonic()
    with watched() as memory:
        run_batch(config, options, make=simulated)
    seconds = time.monotonic() - begin_s
    check_rows(folder / "out", rows)
    return {
        "rows": rows,
        "engines": engines,
        "seconds": round(seconds, 1),
        "rows_per_s": round(rows / seconds, 1),
        "driver_bytes": memory.driver,
        "engine_bytes": max(memory.engines.values(), default=None),
        "memory": asdict(memory),
    }


def simulated(config: EngineConfig) -> Executor:
    """Return the executor of each engine actor."""
    info = ExecutorInfo(
        num_pages=(config.max_num_seqs * 8,),
        page_size=16,
        max_model_len=128,
        vocab_size=1000,
        eos_token_ids=(1,),
        num_speculative_tokens=0,
        dtype="float32",
        device="cpu",
    )
    return SimulatedExecutor(info)


def make_rows(folder: Path, rows: int) -> None:
    """Write Parquet files of rows with an id (the row number) and a prompt of token ids."""
    folder.mkdir(parents=True)
    schema = pa.schema([("id", pa.string()), ("prompt", pa.list_(pa.int32()))])
    for number, first in enumerate(range(0, rows, ROWS_PER_FILE)):
        end = min(rows, first + ROWS_PER_FILE)
        with pq.ParquetWriter(folder / f"rows-{number:04d}.parquet", schema) as writer:
            for begin in range(first, end, ROWS_PER_GROUP):
                ids = np.arange(begin, min(end, begin + ROWS_PER_GROUP), dtype=np.int32)
                tokens = 2 + (ids[:, None] * 7 + np.arange(PROMPT_TOKENS, dtype=np.int32)) % 900
                offsets = np.arange(len(ids) + 1, dtype=np.int32) * PROMPT_TOKENS
                prompts = pa.ListArray.from_arrays(offsets, pa.array(tokens.ravel()))
                writer.write_table(pa.table([pa.array(ids).cast(pa.string()), prompts], schema=schema))


def check_rows(output: Path, rows: int) -> None:
    """Raise MantaError unless each row is in the parts exactly once."""
    times = np.zeros(rows, dtype=np.int32)
    for part in output.glob("*-*.parquet"):
        for batch in pq.ParquetFile(part).iter_batches(columns=["id"]):
            np.add.at(times, batch["id"].cast(pa.int64()).to_numpy(), 1)
    if (wrong := np.flatnonzero(times != 1)).size:
        raise MantaError(
            f"{wrong.size} of {rows} rows are not in {output} once; row {wrong[0]} is there "
            f"{times[wrong[0]]} times."
        )


@contextmanager
def watched() -> Iterator[Memory]:
    """Record the peaks of this process and its engine actors within the `with` block."""
    memory, over = Memory(), threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_EVERY_S):
            memory.engines.update(_engines())

    watcher = threading.Thread(target=watch, name="soak-memory", daemon=True)
    watcher.start()
    try:
        yield memory
    finally:
        over.set()
        watcher.join()
        memory.driver = _peak_bytes(PROC / "self") or 0


def _engines() -> dict[int, int]:
    """Return the peak of each engine actor among this process's descendants."""
    pids = [pid for pid in descendants(read_processes(PROC)) if "BatchEngine" in command_of(PROC, pid)]
    return {pid: peak for pid in pids if (peak := _peak_bytes(PROC / str(pid)))}


def _peak_bytes(process: Path) -> int | None:
    try:
        status = (process / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:  # the process has ended
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.M)
    return None if found is None else int(found[1]) * 1024


def main(
    rows: Annotated[int, typer.Option("--rows")] = 5_000_000,
    engines: Annotated[int, typer.Option("--engines")] = 1,
    model: Annotated[Path, typer.Option("--model", help="Checkpoint; its weights are not loaded.")] = Path(
        "models/target"
    ),
    output: Annotated[Path | None, typer.Option("-o", "--output", help="JSON file for the figures.")] = None,
) -> None:
    """Run a batch job over many rows on a simulated executor; exit code 1 if it uses too much memory."""
    with tempfile.TemporaryDirectory(prefix="manta-soak-") as folder:
        found: dict[str, Any] = run_soak(model.resolve(), rows, engines, Path(folder) / "soak")
    if output is not None:
        write_json(output, {"provenance": provenance(), **found})
    megabytes = {name: (found[name] or 0) / 2**20 for name in ("driver_bytes", "engine_bytes")}
    print_table(
        "soak",
        ["rows", "rows/s", "driver MB (peak)", "engine MB (peak)"],
        [[str(rows), f"{found['rows_per_s']:.0f}", *(f"{size:.0f}" for size in megabytes.values())]],
        num_left=0,
    )
    if found["driver_bytes"] > DRIVER_BYTES or (found["engine_bytes"] or 0) > ENGINE_BYTES:
        raise typer.Exit(1)
