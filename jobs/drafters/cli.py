"""The commands `manta drafter ...`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..common.command_groups import CommandGroup
from ..common.engine_flags import with_flags
from .common.options import (
    AdaptOptions,
    DeployOptions,
    EvalOptions,
    ExplainOptions,
    TrainOptions,
)

# Arguments shared by the commands.
Drafter = Annotated[str, typer.Argument(help="Folder, GGUF file or hub id of a drafter.")]
Target = Annotated[str, typer.Option("--target", "-m", help="Folder, GGUF file or hub id of the target.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

drafter = CommandGroup(
    help="Inspect, validate, convert, evaluate, train and deploy drafters.",
)


@drafter.command()
def inspect(name: Drafter, as_json: AsJson = False) -> None:
    """Describe a drafter from config.json and the headers of its weights; downloads no weights."""
    from .common.drafter_files import open_drafter
    from .drafter_summary import print_summaries, summarize_drafter

    summary = summarize_drafter(open_drafter(name))
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        print_summaries([summary])


@drafter.command()
def compare(one: Drafter, other: Drafter, as_json: AsJson = False) -> None:
    """Describe two drafters side by side and mark the differences."""
    from .common.drafter_files import open_drafter
    from .drafter_summary import print_summaries, summarize_drafter

    summaries = [summarize_drafter(open_drafter(name)) for name in (one, other)]
    if as_json:
        typer.echo(json.dumps(summaries, indent=2))
    else:
        print_summaries(summaries)


@drafter.command("list")
def list_drafters(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders to search, one level deep; default: models/ and the hub's cache."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--for", metavar="MODEL", help="List the published drafters of this target instead."),
    ] = None,
) -> None:
    """List the drafters on this machine, or with --for the published ones of a target."""
    from .drafter_summary import find_drafters, print_drafters, print_published

    if target is None:
        print_drafters(find_drafters(folders))
    elif folders:
        raise typer.BadParameter("Give folders or --for, not both.")
    else:
        print_published(target)


@drafter.command()
def validate(
    name: Drafter,
    target: Target,
    level: Annotated[
        Literal["static", "cpu", "gpu"],
        typer.Option(
            "--level",
            help="static reads no weights; cpu also runs a few prompts in fp32; gpu measures acceptance "
            "and compares it with the card of `manta drafter eval`.",
        ),
    ] = "static",
    card: Annotated[
        Path | None, typer.Option("--card", help="Card for gpu; default: card.json in the drafter's folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Report all problems of a drafter and target with remedies; exit code 1 if they cannot work."""
    from .drafter_summary import describe_files
    from .validate.validate_pair import print_findings, validate_pair

    if level == "gpu":
        from .validate.card_check import needs_gpu

        if reason := needs_gpu():
            typer.echo(reason, err=True)
            raise typer.Exit(2)
    findings = validate_pair(name, target, level=level, card=card)
    if as_json:
        typer.echo(json.dumps([finding.as_json() for finding in findings], indent=2))
    else:
        if described := describe_files(name):
            typer.echo(described)
        print_findings(name, target, findings)
    if any(finding.fatal for finding in findings):
        raise typer.Exit(1)


@drafter.command("eval")
@with_flags
def evaluate(options: EvalOptions, as_json: AsJson = False) -> None:
    """Measure acceptance by category and draft, and the speed-up over plain decoding, with 95 % intervals."""
    from .evaluate.evaluate_drafter import run_eval
    from .evaluate.evaluation_card import print_evaluation, write_card

    figures = run_eval(options)
    if options.output is not None:
        write_card(figures, options.output)
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
    else:
        print_evaluation(figures)


@drafter.command()
@with_flags
def explain(options: ExplainOptions, as_json: AsJson = False) -> None:
    """Find why few drafts are accepted: acceptance by slice of the traffic, and the likely causes."""
    from .explain.explain_drafter import explain_drafter
    from .explain.explanation import explanation_lines

    explanation = explain_drafter(options)
    if as_json:
        typer.echo(json.dumps(explanation.as_json(), indent=2))
    else:
        typer.echo("\n".join(explanation_lines(explanation)))


@drafter.command()
def convert(
    name: Drafter,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="New folder; for gguf a new file that ends in .gguf.")
    ],
    to: Annotated[
        Literal["zlab", "speculators", "gguf"],
        typer.Option("--to", help="Format to write; gguf is llama.cpp's."),
    ],
    target: Target,
) -> None:
    """Convert a drafter to another format and verify that meaning and weights are identical."""
    if to == "gguf":
        from .common.gguf_conversion import convert_to_gguf

        for note in convert_to_gguf(name, target, output):
            typer.echo(note, err=True)
    else:
        from .common.format_conversion import convert_drafter

        convert_drafter(name, target, "z-lab" if to == "zlab" else to, output)
    typer.echo(str(output))


@drafter.command()
@with_flags
def adapt(options: AdaptOptions, as_json: AsJson = False) -> None:
    """Train a drafter on new traffic and replayed text; exit code 1, without output, if it is no better."""
    from .train.adapt_run import print_figures, run_adapt

    figures = run_adapt(options)
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
    else:
        print_figures(figures, options)
    if not figures["passed"]:
        raise typer.Exit(1)


@drafter.command()
@with_flags
def train(options: TrainOptions) -> None:
    """Train a drafter for a frozen target; the same command resumes an interrupted run."""
    from .train.train_run import train_drafter

    train_drafter(options)


@drafter.command()
@with_flags
def deploy(options: DeployOptions) -> None:
    """Replace the drafter of a running application. Running requests continue with the same tokens."""
    from ...actors.checkpoints.checkpoint_paths import absolute_path
    from .deploy import deploy_drafter

    deploy_drafter(options.app, options.deployment, absolute_path(options.drafter))
    typer.echo(f"{options.drafter} is the drafter once the replicas have loaded it (see their log)", err=True)
