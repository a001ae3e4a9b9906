"""`manta doctor` as a command; `jobs/cli.py` has the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..progress import counting, say


def doctor(
    model: Annotated[str, typer.Option("--model", "-m", help="Target checkpoint.")] = "models/target",
    spec_model: Annotated[str, typer.Option("--spec-model", help="Drafter checkpoint.")] = "models/drafter",
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer dtypes, prompts and tokens: within a minute.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The report as JSON in place of the table.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file for the report.")] = None,
) -> None:
    """Examine this machine: what it has, what Manta uses of it, whether all computes what it should.

    Kernels against fp64, speculation on against off token by token, bandwidth. Needs neither Ray nor HTTP.
    Exit code 1 if anything failed; the table says what to do.
    """
    with counting("loading PyTorch and the compiled loops", say):
        from .run import DoctorOptions, print_report, run_doctor

    report = run_doctor(DoctorOptions(model=model, spec_model=spec_model, quick=quick, output=output))
    if as_json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        print_report(report)
    if report["failed"]:
        raise typer.Exit(1)
