"""`python tests/benchmarks NAME ...`: the commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from manta.actors.http.settings import parse_replicas
from manta.cluster.errors import MantaError
from manta.jobs.flags import Model, engine_options
from manta.jobs.settings import engine_config
from manta.jobs.stop import Stopped, StopSignals

from . import adapt, soak_batch, soak_serve
from .simulate import cli as simulate

# Any: settings are plain data, checked where they become dataclasses.
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


# Flags that the commands share.
PromptsFile = Annotated[Path, typer.Option("--prompts", help="JSONL with `prompt` or `messages`.")]
NumPrompts = Annotated[int, typer.Option("--num-prompts", help="Of the file, spread evenly.")]
MaxConcurrency = Annotated[
    list[int] | None,
    typer.Option("--max-concurrency", help="Requests at once; may be repeated (1 and 8)."),
]
Rounds = Annotated[int, typer.Option("--rounds", help="Of each side; the median counts.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Of every request.")]
FiguresFile = Annotated[Path | None, typer.Option("--output", "-o", help="JSON file for the figures.")]
SHIPPED_PROMPTS = Path("models/prompts.jsonl")


@app.command()
@engine_options
def compare(
    settings: dict[str, Any],
    model_: Model = None,
    prompts: PromptsFile = SHIPPED_PROMPTS,
    num_prompts: NumPrompts = 16,
    concurrency: MaxConcurrency = None,
    rounds: Rounds = 3,
    max_tokens: MaxTokens = 128,
    server: Annotated[
        str | None,
        typer.Option("--server", metavar="URL", help="An OpenAI-compatible server of the same target."),
    ] = None,
    server_model: Annotated[
        str | None, typer.Option("--server-model", help="Its name there; the first it lists if absent.")
    ] = None,
    output: FiguresFile = None,
) -> None:
    """Measure DFlash against plain decoding, Hugging Face generate, an unbatched DFlash loop and a server.

    Greedy, the same tokens of the same prompts, each contender in its fastest dtype and setting.
    """
    config = engine_config(settings)
    from .compare import CompareOptions, run_compare

    run_compare(
        config,
        CompareOptions(
            prompts=prompts,
            num_prompts=num_prompts,
            concurrency=tuple(concurrency or (1, 8)),
            rounds=rounds,
            max_tokens=max_tokens,
            server=server,
            server_model=server_model,
            output=output,
        ),
    )


@app.command()
@engine_options
def busy(
    settings: dict[str, Any],
    model_: Model = None,
    prompts: PromptsFile = SHIPPED_PROMPTS,
    num_prompts: NumPrompts = 24,
    concurrency: MaxConcurrency = None,
    rounds: Rounds = 5,
    max_tokens: MaxTokens = 128,
    busy: Annotated[
        list[int] | None,
        typer.Option("--busy", help="Busy processes beside the engine; may be repeated (1, 2 and 4)."),
    ] = None,
    cpu_quota: Annotated[
        list[float] | None,
        typer.Option(
            "--cpu-quota",
            metavar="CORES",
            help="A CPU quota in place of busy processes, as 1.5; may be repeated. Needs root on Linux.",
        ),
    ] = None,
    output: FiguresFile = None,
) -> None:
    """Measure what speed is left beside busy processes or below a CPU quota, against the fair share.

    Speculation on and off; turns on an idle machine alternate with turns in company. The engine's own dtype.
    """
    config = engine_config(settings)
    from .busy import BusyOptions, run_busy

    run_busy(
        config,
        BusyOptions(
            prompts=prompts,
            num_prompts=num_prompts,
            concurrency=tuple(concurrency or (1, 8)),
            rounds=rounds,
            max_tokens=max_tokens,
            busy=tuple(busy or (() if cpu_quota else (1, 2, 4))),
            cpu_quotas=tuple(cpu_quota or ()),
            output=output,
        ),
    )


@app.command()
@engine_options
def batch(
    settings: dict[str, Any],
    model_: Model = None,
    prompts: PromptsFile = SHIPPED_PROMPTS,
    rows: Annotated[int, typer.Option("--rows", help="Of the dataset: the file's, repeated.")] = 2000,
    rounds: Rounds = 3,
    max_tokens: MaxTokens = 64,
    side: Annotated[
        list[str] | None,
        typer.Option("--side", help="job, llm, http, generate or engines; may be repeated (all)."),
    ] = None,
    engines: Annotated[int, typer.Option("--engines", help="Of the job that is to keep them busy.")] = 2,
    output: FiguresFile = None,
) -> None:
    """Measure a batch job against manta.LLM, HTTP, and Ray Data over Hugging Face generate, on the same rows.

    Each side runs alone, in turns. Besides: how soon a job answers its first row, how busy its engines are.
    """
    config = engine_config(settings)
    from .batch import SIDES, BatchBenchOptions, run_batch_bench

    run_batch_bench(
        config,
        BatchBenchOptions(
            prompts=prompts,
            rows=rows,
            rounds=rounds,
            max_tokens=max_tokens,
            sides=tuple(side or SIDES),
            engines=engines,
            output=output,
        ),
    )


@app.command()
@engine_options
def background(
    settings: dict[str, Any],
    model_: Model = None,
    prompts: PromptsFile = SHIPPED_PROMPTS,
    request_rate: Annotated[
        list[float] | None,
        typer.Option("--request-rate", help="Online requests/s that come; may be repeated (2)."),
    ] = None,
    num_requests: Annotated[
        int, typer.Option("--num-requests", help="Online ones, of each side in a round.")
    ] = 48,
    lines: Annotated[int, typer.Option("--lines", help="Of the batch; more than are answered.")] = 5000,
    rounds: Rounds = 3,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Of a request on average: from half of it to half more.")
    ] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="Of online requests; 0 is greedy.")
    ] = 0.0,
    output: FiguresFile = None,
) -> None:
    """Measure what online requests notice of a batch that runs beside them on a server of its own.

    Requests come as a Poisson process, the same ones alone and beside the batch, in turns.
    """
    config = engine_config(settings)
    from .background import BackgroundOptions, run_background_bench

    run_background_bench(
        config,
        BackgroundOptions(
            prompts=prompts,
            rates=tuple(request_rate or (2.0,)),
            num_requests=num_requests,
            lines=lines,
            rounds=rounds,
            max_tokens=max_tokens,
            temperature=temperature,
            output=output,
        ),
    )


@app.command("shared-drafter")
@engine_options
def shared_drafter(
    settings: dict[str, Any],
    model_: Model = None,
    prompts: PromptsFile = SHIPPED_PROMPTS,
    num_prompts: NumPrompts = 20,
    concurrency: Annotated[
        list[int] | None,
        typer.Option("--max-concurrency", help="Requests at once at each engine; may be repeated (4)."),
    ] = None,
    engines: Annotated[
        list[int] | None,
        typer.Option("--engines", help="At once, on this machine; may be repeated (1, 2 and 3)."),
    ] = None,
    rounds: Rounds = 5,
    seconds: Annotated[float, typer.Option("--seconds", help="Of a side's turn in a round.")] = 3.0,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    output: FiguresFile = None,
) -> None:
    """Measure engines that share one drafter against engines with a drafter each: speed, queue, fairness.

    The same closed load at each engine. A drafter for all, a split one each, a colocated one each: in turns.
    """
    config = engine_config(settings)
    from .shared_drafter import SharedDrafterOptions, run_shared_drafter

    run_shared_drafter(
        config,
        SharedDrafterOptions(
            prompts=prompts,
            num_prompts=num_prompts,
            concurrency=tuple(concurrency or (4,)),
            engines=tuple(engines or (1, 2, 3)),
            rounds=rounds,
            seconds=seconds,
            max_tokens=max_tokens,
            temperature=temperature,
            output=output,
        ),
    )


@app.command("serve-tax")
@engine_options
def serve_tax(
    settings: dict[str, Any],
    model_: Model = None,
    prompts: PromptsFile = SHIPPED_PROMPTS,
    num_prompts: NumPrompts = 20,
    concurrency: MaxConcurrency = None,
    rounds: Rounds = 3,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[
        list[float] | None,
        typer.Option("--temperature", "-t", help="0 is greedy; may be repeated (0 and 1)."),
    ] = None,
    side: Annotated[
        list[str] | None,
        typer.Option("--side", help="engine, actor, asgi or serve; may be repeated (all)."),
    ] = None,
    output: FiguresFile = None,
) -> None:
    """Measure what Ray, HTTP, Serve and HAProxy take of the bare engine's speed, and CPU time by process.

    Streams at 1, 8 and 32 at once unless --max-concurrency says otherwise. Each side runs alone, in turns.
    """
    config = engine_config(settings)
    from .serve_tax import SIDES, ServeTaxOptions, run_serve_tax

    run_serve_tax(
        config,
        ServeTaxOptions(
            prompts=prompts,
            num_prompts=num_prompts,
            concurrency=tuple(concurrency or (1, 8, 32)),
            rounds=rounds,
            max_tokens=max_tokens,
            temperatures=tuple([0.0, 1.0] if temperature is None else temperature),
            sides=tuple(side or SIDES),
            output=output,
        ),
    )


@app.command()
@engine_options
def scale(
    settings: dict[str, Any],
    model_: Model = None,
    replicas: Annotated[
        str, typer.Option("--replicas", metavar="LEAST:MOST", help="Between which the load drives them.")
    ] = "1:3",
    clients: Annotated[
        int | None,
        typer.Option("--clients", help="At once, at the height of the load (enough for all replicas)."),
    ] = None,
    hold_s: Annotated[
        float, typer.Option("--hold", help="Seconds that each load lasts at its number.")
    ] = 20.0,
    max_tokens: MaxTokens = 128,
    output: FiguresFile = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="SVG or PNG of it over time.")] = None,
) -> None:
    """Drive a server's replicas up and down by load; no request may fail. Drawn over time."""
    from .scale import ScaleOptions, run_scale

    run_scale(
        settings,
        ScaleOptions(
            replicas=parse_replicas(replicas),
            many=clients,
            hold_s=hold_s,
            max_tokens=max_tokens,
            output=output,
            plot=plot,
        ),
    )


@app.command()
@engine_options
def grammars(
    settings: dict[str, Any],
    model_: Model = None,
    requests: Annotated[int, typer.Option("--requests", help="At once, each with a schema.")] = 8,
    max_tokens: MaxTokens = 128,
    output: FiguresFile = None,
) -> None:
    """Measure what holding answers to schemas costs of a step."""
    config = engine_config(settings)
    from .grammars import GrammarOptions, run_grammars

    run_grammars(config, GrammarOptions(requests=requests, max_tokens=max_tokens, output=output))


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
