"""`manta audit` as a command; `jobs/cli.py` has the others."""

from __future__ import annotations

import typer

from ...cluster.config import EngineConfig
from ..flags import Model, with_flags
from ..progress import counting, say
from .options import AuditOptions


@with_flags
def audit(options: AuditOptions, config: EngineConfig, model_: Model = None) -> None:
    """Decode a dataset with speculation and without, compare token by token, write a certificate.

    Both in one engine, in other company: what runs beside an answer must not matter either. Exit code 1 if
    any token differs.
    """
    with counting("loading PyTorch", say, begin=False):
        from .run import print_certificate, run_audit

    certificate = run_audit(config, options)
    print_certificate(certificate)
    if certificate["mismatches"]:
        raise typer.Exit(1)
