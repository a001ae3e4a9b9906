"""`manta bench ...`: what users measure on models of their own. `tests/benchmarks/` measures Manta itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ...cluster.config import AttentionBackend, DeviceKind, DType, one_of
from ..flags import ENGINE_OPTIONS, Model, engine_options, parse_size, with_options
from ..settings import engine_config, merge_settings
from ..stop import StopSignals

# Any: settings are plain data, checked where they become dataclasses; contexts are typer's own.


class _SpeculationByDefault(TyperGroup):
    """A group that runs its command `speculation` where no command is named, so that flags may come first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = bool(args) and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else ["speculation", *args])


bench = typer.Typer(cls=_SpeculationByDefault, rich_markup_mode=None)


@bench.callback()
def _stoppable(context: typer.Context) -> None:
    """Measure speed; `manta bench speculation` where no command is named."""
    # SIGTERM ends it as Ctrl-C does: the servers and processes that it measures end with it.
    context.with_resource(StopSignals())


PromptsFile = Annotated[Path, typer.Option("--prompts", help="JSONL with `prompt` or `messages`.")]
MaxConcurrency = Annotated[
    list[int] | None,
    typer.Option("--max-concurrency", help="Requests at once; may be repeated (1, 2, 4, ..., 64)."),
]
AverageTokens = Annotated[
    int, typer.Option("--max-tokens", help="Of a request on average: from half of it to half more.")
]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
FiguresFile = Annotated[Path | None, typer.Option("--output", "-o", help="JSON file for the figures.")]
PageFile = Annotated[Path | None, typer.Option("--html", help="A page with pictures: one file, no network.")]
SvgFolder = Annotated[Path | None, typer.Option("--svg", help="Folder that gets each picture as a file.")]
Method = Annotated[
    list[str] | None,
    typer.Option("--method", help="Another method: ngram, eagle3=FOLDER or JSON; may be repeated."),
]
Minutes = Annotated[float, typer.Option("--minutes", help="How long it may take, about.")]
SHIPPED_PROMPTS = Path("models/prompts.jsonl")


@bench.command()
@engine_options
def speculation(
    settings: dict[str, Any],
    model_: Model = None,
    prompts: PromptsFile = SHIPPED_PROMPTS,
    num_prompts: Annotated[int, typer.Option("--num-prompts", help="Of the file, spread evenly.")] = 20,
    concurrency: Annotated[
        list[int] | None,
        typer.Option("--max-concurrency", help="Requests at once; may be repeated (1 and 8)."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Of each side; the median counts.")] = 5,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Of every request.")] = 128,
    temperature: Temperature = 0.0,
    trial: Annotated[
        bool,
        typer.Option("--trial/--no-trial", help="Try dtypes for each mode; without, the engine chooses."),
    ] = True,
    output: FiguresFile = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="SVG or PNG of the speed-up.")] = None,
) -> None:
    """Measure speculation on against off, side by side, each in its faster dtype (or --dtype)."""
    config = engine_config(settings)
    from .speculation import BenchOptions, run_bench

    run_bench(
        config,
        BenchOptions(
            prompts=prompts,
            num_prompts=num_prompts,
            concurrency=tuple(concurrency or (1, 8)),
            rounds=rounds,
            max_tokens=max_tokens,
            temperature=temperature,
            trial=trial,
            output=output,
            plot=plot,
        ),
    )


@bench.command()
@engine_options
def sweep(
    settings: dict[str, Any],
    model_: Model = None,
    prompts: PromptsFile = SHIPPED_PROMPTS,
    concurrency: MaxConcurrency = None,
    arrivals: Annotated[
        list[str] | None,
        typer.Option("--arrivals", help="closed, or poisson:RATE (requests/s); may be repeated (closed)."),
    ] = None,
    method: Method = None,
    max_tokens: AverageTokens = 128,
    temperature: Temperature = 0.0,
    minutes: Minutes = 15.0,
    output: FiguresFile = None,
    html: PageFile = None,
    svg: SvgFolder = None,
) -> None:
    """Measure plain decoding, adaptive and every fixed speculation at 1 to 64 requests; a verdict per bar.

    Also a drafter of shuffled weights, mixed traffic, and the first seconds after starts and changes of load.
    """
    config = engine_config(settings)
    from .load.arrivals import Arrivals
    from .sweep.run import CONCURRENCY, MIXED, SweepOptions, run_sweep
    from .sweep.sides import parse_methods

    loops = [Arrivals.parse(text) for text in arrivals or ("closed",)]
    loads = tuple(concurrency or CONCURRENCY) if None in loops else ()
    figures = run_sweep(
        config,
        SweepOptions(
            prompts=prompts,
            concurrency=loads,
            mixed=tuple(load for load in MIXED if load in loads),
            open_loops=tuple(loop for loop in loops if loop is not None),
            methods=parse_methods(method or ()),
            max_tokens=max_tokens,
            temperature=temperature,
            minutes=minutes,
            output=output,
        ),
    )
    if html is not None or svg is not None:
        from ..pictures.plots import can_plot, write_svgs
        from .load_page import write_sweep_page
        from .load_pictures import sweep_pictures

        if html is not None:
            write_sweep_page(figures, html)
        if svg is not None and can_plot():
            write_svgs(list(sweep_pictures(figures)), svg, "sweep-")


def _engine_options_unless_files(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the engine's flags; with `--of` no engine starts, so that flags are refused."""

    def gather(flags: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any] | None:
        if not arguments["files"]:
            return merge_settings(flags, flags.pop("config"))
        named = [name for name, value in flags.items() if value is not None]
        if named:
            raise typer.BadParameter(f"No engine is started: leave out {', '.join(named)}.")
        return None

    return with_options(command, ENGINE_OPTIONS, "settings", gather)  # type: ignore[arg-type]


@bench.command()
@_engine_options_unless_files
def pareto(
    settings: dict[str, Any] | None,
    files: Annotated[
        list[Path] | None,
        typer.Option("--of", metavar="FILE", help="Written by sweep -o; may be repeated. None: measure."),
    ] = None,
    prompts: PromptsFile = SHIPPED_PROMPTS,
    concurrency: MaxConcurrency = None,
    method: Method = None,
    max_tokens: AverageTokens = 128,
    temperature: Temperature = 0.0,
    minutes: Minutes = 5.0,
    output: FiguresFile = None,
    html: PageFile = None,
    svg: SvgFolder = None,
) -> None:
    """Throughput of a GPU (or machine) against tokens/s of one user, a curve per method."""
    from .pareto import read_figures, run_pareto

    if settings is None:
        sources = [read_figures(path) for path in files or ()]
    else:
        config = engine_config(settings)
        from .sweep.run import CONCURRENCY, SweepOptions, run_sweep
        from .sweep.sides import parse_methods

        options = SweepOptions(
            prompts=prompts,
            concurrency=tuple(concurrency or CONCURRENCY),
            mixed=(),
            methods=parse_methods(method or ()),
            max_tokens=max_tokens,
            temperature=temperature,
            minutes=minutes,
            methods_only=True,
        )
        sources = [run_sweep(config, options)]
    run_pareto(sources, output, html, svg)


@bench.command()
def step(
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", show_default=False, help="Folder or config.json; on a GPU Qwen3-8B if absent."
        ),
    ] = None,
    spec_model: Annotated[
        str | None,
        typer.Option(
            "--spec-model", show_default=False, help="Likewise; z-lab's b16 at the target's width if absent."
        ),
    ] = None,
    spec_tokens: Annotated[
        int | None, typer.Option("--spec-tokens", help="Drafts per request; the drafter's most if absent.")
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", help="Requests in a step; may be repeated (1, 8, 32, 64 and 128)."),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            "--context",
            parser=parse_size,
            metavar="SIZE",
            help="Tokens before a step; may be repeated (1K and 8K).",
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", help="Measured at each point; the median counts.")] = 20,
    synthetic_acceptance_rates: Annotated[
        str | None,
        typer.Option(
            "--synthetic-acceptance-rates",
            show_default=False,
            help="How likely each draft and all before it are accepted, as 0.9,0.8,... (vLLM's meaning); "
            "0.86, 0.86^2, ... if absent.",
        ),
    ] = None,
    dtype: Annotated[DType, typer.Option("--dtype", help="Of weights and K/V.")] = "auto",
    device: Annotated[DeviceKind, typer.Option("--device", help="Where the models run.")] = "auto",
    attention_backend: Annotated[
        AttentionBackend,
        typer.Option(
            "--attention-backend",
            help="Kernels of a step; auto is triton on a GPU, compiled on a CPU that can.",
        ),
    ] = "auto",
    page_size: Annotated[
        int | None,
        typer.Option(
            "--block-size",
            "--page-size",
            show_default=False,
            help="Tokens per K/V page; if absent 64 on a GPU, 16 on a CPU.",
        ),
    ] = None,
    device_rates: Annotated[
        str | None,
        typer.Option(
            "--device-rates",
            show_default=False,
            metavar="GB/s,TFLOP/s",
            help="What the device sustains; known GPUs need none, others are measured.",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file for the figures.")] = None,
) -> None:
    """Measure a step's parts with random weights of any shape, beside the roofline.

    The mean acceptance length comes from the acceptance curve, not from drafts that a model accepted.
    """
    from .step import StepOptions, bench_step, parse_rates

    given = {"batches": tuple(batch or ()), "contexts": tuple(context or ())}
    bench_step(
        StepOptions(
            model=model,
            spec_model=spec_model,
            num_drafts=spec_tokens,
            steps=steps,
            acceptance_rates=parse_rates(synthetic_acceptance_rates),
            dtype=dtype,
            device=device,
            attention_backend=attention_backend,
            page_size=page_size,
            device_rates=device_rates,
            output=output,
            **{name: values for name, values in given.items() if values},
        )
    )


prepare = typer.Typer(
    rich_markup_mode=None, help="Fetch published prompts for --prompts.", no_args_is_help=True
)


@prepare.command("speed-bench")
def speed_bench(
    output: Annotated[Path, typer.Option("--output", "-o", help="JSONL file for the prompts.")] = Path(
        "speed-bench.jsonl"
    ),
    subset: Annotated[
        str, typer.Option("--subset", help="qualitative, or throughput_1k .. 32k.")
    ] = "qualitative",
    source: Annotated[
        Path | None, typer.Option("--from", help="A file of NVIDIA's own preparation, in place of the hub's.")
    ] = None,
) -> None:
    """SPEED-Bench, by your own access to the Hugging Face hub (HF_TOKEN); for evaluation only."""
    from ..tables import print_table
    from .prepare import SUBSETS, prepare_speed_bench

    one_of("subset", subset, SUBSETS)
    done = prepare_speed_bench(subset, output, source)
    rows = [[name, str(count)] for name, count in done.categories.items()]
    print_table(f"{sum(done.categories.values())} prompts in {done.path}", ["category", "prompts"], rows)
    if done.left_out:
        print(
            f"{done.left_out} rows hold no prompt on the hub: NVIDIA's specdec_bench (prepare_data.py) makes "
            "the whole set; give its file with --from."
        )


bench.add_typer(prepare, name="prepare")
