"""`manta audit` as a command, and its options; `jobs/cli.py` has the others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ...cluster.config import EngineConfig
from ...cluster.flag import Flag
from ..flags import Model, with_flags


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """What is audited.

    Attributes:
        prompts: JSONL with `prompt` or `messages`.
        num_prompts: prompts of the file, spread evenly; by default all.
        max_tokens: tokens of every answer.
        temperatures: temperature of the answers; 0 is greedy; may be repeated. Each prompt is answered at
            each, with its index as the seed.
        output: JSON file for the certificate.
    """

    prompts: Annotated[Path, Flag("--prompts -i")] = Path("models/prompts.jsonl")
    num_prompts: Annotated[int | None, Flag(least=1)] = None
    max_tokens: Annotated[int, Flag(least=1)] = 128
    temperatures: Annotated[tuple[float, ...], Flag("--temperature -t", least=0.0)] = (0.0, 0.7, 1.0)
    output: Annotated[Path | None, Flag("-o")] = None


@with_flags
def audit(options: AuditOptions, config: EngineConfig, model_: Model = None) -> None:
    """Decode a dataset with speculation and without, compare token by token, write a certificate.

    Both in one engine, in other company: what runs beside an answer must not matter either. Exit code 1 if
    any token differs.
    """
    from .run import print_certificate, run_audit

    certificate = run_audit(config, options)
    print_certificate(certificate)
    if certificate["mismatches"]:
        raise typer.Exit(1)
