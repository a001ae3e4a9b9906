"""`manta bench ...`: what users measure on models of their own. `tests/benchmarks/` measures Manta itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ...cluster.config import EngineConfig
from ..common.command_groups import CommandGroup
from ..common.engine_flags import Model, with_flags
from ..common.stop_signals import StopSignals
from .common.options import BenchOptions, StepOptions, SweepOptions


class _SpeculationByDefault(TyperGroup):
    """Run the command `speculation` if no command is named, so that flags may come first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # Any: typer's own
        named = bool(args) and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else ["speculation", *args])


bench = CommandGroup(cls=_SpeculationByDefault, no_args_is_help=False)


@bench.callback()
def _stoppable(context: typer.Context) -> None:
    """Measure speed. Without a command, `manta bench` is `manta bench speculation`."""
    # SIGTERM, like Ctrl-C, also stops the servers and processes that are measured.
    context.with_resource(StopSignals())


SvgFolder = Annotated[Path | None, typer.Option("--svg", help="Folder for the charts, one SVG file each.")]
Method = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        help="Additional method: suffix, mixed, mtp, ngram, eagle3=FOLDER or JSON; may be repeated.",
    ),
]


@bench.command()
@with_flags
def speculation(options: BenchOptions, config: EngineConfig, model_: Model = None) -> None:
    """Compare speculation on with off, alternating in one run, each in its faster dtype (or --dtype)."""
    from .spec_on_off import run_bench

    run_bench(config, options)


@bench.command()
@with_flags
def sweep(
    options: SweepOptions,
    config: EngineConfig,
    model_: Model = None,
    method: Method = None,
    svg: SvgFolder = None,
) -> None:
    """Compare plain decoding, adaptive and fixed draft lengths, and other methods at 1 to 64 requests."""
    from ..common.plots import can_plot, write_svgs
    from .sweep.engines import parse_methods
    from .sweep.sweep_run import run_sweep, sweep_pictures

    figures = run_sweep(config, replace(options, methods=parse_methods(method or ())))
    if svg is not None and can_plot():
        write_svgs(sweep_pictures(figures), svg, "sweep-")


@bench.command()
@with_flags
def step(options: StepOptions) -> None:
    """Measure the parts of a step with random weights of any shape and compare them with the roofline.

    The mean acceptance length comes from the configured acceptance curve: no draft is really accepted.
    """
    from .step_cost import bench_step

    bench_step(options)
