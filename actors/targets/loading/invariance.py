"""Whether a loaded rank's rows are batch-invariant: measured at start, and refused if the settings want more.

The measurement is `drafter/compute/invariance.py`'s, through the backend that will run, with heads of the
models' own size. On a GPU rows are not meant to be without `batch_invariant`, and nothing is measured; nor in
Triton's interpreter, where a step takes a second and only tests are. Called by `rank.py`.
"""

from __future__ import annotations

import logging

from ....cluster.errors import ConfigError
from ....drafter.compute.backend import Backend
from ....drafter.compute.invariance import rows_are_invariant
from .plan import LoadPlan

logger = logging.getLogger(__name__)


def check_invariance(plan: LoadPlan, backend: Backend) -> None:
    """Log what holds; ConfigError if `batch_invariant` is set and does not."""
    asked = plan.config.batch_invariant
    if plan.attention_backend in ("triton", "flash_attn") and not (asked and plan.device.type == "cuda"):
        return
    head_dims = sorted({dim for model in plan.models for dim in model.head_dims})
    routed = any("routed experts" in model.features for model in plan.models)
    holds = rows_are_invariant(backend, plan.dtype, plan.device, head_dims, routed=routed)
    logger.info("rows are batch-invariant: %s", holds)
    if asked and not holds:
        raise ConfigError(
            f"batch_invariant does not hold here with dtype={str(plan.dtype).removeprefix('torch.')} and "
            f"attention_backend={plan.attention_backend}: a row's bits were seen to depend on its batch. "
            "Set dtype to float32, or leave attention_backend out.",
            param="batch_invariant",
        )
