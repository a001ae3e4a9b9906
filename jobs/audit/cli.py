"""The command `manta audit`."""

from __future__ import annotations

import typer

from ...cluster.config import EngineConfig
from ..flags import Model, with_flags
from .options import AuditOptions


@with_flags
def audit(options: AuditOptions, config: EngineConfig, model_: Model = None) -> None:
    """Decode a dataset with and without speculation, compare token by token, and write a certificate.

    Both passes use one engine with different batches, which must not matter either. Exit code 1 if any token
    differs.
    """
    from .run import print_certificate, run_audit

    certificate = run_audit(config, options)
    print_certificate(certificate)
    if certificate["mismatches"]:
        raise typer.Exit(1)
