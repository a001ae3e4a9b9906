"""The command `manta simulate node`; needs neither Ray nor a GPU."""

from __future__ import annotations

import typer

from ..flags import with_flags
from .options import NodeOptions

simulate = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@simulate.callback()
def _simulate() -> None:
    """Simulate a node of GPUs that serves a model."""


@simulate.command()
@with_flags
def node(options: NodeOptions) -> None:
    """Simulate load on one node for each method: throughput per GPU against speed per user.

    Runs the real scheduler and policies with the roofline's step times; see docs/simulation.md.
    """
    from .node import run_node

    run_node(options)
