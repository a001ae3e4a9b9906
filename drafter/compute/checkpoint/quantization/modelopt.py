"""ModelOpt's FP8, NVFP4 or mixed quantization, from config.json or hf_quant_config.json.

Algorithms that also scale the inputs of a layer (AWQ's `pre_quant_scale`) are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import AliasChoices, Field

from ..hf_config import HfConfig, Json, parse, wrong
from .checkpoint_quantization import KEY, CheckpointQuantization
from .eight_bit import EightBit
from .fp4 import ModelOptNvfp4
from .kv_scales import is_fp8_kv
from .module_patterns import LINEAR, ModulePatterns, normalized, shell_patterns
from .scheme import Scheme

HF_QUANT_CONFIG = "hf_quant_config.json"
_SCHEMES: Mapping[str, Scheme] = {
    "FP8": EightBit("F8_E4M3", "tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": EightBit("F8_E4M3", "channel"),
    "NVFP4": ModelOptNvfp4(),
    "W4A16_NVFP4": ModelOptNvfp4(),
}
_MIXED = "MIXED_PRECISION"
_NOT_QUANTIZED = ("UNQUANTIZED", "NONE")
_WITHOUT_ACTIVATIONS = (*_NOT_QUANTIZED, "W4A16_NVFP4")


class ModelOptConfig(HfConfig):
    """`quantization_config` of config.json, or "quantization" of hf_quant_config.json."""

    quant_algo: str
    kv_cache_quant_algo: Any = Field(  # Any: JSON values
        None, validation_alias=AliasChoices("kv_cache_quant_algo", "kv_cache_scheme")
    )
    group_size: Literal[16] | None = None
    exclude_modules: tuple[str, ...] = Field(
        (),
        validation_alias=AliasChoices("exclude_modules", "ignore"),
        description="a list of names of modules",
    )
    quantized_layers: dict[str, Any] = Field({}, description="an object by module")  # Any: JSON values


class _LayerSettings(HfConfig):
    quant_algo: str
    group_size: Literal[16] | None = None


def read_modelopt(raw: Json, file: str, at: str = KEY) -> CheckpointQuantization:
    nested = raw.get("quantization")
    config = parse(ModelOptConfig, nested if isinstance(nested, Mapping) else raw, file, at)
    targets: list[tuple[ModulePatterns, Scheme | None]] = []
    if config.quant_algo == _MIXED:
        targets = _by_layer(config, file, at)
    else:
        targets = [(LINEAR, _scheme(config.quant_algo, file, f"{at}.quant_algo"))]
    return CheckpointQuantization(
        method="modelopt",
        file=file,
        ignored=shell_patterns(config.exclude_modules, file, f"{at}.exclude_modules"),
        targets=tuple(targets),
        quantizes_activations=config.quant_algo not in _WITHOUT_ACTIVATIONS,
        quantizes_kv_cache=bool(config.kv_cache_quant_algo),
        has_fp8_kv_scales=is_fp8_kv(config.kv_cache_quant_algo),
    )


def _by_layer(config: ModelOptConfig, file: str, at: str) -> list[tuple[ModulePatterns, Scheme | None]]:
    if not config.quantized_layers:
        raise wrong(file, f"{at}.quantized_layers", None, f"an object by module, for {_MIXED}")
    modules: dict[Scheme | None, set[str]] = {}
    for module, stated in config.quantized_layers.items():
        where = f"{at}.quantized_layers.{module}"
        if not isinstance(stated, Mapping):
            raise wrong(file, where, stated, "an object with quant_algo")
        scheme = _scheme(parse(_LayerSettings, stated, file, where).quant_algo, file, f"{where}.quant_algo")
        modules.setdefault(scheme, set()).add(normalized(module))
    return [
        (ModulePatterns(frozenset(names), with_children=True), scheme) for scheme, names in modules.items()
    ]


def _scheme(algorithm: str, file: str, key: str) -> Scheme | None:
    if algorithm in _NOT_QUANTIZED:
        return None
    if algorithm not in _SCHEMES:
        wanted = f"one of {', '.join((*_SCHEMES, _MIXED))}: others are not served"
        raise wrong(file, key, algorithm, wanted)
    return _SCHEMES[algorithm]
