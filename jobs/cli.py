"""The command line `manta`: parses, hands over to one function per command, and turns errors into words.

Not the work itself: each command checks its settings, then imports its module, so that neither `--help` nor
a wrong flag waits for torch or Ray. A `MantaError` ends with exit code 1, wrong usage with 2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from ..cluster.config import AttentionBackend, DeviceKind, DType
from ..cluster.errors import MantaError
from .flags import engine_options, parse_size, sampling_options
from .settings import engine_config, sampling_params

app = typer.Typer(
    name="manta",
    help="Ray-native inference with DFlash block-diffusion speculative decoding.",
    no_args_is_help=True,
    rich_markup_mode=None,  # its tables cut long option names
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
app.add_typer(bench, name="bench")

Model = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", show_default=False, help="Target checkpoint (or --model).")
]
# Any: merged settings and sampling fields are plain data, checked where they become dataclasses; contexts are
# typer's own.


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    try:
        app(arguments, prog_name="manta")
    except MantaError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(error.message)}")
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def manta(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command()
@engine_options
@sampling_options
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")],
    settings: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Continue one prompt in this process, streaming to the terminal; figures go to standard error."""
    config, params = engine_config(settings), sampling_params(sampling)
    from .generate import generate_text

    generate_text(config, sys.stdin.read() if prompt == "-" else prompt, params)


@app.command()
@engine_options
@sampling_options
def chat(
    settings: dict[str, Any],
    sampling: dict[str, Any],
    model_: Model = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message to begin with.")] = None,
) -> None:
    """Talk to a model in the terminal (/reset forgets the conversation, /exit or Ctrl-D ends)."""
    config, params = engine_config(settings), sampling_params(sampling)
    from .chat import run_chat

    run_chat(config, params, system)


@app.command()
@engine_options
def serve(
    settings: dict[str, Any],
    model_: Model = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="TCP port.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option("--served-model-name", help="Name in the API; may be repeated.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key", help="Key that requests must bring; may be repeated.", envvar="MANTA_API_KEY"
        ),
    ] = None,
    plain_proxy: Annotated[
        bool, typer.Option("--plain-proxy", help="Serve's own proxy in place of HAProxy (slower).")
    ] = False,
) -> None:
    """Serve an OpenAI-compatible endpoint with Ray Serve, until Ctrl-C."""
    from .serve import ServeOptions, start_server

    if served_model_name:
        settings["served_model_name"] = served_model_name
    if api_key:
        settings["api_key"] = api_key
    with start_server(settings, ServeOptions(host=host, port=port, plain_proxy=plain_proxy)) as server:
        server.wait()


@app.command()
@engine_options
@sampling_options
def batch(
    settings: dict[str, Any],
    sampling: dict[str, Any],
    input_file: Annotated[
        Path,
        typer.Option("-i", "--input-file", "--input", help="A Parquet or JSONL file, or a folder of them."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the results.")],
    input_format: Annotated[
        Literal["parquet", "jsonl", "openai"] | None,
        typer.Option("--input-format", help="Found from suffix and content if absent."),
    ] = None,
    output_format: Annotated[
        Literal["parquet", "jsonl", "openai"] | None,
        typer.Option(
            "--output-format", help="The input's if absent; OpenAI batch lines are answered in kind."
        ),
    ] = None,
    prompt_column: Annotated[
        str | None,
        typer.Option(
            "--prompt-column", help="Text, token ids or messages; `messages` or `prompt` if absent."
        ),
    ] = None,
    id_column: Annotated[
        str | None,
        typer.Option("--id-column", help="`custom_id`, `id`, or a hash of the row's content if absent."),
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Engines.")] = 1,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace earlier results in the folder.")
    ] = False,
) -> None:
    """Answer every row of a dataset with Ray Data. A bad row becomes an error row; --seed fixes sampling.

    Columns named like sampling fields (max_tokens, temperature, ...) win over flags. The `model` of an OpenAI
    batch line is not looked at: the job names the model. Also as `ray job submit ... -- manta batch ...`.
    """
    config = engine_config(settings)
    from .batch import BatchOptions, run_batch
    from .report import print_job

    names = settings.get("served_model_name")
    options = BatchOptions(
        input=input_file,
        output=output,
        input_format=input_format,
        output_format=output_format,
        overwrite=overwrite,
        concurrency=concurrency,
        prompt_column=prompt_column,
        id_column=id_column,
        sampling=sampling,
        model_name=names[0] if isinstance(names, list) else names,
    )
    print_job(run_batch(config, options), str(output))


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
        typer.Option("--attention-backend", help="Kernels of a step; auto is triton on a GPU."),
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


@app.command()
def demo(
    target: Annotated[Path, typer.Option("--target", help="Target checkpoint.")] = Path("models/target"),
    drafter: Annotated[Path, typer.Option("--drafter", help="Drafter checkpoint.")] = Path("models/drafter"),
    prompts: Annotated[Path, typer.Option("--prompts", help="Sample dataset.")] = Path(
        "models/prompts.jsonl"
    ),
    rows: Annotated[int, typer.Option("--rows", help="Rows of it to run.")] = 40,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Of every row.")] = 128,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="Rows that run at once.")] = 2,
) -> None:
    """The whole path on the shipped pair: HTTP, a dataset, and the comparison with plain decoding."""
    from .demo import DemoOptions, run_demo

    run_demo(
        DemoOptions(
            target=target,
            drafter=drafter,
            prompts=prompts,
            rows=rows,
            max_tokens=max_tokens,
            max_num_seqs=max_num_seqs,
        )
    )


@app.command("train-pair")
def train_pair(
    output_dir: Annotated[
        Path, typer.Option("-o", "--output", help="Gets target/, drafter/, prompts.jsonl.")
    ],
    work_dir: Annotated[
        Path, typer.Option("--work-dir", help="Snapshots and data; the same one again resumes.")
    ] = Path("out/train-pair"),
    hours: Annotated[float, typer.Option("--hours", help="Time for all stages together.")] = 2.75,
    num_threads: Annotated[int | None, typer.Option("--num-threads", help="Of torch on a CPU.")] = None,
) -> None:
    """Train the pair that ships from the Python standard library's sources; resumable."""
    from .train import train_pair as train

    train(output_dir, work_dir, hours, num_threads)


if __name__ == "__main__":
    main()
