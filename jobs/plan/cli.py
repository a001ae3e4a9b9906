"""`manta plan` as a command; `jobs/cli.py` has the others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ...cluster.config import Quantization
from ...cluster.planner.gpus import GPUS
from ..flags import parse_size

PlanDType = Literal["auto", "bfloat16", "float16"]  # rates are known for 16 bits alone
_SIZE = {"parser": parse_size, "metavar": "SIZE", "show_default": False}


def plan(
    model: Annotated[str, typer.Option("--model", "-m", help="Target: folder or Hugging Face id.")],
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs of the node.")] = 8,
    gpu: Annotated[str, typer.Option("--gpu", help=f"Their kind: {', '.join(GPUS)}.")] = "h200",
    drafter: Annotated[
        str | None,
        typer.Option("--drafter", "--spec-model", show_default=False, help="DFlash drafter; none if absent."),
    ] = None,
    dtype: Annotated[
        PlanDType, typer.Option("--dtype", help="The checkpoint's if auto; bfloat16 where that is float32.")
    ] = "auto",
    quantization: Annotated[
        Quantization | None,
        typer.Option("--quantization", "-q", show_default=False, help="fp8: the target's weights in a byte."),
    ] = None,
    drafter_quantization: Annotated[
        Quantization | None,
        typer.Option("--drafter-quantization", show_default=False, help="The same of the drafter's."),
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(
            "--acceptance",
            show_default=False,
            help="Mean acceptance length, as 4.2, or how likely each draft and all before it are accepted, "
            "as 0.8,0.7,...; the drafter's card's, or 4, if absent.",
        ),
    ] = None,
    slo_tpot_ms: Annotated[
        float | None,
        typer.Option("--slo-tpot-ms", show_default=False, help="Most milliseconds per output token."),
    ] = None,
    slo_ttft_ms: Annotated[
        float | None,
        typer.Option(
            "--slo-ttft-ms", show_default=False, help="Most milliseconds to the first token, in a trace."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            show_default=False,
            help="JSONL of arrivals (arrival_s, prompt_tokens, output_tokens): played through every layout.",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", help="Longest sequence; the checkpoints' limit.", **_SIZE)
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", help="Tokens of a sequence on average; the trace's, or 4096.", **_SIZE),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch", show_default=False, help="Requests at once on the node; each layout's best if absent."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON in place of tables.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", show_default=False, help="File for the Serve config.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Lay out a model over a node's GPUs: what fits, how fast it would be, the ray_config.yaml of the best.

    From shapes and rates alone: needs no GPU, no weights and no Ray.
    """
    from .run import PlanOptions, make_plan

    make_plan(
        PlanOptions(
            num_gpus=gpus,
            gpu=gpu,
            model=model,
            drafter=drafter,
            dtype=dtype,
            quantization=quantization,
            drafter_quantization=drafter_quantization,
            acceptance=acceptance,
            slo_tpot_ms=slo_tpot_ms,
            slo_ttft_ms=slo_ttft_ms,
            trace=trace,
            max_model_len=max_model_len,
            context=context,
            batch=batch,
            as_json=as_json,
            output=output,
            force=force,
        )
    )
