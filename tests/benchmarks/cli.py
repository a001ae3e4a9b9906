"""`python tests/benchmarks NAME ...`: the commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from manta.cluster.config import EngineConfig
from manta.cluster.errors import MantaError
from manta.jobs.common.engine_flags import Model, with_flags
from manta.jobs.common.stop_signals import Stopped, StopSignals

from . import speed_bench
from .batch import soak_batch
from .options import CompareOptions, CouplingOptions, PolicySweepOptions, ServeTaxOptions
from .serving import soak_serve

app = typer.Typer(
    help="Benchmarks of Manta against itself and other systems.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one benchmark. Errors exit with code 1, signals with the usual codes of a shell."""
    try:
        app(sys.argv[1:] if arguments is None else arguments, prog_name="benchmarks")
    except MantaError as error:
        sys.exit(f"error: {error.message}")
    except Stopped as stopped:
        typer.echo(str(stopped), err=True)
        sys.exit(stopped.exit_code)


@app.callback()
def _stoppable(context: typer.Context) -> None:
    # SIGTERM, like Ctrl-C, also stops the servers and processes that are measured.
    context.with_resource(StopSignals())


@app.command()
@with_flags
def compare(options: CompareOptions, config: EngineConfig, model_: Model = None) -> None:
    """Compare DFlash with plain decoding, Hugging Face generate, an unbatched DFlash loop and a server.

    Greedy decoding of the same prompts; each contender uses its fastest dtype and setting.
    """
    from .comparison.compare import run_compare

    run_compare(config, options)


@app.command()
@with_flags
def couplings(options: CouplingOptions, config: EngineConfig, model_: Model = None) -> None:
    """Compare equal noise with rejection sampling in accepted drafts, on one text and the same logits."""
    from .comparison.couplings import run_couplings

    run_couplings(config, options)


@app.command()
@with_flags
def sweep(
    options: PolicySweepOptions,
    config: EngineConfig,
    model_: Model = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Folder for the charts.")] = None,
) -> None:
    """Run manta bench sweep with a useless drafter and mixed traffic, and judge every bar."""
    from manta.jobs.bench.sweep.sweep_run import sweep_pictures
    from manta.jobs.common.plots import can_plot, write_svgs

    from .engine.policy_sweep import run_policy_sweep

    figures = run_policy_sweep(config, options)
    if svg is not None and can_plot():
        write_svgs(sweep_pictures(figures), svg, "sweep-")


@app.command("serve-tax")
@with_flags
def serve_tax(options: ServeTaxOptions, config: EngineConfig, model_: Model = None) -> None:
    """Measure the overhead of Ray, HTTP, Serve and HAProxy over the engine, and CPU time by process.

    1, 8 and 32 concurrent streams by default. Sides run alone and alternate.
    """
    from .serving.serve_tax import run_serve_tax

    run_serve_tax(config, options)


@app.command()
def widen(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for target/ and drafter/.")],
    target: Annotated[Path, typer.Option("--target", help="Target checkpoint.")] = Path("models/target"),
    drafter: Annotated[Path, typer.Option("--drafter", help="Drafter checkpoint.")] = Path("models/drafter"),
    hidden: Annotated[
        int,
        typer.Option(
            "--hidden", help="Hidden size of both; exact in any dtype at 4, 16, 64, ... times theirs."
        ),
    ] = 3072,
    inter: Annotated[int, typer.Option("--inter", help="Intermediate size of both.")] = 17408,
    heads: Annotated[int, typer.Option("--heads", help="Query heads of both.")] = 64,
    kv_heads: Annotated[int, typer.Option("--kv-heads", help="K/V heads of both.")] = 16,
    layers: Annotated[int, typer.Option("--layers", help="Layers of the target.")] = 36,
    drafter_layers: Annotated[int, typer.Option("--drafter-layers", help="Layers of the drafter.")] = 5,
) -> None:
    """Write a larger pair that gives the same answers and drafts as the given one.

    This combines real acceptance with real cost: `manta bench -m OUTPUT/target --spec-model OUTPUT/drafter`.
    By default the layers of the shipped pair grow to the size of Qwen3-8B's (16 GB on disk).
    """
    from .engine.widen import Width, widen_pair

    width = Width(hidden=hidden, inter=inter, heads=heads, kv_heads=kv_heads)
    widen_pair(target, drafter, output, width, layers=layers, drafter_layers=drafter_layers)


app.command("speed-bench")(speed_bench.main)
app.command("soak-batch")(soak_batch.main)
app.command("soak-serve")(soak_serve.main)
