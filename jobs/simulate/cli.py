"""`manta simulate node` as a command: it needs neither Ray nor a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...cluster.flag import parse_size
from ...cluster.planner.gpus import GPUS
from ..flags import text_parser

LOAD = "Load"
DRAFTS = "Drafting"

simulate = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@simulate.callback()
def _simulate() -> None:
    """Simulate a node of GPUs that serves a model."""


@simulate.command()
def node(
    model: Annotated[str, typer.Option("--model", "-m", help="Target: folder or Hugging Face id.")],
    drafter: Annotated[
        str | None,
        typer.Option("--drafter", "--spec-model", show_default=False, help="DFlash drafter, as the target."),
    ] = None,
    gpu: Annotated[str, typer.Option("--gpu", help=f"Their kind: {', '.join(GPUS)}.")] = "b300",
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs of the node.")] = 8,
    tp: Annotated[
        list[int] | None,
        typer.Option("--tp", help="Ranks of an engine; may be repeated (each number that fits)."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            help="plain, dflash, eagle3, or with a fixed number of drafts, as dflash-7; may be repeated "
            "(plain, and with a drafter eagle3-3 and dflash).",
        ),
    ] = None,
    acceptance: Annotated[
        str,
        typer.Option(
            "--acceptance",
            help="Mean acceptance length of the DFlash drafter's block, or by category: code=4.9,chat=2.9.",
            rich_help_panel=DRAFTS,
        ),
    ] = "4.0",
    eagle3_acceptance: Annotated[
        str,
        typer.Option("--eagle3-acceptance", help="The same of EAGLE-3's drafts.", rich_help_panel=DRAFTS),
    ] = "3.0",
    eagle3_drafts: Annotated[
        int, typer.Option("--eagle3-drafts", help="Of so many drafts.", rich_help_panel=DRAFTS)
    ] = 7,
    spread: Annotated[
        float, typer.Option("--spread", help="Of requests' hardness; 0: alike.", rich_help_panel=DRAFTS)
    ] = 0.5,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            "--concurrency",
            help="Requests at once in each engine; may be repeated (1, 2, 4, .. 256).",
            rich_help_panel=LOAD,
        ),
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(
            "--request-rate",
            help="Requests/s on the node (Poisson) in place of that; may be repeated.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    num_requests: Annotated[
        int, typer.Option("--num-requests", help="That arrive at a rate.", rich_help_panel=LOAD)
    ] = 200,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            show_default=False,
            help="JSONL of arrival_s, prompt_tokens, output_tokens, in place of rates and lengths.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    prompt_tokens: Annotated[
        float, typer.Option("--prompt-tokens", help="Mean length.", rich_help_panel=LOAD)
    ] = 1024.0,
    output_tokens: Annotated[
        float, typer.Option("--output-tokens", help="Mean length.", rich_help_panel=LOAD)
    ] = 512.0,
    sigma: Annotated[
        float, typer.Option("--sigma", help="Of the lengths' logarithm; 0: alike.", rich_help_panel=LOAD)
    ] = 0.4,
    seed: Annotated[int, typer.Option("--seed", help="Of lengths and texts.", rich_help_panel=LOAD)] = 0,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            help="Longest sequence; the checkpoints' limit.",
            parser=text_parser(parse_size),
            metavar="SIZE",
            show_default=False,
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file for the figures.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="SVG or PNG of the frontiers.")] = None,
) -> None:
    """Play load over one node, method beside method: throughput of a GPU against the speed of a user.

    The real scheduler and its policies over step times of the roofline; see docs/simulation.md.
    """
    from .node import NodeOptions, run_node
    from .workload import Workload

    options = NodeOptions(
        model=model,
        drafter=drafter,
        gpu=gpu,
        num_gpus=gpus,
        tp=tuple(tp or ()),
        methods=tuple(method or (("plain",) if drafter is None else ("plain", "eagle3-3", "dflash"))),
        acceptance=acceptance,
        eagle3_acceptance=eagle3_acceptance,
        eagle3_drafts=eagle3_drafts,
        spread=spread,
        concurrency=tuple(concurrency or (1, 2, 4, 8, 16, 32, 64, 128, 256)),
        rate_per_s=tuple(rate or ()),
        num_requests=num_requests,
        trace=trace,
        workload=Workload(prompt_tokens=prompt_tokens, output_tokens=output_tokens, sigma=sigma, seed=seed),
        max_model_len=max_model_len,
        output=output,
        plot=plot,
    )
    run_node(options)
