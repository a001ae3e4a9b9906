"""The engine actor of a batch job: a callable class that Ray Data's `map_batches` runs.

Takes spans of the dataset's files, answers their rows concurrently through one `AsyncEngine`, and gives back
one result per row, whatever happens to it: a bad row becomes an error row. A dead engine ends the job
instead. Started lazily, on the event loop on which Ray Data calls it. Writes nothing: `sink.py` does.
"""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace

import pyarrow as pa

from ...actors.batch.answering import WIRE_SCHEMA, RowAnswerer
from ...actors.batch.reading import RowReader
from ...actors.batch.rows import Layout
from ...actors.batch.source import Source
from ...actors.checkpoints import resolve_checkpoint
from ...actors.engine import AsyncEngine
from ...actors.http.defaults import GenerationDefaults
from ...cluster.config import EngineConfig


class BatchEngine:
    """One engine of a batch job.

    Args:
        config: of the engine; admission limits do not apply to batch rows.
        source: what the rows are read from.
        layout: how records are read.
        model_name: reported in OpenAI responses.
    """

    def __init__(self, config: EngineConfig, source: Source, layout: Layout, model_name: str) -> None:
        self._config = replace(config, max_num_queued_reqs=None)
        self._layout = layout
        self._model_name = model_name
        self._reader = RowReader(source, layout)
        self._answerer: RowAnswerer | None = None
        self._starting = asyncio.Lock()

    async def __call__(self, batch: pa.Table) -> pa.Table:
        answerer = await self._started()
        (work,) = (pickle.loads(work) for work in batch["work"].to_pylist())
        rows = await asyncio.to_thread(self._reader.read, work)
        results = await asyncio.gather(*(answerer.answer(row) for row in rows))
        return pa.Table.from_pylist(results, schema=WIRE_SCHEMA)

    async def _started(self) -> RowAnswerer:
        async with self._starting:
            if self._answerer is None:
                folder = resolve_checkpoint(self._config.model, field="model")
                generation = GenerationDefaults.load(folder)
                engine = AsyncEngine(self._config)
                await engine.start()
                self._answerer = RowAnswerer(engine, self._layout, generation, self._model_name)
        return self._answerer
