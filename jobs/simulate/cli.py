"""`manta simulate node` as a command: it needs neither Ray nor a GPU."""

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
    """Play load over one node, method beside method: throughput of a GPU against the speed of a user.

    The real scheduler and its policies over step times of the roofline; see docs/simulation.md.
    """
    from .node import run_node

    run_node(options)
