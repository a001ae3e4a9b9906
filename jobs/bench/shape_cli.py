"""`manta bench step` and `widen`, the commands about models of any shape; `cli.py` has the others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...cluster.config import AttentionBackend, DeviceKind, DType
from ..flags import parse_size


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

    The mean acceptance length comes from the acceptance curve; for drafts that are really accepted at the
    cost of a large model see `manta bench widen`.
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
