"""The command `manta batch`; its options are in `options.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ...cluster.errors import ConfigError
from ..common.config_loading import engine_config
from ..common.engine_flags import SamplingFlags, Settings, with_flags
from .options import BatchOptions


@with_flags
def batch(
    options: BatchOptions,
    sampling: SamplingFlags,
    settings: Settings,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue the job in the output folder.")
    ] = True,
    force_resume: Annotated[
        bool, typer.Option("--force-resume", help="Continue although settings or input changed.")
    ] = False,
    validate_only: Annotated[
        bool,
        typer.Option(
            "--validate-only", help="Check every row without answering; exit code 1 if rows are bad."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what the job would do, and exit.")
    ] = False,
) -> None:
    """Answer every row of a dataset with engines on Ray. Loses nothing: the same command again resumes.

    A bad row becomes an error row; --seed fixes sampling. Columns named like sampling fields (max_tokens,
    temperature, ...) win over flags. The `model` of an OpenAI batch line is not looked at: the job names the
    model. Ended early by Ctrl-C or SIGTERM it keeps what is answered. Also as
    `ray job submit ... -- manta batch ...`.
    """
    config = engine_config(settings)
    names = settings.get("served_model_name")
    if force_resume and not resume:
        raise ConfigError("force_resume and no_resume exclude each other; give one.", param="resume")
    options = replace(
        options,
        resume="force" if force_resume else "yes" if resume else "no",
        sampling=sampling,
        model_name=names[0] if isinstance(names, list) else names,
    )
    from ..common.stop_signals import Stopped, StopSignals

    try:
        with StopSignals() as signals:
            from .job import check_answered, run_batch

            if dry_run or validate_only:
                from .preflight import run_preflight

                raise typer.Exit(run_preflight(config, options, dry_run=dry_run))
            report = run_batch(config, options, signals)
            report.print()
            check_answered(report.stats, options)
    except Stopped as stopped:
        if not stopped.told:
            typer.echo(f"{stopped} before anything was answered", err=True)
        raise typer.Exit(stopped.exit_code) from None
