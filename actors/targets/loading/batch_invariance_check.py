"""Measures at start whether a loaded rank's rows are batch-invariant, and raises if they should be and are
not.

The measurement is that of `drafter/compute/batch_invariance.py`, through the backend in use and with the
models' head sizes. On a GPU it runs only with `batch_invariant`, as rows are not meant to be invariant
otherwise. In Triton's interpreter, which only tests use, it never runs, as a step takes a second. Called by
`rank_loader.py`.
"""

from __future__ import annotations

import logging

from ....cluster.errors import ConfigError
from ....drafter.compute.backend import Backend
from ....drafter.compute.batch_invariance import rows_are_invariant
from .load_plan import LoadPlan

logger = logging.getLogger(__name__)


def check_invariance(plan: LoadPlan, backend: Backend) -> None:
    """Log whether rows are batch-invariant.

    Raises:
        ConfigError: they are not, and `batch_invariant` is set.
    """
    required = plan.config.batch_invariant
    if plan.attention_backend in ("triton", "flash_attn") and not (required and plan.device.type == "cuda"):
        return
    head_dims = sorted({dim for model in plan.models for dim in model.head_dims})
    routed = any("routed experts" in model.features for model in plan.models)
    holds = rows_are_invariant(backend, plan.dtype, plan.device, head_dims, routed=routed)
    logger.info("rows are batch-invariant: %s", holds)
    if required and not holds:
        raise ConfigError(
            f"batch_invariant does not hold here with dtype={str(plan.dtype).removeprefix('torch.')} and "
            f"attention_backend={plan.attention_backend}: a row's bits were seen to depend on its batch. "
            "Set dtype to float32, or leave attention_backend out.",
            param="batch_invariant",
        )
