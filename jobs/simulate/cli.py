"""`manta simulate`, as `cli.py` has the other commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ...cluster.errors import ConfigError
from ..flags import parse_size

TRAFFIC = "Traffic"
REPLICA = "A replica"


def simulate(
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            help="JSONL of arrival_s, prompt_tokens, output_tokens, in place of a made-up day.",
            rich_help_panel=TRAFFIC,
        ),
    ] = None,
    peak: Annotated[
        float, typer.Option("--peak", help="Requests/s at the day's height.", rich_help_panel=TRAFFIC)
    ] = 20.0,
    bursts: Annotated[
        int, typer.Option("--bursts", help="Sudden rises in a day.", rich_help_panel=TRAFFIC)
    ] = 12,
    prompt_tokens: Annotated[
        float, typer.Option("--prompt-tokens", help="Mean length.", rich_help_panel=TRAFFIC)
    ] = 800.0,
    output_tokens: Annotated[
        float, typer.Option("--output-tokens", help="Mean length.", rich_help_panel=TRAFFIC)
    ] = 2500.0,
    hours: Annotated[
        float, typer.Option("--hours", help="From the quietest one on.", rich_help_panel=TRAFFIC)
    ] = 24.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the traffic.", rich_help_panel=TRAFFIC)] = 0,
    replicas: Annotated[
        str, typer.Option("--replicas", metavar="LEAST:MOST", help="The fewest and the most.")
    ] = "1:100",
    start_s: Annotated[
        float, typer.Option("--start-s", help="From wanted to serving.", rich_help_panel=REPLICA)
    ] = 60.0,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", help="Requests at once.", rich_help_panel=REPLICA)
    ] = 16,
    kv_tokens: Annotated[
        int,
        typer.Option(
            "--kv-tokens",
            help="That its pages hold.",
            parser=parse_size,
            metavar="SIZE",
            rich_help_panel=REPLICA,
        ),
    ] = 200_000,
    step_ms: Annotated[
        float, typer.Option("--step-ms", help="Least time of a verify pass.", rich_help_panel=REPLICA)
    ] = 25.0,
    row_ms: Annotated[
        float, typer.Option("--row-ms", help="Of a row in it, where rows rule.", rich_help_panel=REPLICA)
    ] = 0.2,
    draft_ms: Annotated[
        float, typer.Option("--draft-ms", help="Of a drafter's pass.", rich_help_panel=REPLICA)
    ] = 3.0,
    acceptance: Annotated[
        float, typer.Option("--acceptance", help="Of a draft, after accepted ones.", rich_help_panel=REPLICA)
    ] = 0.75,
    scaling: Annotated[
        str, typer.Option("--scaling", metavar="JSON", help="Our policy's rules: '{\"load_high\": 0.8}'.")
    ] = "{}",
    target: Annotated[
        list[float] | None,
        typer.Option(
            "--target-ongoing-requests", help="Of Ray's policy; may be repeated (2, its default, to 12)."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file for the figures.")] = None,
) -> None:
    """Play a day of traffic over simulated replicas: our scaling policy beside Ray Serve's default.

    A simulation of both policies and a coarse model of a replica: no Ray, no model, no GPU.
    """
    from dataclasses import replace

    from ...actors.http.settings import parse_replicas
    from ...cluster.autoscaling import ScalingRules
    from ...cluster.config import from_mapping
    from ...cluster.simulator import LinearCost
    from .run import SimulateOptions, run_simulate
    from .traffic import Day

    day = Day(
        peak_per_s=peak,
        bursts=bursts,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        hours=hours,
        seed=seed,
    )
    options = SimulateOptions(
        day=day,
        trace=trace,
        replicas=parse_replicas(replicas),
        start_s=start_s,
        max_num_seqs=max_num_seqs,
        kv_tokens=kv_tokens,
        cost=LinearCost(step_ms / 1e3, row_ms / 1e3, draft_ms / 1e3),
        acceptance=acceptance,
        rules=from_mapping(ScalingRules, _json(scaling), "scaling."),
        output=output,
    )
    run_simulate(replace(options, targets=tuple(target)) if target else options)


def _json(text: str) -> dict[str, Any]:  # Any: checked where it becomes rules
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"scaling={text!r} must be a JSON object of rules.", param="scaling")
    return found
