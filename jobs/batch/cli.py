"""`manta batch`, as `cli.py` has the other commands."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from ...cluster.errors import ConfigError
from ..flags import engine_options, sampling_options
from ..settings import engine_config

# Any: merged settings and sampling fields are plain data, checked where they become dataclasses.


@engine_options
@sampling_options
def batch(
    settings: dict[str, Any],
    sampling: dict[str, Any],
    # Not Paths: those would take the second slash out of a URL.
    input_file: Annotated[
        list[str],
        typer.Option(
            "-i",
            "--input-file",
            "--input",
            help="File, folder, pattern or URL (s3://, gs://, abfs://, hf://); may be repeated.",
        ),
    ],
    output: Annotated[str, typer.Option("-o", "--output", help="Folder or URL for the results.")],
    input_format: Annotated[
        Literal["parquet", "jsonl", "csv", "openai", "text"] | None,
        typer.Option("--input-format", help="Found from suffix and content if absent."),
    ] = None,
    output_format: Annotated[
        Literal["parquet", "jsonl", "openai"] | None,
        typer.Option(
            "--output-format",
            help="The input's, or JSONL, if absent; OpenAI batch lines are answered in kind.",
        ),
    ] = None,
    prompt_column: Annotated[
        str | None,
        typer.Option(
            "--prompt-column", help="Text, token ids or messages; `messages` or `prompt` if absent."
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option("--template", help='The prompt, made of columns: "Translate {text} to {language}."'),
    ] = None,
    id_column: Annotated[
        str | None,
        typer.Option("--id-column", help="`custom_id`, `id`, or a hash of the row's content if absent."),
    ] = None,
    duplicate_ids: Annotated[
        Literal["refuse", "number"],
        typer.Option("--duplicate-ids", help="Refuse rows with the same id, or number them."),
    ] = "refuse",
    pass_through: Annotated[
        list[str] | None,
        typer.Option(
            "--pass-through", help="Column to hand on to the results; may be repeated; * is all of them."
        ),
    ] = None,
    concurrency: Annotated[
        str, typer.Option("--concurrency", metavar="N|MIN:MAX", help="Engines; 1:4 grows and shrinks.")
    ] = "1",
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on with the job that the output holds.")
    ] = True,
    force_resume: Annotated[
        bool, typer.Option("--force-resume", help="Go on though settings or input have changed.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace earlier results in the output.")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Answer rows again that have failed.")
    ] = False,
    preserve_order: Annotated[
        bool, typer.Option("--preserve-order", help="Parts, by name, hold the rows in the input's order.")
    ] = False,
    sample: Annotated[
        int | None, typer.Option("--sample", metavar="N", help="Answer N rows only, drawn by --seed.")
    ] = None,
    limit_time: Annotated[
        float | None,
        typer.Option(
            "--limit-time", metavar="SECONDS", help="End then, keeping what is answered (exit code 3)."
        ),
    ] = None,
    validate_only: Annotated[
        bool,
        typer.Option("--validate-only", help="Look at every row, answer none; exit code 1 if rows are bad."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what the job would do, and end.")] = False,
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
    from ..stop import Stopped, StopSignals

    try:
        with StopSignals() as signals:
            from ...cluster.pool_size import Concurrency
            from .job import check_answered, run_batch
            from .options import BatchOptions
            from .progress import print_job

            options = BatchOptions(
                input=tuple(input_file),
                output=output,
                input_format=input_format,
                output_format=output_format,
                overwrite=overwrite,
                resume="force" if force_resume else "yes" if resume else "no",
                retry_failed=retry_failed,
                preserve_order=preserve_order,
                sample=sample,
                duplicate_ids=duplicate_ids,
                limit_time_s=limit_time,
                concurrency=Concurrency.parse(concurrency),
                prompt_column=prompt_column,
                template=template,
                id_column=id_column,
                pass_through=tuple(pass_through or ()),
                sampling=sampling,
                model_name=names[0] if isinstance(names, list) else names,
            )
            if dry_run or validate_only:
                from .preview import preview

                raise typer.Exit(preview(config, options, dry_run=dry_run))
            figures = run_batch(config, options, signals)
            print_job(figures, output)
            check_answered(figures, options)
    except Stopped as stopped:
        if not stopped.told:
            typer.echo(f"{stopped} before anything was answered", err=True)
        raise typer.Exit(stopped.exit_code) from None
