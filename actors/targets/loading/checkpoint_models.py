"""Provides a plan's models: from checkpoints, or with random weights of their shapes (`load_format`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ....drafter.compute.backend import Backend
from ....drafter.compute.checkpoint.dummy_weights import RandomTensors
from ....drafter.compute.checkpoint.loading.quantized_tensors import open_folder
from ....drafter.compute.checkpoint.quantized_matrix import Code
from ....drafter.compute.checkpoint.safetensors_reader import TensorSource
from ....drafter.dflash.checkpoint import drafter_shapes, make_drafter
from ....drafter.dflash.config import DrafterConfig
from ....drafter.dflash.target_features import TargetEmbeddings
from ....drafter.eagle3.checkpoint import eagle3_shapes, make_eagle3
from ....drafter.eagle3.config import Eagle3Config
from ..model.tensor_parallel import Sharding
from ..model.weights import TargetWeights, target_shapes
from ..runners.drafts.draft_source import Drafter
from .load_plan import LoadPlan
from .operator_factory import kept_codes


class ModelSource(Protocol):
    def target(self, plan: LoadPlan, sharding: Sharding) -> TargetWeights: ...

    def drafter(self, plan: LoadPlan, shared_embeddings: TargetEmbeddings, backend: Backend) -> Drafter: ...


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Reads the models from the plan's folders, or makes random weights.

    `dequantizes`: the target is not read as codes even where the plan's backend computes with them.
    """

    dequantizes: bool = False

    def target(self, plan: LoadPlan, sharding: Sharding) -> TargetWeights:
        source = plan.target_folder if _reads_weights(plan) else random_target(plan)
        kept = frozenset[Code]() if self.dequantizes else kept_codes(plan)
        return TargetWeights(
            source,
            plan.target,
            sharding,
            plan.dtype,
            plan.device,
            kept_codes=kept,
            has_fp8_kv=plan.kv_dtype is not plan.dtype,
        )

    def drafter(self, plan: LoadPlan, shared_embeddings: TargetEmbeddings, backend: Backend) -> Drafter:
        """Return the plan's drafter; its checkpoint was checked when the plan was made."""
        spec, config, folder = plan.config.speculative_config, plan.drafter, plan.drafter_folder
        assert spec is not None and folder is not None, "called only for plans with a drafter's checkpoint"
        assert isinstance(config, DrafterConfig | Eagle3Config), "other drafters are parts of the target"
        common = (plan.facts, shared_embeddings, plan.dtype, plan.device, backend, plan.pages.drafter)
        tensors: TensorSource | None = None
        if _reads_weights(plan):
            tensors = open_folder(folder, config.quantization, plan.dtype)
        if isinstance(config, Eagle3Config):
            return make_eagle3(config, tensors or _random_tensors(plan, eagle3_shapes(config)), *common)
        tensors = tensors or _random_tensors(plan, drafter_shapes(config, plan.facts))
        return make_drafter(config, tensors, *common, input_embedding_scale=spec.input_embedding_scale)


def random_target(plan: LoadPlan) -> RandomTensors:
    """Return random weights of the plan's target, as codes where its checkpoint has these."""
    quantization = plan.target.quantization
    form = None if quantization is None else quantization.packed_form
    return RandomTensors(target_shapes(plan.target), plan.dtype, plan.device, form)


def _reads_weights(plan: LoadPlan) -> bool:
    return plan.config.load_format == "auto"


def _random_tensors(plan: LoadPlan, shapes: Mapping[str, tuple[int, ...]]) -> RandomTensors:
    return RandomTensors(shapes, plan.dtype, plan.device)
