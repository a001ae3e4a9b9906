"""Reports the device, dtype and kernels that Manta will use for a pair, and why not the other backends.

Uses the decisions of loading (`actors/targets/loading/`) without loading anything. Called by `run.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import get_args

from ...actors.targets.loading.backends import BackendName, why_not
from ...actors.targets.loading.plan import LoadPlan
from .findings import Check, Outcome

GROUP = "Manta uses"


def choice_checks(plan: LoadPlan) -> Iterator[Check]:
    """Yield a line for each choice, and for each backend that is not chosen."""
    yield _fact("device", str(plan.device))
    yield _fact("dtype", str(plan.dtype).removeprefix("torch."))
    yield _fact("attention backend", plan.attention_backend)
    for name in get_args(BackendName):
        if name != plan.attention_backend:
            yield Check(GROUP, f"not {name}", partial(_refusal, plan, name), "")


def _fact(name: str, words: str) -> Check:
    return Check(GROUP, name, lambda: Outcome(words), "")


def _refusal(plan: LoadPlan, name: str) -> Outcome:
    reason = why_not(name, plan.models, plan.machine)
    return Outcome(reason or f"runs here; --attention-backend {name} selects it")
