"""`python tests/benchmarks NAME ...`: the commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from manta.cluster.config import EngineConfig
from manta.cluster.errors import MantaError
from manta.jobs.flags import Model, Settings, with_flags
from manta.jobs.stop import Stopped, StopSignals

from . import adapt, soak_batch, soak_serve
from .options import (
    BackgroundOptions,
    BatchBenchOptions,
    BusyOptions,
    CompareOptions,
    GrammarOptions,
    ScaleOptions,
    ServeTaxOptions,
    SharedDrafterOptions,
)
from .simulate import cli as simulate

app = typer.Typer(
    help="Benchmarks of Manta against itself and against others.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one benchmark. Errors end with exit code 1, signals as in a shell."""
    try:
        app(sys.argv[1:] if arguments is None else arguments, prog_name="benchmarks")
    except MantaError as error:
        sys.exit(f"error: {error.message}")
    except Stopped as stopped:
        typer.echo(str(stopped), err=True)
        sys.exit(stopped.exit_code)


@app.callback()
def _stoppable(context: typer.Context) -> None:
    # SIGTERM ends a benchmark as Ctrl-C does: the servers and processes that it measures end with it.
    context.with_resource(StopSignals())


@app.command()
@with_flags
def compare(options: CompareOptions, config: EngineConfig, model_: Model = None) -> None:
    """Measure DFlash against plain decoding, Hugging Face generate, an unbatched DFlash loop and a server.

    Greedy, the same tokens of the same prompts, each contender in its fastest dtype and setting.
    """
    from .compare import run_compare

    run_compare(config, options)


@app.command()
@with_flags
def busy(options: BusyOptions, config: EngineConfig, model_: Model = None) -> None:
    """Measure what speed is left beside busy processes or below a CPU quota, against the fair share.

    Speculation on and off; turns on an idle machine alternate with turns in company. The engine's own dtype.
    """
    from .busy import run_busy

    run_busy(config, options)


@app.command()
@with_flags
def batch(options: BatchBenchOptions, config: EngineConfig, model_: Model = None) -> None:
    """Measure a batch job against manta.LLM, HTTP, and Ray Data over Hugging Face generate, on the same rows.

    Each side runs alone, in turns. Besides: how soon a job answers its first row, how busy its engines are.
    """
    from .batch import run_batch_bench

    run_batch_bench(config, options)


@app.command()
@with_flags
def background(options: BackgroundOptions, config: EngineConfig, model_: Model = None) -> None:
    """Measure what online requests notice of a batch that runs beside them on a server of its own.

    Requests come as a Poisson process, the same ones alone and beside the batch, in turns.
    """
    from .background import run_background_bench

    run_background_bench(config, options)


@app.command("shared-drafter")
@with_flags
def shared_drafter(options: SharedDrafterOptions, config: EngineConfig, model_: Model = None) -> None:
    """Measure engines that share one drafter against engines with a drafter each: speed, queue, fairness.

    The same closed load at each engine. A drafter for all, a split one each, a colocated one each: in turns.
    """
    from .shared_drafter import run_shared_drafter

    run_shared_drafter(config, options)


@app.command("serve-tax")
@with_flags
def serve_tax(options: ServeTaxOptions, config: EngineConfig, model_: Model = None) -> None:
    """Measure what Ray, HTTP, Serve and HAProxy take of the bare engine's speed, and CPU time by process.

    Streams at 1, 8 and 32 at once unless --max-concurrency says otherwise. Each side runs alone, in turns.
    """
    from .serve_tax import run_serve_tax

    run_serve_tax(config, options)


@app.command()
@with_flags
def scale(options: ScaleOptions, settings: Settings, model_: Model = None) -> None:
    """Drive a server's replicas up and down by load; no request may fail. Drawn over time."""
    from .scale import run_scale

    run_scale(settings, options)


@app.command()
@with_flags
def grammars(options: GrammarOptions, config: EngineConfig, model_: Model = None) -> None:
    """Measure what holding answers to schemas costs of a step."""
    from .grammars import run_grammars

    run_grammars(config, options)


@app.command()
def widen(
    output: Annotated[Path, typer.Option("-o", "--output", help="Gets target/ and drafter/.")],
    target: Annotated[Path, typer.Option("--target", help="Target checkpoint.")] = Path("models/target"),
    drafter: Annotated[Path, typer.Option("--drafter", help="Drafter checkpoint.")] = Path("models/drafter"),
    hidden: Annotated[
        int,
        typer.Option("--hidden", help="Width of both; 4, 16, 64, ... times theirs is exact in any dtype."),
    ] = 3072,
    inter: Annotated[int, typer.Option("--inter", help="Inner width of both.")] = 17408,
    heads: Annotated[int, typer.Option("--heads", help="Query heads of both.")] = 64,
    kv_heads: Annotated[int, typer.Option("--kv-heads", help="K/V heads of both.")] = 16,
    layers: Annotated[int, typer.Option("--layers", help="Of the target.")] = 36,
    drafter_layers: Annotated[int, typer.Option("--drafter-layers", help="Of the drafter.")] = 5,
) -> None:
    """Write a pair as large as asked for that answers and drafts as the given one does.

    A real acceptance at a real cost: `manta bench -m OUTPUT/target --spec-model OUTPUT/drafter`. By default
    the blocks of the pair that ships grow to the size of Qwen3-8B's (16 GB on the disk).
    """
    from .widen import Width, widen_pair

    width = Width(hidden=hidden, inter=inter, heads=heads, kv_heads=kv_heads)
    widen_pair(target, drafter, output, width, layers=layers, drafter_layers=drafter_layers)


app.command("adapt")(adapt.main)
app.command("soak-batch")(soak_batch.main)
app.command("soak-serve")(soak_serve.main)
app.command("simulate-fleet")(simulate.fleet)
app.command("simulate-policy")(simulate.policy)
app.command("simulate-validate")(simulate.validate)
