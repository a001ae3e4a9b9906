"""Loads the drafter of a target rank's process, from a checkpoint of its own or from the target's.

Called by `rank_loader.py`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ....drafter.compute.backend import Backend
from ..model.assistant import AssistantConfig, AssistantDrafter
from ..model.decoder import Decoder
from ..model.mtp import MtpConfig, MtpDrafter
from ..model.tensor_parallel import Communicator, Sharding
from ..runners.runner_interface import Drafter
from .checkpoint_models import ModelSource
from .load_plan import LoadPlan
from .operator_factory import make_drafter_backend


def load_drafter(
    plan: LoadPlan, models: ModelSource, target: Decoder, target_norm_H: Tensor, ranks: Communicator
) -> tuple[Drafter, Backend]:
    """Return the plan's drafter and its backend, which may be the target's."""
    if isinstance(plan.drafter, MtpConfig):
        return _mtp(plan, plan.drafter, models, target, target_norm_H, ranks), target.backend
    backend = make_drafter_backend(plan, target.backend, ranks)
    if isinstance(plan.drafter, AssistantConfig):
        return _assistant(plan, plan.drafter, models, target, target_norm_H, ranks, backend), backend
    return models.drafter(plan, target.shared_embeddings, backend), backend


def _mtp(
    plan: LoadPlan,
    config: MtpConfig,
    models: ModelSource,
    target: Decoder,
    target_norm_H: Tensor,
    ranks: Communicator,
) -> MtpDrafter:
    """Load the target's own layer for multi-token prediction, sharded like its blocks."""
    sharding = Sharding(config.model, ranks.rank, ranks.world_size)
    weights = models.target(replace(plan, target=config.model), sharding)
    args = (target.shared_embeddings, target.rope_of, ranks, target.backend, plan.pages.drafter)
    return MtpDrafter(config, weights, target_norm_H, *args)


def _assistant(
    plan: LoadPlan,
    config: AssistantConfig,
    models: ModelSource,
    target: Decoder,
    target_norm_H: Tensor,
    ranks: Communicator,
    backend: Backend,
) -> AssistantDrafter:
    """Load an assistant, sharded like the target, of which it reads K and V."""
    assert plan.drafter_folder is not None, "an assistant has a checkpoint"
    sharding = Sharding(config.model, ranks.rank, ranks.world_size)
    weights = models.target(replace(plan, target=config.model, target_folder=plan.drafter_folder), sharding)
    shared, rope_of = target.shared_embeddings, target.rope_of
    return AssistantDrafter(config, weights, target_norm_H, shared, rope_of, ranks, backend)
