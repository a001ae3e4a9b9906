"""`manta batch --dry-run` and `--validate-only`: the same options as a job's, and no job."""

from __future__ import annotations

from ...actors.batch.source import check_columns, open_source
from ...cluster.config import EngineConfig
from ...cluster.errors import shown_url
from .options import BatchOptions


def preview(config: EngineConfig, options: BatchOptions, *, dry_run: bool) -> int:
    """Print what a job would do, or find in its rows. Returns the command's exit code.

    Raises what a job would before it starts: ConfigError, DatasetError.
    """
    source = open_source(options.input, options.input_format)
    layout = options.layout(source, config)
    check_columns(source, layout)
    options.format(source)
    if dry_run:
        from .dry_run import dry_run as look
        from .dry_run import print_dry_run

        plan = look(source, layout, config, duplicates=options.duplicate_ids)
        spec = config.speculative_config
        settings = {
            "model": config.model,
            "drafter": "none" if spec is None else spec.drafter,
            "engines": options.concurrency,
            "sampling": dict(options.sampling) or "the checkpoint's defaults",
        }
        print_dry_run(plan, shown_url(options.output), settings)
        return 0
    from .validate import print_validation, validate

    report = validate(source, layout, config, duplicates=options.duplicate_ids)
    print_validation(report)
    return 0 if report.ok else 1
