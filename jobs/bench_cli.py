"""`manta bench ...`: the benchmarks' commands, as `cli.py` has the others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..cluster.config import AttentionBackend, DeviceKind, DType
from .flags import Model, engine_options, parse_size
from .settings import engine_config

# Any: settings are plain data, checked where they become dataclasses; contexts are typer's own.


class _SpeculationByDefault(TyperGroup):
    """A group that runs its command `speculation` where no command is named, so that flags may come first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = bool(args) and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else ["speculation", *args])


bench = typer.Typer(
    cls=_SpeculationByDefault,
    help="Measure speed; `manta bench speculation` where no command is named.",
    rich_markup_mode=None,
)
# Flags that the commands of `bench` share.
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


@bench.command()
@engine_options
def speculation(
    settings: dict[str, Any],
    model_: Model = None,
    prompts: PromptsFile = SHIPPED_PROMPTS,
    num_prompts: NumPrompts = 20,
    concurrency: MaxConcurrency = None,
    rounds: Rounds = 3,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    output: FiguresFile = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="SVG or PNG of the speed-up.")] = None,
) -> None:
    """Measure speculation on against off, side by side, each in its faster dtype (or --dtype)."""
    config = engine_config(settings)
    from .bench import BenchOptions, run_bench

    run_bench(
        config,
        BenchOptions(
            prompts=prompts,
            num_prompts=num_prompts,
            concurrency=tuple(concurrency or (1, 8)),
            rounds=rounds,
            max_tokens=max_tokens,
            temperature=temperature,
            output=output,
            plot=plot,
        ),
    )


@bench.command()
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
    from .bench_compare import CompareOptions, run_compare

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
    page_size: Annotated[int, typer.Option("--block-size", "--page-size", help="Tokens per K/V page.")] = 16,
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

    Tokens per step come from the acceptance curve; for drafts that are really accepted at the cost of a large
    model see `manta bench widen`.
    """
    from .bench_step import StepOptions, bench_step, parse_rates

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


@bench.command()
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
    from ..drafter.training.widen import Width, widen_pair

    width = Width(hidden=hidden, inter=inter, heads=heads, kv_heads=kv_heads)
    widen_pair(target, drafter, output, width, layers=layers, drafter_layers=drafter_layers)
