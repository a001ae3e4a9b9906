"""Describes how a loaded model's weights are kept: packed or dequantized, and the bytes of packed ones.

Called where a model was loaded: by `rank_loader.py`, and for split drafters in the drafter's process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ....drafter.compute.backend import Backend
from ..model.model_spec import ModelSpec
from .draft_window import DraftConfig
from .resolved_config import ResolvedConfig


@dataclass(frozen=True, slots=True)
class WeightCounts:
    """A model's weights on this rank, as its backend was given them.

    Attributes:
        packed_bytes: of the weights that the backend packed.
        num_codes, num_plain: dense matrices that were given as codes and as numbers; the parts of one product
            (q, k and v) count once.
        num_expert_codes, num_expert_plain: products of layers' experts (gate and up, or down), likewise.
    """

    packed_bytes: int = 0
    num_codes: int = 0
    num_plain: int = 0
    num_expert_codes: int = 0
    num_expert_plain: int = 0

    @classmethod
    def of(cls, backend: Backend, before: WeightCounts | None = None) -> WeightCounts:
        """Return the counts of a backend, less those of the models that it was given before."""
        first = before or cls()
        return cls(
            (backend.weight_bytes or 0) - first.packed_bytes,
            backend.num_codes - first.num_codes,
            backend.num_plain - first.num_plain,
            backend.num_expert_codes - first.num_expert_codes,
            backend.num_expert_plain - first.num_expert_plain,
        )


def describe_weights(resolved: ResolvedConfig, counts: Mapping[str, WeightCounts]) -> Iterator[str]:
    """Yield sentences about the models in `counts`: "target", "drafter" or both."""
    models: Mapping[str, ModelSpec | DraftConfig | None] = {
        "target": resolved.target,
        "drafter": resolved.drafter,
    }
    for name, held in counts.items():
        model = models[name]
        if model is not None and model.quantization is not None:
            kept = _packed_matrices(held)
            yield f"the {name}'s checkpoint is quantized ({model.quantization}): {kept} dequantized at load"
        if held.packed_bytes:
            yield f"packed weights of the {name} take {held.packed_bytes / 2**20:,.1f} MiB"


def _packed_matrices(held: WeightCounts) -> str:
    packed: list[str] = []
    if held.num_expert_codes:
        num_products = held.num_expert_codes + held.num_expert_plain
        packed.append(f"{held.num_expert_codes} of its {num_products} products of experts")
    if held.num_codes:
        packed.append(f"{held.num_codes} of its {held.num_codes + held.num_plain} dense matrices")
    return f"{' and '.join(packed)} stay packed, others are" if packed else "its matrices are"
