"""What a job's answers are made from, written down: the model's identity, the settings, the rows.

By its paper a later run knows whether it may go on with an output. The drafter is told, but is not part of
the identity: it changes no answer. Called by `opening.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...actors.batch.identity import checkpoint_identity, settings_identity
from ...actors.batch.paper import JobPaper
from ...actors.batch.parts import OutputForm
from ...actors.batch.rows import Layout
from ...actors.batch.survey import Survey
from ...actors.checkpoints import target_folder, tokenizer_folder
from ...cluster.config import EngineConfig
from ...cluster.row_ranges import RowRanges, of_rows
from .messages import EngineSetup
from .options import BatchOptions

SHARDS = 64  # of a job that preserves order, unless they would be very small or large
SMALLEST_SHARD, LARGEST_SHARD = 64, 4096


def job_paper(setup: EngineSetup, options: BatchOptions, form: OutputForm, found: Survey) -> JobPaper:
    """The paper of a job over an input."""
    num_rows = found.num_rows
    source, layout, spec = setup.source, setup.layout, setup.config.speculative_config
    return JobPaper(
        made_from=_made_from(setup.config, layout),
        input=source.identity(found.digests),
        input_format=source.format,
        form=form,
        num_rows=num_rows,
        sample=None if options.sample is None else sampled(num_rows, options.sample, layout.seed),
        rows_per_shard=rows_per_shard(num_rows) if form.ordered else None,
        about={
            "drafter": None if spec is None else spec.drafter,
            "concurrency": str(options.concurrency),
            "model_name": setup.model_name,
        },
    )


def rows_per_shard(num_rows: int) -> int:
    """Of a job that preserves order. Depends on the rows alone, so that a later run has the same shards."""
    return min(max(-(-num_rows // SHARDS), SMALLEST_SHARD), LARGEST_SHARD)


def sampled(num_rows: int, wanted: int, seed: int) -> RowRanges | None:
    """Rows drawn for a sample; None means all. The same whoever draws them, and when."""
    if wanted >= num_rows:
        return None
    drawn = np.random.default_rng(seed).choice(num_rows, size=wanted, replace=False)
    return of_rows(sorted(drawn.tolist()))


def _made_from(config: EngineConfig, layout: Layout) -> dict[str, Any]:  # Any: JSON
    target, tokenizer = target_folder(config), tokenizer_folder(config)
    return {
        "model": checkpoint_identity(target),
        "tokenizer": None if tokenizer == target else checkpoint_identity(tokenizer),
        **settings_identity(config),
        "dtype": config.dtype,
        **({} if config.quantization is None else {"quantization": config.quantization}),
        "max_model_len": config.max_model_len,
        "sampling": dict(layout.defaults),
        "seed": layout.seed,
        "kind": layout.kind,
        "prompt_column": layout.prompt_column,
        "template": layout.template,
        "id_column": layout.id_column,
    }
