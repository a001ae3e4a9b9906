"""Scales of K and V that a checkpoint holds for K/V in FP8: x is stored as x / scale in E4M3.

    ATTENTION.k_scale, .v_scale                             compressed-tensors
    ATTENTION.k_proj.k_scale, .v_proj.v_scale               ModelOpt
    ATTENTION.k_proj.output_scale, .v_proj.output_scale     compressed-tensors' and AutoFP8's first versions
    ATTENTION.kv_scale                                      AutoFP8's first version: of both

One number each. Used if K and V are stored in FP8 (`kv_cache_dtype`); `quantized_tensors.py` calls this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .....cluster.errors import CheckpointError
from ...memory.kv_cache import KVScales
from ..safetensors_reader import TensorFolder, TensorHeaders
from .scheme import FLOAT_SCALES

_NAMES = (
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
)
_REMEDY = "Set kv_cache_dtype to auto, or override quantization_config."


def is_fp8_kv(declared: Any) -> bool:  # Any: JSON values
    """Return whether stored scales are for FP8: unless another form is declared, or scales of each step."""
    if isinstance(declared, Mapping):
        form = (declared.get("type", "float"), declared.get("num_bits", 8), declared.get("dynamic", False))
        return form == ("float", 8, False)
    return declared in (None, "FP8")


def find_kv_scales(stored: TensorHeaders, attention: str) -> tuple[str, str] | None:
    """Return the names of the scales of K and V of a module; None if it has none.

    Raises CheckpointError if only one is there, or one is no single number.
    """
    for pair in _NAMES:
        k_name, v_name = (f"{attention}.{name}" for name in pair)
        if k_name in stored.shapes or v_name in stored.shapes:
            _check(stored, k_name)
            _check(stored, v_name)
            return k_name, v_name
    return None


def _check(stored: TensorHeaders, name: str) -> None:
    if name not in stored.shapes:
        raise CheckpointError(
            f"{stored.where}: tensor {name} is missing, although the layer has another scale for K/V in FP8. "
            f"{_REMEDY}",
            param=name,
        )
    shape, dtype = stored.shapes[name], stored.dtypes[name]
    if math.prod(shape) != 1 or dtype not in FLOAT_SCALES:
        raise CheckpointError(
            f"{stored.where}: {name} is stored as {dtype} of shape {list(shape)}; K/V in FP8 take one "
            f"floating-point number per layer. {_REMEDY}",
            param=name,
        )


def read_kv_scales(files: TensorFolder, names: tuple[str, str]) -> KVScales:
    """Return the scales. Raises CheckpointError if one is no positive, finite number."""
    scales = KVScales(*(files.get(name).item() for name in names))
    for name, scale in zip(names, scales, strict=True):
        if not 0.0 < scale < math.inf:
            raise CheckpointError(
                f"{files.where}: {name} is {scale}; a scale for K/V in FP8 must be positive and finite. "
                f"{_REMEDY}",
                param=name,
            )
    return scales
