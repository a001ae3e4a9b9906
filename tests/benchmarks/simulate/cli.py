"""`python tests/benchmarks simulate-fleet`, `simulate-policy` and `simulate-validate` as commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError
from manta.cluster.flag import parse_size
from manta.cluster.planner.gpus import GPUS
from manta.jobs.flags import Model, text_parser, with_flags

from ..options import ValidateOptions

TRAFFIC = "Traffic"
REPLICA = "A replica"
ENGINE = "A replica that is an engine on GPUs"


def fleet(
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
            parser=text_parser(parse_size),
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
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            show_default=False,
            help="Target of an engine on GPUs, in place of the times, --acceptance and --kv-tokens.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter", "--spec-model", show_default=False, rich_help_panel=ENGINE, help="Its drafter."
        ),
    ] = None,
    gpu: Annotated[str, typer.Option("--gpu", help=", ".join(GPUS), rich_help_panel=ENGINE)] = "b300",
    tp: Annotated[int, typer.Option("--tp", help="GPUs of a replica.", rich_help_panel=ENGINE)] = 1,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            show_default=False,
            help="As of `manta simulate node`; dflash with a drafter, else plain.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    acceptance_length: Annotated[
        str,
        typer.Option("--acceptance-length", help="As node's --acceptance.", rich_help_panel=ENGINE),
    ] = "4.0",
    spread: Annotated[
        float, typer.Option("--spread", help="Of requests' hardness.", rich_help_panel=ENGINE)
    ] = 0.5,
    scaling: Annotated[
        str, typer.Option("--scaling", metavar="JSON", help="Our policy's rules: '{\"load_high\": 0.8}'.")
    ] = "{}",
    target: Annotated[
        list[float] | None,
        typer.Option(
            "--target-ongoing-requests", help="Of Ray's policy; may be repeated (2, its default, to 12)."
        ),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray/--no-ray", help="Ray's policy, too; slow in large fleets.")
    ] = True,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file for the figures.")] = None,
) -> None:
    """Play a day of traffic over simulated replicas: our scaling policy beside Ray Serve's default.

    A simulation of both policies and a coarse model of a replica: no Ray, no model, no GPU.
    """
    from dataclasses import replace

    from manta.actors.http.settings import parse_replicas
    from manta.cluster.autoscaling import ScalingRules
    from manta.cluster.config import from_mapping
    from manta.cluster.simulator import LinearCost
    from manta.jobs.simulate.subjects import Drafting

    from .fleet import EngineOfFleet, SimulateOptions, run_simulate
    from .traffic import Day

    day = Day(
        peak_per_s=peak,
        bursts=bursts,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        hours=hours,
        seed=seed,
    )
    engine = None
    if model is not None:
        engine = EngineOfFleet(
            model=model,
            drafter=drafter,
            gpu=gpu,
            tp=tp,
            method=method or ("plain" if drafter is None else "dflash"),
            drafting=Drafting(dflash=acceptance_length, eagle3=acceptance_length, spread=spread),
        )
    options = SimulateOptions(
        day=day,
        engine=engine,
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
    if target or not ray:
        options = replace(options, targets=tuple(target or ()) if ray else ())
    run_simulate(options)


def policy(
    model: Annotated[
        list[str], typer.Option("--model", "-m", help="Target: folder or Hugging Face id; may be repeated.")
    ],
    drafter: Annotated[
        list[str],
        typer.Option("--drafter", "--spec-model", help="DFlash drafter of each target, in their order."),
    ],
    gpu: Annotated[str, typer.Option("--gpu", help=f"Their kind: {', '.join(GPUS)}.")] = "h200",
    tp: Annotated[
        list[int] | None, typer.Option("--tp", help="Ranks of the engine; may be repeated (1).")
    ] = None,
    acceptance: Annotated[
        list[str] | None,
        typer.Option(
            "--acceptance", help="Mean acceptance length of the whole block; may be repeated (4.0)."
        ),
    ] = None,
    spread: Annotated[float, typer.Option("--spread", help="Of requests' hardness; 0: all are alike.")] = 0.5,
    context: Annotated[
        list[int] | None,
        typer.Option(
            "--context",
            help="Tokens of prompts; may be repeated (1k, 8k, 64k).",
            parser=text_parser(parse_size),
            metavar="SIZE",
        ),
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option("--concurrency", help="Requests at once; may be repeated (1, 4, 16, 64, 256)."),
    ] = None,
    output_tokens: Annotated[int, typer.Option("--output-tokens", help="Of every answer.")] = 192,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file for the figures.")] = None,
) -> None:
    """Compare speculation that adapts with plain decoding and every fixed length, by requests and context.

    The real scheduler and its policies over step times of the roofline; prompts cost nothing.
    """
    if len(model) != len(drafter):
        raise ConfigError(
            f"drafter: {len(drafter)} for {len(model)} target(s); give --drafter once for each --model.",
            param="drafter",
        )
    from .policy import PolicyOptions, run_policy

    defaults = PolicyOptions(pairs=tuple(zip(model, drafter, strict=True)))
    run_policy(
        PolicyOptions(
            pairs=defaults.pairs,
            gpu=gpu,
            tp=tuple(tp or defaults.tp),
            acceptance=tuple(acceptance or defaults.acceptance),
            spread=spread,
            contexts=tuple(context or defaults.contexts),
            concurrency=tuple(concurrency or defaults.concurrency),
            output_tokens=output_tokens,
            output=output,
        )
    )


@with_flags
def validate(options: ValidateOptions, config: EngineConfig, model_: Model = None) -> None:
    """Hold the simulation against this machine's engine: measure its steps, then the same load on both."""
    from .validate import run_validate

    run_validate(config, options)


def _json(text: str) -> dict[str, Any]:  # Any: checked where it becomes rules
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"scaling={text!r} must be a JSON object of rules.", param="scaling")
    return found
