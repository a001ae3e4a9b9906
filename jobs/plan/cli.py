"""The command `manta plan`."""

from __future__ import annotations

from ..flags import with_flags
from .options import PlanOptions


@with_flags
def plan(options: PlanOptions) -> None:
    """Plan a model's layout over a node's GPUs: what fits, estimated speed, and the best one's
    ray_config.yaml.

    Uses shapes and rates only: needs no GPU, no weights and no Ray.
    """
    from .run import make_plan

    make_plan(options)
