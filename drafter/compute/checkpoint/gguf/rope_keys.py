"""The rotary settings of config.json from GGUF's keys, and from the tensor that holds Llama 3's scaling.

llama.cpp divides each frequency f by a factor: 1 for wavelengths below L / high, `factor` for those above
L / low, and between them 1 / ((1 - s) / factor + s) with s = (L / wavelength - low) / (high - low), where L
is the original length. The file holds the factors; only the ratios of L, low and high follow from them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .....cluster.errors import CheckpointError, ConfigError
from .architecture import FREQUENCIES, Config
from .metadata_keys import MetadataKeys
from .tensor_views import values

_SCALING = "rope.scaling."
_YARN = (  # optional keys of config.json, and the file's
    ("attention_factor", "yarn_attn_factor"),
    ("beta_fast", "yarn_beta_fast"),
    ("beta_slow", "yarn_beta_slow"),
)
_DEFAULT_THETA = 10_000.0  # of llama.cpp
_PUBLISHED = (4.0, 8192)  # high / low and length of Llama 3.1 to 3.3
_TOLERANCE = 1e-5


def rope_config(keys: MetadataKeys, head_dim: int, default_theta: float = _DEFAULT_THETA) -> Config:
    """Return `rope_parameters`. Raises CheckpointError for a scaling that is not supported."""
    theta = keys.number("rope.freq_base", default_theta)
    rotated = keys.count("rope.dimension_count", head_dim)
    found: Config = {"rope_type": "default", "rope_theta": theta}
    if rotated != head_dim:
        found["partial_rotary_factor"] = rotated / head_dim
    if FREQUENCIES in keys.file.tensors:
        return found | _llama3(keys, values(keys.file, FREQUENCIES), theta, rotated)
    kind = keys.text(f"{_SCALING}type", "none")
    match kind:
        case "none":
            return found
        case "linear":
            return found | {"rope_type": "linear", "factor": keys.number(f"{_SCALING}factor")}
        case "yarn":
            return found | _yarn(keys)
        case _:
            raise keys.wrong(f"{_SCALING}type", kind, "none, linear or yarn: others are not supported")


def _yarn(keys: MetadataKeys) -> Config:
    found: Config = {
        "rope_type": "yarn",
        "factor": keys.number(f"{_SCALING}factor"),
        "original_max_position_embeddings": keys.count(f"{_SCALING}original_context_length"),
    }
    for name, key in _YARN:
        if keys.has(f"{_SCALING}{key}"):
            found[name] = keys.number(f"{_SCALING}{key}")
    return found


def rope_metadata(rope: Config, head_dim: int) -> Config:
    """Return the keys from which `rope_config` reads these `rope_parameters`, without the architecture.

    Raises ConfigError for a type that GGUF does not have.
    """
    kind, found = rope["rope_type"], Config({"rope.freq_base": float(rope["rope_theta"])})
    if (share := rope.get("partial_rotary_factor")) is not None:
        found["rope.dimension_count"] = round(head_dim * share)
    if kind in ("linear", "yarn"):
        found |= {f"{_SCALING}type": kind, f"{_SCALING}factor": float(rope["factor"])}
    elif kind not in ("default", "llama3"):
        raise ConfigError(f"to=gguf: the rotation {kind!r} is not written.", param="to")
    if kind == "yarn":
        found[f"{_SCALING}original_context_length"] = rope["original_max_position_embeddings"]
        found |= {f"{_SCALING}{key}": float(rope[name]) for name, key in _YARN if rope.get(name) is not None}
    return found


def frequency_factors(rope: Config, head_dim: int) -> Tensor | None:
    """Return the factors of Llama 3's scaling, fp32 [pairs], which a tensor holds; None for other types."""
    if rope["rope_type"] != "llama3":
        return None
    rotated = round(head_dim * rope.get("partial_rotary_factor", 1.0))
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    length = rope["original_max_position_embeddings"] / low
    return _factors(_wavelengths(rope["rope_theta"], rotated), rope["factor"], high / low, length).float()


def _wavelengths(theta: float, rotated: int) -> Tensor:
    return 2 * math.pi * theta ** (torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)


def _llama3(keys: MetadataKeys, factors: Tensor, theta: float, rotated: int) -> Config:
    wavelengths = _wavelengths(theta, rotated)
    if factors.shape != wavelengths.shape:
        raise CheckpointError(
            f"{keys.where}: {FREQUENCIES} has {len(factors)} factors for {rotated} rotated dimensions;"
            " convert the model again."
        )
    factors, factor = factors.double(), float(factors.max())
    for ratio, length in (_PUBLISHED, *_fitted(factors, wavelengths, factor)):
        expected = _factors(wavelengths, factor, ratio, length)
        if torch.allclose(expected, factors, rtol=_TOLERANCE):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": ratio,
                "original_max_position_embeddings": length,
            }
    raise CheckpointError(
        f"{keys.where}: {FREQUENCIES} holds other factors than those of Llama 3's scaling, which alone is "
        "supported."
    )


def _factors(wavelengths: Tensor, factor: float, ratio: float, length: float) -> Tensor:
    smooth = ((length / wavelengths - 1) / (ratio - 1)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _fitted(factors: Tensor, wavelengths: Tensor, factor: float) -> list[tuple[float, int]]:
    """Return candidates of high / low and the length, from the frequencies between: s = a f - b."""
    between = (factors > 1 + _TOLERANCE) & (factors < factor * (1 - _TOLERANCE))
    frequencies = 1 / wavelengths[between]
    if not len(frequencies):
        return []
    smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
    ratio = _PUBLISHED[0]
    found = [(ratio, round(float((((ratio - 1) * smooth + 1) / frequencies).mean())))]
    if len(frequencies) > 1:
        slope = float((smooth[0] - smooth[-1]) / (frequencies[0] - frequencies[-1]))
        offset = float(slope * frequencies[0] - smooth[0])
        found.append((round(1 + 1 / offset, 3), round(slope / offset)))
    return found
