"""`manta plan` as a command; `jobs/cli.py` has the others."""

from __future__ import annotations

from ..flags import with_flags
from .options import PlanOptions


@with_flags
def plan(options: PlanOptions) -> None:
    """Lay out a model over a node's GPUs: what fits, how fast it would be, the ray_config.yaml of the best.

    From shapes and rates alone: needs no GPU, no weights and no Ray.
    """
    from .run import make_plan

    make_plan(options)
