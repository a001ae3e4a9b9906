"""A drafter's tensors by Manta's names; matrices that a backend multiplies as codes stay codes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .compute.backend import Backend
from .compute.checkpoint.loading.quantized_tensors import QuantizedFolder
from .compute.checkpoint.quantized_matrix import Matrix, QuantizedMatrix, cat_rows
from .compute.checkpoint.safetensors_reader import TensorSource
from .compute.memory.kv_cache import KVScales
from .drafter_spec import TOKEN_MAP

# Names of matrices that are only multiplied with; others are also read as numbers.
_KEYS = ".k_proj.weight"
MULTIPLIED = ("_proj.weight", "_projection.weight", "fc.weight")


@dataclass(frozen=True, slots=True)
class DrafterWeights:
    """Tensors on the device, in the computing dtype; each matrix is in one of both mappings.

    `kv_scales` reads the layers' scales of K and V in e4m3; no pairs if the checkpoint has none.
    """

    tensors: Mapping[str, Tensor]
    codes: Mapping[str, QuantizedMatrix] = field(default_factory=dict[str, QuantizedMatrix])
    kv_scales: Callable[[], tuple[KVScales, ...]] = tuple

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors or name in self.codes

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(name)

    def matrix(self, name: str) -> Matrix:
        return self.codes[name] if name in self.codes else self.tensors[name]

    def joined(self, *names: str) -> Matrix:
        """Return the rows of several matrices; as codes if all have the same form."""
        return cat_rows([self.matrix(name) for name in names], self["norm.weight"].dtype)

    def adding(self, **tensors: Tensor) -> DrafterWeights:
        return replace(self, tensors={**self.tensors, **tensors})


def read_weights(
    source: TensorSource,
    names: Mapping[str, str],
    dtype: torch.dtype,
    device: torch.device | str,
    backend: Backend | None,
) -> DrafterWeights:
    """Read tensors; `names` maps Manta's names to the files'."""
    tensors: dict[str, Tensor] = {}
    codes: dict[str, QuantizedMatrix] = {}
    for name, stored in names.items():
        matrix = None
        if backend is not None and backend.kept_codes and isinstance(source, QuantizedFolder):
            found = source.codes(stored) if name.endswith(MULTIPLIED) else None
            matrix = None if found is None else found.of_kinds(backend.kept_codes)
        if matrix is not None:
            codes[name] = matrix.to(device)
        else:
            tensor = source.get(stored)
            tensors[name] = tensor.to(device) if name == TOKEN_MAP else tensor.to(device=device, dtype=dtype)
    if not isinstance(source, QuantizedFolder):
        return DrafterWeights(tensors, codes)
    modules = _attention_modules(names.values())
    return DrafterWeights(tensors, codes, lambda: tuple(map(source.kv_scales, modules)))


def unused_drafter_scales(tensors: QuantizedFolder, *, has_fp8_kv: bool) -> tuple[str, ...]:
    """Return sentences about a checkpoint's scales that are not applied; raises as `find_kv_scales`."""
    modules = _attention_modules(tensors.shapes) if has_fp8_kv else []
    return tensors.notes([name for module in modules for name in tensors.kv_scale_names(module) or ()])


def _attention_modules(names: Iterable[str]) -> list[str]:
    """Return the modules that have a matrix for keys, in the order of `names`."""
    return [name.removesuffix(_KEYS) for name in names if name.endswith(_KEYS)]
