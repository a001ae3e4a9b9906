"""Provides the models of resolved settings: from checkpoints, or of random weights (`load_format`)."""

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
from .operator_factory import kept_codes
from .resolved_config import ResolvedConfig


class ModelSource(Protocol):
    def target(self, resolved: ResolvedConfig, sharding: Sharding) -> TargetWeights: ...

    def drafter(
        self, resolved: ResolvedConfig, shared_embeddings: TargetEmbeddings, backend: Backend
    ) -> Drafter: ...


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Reads the models from their folders, or makes random weights.

    `dequantizes`: the target is not read as codes even where the settings' backend computes with them.
    """

    dequantizes: bool = False

    def target(self, resolved: ResolvedConfig, sharding: Sharding) -> TargetWeights:
        source = resolved.target_folder if _reads_weights(resolved) else random_target(resolved)
        kept = frozenset[Code]() if self.dequantizes else kept_codes(resolved)
        return TargetWeights(
            source,
            resolved.target,
            sharding,
            resolved.dtype,
            resolved.device,
            kept_codes=kept,
            has_fp8_kv=resolved.kv_dtype is not resolved.dtype,
        )

    def drafter(
        self, resolved: ResolvedConfig, shared_embeddings: TargetEmbeddings, backend: Backend
    ) -> Drafter:
        """Return the drafter; its checkpoint was checked when the settings were resolved."""
        spec, config, folder = resolved.config.speculative_config, resolved.drafter, resolved.drafter_folder
        assert spec is not None and folder is not None, "called only with a drafter's checkpoint"
        assert isinstance(config, DrafterConfig | Eagle3Config), "other drafters are parts of the target"
        common = (
            resolved.facts,
            shared_embeddings,
            resolved.dtype,
            resolved.device,
            backend,
            resolved.pages.drafter,
        )
        tensors: TensorSource | None = None
        if _reads_weights(resolved):
            tensors = open_folder(folder, config.quantization, resolved.dtype)
        if isinstance(config, Eagle3Config):
            return make_eagle3(config, tensors or _random_tensors(resolved, eagle3_shapes(config)), *common)
        tensors = tensors or _random_tensors(resolved, drafter_shapes(config, resolved.facts))
        return make_drafter(config, tensors, *common, input_embedding_scale=spec.input_embedding_scale)


def random_target(resolved: ResolvedConfig) -> RandomTensors:
    """Return random weights of the target, as codes where its checkpoint has these."""
    quantization = resolved.target.quantization
    form = None if quantization is None else quantization.packed_form
    return RandomTensors(target_shapes(resolved.target), resolved.dtype, resolved.device, form)


def _reads_weights(resolved: ResolvedConfig) -> bool:
    return resolved.config.load_format == "auto"


def _random_tensors(resolved: ResolvedConfig, shapes: Mapping[str, tuple[int, ...]]) -> RandomTensors:
    return RandomTensors(shapes, resolved.dtype, resolved.device)
