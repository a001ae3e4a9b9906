"""`manta drafter ...`, as `jobs/cli.py` has the other commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer

from ..flags import with_flags
from .options import AdaptOptions, TrainOptions

# Arguments that the commands share.
Drafter = Annotated[str, typer.Argument(help="Folder or hub id of a drafter.")]
Target = Annotated[str, typer.Option("--target", "-m", help="Folder or hub id of the target.")]
AsJson = Annotated[bool, typer.Option("--json", help="A JSON object instead of a table.")]

drafter = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Drafters: what they are, whether they fit a target, their training, how they do in service.",
)


@drafter.command()
def inspect(name: Drafter, as_json: AsJson = False) -> None:
    """Tell what a drafter is, from config.json and the headers of its weights; of the hub no weight comes."""
    from .files import open_drafter
    from .portrait import portrait_of, print_portraits

    portrait = portrait_of(open_drafter(name))
    if as_json:
        typer.echo(json.dumps(portrait.as_json(), indent=2))
    else:
        print_portraits([portrait])


@drafter.command()
def compare(one: Drafter, other: Drafter, as_json: AsJson = False) -> None:
    """Tell two drafters side by side; what differs is marked."""
    from .files import open_drafter
    from .portrait import portrait_of, print_portraits

    portraits = [portrait_of(open_drafter(name)) for name in (one, other)]
    if as_json:
        typer.echo(json.dumps([portrait.as_json() for portrait in portraits], indent=2))
    else:
        print_portraits(portraits)


@drafter.command("list")
def list_drafters(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Where to look, one level deep; models/ and the hub's cache if absent."),
    ] = None,
) -> None:
    """List the drafters that are on this machine."""
    from .shelf import find_drafters, print_shelf

    print_shelf(find_drafters(folders))


@drafter.command()
def validate(
    name: Drafter,
    target: Target,
    level: Annotated[
        Literal["static", "cpu", "gpu"],
        typer.Option(
            "--level",
            help="static reads no weight; cpu also runs a few prompts in fp32; gpu measures acceptance again "
            "and compares it with the card of `manta drafter eval`.",
        ),
    ] = "static",
    card: Annotated[
        Path | None, typer.Option("--card", help="Its card.json, for gpu; in the drafter's folder if absent.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find every misfit of drafter and target, each with what to change; ends with 1 if they cannot work."""
    from .validate import print_misfits, validate_pair

    if level == "gpu":
        from .against_card import needs_gpu

        if reason := needs_gpu():
            typer.echo(reason, err=True)
            raise typer.Exit(2)
    misfits = validate_pair(name, target, level=level, card=card)
    if as_json:
        typer.echo(json.dumps([misfit.as_json() for misfit in misfits], indent=2))
    else:
        print_misfits(name, target, misfits)
    if any(misfit.fatal for misfit in misfits):
        raise typer.Exit(1)


@drafter.command("eval")
def evaluate(
    name: Drafter,
    target: Target,
    suite: Annotated[
        str, typer.Option("--suite", help="quick (the shipped prompts), speed-bench, or a JSONL file.")
    ] = "quick",
    concurrency: Annotated[
        str,
        typer.Option("--concurrency", help="Requests at once, between commas; speed is measured at each."),
    ] = "1,8",
    temperature: Annotated[
        str, typer.Option("--temperature", "-t", help="Between commas; 0 is greedy.")
    ] = "0,1",
    num_prompts: Annotated[
        int | None,
        typer.Option("--num-prompts", help="Of the suite, spread evenly; all if absent, of quick 40."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Over all prompts, of the speed.")] = 3,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Of every answer.")] = 128,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for card.json, card.md and card.svg.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure tokens per step by category and draft, and the speed-up over plain decoding, with intervals."""
    from .evaluate import EvalOptions, engine_of, run_eval
    from .evaluation_card import print_evaluation, write_card
    from .suites import open_suite

    prompts = open_suite(suite, num_prompts)
    options = EvalOptions(
        prompts=prompts.path,
        num_prompts=len(prompts.rows),
        suite=prompts.name,
        concurrency=_numbers("concurrency", concurrency, int),
        temperatures=_numbers("temperature", temperature, float),
        rounds=rounds,
        max_tokens=max_tokens,
    )
    figures = run_eval(engine_of(name, target), prompts, options)
    if output is not None:
        write_card(figures, output)
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
    else:
        print_evaluation(figures)


_Number = TypeVar("_Number", int, float)


def _numbers(option: str, text: str, kind: Callable[[str], _Number]) -> tuple[_Number, ...]:
    """Those between commas."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} must be numbers between commas.", param_hint=f"--{option}"
        ) from None


@drafter.command()
def convert(
    name: Drafter,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder; made, and never written over.")],
    to: Annotated[Literal["zlab", "speculators"], typer.Option("--to", help="Format to write.")],
    target: Target,
) -> None:
    """Write a drafter in another format; reads it again and compares meaning and every bit."""
    from .convert import convert_drafter

    convert_drafter(name, target, "z-lab" if to == "zlab" else to, output)
    typer.echo(str(output))


@drafter.command()
@with_flags
def adapt(options: AdaptOptions, as_json: AsJson = False) -> None:
    """Train a drafter on new traffic and replayed text; if it is no better, write nothing and end with 1."""
    from .adapt import print_figures, run_adapt

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
    """Train a drafter for a target that stays as it is; killed at any point, the same command goes on."""
    from .train import train_drafter

    train_drafter(options)


# Of a running application.
App = Annotated[str, typer.Option("--app", help="Serve's name of the application.")]
Deployment = Annotated[str, typer.Option("--deployment", help="Of the model's replicas in it.")]


@drafter.command()
def deploy(
    candidate: Annotated[str, typer.Argument(help="Folder or hub id of the drafter to try.")],
    canary: Annotated[
        str, typer.Option("--canary", help="Share of requests that it drafts for, by lot; at most 50%.")
    ] = "10%",
    shadow: Annotated[
        bool,
        typer.Option("--shadow", help="It drafts for nobody who waits; answers are decoded again."),
    ] = False,
    auto_promote: Annotated[
        bool, typer.Option("--auto-promote", help="If it is better, it takes the drafter's place by itself.")
    ] = False,
    alpha: Annotated[
        float, typer.Option("--alpha", help="Chance of promoting one that is not better.")
    ] = 0.01,
    min_requests: Annotated[
        int, typer.Option("--min-requests", help="Of the candidate, before any verdict.")
    ] = 50,
    max_hours: Annotated[
        float, typer.Option("--max-hours", help="Without a verdict it is taken out then.")
    ] = 24.0,
    wait: Annotated[bool, typer.Option("--wait", help="Tell how it goes until the verdict.")] = False,
    app: App = "manta",
    deployment: Deployment = "manta",
) -> None:
    """Try a drafter on the traffic of a running application; a worse one is taken out by itself."""
    from .deploy import DrafterDeployment, absolute, await_verdict, percentage

    rules = {"fraction": percentage(canary), "shadow": shadow, "auto_promote": auto_promote, "alpha": alpha}
    rules |= {"min_requests": min_requests, "max_duration_s": 3600.0 * max_hours}
    place = DrafterDeployment(app, deployment)
    place.deploy({"drafter": absolute(candidate), **rules})
    typer.echo(f"{candidate} is on trial; `manta drafter status` tells how it does", err=True)
    if wait:
        await_verdict(place, lambda line: typer.echo(line, err=True), every_s=5.0)


@drafter.command()
def status(app: App = "manta", deployment: Deployment = "manta", as_json: AsJson = False) -> None:
    """Tell what drafts in a running application, and how the trial of a candidate stands."""
    from .deploy import DrafterDeployment, describe

    found = DrafterDeployment(app, deployment).status()
    typer.echo(json.dumps(found.as_json(), indent=2) if as_json else "\n".join(describe(found)))


@drafter.command()
def promote(app: App = "manta", deployment: Deployment = "manta") -> None:
    """Make the candidate the drafter, whatever its trial says."""
    from .deploy import DrafterDeployment

    typer.echo(f"{DrafterDeployment(app, deployment).promote()} drafts from now on", err=True)


@drafter.command()
def rollback(app: App = "manta", deployment: Deployment = "manta") -> None:
    """Draft with what drafted before the candidate, whether that is on trial or was promoted."""
    from .deploy import DrafterDeployment

    back = DrafterDeployment(app, deployment).rollback()
    typer.echo(f"{back or 'the drafter that args name'} drafts from now on", err=True)
